"""Source of the page's numbers: one Table of all traces, looked up by row of the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvsim.analysis.results import Result
from kvsim.claims import Evidence
from kvsim.claims.evidence import of
from results_page.plan import Plan

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Results:
    """The values of every trace; digests and sizes (tokens, of these prompt) of the traces."""

    plan: Plan
    evidence: Evidence
    digests: Sequence[str] = ()
    sizes: Sequence[tuple[int, int]] = ()

    def of(
        self,
        label: str,
        budget: int,
        metric: str,
        variant: str | None = None,
        layer: int | None = None,
    ) -> Floats:
        """A value for each prompt, NaN where there is none."""
        return self.evidence.value(metric, variant, layer, of=(self._result(label), str(budget)))

    def chance(self, label: str, budget: int, metric: str) -> Floats:
        """Values of chance alone; [prompt]."""
        return self.evidence.value(metric, of=(self._result(label), str(budget)), chance=True)

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return len(self.evidence.layers("layer_entropy"))

    def _result(self, label: str) -> Result:
        """The row of the tables; of policies that drop rows, the one after the prompt."""
        setting = of(label)
        found = self.evidence.alone(setting) or self.evidence.of_prompt().alone(setting)
        if not found:
            raise KeyError(label)
        return found[0][1]
