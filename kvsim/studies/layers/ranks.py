"""How the layers of a trace rank the tokens of its prompt, and ASL's test of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from kvsim.analysis.subject import Analysis
from kvsim.core.arguments import resolve_budget
from kvsim.core.trace import Trace
from kvsim.policies.asl import ASL, Selecting
from kvsim.studies.layers.ranking import Curve, Ranking, ranking

#: Shares of the tokens before ASL's window that propagate, where nothing else is asked for.
SHARES = ("10%", "25%", "50%")


@dataclass(frozen=True)
class Ranks:
    """The ranks of a prompt's tokens by layer, and ASL's test of them.

    ks: tokens that propagate next to ASL's window, as numbers or as shares (`25%`) of the tokens
    before it. rule: ASL's parameters.
    """

    trace: Trace
    device: str = "cpu"
    ks: Sequence[int | str] = SHARES
    rule: Selecting = field(default_factory=ASL)

    @cached_property
    def ranking(self) -> Ranking | None:
        """Ranks of the prompt in each layer.

        None where layers are missing or have sliding windows, or the prompt is no longer than the
        window of ASL.
        """
        trace = self.trace
        if not trace.whole or trace.windowed or trace.prompt_len <= self.rule.window:
            return None
        return ranking(trace, self.rule, device=self.device)

    @cached_property
    def curves(self) -> Mapping[str, Curve]:
        """ASL's test at each k, by k as it was given."""
        if (ranking := self.ranking) is None:
            return {}
        budgets = {k: resolve_budget(k, ranking.ranked) + self.rule.window for k in self.ks}
        return {
            str(k): ranking.curve(budget, share=budget_label(k)) for k, budget in budgets.items()
        }


def ranks(analysis: Analysis) -> Ranks:
    """Return the ranks of an analysed trace, by ASL's defaults."""
    return Ranks(analysis.trace, analysis.device)


def budget_label(k: int | str) -> str:
    """The budget that leaves k tokens next to ASL's window, in words."""
    return f"{k} + window"
