"""A claim: numbers per prompt for each case, and a verdict from tests over prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from kvsim.analysis.arrays import Floats
from kvsim.analysis.significance import ALPHA, FEWEST, holm, sign_flip, undecidable
from kvsim.analysis.summaries import Interval
from kvsim.schema import plural

HOLDS, NOT, OPEN = "holds", "does not hold", "not decided"

#: Cases that are listed one by one; of more, how many of each kind and the outermost.
LISTED = 4
#: The least mean that matters in a case, in the unit of its number; of a difference between two
#: settings as a share of their mean. A margin is the effect size of a claim that has one.
MATTERS = 0.01
#: Cases of ten in which a claim has to be right: one of many layers and budgets refutes nothing.
OF_TEN = 9


class ClaimCase(NamedTuple):
    """The interval of a case, its vote (`for`, `against`, `open`, `few`), and its corrected p."""

    interval: Interval
    vote: str
    p: float


@dataclass(frozen=True)
class Claim:
    """A sentence of a paper, and its result on these traces.

    number: such as Q1. says: the claim in words. tested: the tested number. cases: for each case a
    number per prompt that is above 0 where the claim is right; with a margin, one that is nearer to
    0 than the margin. least: means that matter, `MATTERS` where a case has none. outside: cases in
    which a method is out of its range, and why. needs: what would give it a number, said where
    there is none.
    """

    number: str
    says: str
    tested: str = ""
    cases: Mapping[str, Floats] = field(default_factory=dict)
    margin: float | None = None
    least: Mapping[str, float] = field(default_factory=dict)
    outside: Mapping[str, str] = field(default_factory=dict)
    needs: str = ""

    @cached_property
    def votes(self) -> dict[str, ClaimCase]:
        """Interval, vote and p-value of each case that has a number.

        A case is `for` or `against` the claim where sign flips over prompts (`sign_flip`) say so
        after correction for the number of cases (`holm`) and the mean matters; `few` with fewer
        prompts than can say so of one case.
        """
        intervals = Interval.of_each(list(self.cases.values()))
        named = zip(self.cases, intervals, strict=True)
        found = {case: interval for case, interval in named if interval.n}
        gaps = {case: self._gap(case) for case, one in found.items() if one.n >= FEWEST}
        p = np.empty(len(gaps))
        sizes = np.array([len(gap) for gap in gaps.values()])
        for size in np.unique(sizes):
            chosen = sizes == size
            p[chosen] = sign_flip(np.array([gap for gap in gaps.values() if len(gap) == size]))
        corrected = dict(zip(gaps, holm(p).tolist(), strict=True))
        return {
            case: ClaimCase(
                interval, self._vote(case, gaps, corrected), corrected.get(case, np.nan)
            )
            for case, interval in found.items()
        }

    def _gap(self, case: str) -> Floats:
        """Numbers above 0 where the claim is right; of a margin the distance to its nearer end."""
        values: Floats = self.cases[case][~np.isnan(self.cases[case])].astype(np.float64)
        return values if self.margin is None else self.margin - np.sign(values.mean()) * values

    def _vote(self, case: str, gaps: Mapping[str, Floats], p: Mapping[str, float]) -> str:
        if case not in gaps:
            return "few"
        mean = gaps[case].mean()
        least = self.least.get(case, MATTERS) if self.margin is None else 0.0
        if p[case] > ALPHA or abs(mean) < least:
            return "open"
        return "for" if mean > 0 else "against"

    @property
    def verdict(self) -> str:
        """Holds in nine tenths of the cases; does not hold in more than a tenth; or neither."""
        votes = Counter(case.vote for case in self.votes.values())
        tested = votes.total() - votes["few"]
        if 10 * votes["against"] > (10 - OF_TEN) * tested:
            return NOT
        return HOLDS if tested and 10 * votes["for"] >= OF_TEN * tested else OPEN

    @property
    def why(self) -> str:
        """Why nothing can be said, where that is not for the numbers; empty otherwise."""
        if not self.votes:
            return self._out_of_range or self.needs
        sizes = [case.interval.n for case in self.votes.values() if case.vote != "few"]
        most = max(sizes, default=max(case.interval.n for case in self.votes.values()))
        return undecidable(most, len(sizes) or len(self.votes))

    @property
    def _out_of_range(self) -> str:
        count = Counter(self.outside.values())
        return "; ".join(f"{plural(n, 'case')} out of range: {why}" for why, n in count.items())

    def lines(self, prompts: int, *, every: bool = False) -> list[str]:
        """The cases with their numbers, the test, and missing results; every: list all cases.

        prompts: how many there are; a case with another number of them says so.
        """
        if not self.votes:
            return [self.why] if self.why else []
        lines = {case: _line(case, *result, prompts) for case, result in self.votes.items()}
        ends = [self._test, *filter(None, (self._out_of_range, self.why))]
        if every or len(lines) <= LISTED:
            return [*lines.values(), *ends]
        order = sorted(lines, key=lambda case: self.votes[case].interval.mean)
        return [f"least, {lines[order[0]]}", f"most, {lines[order[-1]]}", *ends]

    @property
    def _test(self) -> str:
        """The number of cases of each kind, of prompts, and the correction."""
        votes = Counter(case.vote for case in self.votes.values())
        sizes = [case.interval.n for case in self.votes.values() if case.vote != "few"]
        kinds = [f"{n} {'with too few prompts' if x == 'few' else x}" for x, n in votes.items()]
        tested = ""
        if sizes:
            fewer = f"{len(sizes)} tested " * (len(sizes) < len(self.votes))
            span = " to ".join(map(str, sorted({min(sizes), max(sizes)})))
            tested = f", {fewer}over {span} prompts (Holm)"
        return f"{plural(len(self.votes), 'case')}{tested}: {', '.join(kinds)}"


def _line(case: str, interval: Interval, vote: str, p: float, prompts: int) -> str:
    number = "" if interval.n == prompts else f", n = {interval.n}"
    mark = {"for": "", "few": " (too few prompts)"}.get(vote, f" ({vote})")
    value = interval.text("+.1f" if abs(interval.mean) >= 10 else "+.3f")
    chance = "" if np.isnan(p) else f", p = {p:.2g}"
    return f"{f'{case}: ' if case else ''}{value}{number}{chance}{mark}"
