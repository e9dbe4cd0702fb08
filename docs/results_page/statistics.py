"""Values over prompts, and their differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from results_page.plan import Plan
from results_page.quantities import Floats, Numbers


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
