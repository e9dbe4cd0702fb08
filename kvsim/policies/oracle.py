"""The oracle: keeps the entries that later rows attend to most. It uses the future.

`by="mass"` (default) ranks entries by the attention that later rows give them, summed over these
rows and the query heads of the group. At one event this is a bound: no policy that keeps as many
entries in each head and protects the same ones retains more of this attention. Over several events
it is a reference and not a bound, because an event keeps entries for all later rows, and the next
event may evict them. `by="optimum"` is the bound over all events: at the same events, with each
layer's budget at the first of them and the same protected entries, no policy retains more of the
full attention of the rows after the prompt (`kvsim.policies.optimum`). With `pooled`, heads share
the budget of their layer, as in adakv+oracle with floor=0. `by="output"` ranks by the relative
error of the output if only this entry were missing. It is not a bound even at one event, because
errors of several entries do not add up.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from kvsim.core.lazy import Tensor, torch
from kvsim.core.pieces import Inputs, Scorer
from kvsim.core.view import View
from kvsim.policies.future import best, future_mass

# Lower limit on the attention to all other entries, so that an entry with all attention of a row
# has a large but finite score.
_OTHERS = 1e-6

# Sums (one per entry and event) of a layer held at once.
_MOST = 1 << 19


class Oracle(Scorer):
    """Attention mass, or effect on the output, over all later recorded rows."""

    by: Literal["mass", "output", "optimum"] = "mass"
    pooled: bool = False

    reads = Inputs(future=True)

    def score(self, view: View) -> Tensor:
        """s_j = sum over rows r > e and the group of A_r(j), A the full cache's softmax; [L, H, n].

        by="output": of A_r(j) / (1 - A_r(j)) * |v_j - o_r| / |o_r|, with o_r the full output.
        by="optimum": the number of the event that evicts the entry.
        """
        if self.by == "optimum":
            stops = view.memo((self,), lambda: self._stops(view))
            return stops.gather(-1, view.pos.clamp(min=0))
        source, events, weigh = view.source, view.setting.events, None
        if view.row not in events:
            events = (view.row,)
        if self.by == "output":
            weigh = _moved
        # events with a common pass over later rows; rounding changes keys between events
        each = 1 if view.rounded else max(1, _MOST // source.keys[0, ..., 0].numel())
        first = events.index(view.row) // each * each
        together = events[first : first + each]
        weighed: dict[Any, Tensor] = view.memo((self,), dict)
        if together not in weighed:
            mass = future_mass(source, together, 0, weigh=weigh)
            weighed.clear()
            weighed[together] = mass.flip(-1).cumsum(-1).flip(-1)
        ahead = weighed[together][..., together.index(view.row)]
        total = ahead.gather(-1, view.pos.clamp(min=0))
        return total.masked_fill(~view.live, 0.0)

    def _stops(self, view: View) -> Tensor:
        """Index of the event that evicts each entry; the number of events if none does."""
        setting, budget = view.setting, view.budget.cpu().numpy()
        pools = 1 if self.pooled else view.keys.shape[1]
        places = budget * (view.keys.shape[1] // pools)  # [L, 1]
        optimum = best(
            view.source,
            setting.events,
            np.broadcast_to(places[..., None], (len(places), pools, len(setting.events))),
            start=setting.response,
            protect=setting.protected_ends,
        )
        return torch.from_numpy(optimum.stop).to(view.pos.device, torch.float32)


def _moved(attention: Tensor, output: Tensor, values: Tensor) -> Tensor:
    """Relative move of the output without an entry; overwrites attention."""
    attention.clamp_(max=1.0)
    # as a difference: where one entry has nearly all attention, the output is nearly its value
    distance = torch.cdist(output, values, compute_mode="donot_use_mm_for_euclid_dist")
    size = output.norm(dim=-1, keepdim=True)
    relative = torch.where(size > 0, distance / size, torch.zeros_like(distance))
    return attention.mul_(relative / (1 - attention).clamp_(min=_OTHERS))
