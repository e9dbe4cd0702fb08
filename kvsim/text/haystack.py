"""Haystacks: windows of prose from Python's documentation."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pydoc_data.topics import topics

__all__ = ["Haystack", "draw", "prose"]

# Lines of grammars, headings, tables and addresses; prose has none of them.
_MARKUP = re.compile(r"::=|={3}|\*{3}|-{3}|\+-|https?:|`")
_SENTENCE_END = re.compile(r"(?<=[.!?:]) (?=[A-Z\"*(])")


@cache
def prose() -> tuple[tuple[str, ...], ...]:
    """Return the prose paragraphs of Python's documentation, each as its sentences.

    About 28,000 tokens; the text depends on the version of Python.
    """
    paragraphs: dict[str, None] = {}
    for name in sorted(topics):
        for block in topics[name].split("\n\n"):
            text = " ".join(block.split())
            whole = len(text) >= 80 and text[0].isupper() and text.endswith(".")
            if whole and not block.startswith(" ") and not _MARKUP.search(text):
                paragraphs.setdefault(text)  # topics share paragraphs
    return tuple(tuple(_SENTENCE_END.split(text)) for text in paragraphs)


@dataclass(frozen=True)
class Haystack:
    """Consecutive sentences, in order; first: whether each begins a paragraph."""

    sentences: tuple[str, ...]
    first: tuple[bool, ...]

    @property
    def words(self) -> int:
        """Number of words."""
        return sum(len(sentence.split()) for sentence in self.sentences)

    def last_words(self, n: int) -> Haystack:
        """Return the last n words; the first sentence may lack its beginning."""
        sentences: list[str] = []
        for sentence in reversed(self.sentences):
            words = sentence.split()
            if n <= 0:
                break
            sentences.append(" ".join(words[-n:]))
            n -= len(words)
        kept = len(sentences)
        return Haystack(tuple(reversed(sentences)), self.first[len(self.first) - kept :])

    def text(self, needles: Sequence[tuple[float, str]] = ()) -> str:
        """Return the text, with needles as paragraphs of their own.

        needles: (depth, needle); depth is the share of the words before the needle, and the needle
        is put between the two sentences nearest to it.
        """
        ends = [0, *accumulate(len(sentence.split()) for sentence in self.sentences)]
        places = [
            (min(range(len(ends)), key=lambda i: abs(ends[i] - depth * ends[-1])), needle)
            for depth, needle in needles
        ]
        parts: list[str] = []
        for i in range(len(ends)):
            inserted = [needle for place, needle in places if place == i]
            if inserted:
                parts += ["\n\n", "\n\n".join(inserted), "\n\n"]
            if i < len(self.sentences):
                separator = "\n\n" if self.first[i] else " "
                parts += ([] if inserted else [separator]) + [self.sentences[i]]
        return "".join(parts).strip()


def draw(rng: random.Random, words: int) -> Haystack:
    """Draw at least `words` words from a random paragraph on, around the end; all if too few."""
    paragraphs = prose()
    start = rng.randrange(len(paragraphs))
    sentences: list[str] = []
    first: list[bool] = []
    count = 0
    for paragraph in (*paragraphs[start:], *paragraphs[:start]):
        if count >= words:
            break
        sentences += paragraph
        first += [True] + [False] * (len(paragraph) - 1)
        count += sum(len(sentence.split()) for sentence in paragraph)
    return Haystack(tuple(sentences), tuple(first))
