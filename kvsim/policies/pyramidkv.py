"""PyramidKV: more entries in the first layers, fewer in the last.

Cai et al., "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling",
arXiv 2406.02069, section 4. Scores are SnapKV's. With c the budget and beta the steepness, the last
layer gets mn = c / beta entries, the first mx = 2c - mn; between them the budget falls linearly. A
layer with a sliding window is left out and not counted, because the window bounds its cache.

Deviations. A layer's budget includes its window. The layers' budgets are computed for the longest
cache T at any event so far, if each layer gets the budget: the prompt, or in decoding c + interval
where that is more. mx is at most T - window and at least c, budgets are clipped to [window, T], and
rounding by largest remainders makes their mean exactly the budget. Two presets follow
implementations that compute the budgets at every event, from the entries that the layer then holds
(`rule="event"`): `pyramidkv@kvpress` (window 64, average-pool of 5, the plain budget where mn is
below the window) and `pyramidkv@reference`, the rule in the AMS release. That release searches for
a ratio that keeps the budget, and gives layers the remainder of 1 or 2 entries, in 9 % of the
budgets up to 2,048 with events every 512 rows; here the budget is exact. In decoding these budgets
oscillate, because layers then hold different numbers of entries. Both presets count a layer's depth
among all layers, also those with a sliding window.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Literal

from kvsim.core.lazy import Tensor, torch
from kvsim.core.parameters import AtLeast
from kvsim.core.pieces import Effect, LayerBudgets
from kvsim.core.select import apportion
from kvsim.core.view import View


class Pyramid(LayerBudgets):
    """Budgets that fall with depth; `rule`: from the schedule, or from the entries held."""

    window: Annotated[int, AtLeast(1)] = 8
    beta: Annotated[float, AtLeast(1)] = 20.0
    rule: Literal["fixed", "event"] = "fixed"

    @property
    def effect(self) -> Effect:
        """The rule of the implementations has no fixed total."""
        return "exact" if self.rule == "fixed" else "near"

    def planned(self, budget: int, n_layers: int, longest: int) -> Sequence[int]:
        """The budgets of all layers where they are fixed; their mean is `budget`."""
        return _planned(self, budget, n_layers, longest) if self.rule == "fixed" else (budget,)

    def budgets(self, view: View, budget: int) -> Tensor:
        """Return the budget n_l of each layer, int [L]."""
        if self.rule == "fixed":
            windowed = torch.tensor(view.setting.windowed, device=view.layers.device)
            longest = view.setting.longest(int(view.positions[-1]) + 1)
            place = view.layers - (windowed < view.layers.unsqueeze(-1)).sum(-1)
            of_all = self.planned(budget, view.setting.n_layers - len(windowed), longest)
            return torch.tensor(of_all, device=view.layers.device)[place]
        count = view.count.amax(-1).double()  # entries of a head before the event
        last = torch.full_like(count, budget / self.beta)
        first = 2 * budget - last
        over = first >= count - self.window
        first = torch.where(over, count - self.window, first)
        last = torch.where(over, 2 * budget - first, last)
        step = (first - last) / max(view.setting.n_layers - 1, 1)
        share = (first - view.layers * step).round().long()  # halves to even, as Python rounds
        falls = (count >= first) & (first >= last) & (last >= self.window)
        return torch.where(falls, share, budget).clamp(min=view.setting.protected)


@lru_cache(maxsize=1024)  # called at every event and in every search for the smallest budget
def _planned(pyramid: Pyramid, budget: int, n_layers: int, longest: int) -> tuple[int, ...]:
    least = min(pyramid.window, budget)  # at least the window is kept
    most = max(longest, budget)
    first = max(budget, min(2 * budget - budget / pyramid.beta, longest - pyramid.window))
    share = torch.linspace(first, 2 * budget - first, n_layers, dtype=torch.float64)
    share = share.clamp(min=least, max=most)
    total = torch.tensor(n_layers * budget)
    floor = torch.full((n_layers,), least)
    cap = torch.full((n_layers,), most)
    return tuple(apportion(total, share - least, floor, cap).tolist())
