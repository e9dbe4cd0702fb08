"""GemFilter: an early layer selects the tokens, and the model reads only these.

Shi et al., "Discovering the Gems in Early Layers: Accelerating Long-Context LLMs with 1000x Input
Token Reduction", arXiv 2409.17422. The prompt runs through the first layers up to `layer`. There
each token's score is the product of its key with the last row's query (neither scaled nor
normalised), summed over the query heads and average-pooled over neighbours. The best tokens of the
whole prompt, as many as the budget, go through all layers from the start, in their order, at
positions 0, 1, 2, ... Nothing protects the last token. Every cache holds these tokens, and decoding
continues after them.

By default (`layer=None`) the layer is 13 of 32 or 14 of 28, as ASL's authors ran it (appendix C.2
of their paper), and in other models the layer at the same relative depth as 13 of 32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from kvsim.core.parameters import AtLeast, Odd
from kvsim.core.propagation import Forecast, Step, dropped_after
from kvsim.core.view import View
from kvsim.policies.asl import AtLayer, ranks
from kvsim.policies.window import smooth


class GemFilter(AtLayer):
    """The tokens that the last row attends to in one layer run through all layers again."""

    caches = "again"
    published: ClassVar[Mapping[int, int]] = {32: 13, 28: 14}
    depth: ClassVar[float] = 14 / 32

    pool_kernel: Annotated[int, AtLeast(1), Odd()] = 5

    def after(self, view: View, memory: Any) -> Step:
        """Select the best tokens at the selection layer."""
        if view.row < view.setting.budget:
            return Step(done=True)
        if int(view.layers[0]) < self.at(view.setting.n_layers):
            return Step()
        # the scale of the logits changes no order
        products = view.logits(1)[0, ..., 0, :].sum((0, 1))  # [n]
        ranked = ranks(smooth(products.unsqueeze(0), "avg", self.pool_kernel)[0])
        return Step((ranked <= view.setting.budget).nonzero()[:, 0], done=True)

    def forecast(
        self, budget: int, prompt_len: int, n_layers: int, layer: int | None = None
    ) -> Forecast:
        """The budget in each layer of the second pass."""
        at, whole = self.at(n_layers) if layer is None else layer, prompt_len <= budget
        out = dropped_after(at, budget, prompt_len, n_layers, again=True)
        return out._replace(scored=() if whole else [at], layer=self.at(n_layers), whole=whole)
