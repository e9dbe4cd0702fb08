"""Words of the ledger language by token id; their order is part of the shipped weights."""

from __future__ import annotations

import random
from dataclasses import dataclass


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


PAD, BOS, EOS, UNK = SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
#: Words after ``question :``, in the order of their ids.
VERBS = _words("walk get join check wait fork")
MARKS = _words("facts key question agenda report think done : ; , .")
DIGITS = tuple(str(digit) for digit in range(10))
COUNTERS = tuple(f"#{count}" for count in range(128))


def _node_names() -> list[str]:
    """Names such as ``kuga``: consonant, vowel, consonant, vowel; the same on every call."""
    consonants, vowels = "bdfgklmnprstvz", "aeiou"
    syllables = [consonant + vowel for consonant in consonants for vowel in vowels]
    names = [first + second for first in syllables for second in syllables]
    random.Random(7).shuffle(names)
    return sorted(names[:160])


NODES = tuple(_node_names())


@dataclass(frozen=True)
class Domain:
    """Subject of a prompt: the kinds that its facts name, and the nouns of its filler."""

    kinds: tuple[str, ...]
    nouns: tuple[str, ...]


def _domain(kinds: str, nouns: str) -> Domain:
    return Domain(_words(kinds), _words(nouns))


#: Domains differ in these words alone, never in sizes or rules.
DOMAINS: dict[str, Domain] = {
    "paint": _domain(
        "red blue pink teal gold gray lime navy plum rust jade coral amber ivory khaki mauve "
        "ochre sepia umber azure",
        "wall brush door frame roof gate fence paper cloth glass house shed",
    ),
    "ore": _domain(
        "iron zinc lead tin nickel copper silver cobalt chrome quartz opal topaz ruby beryl "
        "onyx garnet basalt marble slate flint",
        "river stone hill shaft cave rock sand valley ridge mine cart lamp",
    ),
    "fruit": _domain(
        "apple pear fig date mango melon cherry grape lemon orange quince papaya guava kiwi "
        "peach lychee medlar olive currant damson",
        "tree branch basket field farm rain root leaf market jar knife bowl",
    ),
    "beast": _domain(
        "otter badger weasel ferret rabbit marten beaver heron falcon magpie raven thrush "
        "lizard gecko turtle salmon trout carp moose bison",
        "wood pond nest trail night moon snow cliff shore reed bush den",
    ),
}
#: Words that the filler of every domain shares.
COMMON = _words(
    "the a old wind quiet light under over near far walks sings waits turns slowly again then and "
    "but while small large cold warm"
)
KINDS = tuple(kind for domain in DOMAINS.values() for kind in domain.kinds)
FILLER = (*COMMON, *(noun for domain in DOMAINS.values() for noun in domain.nouns))

VOCAB = (*SPECIAL, *VERBS, *MARKS, *DIGITS, *COUNTERS, *NODES, *KINDS, *FILLER)
ID: dict[str, int] = {word: index for index, word in enumerate(VOCAB)}
