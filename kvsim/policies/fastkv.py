"""FastKV: only some tokens propagate beyond a given layer of the prefill.

Jo et al., "FastKV: KV Cache Compression for Fast Long-Context Processing with Token-Selective
Propagation", arXiv 2502.01068. At the end of a prompt, after the token-selective layer, `rows`
tokens propagate at their own positions: the window, and the tokens with the largest pooled
attention from the last `window` rows, summed over all query heads. Every layer's cache is cut to
the budget by SnapKV from the same window; deeper layers choose among the propagated tokens. FastKV
is ASL with a fixed layer.

By default (`layer=None`) the layer is that of ASL's authors (appendix C.2 of their paper): layer 15
of 32 or 14 of 28; in other models, the middle layer. `rows` has three forms: a count (mode
"constant" of the release, 2048 with a budget of 512), a share of the prompt (`fastkv@proportional`,
0.2 with a budget of 10%), or None for as many as the budget, as in ASL's comparison. A prompt
shorter than the budget, or of at most `rows` tokens, propagates whole.

Deviations. Pooling takes the maximum, the default of the released scripts; the class that they call
takes the average. In the proportional mode, deeper layers of the release keep the same number of
entries as the others up to rounding; here it is exactly the budget everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from kvsim.core.parameters import Above, AtLeast, AtMost, Odd
from kvsim.core.propagation import Forecast, Step, dropped_after
from kvsim.core.view import View
from kvsim.errors import PolicyError
from kvsim.policies.asl import AtLayer, best_and_rest, pooled_scores, ranks
from kvsim.policies.window import Pooling, Windowed


class FastKV(AtLayer):
    """The `rows` tokens that a window attends to most at one layer propagate."""

    published: ClassVar[Mapping[int, int]] = {32: 15, 28: 14}
    depth: ClassVar[float] = 0.5

    rows: Annotated[int, AtLeast(1)] | Annotated[float, Above(0), AtMost(1)] | None = 2048
    window: Annotated[int, AtLeast(1)] = 8
    pool: Pooling = "max"
    pool_kernel: Annotated[int, AtLeast(1), Odd()] = 7
    kv_before: Literal["budget", "full"] = "budget"

    reads = Windowed.reads

    @property
    def effect(self) -> Literal["exact", "near", "some"]:
        """Deeper layers hold less where fewer tokens propagate than the budget allows."""
        if self.kv_before == "full":
            return "some"
        return "exact" if self.rows is None else "near"

    @property
    def least_budget(self) -> int:
        """The window, which always propagates, and one selected token."""
        return self.window + 1 if self.rows is None else 1

    def after(self, view: View, memory: Any) -> Step:
        """Select the best tokens and the window at the selection layer."""
        n, budget = view.row + 1, view.setting.budget
        kept = self._kept(budget, n)
        if n < budget or n <= max(
            kept, self.window
        ):  # one that just fills the budget is long enough
            return Step(done=True)
        if int(view.layers[0]) < self.at(view.setting.n_layers):
            return Step()
        if kept < self.window:
            raise PolicyError(
                f"fastkv: {kept} rows propagate (rows={self.rows!r} of a prompt of {n} tokens), "
                f"fewer than the window of {self.window}; give more rows or a smaller window"
            )
        scores = pooled_scores(view, self.window, self.pool, self.pool_kernel)[0]
        return Step(best_and_rest(ranks(scores), kept - self.window, n), done=True)

    def forecast(
        self, budget: int, prompt_len: int, n_layers: int, layer: int | None = None
    ) -> Forecast:
        """All rows up to the layer, `rows` in deeper layers."""
        at, whole = self.at(n_layers) if layer is None else layer, prompt_len < budget
        kept = prompt_len if whole else self._kept(budget, prompt_len)
        out = dropped_after(at, kept, prompt_len, n_layers)
        scored = [at] if out.rows[-1] < out.rows[0] else []
        return out._replace(scored=scored, layer=self.at(n_layers), whole=whole)

    def _kept(self, budget: int, prompt_len: int) -> int:
        if self.rows is None:
            return budget
        return int(prompt_len * self.rows) if isinstance(self.rows, float) else self.rows
