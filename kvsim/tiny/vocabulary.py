"""The words of the ledger language, in the order of their token ids.

The order is part of the shipped weights: a change here makes them useless.
"""

from __future__ import annotations

import random


def _words(text: str) -> list[str]:
    return text.split()


PAD, BOS, EOS, UNK = SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
MARKS = _words("facts key question walk get report think done : ; , .")
DIGITS = [str(digit) for digit in range(10)]
COUNTERS = [f"#{count}" for count in range(128)]


def _node_names(count: int = 160) -> list[str]:
    """Names such as ``kuga``: consonant, vowel, consonant, vowel; the same on every call."""
    consonants, vowels = "bdfgklmnprstvz", "aeiou"
    syllables = [consonant + vowel for consonant in consonants for vowel in vowels]
    names = [first + second for first in syllables for second in syllables]
    random.Random(7).shuffle(names)
    return sorted(names[:count])


NODES = _node_names()
COLOURS = _words(
    "red blue pink teal gold gray lime navy plum rust jade coral amber ivory khaki mauve ochre "
    "olive peach sepia umber azure beige black"
)
FILLER = _words(
    "the a old river stone wind quiet light under over near far walks sings waits turns slowly "
    "again then and but while house tree road hill cloud rain bird dog child night day year green "
    "cold warm small large open"
)

VOCAB: tuple[str, ...] = (*SPECIAL, *MARKS, *DIGITS, *COUNTERS, *NODES, *COLOURS, *FILLER)
ID: dict[str, int] = {word: index for index, word in enumerate(VOCAB)}


def unknown_words(text: str) -> list[str]:
    """Words of ``text`` that are not in the vocabulary, each once, in order of appearance."""
    return list(dict.fromkeys(word for word in text.split() if word not in ID))
