"""A claim: numbers per prompt, and a verdict from their intervals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from kvsim.analysis.summaries import Interval

Floats = NDArray[np.float64]

HOLDS, NOT, OPEN = "holds", "does not hold", "cannot be decided"

#: Cases that are listed one by one; of more, how many of each kind and the outermost.
LISTED = 4


@dataclass(frozen=True)
class Claim:
    """A sentence of a paper, and its result on these traces.

    number: such as Q1. says: the claim in words. tested: what the number is. cases: for each case a
    number per prompt that is above 0 where the claim is right; with a margin, one that is nearer to
    0 than the margin. needs: what would give it a number, said where there is none.
    """

    number: str
    says: str
    tested: str = ""
    cases: Mapping[str, Floats] = field(default_factory=dict)
    margin: float | None = None
    needs: str = ""

    def vote(self, interval: Interval) -> str:
        """`for`, `against` or `open`, for one case; always open for a single prompt."""
        least, most = (0.0, np.inf) if self.margin is None else (-self.margin, self.margin)
        low, high = interval.low, interval.high
        if self.margin is None and low == 0:
            return "open"
        if least <= low and high <= most:
            return "for"
        return "against" if high < least or low > most else "open"

    @cached_property
    def votes(self) -> dict[str, tuple[Interval, str]]:
        """Interval and vote of each case that has a number."""
        intervals = Interval.of_each(list(self.cases.values()))
        cases = zip(self.cases, intervals, strict=True)
        return {case: (interval, self.vote(interval)) for case, interval in cases if interval.n}

    @property
    def verdict(self) -> str:
        """Holds in every case; does not hold in at least one; or neither."""
        votes = {vote for _, vote in self.votes.values()}
        if "against" in votes:
            return NOT
        return HOLDS if votes == {"for"} else OPEN

    @property
    def why(self) -> str:
        """Why nothing can be said, where that is not for the numbers; empty otherwise."""
        if not self.votes:
            return self.needs
        alone = all(vote.n == 1 for vote, _ in self.votes.values())
        return "needs more than one prompt: a single one has no interval" if alone else ""

    def lines(self, prompts: int, *, every: bool = False) -> list[str]:
        """The cases with their numbers, and what is missing; every: however many there are.

        prompts: how many there are; a case with another number of them says so.
        """
        lines = {case: _line(case, *at, prompts) for case, at in self.votes.items()}
        why = [self.why] if self.why else []
        if every or len(lines) <= LISTED:
            return [*lines.values(), *why]
        votes = Counter(vote for _, vote in self.votes.values())
        count = ", ".join(f"{n} {kind}" for kind, n in votes.items())
        order = sorted(lines, key=lambda case: self.votes[case][0].mean)
        least, most = lines[order[0]], lines[order[-1]]
        return [f"{len(lines)} cases: {count}", f"least, {least}", f"most, {most}", *why]


def _line(case: str, interval: Interval, vote: str, prompts: int) -> str:
    number = "" if interval.n == prompts else f", n = {interval.n}"
    mark = "" if vote == "for" else f" ({vote})"
    value = interval.text("+.1f" if abs(interval.mean) >= 10 else "+.3f")
    return f"{f'{case}: ' if case else ''}{value}{number}{mark}"
