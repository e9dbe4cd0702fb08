"""Where the sets of a dump part from a definition, each event judged on the dump's own state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.core.lazy import Tensor, torch
from kvsim.core.policy import Policy, Schedule
from kvsim.core.trace import Trace
from kvsim.engine.block import Block, Choice
from kvsim.engine.checks import Setup
from kvsim.engine.layers import runs
from kvsim.engine.source import TraceSource, ended
from kvsim.errors import DumpError
from kvsim.studies.conformance.accesses import Difference, DifferenceKind, read_apart, stored_apart
from kvsim.studies.conformance.dump import Dump


@dataclass(frozen=True)
class DumpCase:
    """Sets to be judged, and by what: a policy at a budget and the rows of its events, on a trace.

    kept: by row, bool [layer, head, row + 1] of `layers`, which are counted in the trace. dump: has
    what is read and stored.
    """

    kept: dict[int, NDArray[np.bool_]]
    layers: tuple[int, ...]
    trace: Trace
    policy: Policy
    budget: int
    schedule: Schedule
    events: tuple[int, ...]
    tolerance: float
    dump: Dump

    def differences(self) -> Iterator[Difference]:
        """Yield the sets that differ, layers first; each event follows the sets of the dump."""
        if self.kept:
            yield from self._kept()
        policy, trace = self.policy.at(self.budget), self.trace
        gone = torch.from_numpy(self.dump.evicted_at(trace.n_heads, trace.n_pos))
        first = self.schedule.ends(trace.prompt_len, trace.header.context_len)[0]
        for layer, of_layer in zip(self.layers, gone, strict=True):
            if self.dump.read is not None and policy.sparse is not None:
                terms = policy.sparse, of_layer, self.budget, self.dump, self.tolerance
                yield from read_apart(ended(trace, first), layer, *terms)
            if self.dump.stored is not None and policy.rounds:
                yield from stored_apart(
                    trace, layer, policy.storage, of_layer, first - 1, self.dump.stored
                )

    def _kept(self) -> Iterator[Difference]:
        setup = Setup(self.trace, self.policy, self.budget, self.schedule).checked()
        trace, policy, setting = setup.trace, setup.policy, setup.setting()
        for run in runs(trace, self.layers, policy):
            at = [self.layers.index(layer) for layer in run.layers]
            source = TraceSource(trace, run.layers, torch.device("cpu"))
            block = Block(source, policy, setting, run.layers)
            for row in sorted({*self.events, *self.kept}):
                with torch.inference_mode():
                    choice = block.choose(row, fires=row in self.events)
                    kept, differences = self._compared(choice, at)
                    block.apply(choice, kept)
                yield from differences

    def _compared(self, choice: Choice, at: list[int]) -> tuple[Tensor, list[Difference]]:
        """The sets of the dump as far as they are in the cache, [L, H, n], and where they differ.

        at: places of the block's layers in those of the dump.
        """
        view = choice.view
        pos, live = view.pos, view.live
        stayed = torch.zeros(*pos.shape[:2], view.row + 1, dtype=torch.bool)
        layer, head, slot = live.nonzero(as_tuple=True)
        stayed[layer, head, pos[layer, head, slot]] = True
        sets = stayed  # where the implementation has no event
        if view.row in self.kept:
            sets = torch.from_numpy(self.kept[view.row][at])
        kept, absent = sets.gather(-1, pos.clamp(min=0)) & live, sets & ~stayed
        if not bool(kept.any(-1).all()):
            raise DumpError(f"after row {view.row} a head keeps nothing that is in the cache")
        differs = (kept != choice.keep).any(-1) | absent.any(-1)
        layers = differs.any(-1).nonzero().flatten().tolist()
        return kept, [x for i in layers for x in self._of_layer(choice, kept, absent, differs, i)]

    def _of_layer(
        self, choice: Choice, kept: Tensor, absent: Tensor, differs: Tensor, index: int
    ) -> list[Difference]:
        """The differences of a layer; where heads share its budget, they may tie together."""
        ours, theirs = choice.keep[index], kept[index]
        extra, missing = theirs & ~ours, ours & ~theirs
        every = torch.ones_like(extra)
        groups = None if choice.plan is None else choice.plan.groups
        group = torch.zeros_like(extra, dtype=torch.long) if groups is None else groups[index]
        differences = []
        for head in differs[index].nonzero().flatten().tolist():
            of_head = torch.zeros_like(every)
            of_head[head] = True
            moved = of_head & (extra | missing)
            parts = [of_head & (group == part) for part in group[moved].unique()]
            gaps = self._gaps(choice, index, extra & of_head, missing & of_head, parts)
            highest = bool(gaps) and not any(gap for gap, _ in gaps)
            for part in parts if highest else ():
                scores = choice.scores[index].double()  # type: ignore[index]  # of gaps
                cut = scores[extra & part].min()
                stays = theirs[choice.view.live[index] & part & (scores == cut)]
                highest &= bool(stays[len(stays) - int(stays.sum()) :].all())
            returned = tuple(absent[index, head].nonzero().flatten().tolist())
            kinds: dict[DifferenceKind, bool] = {
                "return": bool(returned),
                "no event": choice.scores is None,
                "tie": bool(gaps) and self._tied(gaps),
                "no eviction": bool((theirs == choice.view.live[index])[head].all()),
            }
            pos = choice.view.pos[index, head]
            gap, cut = max(gaps, key=lambda x: abs(x[0]), default=(None, None))
            differences.append(
                Difference(
                    row=choice.view.row,
                    layer=self.trace.layer_ids[int(choice.view.layers[index])],
                    head=head,
                    kind=next((kind for kind, is_so in kinds.items() if is_so), "choice"),
                    extra=tuple(pos[extra[head]].tolist()),
                    missing=tuple(pos[missing[head]].tolist()),
                    returned=returned,
                    gap=gap,
                    highest=highest,
                    cut=cut,
                )
            )
        shared = self._gaps(choice, index, extra, missing, [every])
        exchanged = bool((extra.sum(-1) != missing.sum(-1)).any())  # from one head to another
        choices = {each.kind for each in differences} - {"tie"} == {"choice"}
        if choices and exchanged and shared and self._tied(shared):
            return [replace(each, kind="tie", gap=shared[0][0]) for each in differences]
        return differences

    def _gaps(
        self, choice: Choice, index: int, extra: Tensor, missing: Tensor, parts: Sequence[Tensor]
    ) -> list[tuple[float, tuple[float, float]]]:
        """The gap between the scores of differing entries in each part of a layer, [H, n].

        And the scores: of the best that is missing, and of the worst that is extra.

        Empty where other entries than those that scores decide on differ, or more than they stay.
        """
        if choice.scores is None or choice.protected is None or not bool(extra.any()):
            return []
        scores, gaps = choice.scores[index].double(), []
        finite: Any = scores[choice.view.live[index] & scores.isfinite()].abs()
        scale = (float(finite.max()) if finite.numel() else 0.0) or 1.0  # of the layer
        for part in parts:
            a, b = extra & part, missing & part
            if int(a.sum()) != int(b.sum()) or bool((choice.protected[index] & (a | b)).any()):
                return []
            cut = float(scores[b].max()), float(scores[a].min())
            gaps.append(((cut[0] - cut[1]) / scale, cut))
        return gaps

    def _tied(self, gaps: Sequence[tuple[float, Any]]) -> bool:
        return all(abs(gap) <= self.tolerance for gap, _ in gaps)
