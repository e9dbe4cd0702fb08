"""Deviations that implementations are known for, each as a definition that can be replayed.

A deviation takes a case and returns another: other events, sets, budget or policy. It explains a
dump if the sets then equal that definition's, ties apart, at every event. Those of kvpress are
documented, with their tests, in docs/kvpress.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise
from operator import attrgetter
from typing import Any, ClassVar, Literal, NamedTuple, get_args, get_origin

from kvsim.core.arguments import setting
from kvsim.core.attention import reduce_group
from kvsim.core.lazy import Tensor, torch
from kvsim.core.parameters import parameters
from kvsim.core.policy import Policy, Protection, Scorer, Scores, Uniform, Wrapper
from kvsim.core.view import View
from kvsim.engine.checks import DROPS, QUERY_HEADS, does
from kvsim.errors import KvsimError, PolicyError
from kvsim.policies import CATALOGUE
from kvsim.policies import policy as build_policy
from kvsim.policies.streaming_llm import StreamingLLM
from kvsim.policies.window import first_of
from kvsim.studies.conformance.judging import DumpCase

#: Attention of the last rows of a view, [L, H, G, w, n].
Weigh = Callable[[View, int], Tensor]


class Deviation(NamedTuple):
    """A known difference from a definition: its name, and the behaviour."""

    name: str
    description: str


def hypotheses(case: DumpCase) -> Iterator[tuple[Deviation, DumpCase]]:
    """Yield the case under each known deviation that applies to it, and by other presets."""
    for name, (description, change) in _CHANGES.items():
        with suppress(KvsimError):  # no such budget, parameter or score
            if (changed := change(case)) is not None:
                yield Deviation(name, description), changed
    yield from _policies(case, _presets)


def guess(case: DumpCase) -> Iterator[Deviation]:
    """Yield other parameters that explain a case, of which ties leave at most half to differ.

    Other scores can have more ties.
    """
    most = sum(len(each.extra + each.missing) for each in case.differences()) / 2
    for deviation, changed in _policies(case, _parameters):
        if explains(changed, most):
            yield deviation


def explains(case: DumpCase, most: float = math.inf) -> bool:
    """Whether the sets of a case agree with its definition but for ties, of `most` entries."""
    try:
        for each in case.differences():
            most -= len(each.extra + each.missing)
            if each.kind != "tie" or most < 0:
                return False
    except KvsimError:  # the changed definition has no rule for this trace
        return False
    return True


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


def _budget(by: Callable[[Protection], int], case: DumpCase) -> DumpCase | None:
    more = by(case.policy.at(case.budget).protection(case.budget, enforced=False))
    return replace(case, budget=case.budget + more) if more else None


def _without(name: Literal["sink", "recent"], case: DumpCase) -> DumpCase | None:
    """The policy without sinks, or without the protection of its window or last entries."""
    policy = case.policy
    if not getattr(policy.at(case.budget).protection(case.budget, enforced=False), name):
        return None
    pieces: Any = (policy.scorer, policy.allocator)
    inner, allocator = (
        replace(piece, sink=0) if name == "sink" and "sink" in parameters(type(piece)) else piece
        for piece in pieces
    )
    nothing: dict[str, Any] = {name: 0}
    protect, scorer = replace(policy.protect, **nothing), _Unprotected(inner, name)
    return _changed(case, scorer=scorer, allocator=allocator, protect=protect)


def _changed(case: DumpCase, **pieces: Any) -> DumpCase:
    return replace(case, policy=replace(case.policy, **pieces))


class _Unprotected(Wrapper):
    """The scorer inside, without a part of its protection."""

    part: Literal["sink", "recent"]

    def score(self, view: View) -> Scores:
        return self.inner(view)

    def protection(self, budget: int) -> Protection:
        nothing: dict[str, Any] = {self.part: 0}
        return replace(self.scorer.protection(budget), **nothing)


class _Seen:
    """A view for the scorer inside of a wrapper: other attributes, and attention by a formula.

    weigh: of the view and its last rows, [L, H, G, w, n].
    """

    def __init__(self, view: View, weigh: Weigh, **changed: Any) -> None:
        self._view, self._weigh = view, weigh
        vars(self).update(changed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)

    def __getitem__(self, column: str) -> Tensor:
        return self._view[column]

    def scored(self, scorer: Scorer) -> Scores:
        return Scores.of(scorer.score(self))  # type: ignore[arg-type]  # not what the plain view knows

    def attn(self, rows: int | range, group: Any = None, *, log: bool = False) -> Tensor:
        if isinstance(rows, range):  # no window of recent rows, which deviations change
            return self._view.attn(rows, group, log=log)
        weights = self._weigh(self._view, rows).nan_to_num(0.0)
        return reduce_group(weights.double().log() if log else weights, group)

    def logits(self, last: int) -> Tensor:
        return self.attn(last, log=True)


def _rotated(view: View, last: int) -> Tensor:
    """Queries of the window at the position of the last row (kvpress's SnapKV in decoding)."""
    if view.is_prompt:  # there every query has its position
        return view.attn(last)
    first, stop = first_of(view, last), view.row + 1
    plain = view.queries(range(first, stop), rotated=False)
    rows = torch.arange(first, stop)
    queries = view.rope.rotate(plain, torch.full_like(rows, view.row))
    logits = torch.einsum("lhgwd,lhnd->lhgwn", queries, view.keys) * view.formula.scale
    hidden = (view.pos[:, :, None] > rows[:, None]) | ~view.live[:, :, None]  # [L, H, w, n]
    return logits.masked_fill(hidden.unsqueeze(2), -torch.inf).softmax(-1)


class _Seeing(Wrapper):
    """The scorer inside on another view of the window."""

    weigh: Weigh

    scale: ClassVar[Any] = property(attrgetter("scorer.scale"))
    reads: ClassVar[Any] = property(
        lambda x: replace(
            x.scorer.reads, rows=x.scorer.reads.rows + 1, last=x.scorer.reads.last + 1
        )
    )

    def __post_init__(self) -> None:
        """Take logarithms, too: nothing is computed with the scores."""

    def score(self, view: View) -> Scores:
        seen: Any = _Seen(view, self.weigh)
        return self.inner(seen)


class _Reduced(Wrapper):
    """The scorer inside for each query head, and another reduction over them."""

    over: Literal["max", "first", "all"]

    def score(self, view: View) -> Tensor:
        group = view.queries(1).shape[2]
        names = ("pos", "live", "keys", "values", "count")
        heads = {name: getattr(view, name).repeat_interleave(group, 1) for name in names}
        seen: Any = _Seen(view, lambda x, last: x.attn(last).flatten(1, 2).unsqueeze(2), **heads)
        each: Tensor = self.inner(seen).values.unflatten(1, (-1, group))  # [L, H, G, n]
        if self.over == "max":
            return each.amax(2)
        if self.over == "first":
            return each[:, :, 0]
        return each.mean((1, 2)).unsqueeze(1).expand_as(each[:, :, 0])


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
        rows = {
            name: x.gather(2, order.unsqueeze(-1).expand_as(x))
            for name, x in (("keys", view.keys), ("values", view.values))
        }

        def weigh(view: View, last: int) -> Tensor:
            weights = view.attn(last)
            return weights.gather(-1, order[:, :, None, None].expand_as(weights))

        seen: Any = _Seen(view, weigh, pos=view.pos.gather(-1, order), **rows)
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


def _seeing(weigh: Weigh, case: DumpCase) -> DumpCase:
    return _changed(case, scorer=_Seeing(case.policy.scorer, weigh))


def _reduced(over: Literal["max", "first", "all"], case: DumpCase) -> DumpCase | None:
    scorer = case.policy.scorer
    of_parameter = {"heads", "group"} & {*parameters(type(scorer))}  # has other values itself
    if of_parameter or scorer.columns or not hasattr(scorer, "window"):
        return None
    return _changed(case, scorer=_Reduced(scorer, over))


def _scrambled(case: DumpCase) -> DumpCase | None:
    policy, scorer = case.policy, case.policy.scorer
    if not isinstance(policy.allocator, Uniform) or scorer.columns:
        return None
    if isinstance(scorer, StreamingLLM):
        return _changed(case, scorer=_Scrambled(scorer, by_slot=scorer.sink))
    return _changed(case, scorer=_Scrambled(scorer, scorer.protection(case.budget).recent))


def _one_row(case: DumpCase) -> DumpCase | None:
    scorer: Any = case.policy.scorer
    if getattr(scorer, "window", 1) < 2:
        return None
    protect = case.policy.protect | scorer.protection(case.budget)
    return _changed(case, scorer=replace(scorer, window=1), protect=protect)


def _policies(case: DumpCase, others: Any) -> Iterator[tuple[Deviation, DumpCase]]:
    """The case by other policies of its name, with the parameters that are not the defaults."""
    name, params = case.policy.name, case.policy.params
    with suppress(KvsimError):  # a name that builds no policy
        given = {x: y for x, y in params.items() if x.endswith("calibration")}  # has no default
        defaults = build_policy(name, **given).params | dict.fromkeys(given)
        changed = {x: y for x, y in params.items() if defaults.get(x) != y}
        for other, more in others(case.policy):
            with suppress(KvsimError):
                policy = build_policy(other, **changed | more)
                if not does(policy, DROPS, QUERY_HEADS):
                    title = "".join(setting(*each) for each in more.items())
                    says = f"follows the rule of {other}" + f" with {title}" * bool(more)
                    yield Deviation(title or other, says), replace(case, policy=policy)


def _presets(policy: Policy) -> Iterator[tuple[str, dict[str, Any]]]:
    """The other presets of the outermost part: name and parameters."""
    outer, plus, inside = policy.name.partition("+")
    base, _, preset = outer.partition("@")
    for other in ("", *CATALOGUE[base].presets) if base in CATALOGUE else ():
        if other != preset:
            yield f"{base}@{other}".removesuffix("@") + plus + inside, {}


def _parameters(policy: Policy) -> Iterator[tuple[str, dict[str, Any]]]:
    """The other choices of each parameter, and integers near it, as `_presets`."""
    hints = {key: x.hint for y in chain(*policy.levels) for key, x in parameters(type(y)).items()}
    for key, value in policy.params.items():
        for other in _values(hints.get(key.rpartition("__")[2]), value):
            if other != value:
                yield policy.name, {key: other}


def _values(hint: Any, value: Any) -> Sequence[Any]:
    parts = get_args(hint)
    if get_origin(hint) is Literal:
        return parts
    if parts:
        return [x for part in parts for x in _values(part, value)]
    x = value if type(value) is int else 1
    near = (x - 1, x + 1, 1, 3, 5, 7, 0, 2 * x, x // 2)
    return {int: near, bool: (True, False), type(None): (None,)}.get(hint, ())


_CHANGES: dict[str, tuple[str, Callable[[DumpCase], DumpCase | None]]] = {
    "event-late": ("each set is that of the event before, so each event takes effect late", _late),
    "row-early": ("events fire one row early", partial(_shifted, -1)),
    "row-late": ("events fire one row late", partial(_shifted, 1)),
    "lost-sinks": ("the first entries are not protected", partial(_without, "sink")),
    "lost-window": ("the last entries are not protected", partial(_without, "recent")),
    "window-on-top": ("the last entries stay in addition to the budget",
        partial(_budget, attrgetter("recent"))),
    "sinks-on-top": ("the first entries stay in addition to the budget",
        partial(_budget, attrgetter("sink"))),
    "one-more": ("one entry more than the budget stays", partial(_budget, lambda _: 1)),
    "one-fewer": ("one entry fewer than the budget stays", partial(_budget, lambda _: -1)),
    "window-early": ("the window ends one row before the event",
        partial(_seeing, lambda view, last: view.attn(last + 1)[..., :-1, :])),
    "window-rotated": (
        "all queries of the window are rotated to the row of the event (kvpress, decoding)",
        partial(_seeing, _rotated)),
    "window-of-one": ("only the last row of the window is read (kvpress, eager)", _one_row),
    "top-k-order": (
        "entries are taken in the order of the last top-k, not of the text (kvpress, decoding)",
        _scrambled),
    "window-rotated, top-k-order": ("both window-rotated and top-k-order",
        lambda case: _scrambled(_seeing(_rotated, case))),
    "max-of-heads": ("the maximum over query heads instead of the mean", partial(_reduced, "max")),
    "first-head": ("the first query head of each group alone", partial(_reduced, "first")),
    "mean-before-pool": (
        "attention is averaged over each group before it is pooled, not after (RocketKV)",
        partial(_seeing, lambda view, last: view.attn(last, "mean").unsqueeze(2))),
    "mean-of-all-heads": ("the mean over all query heads of the layer instead of each group",
        partial(_reduced, "all")),
}  # fmt: skip
