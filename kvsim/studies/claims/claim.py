"""A claim: a sentence about several cells, and one test of it over prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from kvsim.analysis.arrays import Floats
from kvsim.analysis.significance import ALPHA, ENOUGH, FEWEST, at_least
from kvsim.schema import plural

HOLDS, NOT, OPEN = "holds", "does not hold", "not decided"
#: In how many cells a sentence has to be right.
ALL, MOST = "in all", "in most"

#: The least relevant difference, in the unit of the number; of two settings a share of their mean.
MATTERS = 0.01


@dataclass(frozen=True)
class Claim:
    """A sentence of a paper, and its test on these traces.

    number: such as Q1. says: the sentence. tested: the tested number. cells: that number of each
    prompt at each budget, layer or policy, above 0 where the sentence is right; [prompt], or with
    its denominator [2, prompt]. where: in how many of the cells it has to be right. least: the
    least relevant value in a cell. untested: cells that are not tested, and why. needs: the replays
    that would produce a number, where there is none.
    """

    number: str
    says: str
    tested: str = ""
    cells: Mapping[str, Floats] = field(default_factory=dict)
    where: str = MOST
    least: float = MATTERS
    untested: Mapping[str, str] = field(default_factory=dict)
    needs: str = ""

    @cached_property
    def _numbers(self) -> tuple[list[str], Floats, Floats]:
        """Cells of enough prompts, unless all sizes are 0; numbers and sizes [prompt, cell]."""
        each = self.cells.items()
        cells = {x: y if y.ndim > 1 else np.stack([y, np.ones_like(y)]) for x, y in each}
        counts = {name: int(np.isfinite(x).all(0).sum()) for name, x in cells.items()}
        fewest = max(min(max(counts.values(), default=1), FEWEST), 1)
        names = [name for name, n in counts.items() if n >= fewest]
        if not names:
            return names, np.empty((0, 0)), np.empty((0, 0))
        both = np.stack([cells[name] for name in names], -1).astype(np.float64)
        both = both[:, np.isfinite(both).all((0, 2))]
        some = both[1].any(0)
        return [x for x, there in zip(names, some, strict=True) if there], *both[:, :, some]

    @property
    def n(self) -> int:
        """Prompts that have all tested cells."""
        names, numbers, _ = self._numbers
        return len(numbers) if names else 0

    @property
    def means(self) -> dict[str, float]:
        """The mean of each tested cell over these prompts, as a share of the mean size."""
        names, numbers, sizes = self._numbers
        return dict(zip(names, (numbers.sum(0) / sizes.sum(0)).tolist(), strict=True))

    @cached_property
    def p(self) -> tuple[float, float]:
        """P-values of the sentence and of its contrary; NaN of too few prompts.

        The contrary of "in at least r of L cells" is the opposite in at least L - r + 1. Either has
        to hold by at least `least`.
        """
        names, numbers, sizes = self._numbers
        if self.n < FEWEST:
            return np.nan, np.nan
        order, least = (np.lexsort(np.abs(numbers).T), self.least * sizes)  # no order but of values
        right, contrary = (numbers - least)[order], (-numbers - least)[order]
        cells = len(names) if self.where == ALL else len(names) // 2 + 1
        return at_least(right, cells), at_least(contrary, len(names) - cells + 1)

    @property
    def verdict(self) -> str:
        """Whether the test shows the sentence, its contrary, or neither."""
        right, contrary = self.p
        return HOLDS if right <= ALPHA else NOT if contrary <= ALPHA else OPEN

    @property
    def why(self) -> str:
        """Why nothing can be decided, apart from the numbers; empty otherwise."""
        if not self.n:
            return self.omitted or self.needs
        if self.n >= ENOUGH or self.verdict != OPEN:
            return ""
        if self.n < FEWEST:
            return f"fewer than {FEWEST} prompts decide nothing; record {ENOUGH}"
        return f"of {self.n} prompts p is at least {0.5**self.n:.2g}; record {ENOUGH}"

    @cached_property
    def _reasons(self) -> Counter[str]:
        """Count the cells that are not tested, by reason."""
        there = {name for name, x in self.cells.items() if np.isfinite(x).any()}
        few = there - {*self._numbers[0]}
        return Counter([*self.untested.values(), *("too few prompts" for _ in few)])

    @property
    def omitted(self) -> str:
        """Describe the cells that are not tested, and why."""
        reasons = self._reasons.items()
        return "; ".join(f"{plural(n, 'cell')} left out: {why}" for why, n in reasons)

    @property
    def result(self) -> str:
        """P-values, the number of prompts, cells whose mean is above 0, and the outermost means."""
        if not self.n:
            return ""
        means = sorted(self.means.values())
        ends = " to ".join(dict.fromkeys(map(shown, (means[0], means[-1]))))
        right, contrary = (f"p={p:.2g}" for p in self.p)
        p = {HOLDS: right, NOT: f"contrary {contrary}", OPEN: f"{right}, contrary {contrary}"}
        above = f"{sum(mean > 0 for mean in means)}/{len(means)} above 0"
        if self._reasons:
            above += f" ({self._reasons.total()} left out)"
        tested = [p[self.verdict]] if self.n >= FEWEST else []
        return ", ".join([*tested, f"n={self.n}", above, ends])


def shown(mean: float) -> str:
    """The mean of a cell as text."""
    return f"{mean:+.1f}" if abs(mean) >= 10 else f"{mean:+.3f}"
