"""Where the sets of a dump part from a definition, each event judged on the dump's own state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvsim.core.lazy import Tensor, torch
from kvsim.core.policy import Policy, Schedule
from kvsim.core.trace import Trace
from kvsim.engine.block import Block, Choice
from kvsim.engine.checks import check_cell
from kvsim.engine.layers import runs
from kvsim.engine.replay import settings_of
from kvsim.engine.source import TraceSource
from kvsim.errors import DumpError

#: Kinds of differing sets: tied at the cut; another choice; everything kept at an event that
#: should evict; entries evicted where the definition has no event; evicted entries that return.
DifferenceKind = Literal["tie", "choice", "no eviction", "no event", "return"]


@dataclass(frozen=True)
class Difference:
    """A set that differs from the definition's, of one layer and head after the event after a row.

    extra: positions that stay and by definition leave; missing: that leave and by definition stay;
    returned: that had left before. gap: the highest score of what is missing less the lowest of
    what is extra, as a share of the largest score of the layer; None where one of them is empty or
    protected. highest: the extra entries are the highest positions of an exact tie.
    """

    row: int
    layer: int
    head: int
    kind: DifferenceKind
    extra: tuple[int, ...]
    missing: tuple[int, ...]
    returned: tuple[int, ...] = ()
    gap: float | None = None
    highest: bool = False


@dataclass(frozen=True)
class DumpCase:
    """Sets to be judged, and by what: a policy at a budget and the rows of its events, on a trace.

    kept: by row, bool [layer, head, row + 1] of `layers`, which are counted in the trace.
    """

    kept: dict[int, NDArray[np.bool_]]
    layers: tuple[int, ...]
    trace: Trace
    policy: Policy
    budget: int
    schedule: Schedule
    events: tuple[int, ...]
    tolerance: float

    def differences(self) -> Iterator[Difference]:
        """Yield the sets that differ, layers first; each event follows the sets of the dump."""
        trace, policy = self.trace, self.policy.at(self.budget)
        check_cell(trace, policy, self.budget, None, self.schedule)
        settings = settings_of(trace, policy, self.budget, self.schedule)
        for run in runs(trace, self.layers, policy):
            comparison = _Comparison(self, [self.layers.index(layer) for layer in run.layers])
            source = TraceSource(trace, run.layers, torch.device("cpu"))
            block = Block(source, policy, settings, run.layers)
            for row in sorted({*self.events, *self.kept}):
                with torch.inference_mode():
                    choice = block.choose(row, fires=row in self.events)
                    block.apply(choice, comparison.follow(choice))
                yield from comparison.differences
                comparison.differences = []


class _Comparison:
    """Compare the kept sets of a block's policy with the sets of some layers, and follow these."""

    def __init__(self, case: DumpCase, at: list[int]) -> None:
        self._case, self._at = case, at
        self.differences: list[Difference] = []

    def follow(self, choice: Choice) -> Tensor:
        """Return the sets of the dump, as far as they are in the cache."""
        case, view = self._case, choice.view
        pos, live = view.pos, view.live
        stayed = torch.zeros(*pos.shape[:2], view.row + 1, dtype=torch.bool)
        layer, head, slot = live.nonzero(as_tuple=True)
        stayed[layer, head, pos[layer, head, slot]] = True
        sets = stayed  # where the implementation has no event
        if view.row in case.kept:
            sets = torch.from_numpy(case.kept[view.row][self._at])
        kept, absent = sets.gather(-1, pos.clamp(min=0)) & live, sets & ~stayed
        differs = (kept != choice.keep).any(-1) | absent.any(-1)
        for index in differs.any(-1).nonzero().flatten().tolist():
            heads = differs[index].nonzero().flatten().tolist()
            layer_differences = [self._compare(choice, kept, absent, index, h) for h in heads]
            self.differences += self._shared_ties(choice, kept, index, layer_differences)
        if not bool(kept.any(-1).all()):
            raise DumpError(f"after row {view.row} a head keeps nothing that is in the cache")
        return kept

    def _compare(
        self, choice: Choice, kept: Tensor, absent: Tensor, index: int, head: int
    ) -> Difference:
        theirs, ours = kept[index, head], choice.keep[index, head]
        live, pos = choice.view.live[index, head], choice.view.pos[index, head]
        extra, missing = theirs & ~ours, ours & ~theirs
        returned = tuple(absent[index, head].nonzero().flatten().tolist())
        gap, tied, highest = self._gap(choice, extra, missing, index, head)
        kinds: dict[DifferenceKind, bool] = {
            "return": bool(returned),
            "no event": choice.scores is None,
            "tie": tied,
            "no eviction": bool((theirs == live).all()),
        }
        return Difference(
            row=choice.view.row,
            layer=self._case.trace.layer_ids[self._case.layers[self._at[index]]],
            head=head,
            kind=next((kind for kind, is_so in kinds.items() if is_so), "choice"),
            extra=tuple(pos[extra].tolist()),
            missing=tuple(pos[missing].tolist()),
            returned=returned,
            gap=gap,
            highest=highest,
        )

    def _gap(
        self, choice: Choice, extra: Tensor, missing: Tensor, index: int, head: int
    ) -> tuple[float | None, bool, bool]:
        """The gap between the scores of differing entries; whether it is a tie; of which side."""
        some = bool(extra.any()) and bool(missing.any())
        if choice.scores is None or choice.protected is None or not some:
            return None, False, False
        if bool((choice.protected[index, head] & (extra | missing)).any()):
            return None, False, False
        scores, live = choice.scores[index].double(), choice.view.live[index]
        scale = _largest(scores, live)
        groups = None if choice.plan is None else choice.plan.groups
        parts = torch.zeros_like(extra, dtype=torch.long) if groups is None else groups[index, head]
        gaps, tied, highest = [], True, True
        for part in parts[extra | missing].unique():
            mine = parts == part
            a, b = extra & mine, missing & mine
            if int(a.sum()) != int(b.sum()):
                return None, False, False
            gaps.append(float(scores[head][b].max() - scores[head][a].min()) / scale)
            tied &= abs(gaps[-1]) <= self._case.tolerance
            cut = scores[head][a].min()
            ties = (live[head] & mine & (scores[head] == cut)).nonzero().flatten()
            stays = (choice.keep[index, head] & ~missing | extra)[ties]
            highest &= gaps[-1] == 0 and bool(stays[len(stays) - int(stays.sum()) :].all())
        return max(gaps, key=abs), tied, highest

    def _shared_ties(
        self, choice: Choice, kept: Tensor, index: int, differences: list[Difference]
    ) -> list[Difference]:
        """Return differences of heads that share a budget, where all of them are a tie, as ties."""
        ours, theirs = choice.keep[index], kept[index]
        extra, missing = theirs & ~ours, ours & ~theirs
        apart = {difference.kind for difference in differences} - {"tie"}
        if apart != {"choice"} or choice.scores is None or choice.protected is None:
            return differences
        if int(extra.sum()) != int(missing.sum()) or not bool(extra.any()):
            return differences
        if bool((choice.protected[index] & (extra | missing)).any()):
            return differences
        scores = choice.scores[index].double()
        gap = float(scores[missing].max() - scores[extra].min()) / _largest(
            scores, choice.view.live[index]
        )
        per_head = (extra.sum(-1) == missing.sum(-1)).all()
        if abs(gap) > self._case.tolerance or bool(per_head):
            return differences
        return [replace(each, kind="tie", gap=gap) for each in differences]


def _largest(scores: Tensor, live: Tensor) -> float:
    """The largest finite score of a layer, of either sign."""
    finite: Any = scores[live & scores.isfinite()].abs()
    return float(finite.max()) or 1.0 if finite.numel() else 1.0
