"""Repetition in a response: how much of it was there before, and whether it ends in a loop."""

from __future__ import annotations

from collections.abc import Sequence

#: Tokens of the n-grams that are counted.
NGRAM = 4

#: A loop is a period of at most so many tokens, this often at the end, and so many tokens in all.
PERIOD, TIMES, LEAST = 64, 3, 12


def repeated(tokens: Sequence[int], n: int = NGRAM) -> float | None:
    """The share of n-grams that occurred earlier in the same tokens; None if there is no n-gram."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else None


def looping(tokens: Sequence[int]) -> bool:
    """Whether the tokens end in a loop: one period of them, three times or more in a row."""
    for period in range(1, min(PERIOD, len(tokens) // TIMES) + 1):
        times = max(TIMES, -(-LEAST // period))
        end = list(tokens[-period * times :])
        if len(end) == period * times and end == end[:period] * times:
            return True
    return False
