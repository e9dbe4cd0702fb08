"""Values over prompts, their differences, and intervals of their means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from results_page.plan import Plan
from results_page.quantities import Floats, Numbers

RESAMPLES = 4000


@dataclass(frozen=True)
class Interval:
    """A mean over prompts and its 95 % bootstrap interval."""

    mean: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, values: Floats) -> Interval:
        """Percentiles of the means of resamples; prompts without a value are left out."""
        known = values[~np.isnan(values)]
        if not len(known):
            return cls(np.nan, np.nan, np.nan, 0)
        low, high = np.percentile(known[_resamples(len(known))].mean(1), [2.5, 97.5])
        return cls(float(known.mean()), float(low), float(high), len(known))

    def text(self, form: str) -> str:
        """The mean, and the interval in brackets; empty without a value."""
        if not self.n:
            return ""
        mean, low, high = (format(x, form) for x in (self.mean, self.low, self.high))
        return f"{mean} [{low}, {high}]"


@cache
def _resamples(n: int) -> NDArray[np.int64]:
    return np.random.default_rng(0).integers(n, size=(RESAMPLES, n))


@dataclass(frozen=True)
class Results:
    """The numbers of every trace, and the seconds of `cost`."""

    plan: Plan
    traces: Sequence[Numbers]
    seconds: Mapping[str, Floats]
    digests: Sequence[str] = ()

    def of(self, label: str, budget: int, quantity: str) -> Floats:
        """A value for each prompt, NaN where there is none."""
        at = label, budget, quantity
        if not any(at in one for one in self.traces):
            raise KeyError(at)
        return np.array([one.get(at, np.nan) for one in self.traces])

    def trace(self, quantity: str) -> Floats:
        """A property of each trace."""
        return self.of("trace", 0, quantity)

    def has(self, label: str, budget: int, quantity: str) -> bool:
        """Whether any trace has a value."""
        return any((label, budget, quantity) in one for one in self.traces)

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return sum(quantity.startswith("expectation ") for *_, quantity in self.traces[0])

    def above(self, more: str, less: str, quantity: str) -> dict[str, Floats]:
        """The difference on each prompt, at each budget."""
        return {
            str(n): self.of(more, n, quantity) - self.of(less, n, quantity)
            for n in self.plan.budgets
        }

    def change(self, label: str, base: str) -> dict[str, Floats]:
        """The difference of the output error, relative to the mean error of the base."""
        means = {str(n): np.nanmean(self.of(base, n, "error")) for n in self.plan.budgets}
        return {n: x / means[n] for n, x in self.above(label, base, "error").items()}
