"""What a claim is: numbers per prompt, and a verdict from their intervals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from kvsim.statistics import Interval
from results_page.quantities import TITLES, Floats
from results_page.statistics import Results

HOLDS, NOT, OPEN = "holds", "does not hold", "not decidable here"


@dataclass(frozen=True)
class Claim:
    """What a paper says, and how it does here.

    cases: for each case a number per prompt that is above 0 where the claim is right; with a
    margin, one that is nearer to 0 than the margin. why: why there is no number here.
    """

    number: str
    says: str
    test: str = ""
    cases: Mapping[str, Floats] = field(default_factory=dict)
    margin: float | None = None
    why: str = ""

    def vote(self, found: Interval) -> str:
        """`for`, `against` or `open`, for one case."""
        least = 0.0 if self.margin is None else -self.margin
        most = np.inf if self.margin is None else self.margin
        if self.margin is None and found.low == 0:
            return "open"
        if least <= found.low and found.high <= most:
            return "for"
        return "against" if found.high < least or found.low > most else "open"

    @property
    def votes(self) -> dict[str, tuple[Interval, str]]:
        """Interval and vote of each case."""
        found = {case: Interval.of(values) for case, values in self.cases.items()}
        return {case: (one, self.vote(one)) for case, one in found.items()}

    @property
    def verdict(self) -> str:
        """Holds in every case; does not hold in at least one; or neither."""
        votes = {vote for _, vote in self.votes.values()}
        if "against" in votes:
            return NOT
        return HOLDS if votes == {"for"} else OPEN

    def result(self, prompts: int) -> str:
        """The cases, or where there are many how many of each kind and the outermost."""
        if self.why:
            return self.why
        said = {case: _case(case, *found, prompts) for case, found in self.votes.items()}
        if len(said) <= 4:
            return "<br>".join(said.values())
        votes = [vote for _, vote in self.votes.values()]
        count = ", ".join(f"{votes.count(kind)} {kind}" for kind in dict.fromkeys(votes))
        order = sorted(said, key=lambda case: self.votes[case][0].mean)
        return f"{len(said)} cases: {count}<br>least, {said[order[0]]}<br>most, {said[order[-1]]}"


def _case(case: str, found: Interval, vote: str, prompts: int) -> str:
    number = "" if found.n == prompts else f", n = {found.n}"
    mark = "" if vote == "for" else f" ({vote})"
    return f"{case}: {found.text('+.1f' if abs(found.mean) >= 10 else '+.3f')}{number}{mark}"


def compared(
    r: Results, number: str, says: str, more: str, less: str, quantity: str = "error"
) -> Claim:
    """A claim that one policy has more of something than another, at every budget."""
    pair = (label.removeprefix("prompt: ") for label in (more, less))
    test = f"{TITLES[quantity]}: " + " minus ".join(f"`{label}`" for label in pair)
    return Claim(number, says, test, r.above(more, less, quantity))
