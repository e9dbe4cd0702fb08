"""Deviations that implementations are known for, each as a definition that can be replayed.

A deviation takes a case and returns another: other events, sets, budget or policy. It explains a
dump if the sets then equal that definition's, ties apart, at every event. Those of kvpress are
documented, with their tests, in docs/kvpress.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar, Literal

from kvsim.core.attention import reduce_group
from kvsim.core.lazy import Tensor, torch
from kvsim.core.parameters import parameters
from kvsim.core.policy import Protection, Scorer, Scores, Uniform, Wrapper
from kvsim.core.view import View
from kvsim.errors import KvsimError, PolicyError
from kvsim.policies import CATALOGUE
from kvsim.policies import policy as build_policy
from kvsim.policies.streaming_llm import StreamingLLM
from kvsim.studies.referee.judging import DumpCase


@dataclass(frozen=True)
class Deviation:
    """A known difference from a definition: its name, and the behaviour."""

    name: str
    description: str


def hypotheses(case: DumpCase) -> Iterator[tuple[Deviation, DumpCase]]:
    """Yield the case under each deviation that applies to it."""
    for name, (description, change) in _CHANGES.items():
        try:
            changed = change(case)
        except KvsimError:  # no such budget, parameter or score
            continue
        if changed is not None:
            yield Deviation(name, description), changed
    yield from _presets(case)


def explains(case: DumpCase) -> bool:
    """Whether the sets of a case agree with its definition, except for ties."""
    try:
        return not any(each.kind != "tie" for each in case.differences())
    except KvsimError:  # the changed definition has no rule for this trace
        return False


def _late(case: DumpCase) -> DumpCase | None:
    """Each set is that of the event before, with what came since."""
    rows = sorted(case.kept)
    pairs = list(pairwise(rows))
    if not pairs or not case.kept[rows[0]].all():
        return None
    kept = {row: case.kept[later][..., : row + 1] for row, later in pairs}
    return replace(case, kept=kept, events=tuple(row for row in case.events if row in kept))


def _shifted(by: int, case: DumpCase) -> DumpCase | None:
    last, trace = max(case.kept), case.trace
    rows = case.schedule.rows(trace.prompt_len, last + 2, *trace.extent[2:])
    return replace(case, events=tuple(row + by for row in rows if 0 <= row + by <= last))


def _budget(by: Callable[[Protection, int], int], case: DumpCase) -> DumpCase | None:
    more = by(case.policy.at(case.budget).requested(case.budget), case.budget)
    return replace(case, budget=case.budget + more) if more else None


def _without(name: Literal["sink", "recent"], case: DumpCase) -> DumpCase | None:
    """The policy without sinks, or without the protection of its window or last entries."""
    policy = case.policy
    if not getattr(policy.at(case.budget).requested(case.budget), name):
        return None
    pieces: Any = (policy.scorer, policy.allocator)
    inner, allocator = (
        replace(piece, sink=0) if name == "sink" and "sink" in parameters(type(piece)) else piece
        for piece in pieces
    )
    scorer = _Unprotected(scorer=inner, part=name)
    protect = _less(policy.protect, name)
    return _changed(case, scorer=scorer, allocator=allocator, protect=protect)


def _less(protection: Protection, name: Literal["sink", "recent"]) -> Protection:
    return replace(protection, sink=0) if name == "sink" else replace(protection, recent=0)


def _changed(case: DumpCase, **pieces: Any) -> DumpCase:
    return replace(case, policy=replace(case.policy, **pieces))


@dataclass(frozen=True)
class _Unprotected(Wrapper):
    """The scorer inside, without a part of its protection."""

    part: Literal["sink", "recent"]

    def score(self, view: View) -> Scores:
        return self.inner(view)

    def protection(self, budget: int) -> Protection:
        return _less(self.scorer.protection(budget), self.part)


class _Seen:
    """A view of which some attributes differ, for the scorer inside of a wrapper."""

    def __init__(self, view: View) -> None:
        self._view = view

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)

    def __getitem__(self, column: str) -> Tensor:
        return self._view[column]

    def scored(self, scorer: Scorer) -> Tensor | Scores:
        return scorer.score(self)  # type: ignore[arg-type]  # not what the plain view knows


class _Rotated(_Seen):
    """Queries of the window at the position of the last row (kvpress's SnapKV in decoding)."""

    def attn(self, last: int, group: str | None = None) -> Tensor:
        view = self._view
        if view.is_prompt:  # there every query has its position
            return view.attn(last, group)  # type: ignore[arg-type]
        plain = view.unrotated(last)  # [L, H, G, w, d]
        rows = torch.arange(view.first(last), view.row + 1)
        queries = view.rope.rotate(plain, torch.full_like(rows, view.row))
        logits = torch.einsum("lhgwd,lhnd->lhgwn", queries, view.keys) * view.scale
        hidden = (view.pos[:, :, None] > rows[:, None]) | ~view.live[:, :, None]  # [L, H, w, n]
        weights = logits.masked_fill(hidden.unsqueeze(2), -torch.inf).softmax(-1)
        return reduce_group(weights, group)  # type: ignore[arg-type]


class _Earlier(_Seen):
    """A window that ends one row before the event."""

    def attn(self, last: int, group: str | None = None) -> Tensor:
        return self._view.attn(last + 1, group)[..., :-1, :]  # type: ignore[arg-type]

    def logits(self, last: int) -> Tensor:
        return self._view.logits(last + 1)[..., :-1, :]


class _Grouped(_Seen):
    """Each group of query heads as one head, with their mean attention."""

    def attn(self, last: int, group: str | None = None) -> Tensor:
        weights = self._view.attn(last, "mean")
        return weights.unsqueeze(2) if group is None else weights


class _Unordered(_Seen):
    """Entries in the order in which a cache holds them."""

    def __init__(self, view: View, order: Tensor) -> None:
        super().__init__(view)
        self._order = order  # [L, H, n]

    @property
    def pos(self) -> Tensor:
        return self._view.pos.gather(-1, self._order)

    @property
    def keys(self) -> Tensor:
        return self._rows(self._view.keys)

    @property
    def values(self) -> Tensor:
        return self._rows(self._view.values)

    def attn(self, last: int, group: str | None = None) -> Tensor:
        weights = self._view.attn(last, group)  # type: ignore[arg-type]
        order = self._order.view(*self._order.shape[:2], *[1] * (weights.ndim - 3), -1)
        return weights.gather(-1, order.expand_as(weights))

    def _rows(self, x: Tensor) -> Tensor:
        return x.gather(2, self._order.unsqueeze(-1).expand_as(x))


class _ByQueryHead(_Seen):
    """Each query head as a KV head of its own."""

    def __init__(self, view: View) -> None:
        super().__init__(view)
        self.group = view.queries(1).shape[2]
        for name in ("pos", "live", "keys", "values", "count"):
            vars(self)[name] = getattr(view, name).repeat_interleave(self.group, 1)

    def attn(self, last: int, group: str | None = None) -> Tensor:
        weights = self._view.attn(last).flatten(1, 2)
        return weights.unsqueeze(2) if group is None else weights

    def logits(self, last: int) -> Tensor:
        return self._view.logits(last).flatten(1, 2).unsqueeze(2)

    def log_attn(self, last: int) -> Tensor:
        return self._view.log_attn(last).flatten(1, 2).unsqueeze(2)


@dataclass(frozen=True)
class _Seeing(Wrapper):
    """The scorer inside on another view of the window."""

    kind: Literal["rotated", "earlier", "grouped"]

    rows: ClassVar[Any] = property(lambda self: self.scorer.rows + 1)
    query_rows: ClassVar[Any] = property(
        lambda self: (self.scorer.query_rows[0], self.scorer.query_rows[1] + 1)
    )

    def score(self, view: View) -> Scores:
        views = {"rotated": _Rotated, "earlier": _Earlier, "grouped": _Grouped}
        seen: Any = views[self.kind](view)
        return self.inner(seen)


@dataclass(frozen=True)
class _Reduced(Wrapper):
    """The scorer inside for each query head, and another reduction over them."""

    over: Literal["max", "first", "all"]

    def score(self, view: View) -> Tensor:
        seen: Any = _ByQueryHead(view)
        each: Tensor = self.inner(seen).values.unflatten(1, (-1, seen.group))  # [L, H, G, n]
        if self.over == "max":
            return each.amax(2)
        if self.over == "first":
            return each[:, :, 0]
        return each.mean((1, 2)).unsqueeze(1).expand_as(each[:, :, 0])


@dataclass(frozen=True)
class _Scrambled(Wrapper):
    """Entries stand in the order in which top-k returned them (kvpress in decoding).

    recent: how many are padded with the largest score + 1. by_slot: the first slots are the sinks,
    whatever they hold.
    """

    recent: int = 0
    by_slot: int = 0

    columns: ClassVar[Mapping[str, float]] = {"place": math.inf}

    def score(self, view: View) -> Scores:
        """Minus the place in the top-k, so that its choice stays; [L, H, n]."""
        budgets = set(view.budget.flatten().tolist())
        if len(budgets) > 1 or not bool(view.live.all()):
            raise PolicyError("heads hold different numbers of entries, which top-k cannot return")
        budget = min(budgets.pop(), view.pos.shape[-1])
        order = view["place"].argsort(dim=-1, stable=True)
        seen: Any = _Unordered(view, order)
        if self.by_slot:
            scores = torch.ones_like(view.keys[..., 0])
            scores[..., self.by_slot : self.by_slot + scores.shape[-1] - budget] = 0
        else:
            scores = self.inner(seen).values
        scores = scores.masked_fill(seen.pos > view.row - self.recent, float(scores.max()) + 1)
        top = order.gather(-1, scores.topk(budget, dim=-1).indices)
        place = torch.arange(budget, dtype=view["place"].dtype).expand_as(top)
        place = torch.full_like(view["place"], torch.inf).scatter(-1, top, place)
        return Scores(-place, {"place": place})

    def protection(self, budget: int) -> Protection:
        """Protect no entries: the score itself protects the window, whose entries are padded."""
        return Protection()


def _seeing(kind: Literal["rotated", "earlier", "grouped"], case: DumpCase) -> DumpCase | None:
    scorer = case.policy.scorer
    pooled = getattr(scorer, "pool", None) is not None
    if not hasattr(scorer, "window") or (kind == "grouped" and not pooled):
        return None
    return _changed(case, scorer=_Seeing(scorer=scorer, kind=kind))


def _reduced(over: Literal["max", "first", "all", "groups"], case: DumpCase) -> DumpCase | None:
    scorer: Any = case.policy.scorer
    fields = {"heads": {"all": "all", "groups": "group"}, "group": {"max": "max"}}
    for field, values in fields.items():
        if field in parameters(type(scorer)):
            value = values.get(over)
            if value is None or getattr(scorer, field) == value:
                return None
            return _changed(case, scorer=replace(scorer, **{field: value}))
    if over == "groups" or scorer.columns or not hasattr(scorer, "window"):
        return None
    return _changed(case, scorer=_Reduced(scorer=scorer, over=over))


def _scrambled(case: DumpCase) -> DumpCase | None:
    policy, scorer = case.policy, case.policy.scorer
    if not isinstance(policy.allocator, Uniform) or scorer.columns:
        return None
    if isinstance(scorer, StreamingLLM):
        scrambled = _Scrambled(scorer=scorer, by_slot=scorer.sink)
    else:
        recent = scorer.protection(case.budget).recent
        scrambled = _Scrambled(scorer=scorer, recent=recent)
    return _changed(case, scorer=scrambled)


def _rotated_and_scrambled(case: DumpCase) -> DumpCase | None:
    rotated = _seeing("rotated", case)
    return None if rotated is None else _scrambled(rotated)


def _one_row(case: DumpCase) -> DumpCase | None:
    scorer: Any = case.policy.scorer
    if getattr(scorer, "window", 1) < 2:
        return None
    protect = case.policy.protect | scorer.protection(case.budget)
    return _changed(case, scorer=replace(scorer, window=1), protect=protect)


def _presets(case: DumpCase) -> Iterator[tuple[Deviation, DumpCase]]:
    """The other rules of a policy's name, with the parameters that are not the defaults."""
    outer, *inside = case.policy.name.split("+")
    base, _, preset = outer.partition("@")
    if base not in CATALOGUE:
        return
    defaults = build_policy(case.policy.name).params
    changed = {x: y for x, y in case.policy.params.items() if defaults.get(x) != y}
    for other in ("", *CATALOGUE[base].presets):
        name = "+".join([f"{base}@{other}" if other else base, *inside])
        if other == preset:
            continue
        try:
            policy = build_policy(name, **changed)
        except KvsimError:
            continue
        if policy.propagation is None and not policy.per_query_head:
            deviation = Deviation(name, f"follows the rule of {name}")
            yield deviation, replace(case, policy=policy)


_CHANGES: dict[str, tuple[str, Callable[[DumpCase], DumpCase | None]]] = {
    "event-late": ("each set is that of the event before, so each event takes effect late", _late),
    "row-early": ("events fire one row early", partial(_shifted, -1)),
    "row-late": ("events fire one row late", partial(_shifted, 1)),
    "lost-sinks": ("the first entries are not protected", partial(_without, "sink")),
    "lost-window": ("the last entries are not protected", partial(_without, "recent")),
    "window-on-top": (
        "the last entries stay in addition to the budget",
        partial(_budget, lambda protection, _: protection.recent),
    ),
    "sinks-on-top": (
        "the first entries stay in addition to the budget",
        partial(_budget, lambda protection, _: protection.sink),
    ),
    "one-more": ("one entry more than the budget stays", partial(_budget, lambda *_: 1)),
    "one-fewer": ("one entry fewer than the budget stays", partial(_budget, lambda *_: -1)),
    "window-early": ("the window ends one row before the event", partial(_seeing, "earlier")),
    "window-rotated": (
        "all queries of the window are rotated to the row of the event (kvpress, decoding)",
        partial(_seeing, "rotated"),
    ),
    "window-of-one": ("only the last row of the window is read (kvpress, eager)", _one_row),
    "top-k-order": (
        "entries are taken in the order of the last top-k, not of the text (kvpress, decoding)",
        _scrambled,
    ),
    "window-rotated, top-k-order": ("both window-rotated and top-k-order", _rotated_and_scrambled),
    "max-of-heads": ("the maximum over query heads instead of the mean", partial(_reduced, "max")),
    "first-head": ("the first query head of each group alone", partial(_reduced, "first")),
    "mean-before-pool": (
        "attention is averaged over each group before it is pooled, not after (RocketKV)",
        partial(_seeing, "grouped"),
    ),
    "mean-of-all-heads": (
        "the mean over all query heads of the layer instead of each group",
        partial(_reduced, "all"),
    ),
    "mean-of-groups": (
        "the mean over each group instead of all query heads",
        partial(_reduced, "groups"),
    ),
}
