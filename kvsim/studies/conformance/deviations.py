"""Deviations that implementations are known for, each as a definition that can be replayed.

A deviation takes a case and returns another: other events, sets, budget or policy. It explains a
dump if the sets then equal that definition's, ties apart, at every event. Those of kvpress are
documented, with their tests, in docs/kvpress.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import chain, islice, pairwise
from typing import Any, Literal, NamedTuple, get_args, get_origin

import numpy as np
from numpy.typing import NDArray

from kvsim.core.arguments import setting
from kvsim.core.lazy import Tensor, torch
from kvsim.core.parameters import parameters
from kvsim.core.policy import Policy, Protection, Uniform
from kvsim.core.storing import Quantizer
from kvsim.core.view import View
from kvsim.engine.checks import DROPS, QUERY_HEADS, does
from kvsim.errors import KvsimError
from kvsim.policies import ACCESS, CATALOGUE
from kvsim.policies import policy as build_policy
from kvsim.policies.streaming_llm import StreamingLLM
from kvsim.studies.conformance import definitions as see
from kvsim.studies.conformance.accesses import Difference
from kvsim.studies.conformance.judging import DumpCase

#: Deviations of which each is tried with a second one.
_NEAREST = 5


class Deviation(NamedTuple):
    """A known difference from a definition: its name, and the behaviour."""

    name: str
    description: str


def _by(change: Callable[..., Any]) -> Callable[..., Any]:
    """A function of terms that returns the change of a case by these."""
    return lambda *terms, **more: lambda case: change(case, *terms, **more)


def _named(case: DumpCase) -> Iterator[tuple[Deviation, DumpCase]]:
    """Yield the case under each known deviation that applies to it."""
    changes = (CHANGES if case.kept else {}) | ACCESSES
    for name, (description, change) in changes.items():
        with suppress(KvsimError):  # no such budget, parameter or score
            if (changed := change(case)) is not None:
                yield Deviation(name, description), changed


def explained(case: DumpCase, differences: Sequence[Difference]) -> list[Deviation]:
    """Return the deviations that explain a case with the fewest ties, else one of parameters.

    Else a pair that explains kept sets: one of the nearest at the first event, and any other.
    """
    most = sum(len(each.extra + each.missing) for each in differences) - 1
    named = [*_named(case)]
    tried = [*named, *_policies(case, _presets)]
    ties = [_tied(changed, most) for _, changed in tried]
    if (least := min(ties, default=math.inf)) < math.inf:
        return [x for (x, _), of_x in zip(tried, ties, strict=True) if of_x == least]
    if not {each.kind for each in differences} <= {"tie", "choice", "bits", "no event"}:
        return []
    named += (others := [*_policies(case, _parameters)])
    row = next(each.row for each in differences if each.kind != "tie")
    pairs = _pairs(case, named, row) if case.kept else ()
    both = (x for x, changed in chain(others, pairs) if _tied(changed, most / 2) < math.inf)
    return [*islice(both, 1)]


def _pairs(case: DumpCase, named: Any, row: int) -> Iterator[tuple[Deviation, DumpCase]]:
    far = [_distance(changed, row) for _, changed in named]
    order = {each.name: at for at, (each, _) in enumerate(named)}
    for at in sorted(range(len(far)), key=far.__getitem__)[:_NEAREST]:
        first, changed = named[at]
        built = type(changed.policy.scorer) is type(case.policy.scorer)  # by name
        more = chain(_named(changed), _policies(changed, _parameters) if built else ())
        for second, both in more if far[at] < _distance(case, row) else ():
            if second != first:
                pair = sorted((first, second), key=lambda x: order.get(x.name, 0))
                yield Deviation(*map(", ".join, zip(*pair, strict=True))), both


def _distance(case: DumpCase, row: int) -> float:
    """How many entries differ beyond ties up to a row."""
    kept = {x: sets for x, sets in case.kept.items() if x <= row}
    first = replace(case, kept=kept, events=tuple(x for x in case.events if x <= row))
    with suppress(KvsimError):
        return sum(len(x.extra + x.missing) for x in first.differences() if x.kind != "tie")
    return math.inf


def _tied(case: DumpCase, most: float) -> float:
    """How many entries differ in ties, if these are all that differ, and at most `most`; else inf.

    Other scores can have so many ties that any sets agree with them.
    """
    ties = 0
    try:
        for each in case.differences():
            ties += len(each.extra + each.missing)
            if each.kind != "tie" or ties > most:
                return math.inf
    except KvsimError:  # the changed definition has no rule for this trace
        return math.inf
    return ties


def _late(case: DumpCase) -> DumpCase | None:
    """Each set is that of the event before, with what came since."""
    rows = sorted(case.kept)
    pairs = list(pairwise(rows))
    if not pairs or not case.kept[rows[0]].all():
        return None
    kept = {row: case.kept[later][..., : row + 1] for row, later in pairs}
    return replace(case, kept=kept, events=tuple(row for row in case.events if row in kept))


@_by
def _shifted(case: DumpCase, by: int) -> DumpCase | None:
    last, trace = max(case.kept), case.trace
    rows = case.schedule.rows(trace.prompt_len, last + 2, *trace.extent[2:])
    return replace(case, events=tuple(row + by for row in rows if 0 <= row + by <= last))


@_by
def _budget(case: DumpCase, by: int | str) -> DumpCase | None:
    protection = case.policy.at(case.budget).protection(case.budget, enforced=False)
    more = by if isinstance(by, int) else getattr(protection, by)
    return replace(case, budget=case.budget + more) if more else None


@_by
def _kept(case: DumpCase, change: Callable[..., Any], by: int = 0) -> DumpCase:
    """Other sets, of rows and sets, of events so many rows later."""
    return replace(case, kept={row + by: change(row, x) for row, x in case.kept.items()})


@_by
def _moved(case: DumpCase, by: int, *, chosen: bool = False) -> DumpCase:
    """The sets if each position, or each chosen one, is listed `by` too high; some are lost."""
    recent = case.policy.protection(case.budget).recent if chosen else 0

    def change(_: int, sets: NDArray[np.bool_]) -> NDArray[np.bool_]:
        out, end = sets.copy(), sets.shape[-1] - recent
        lost, to, of = (0, 1, 0) if by < 0 else (end - 1, 0, 1)
        out[..., to : end - of], out[..., lost] = sets[..., of : end - to], False
        out[..., lost] = out.sum(-1) < case.budget
        return out

    return _kept(change)(case)  # type: ignore[no-any-return]


@_by
def _protecting(
    case: DumpCase, name: Literal["sink", "recent"], by: int | None = None
) -> DumpCase | None:
    """The policy without its first or last protected entries, or with more of them."""
    policy = case.policy
    if not getattr(policy.at(case.budget).protection(case.budget, enforced=False), name):
        return None

    def change(x: Protection) -> Protection:
        size: dict[str, Any] = {name: ((y := getattr(x, name)) and by and y + by) or 0}
        return replace(x, **size)

    pieces: Any = (policy.scorer, policy.allocator)
    inner, allocator = (
        replace(piece, sink=0) if name == "sink" and "sink" in parameters(type(piece)) else piece
        for piece in pieces
    )
    protect, scorer = change(policy.protect), see.Deviating(inner, protects=change)
    return _changed(case, scorer=scorer, allocator=allocator, protect=protect)


@_by
def _permuted(case: DumpCase, axis: int, *, by_slot: bool = False) -> DumpCase | None:
    """The sets in the order of layers (0) or heads (1) that the first event has, if in another."""
    row = min(case.kept)
    theirs = case.kept[row]
    ours = theirs.copy()
    for each in replace(case, kept={row: theirs}, events=(row,)).differences():
        at = case.dump.layers.index(each.layer), each.head
        ours[at][[*each.extra, *each.missing]] ^= True
    a, b = ours.swapaxes(0, axis), theirs.swapaxes(0, axis)
    order = (a[:, None] != b).sum((2, 3)).argmin(1)
    if len({*order}) < len(order) or (order == np.arange(len(order))).all():
        return None
    if by_slot:
        return _seen(change=lambda scores, _: scores[:, order.argsort()])(case)  # type: ignore[no-any-return]
    return _kept(lambda _, x: x.take(order, axis))(case)  # type: ignore[no-any-return]


def _changed(case: DumpCase, **pieces: Any) -> DumpCase:
    return replace(case, policy=replace(case.policy, **pieces))


@_by
def _seen(case: DumpCase, weigh: see.Weigh = View.attn, **terms: Any) -> DumpCase:
    return _changed(case, scorer=see.Deviating(case.policy.scorer, weigh, **terms))


@_by
def _of_window(case: DumpCase, *weigh: see.Weigh) -> DumpCase | None:
    """Other attention of the rows of a window, or its own entries among the candidates."""
    if (size := getattr(case.policy.scorer, "window", 0)) < 1:
        return None
    own: Any = {"other": lambda view: {"pos": view.pos.clamp(max=view.row - size)}}
    return _seen(*weigh, **{} if weigh else own)(case)  # type: ignore[no-any-return]


@_by
def _sparse(case: DumpCase, **methods: Callable[..., Tensor]) -> DumpCase | None:
    """Sparse attention with other methods, each of which is given the piece first."""
    if case.policy.sparse is None:
        return None
    changed = copy(case.policy.sparse)
    for name, method in methods.items():
        object.__setattr__(changed, name, partial(method, case.policy.sparse))
    return _changed(case, sparse=changed)


@_by
def _reading(
    case: DumpCase, change: Callable[[Tensor, Tensor], Tensor], *, own_too: bool = False
) -> DumpCase | None:
    """Sparse attention by other scores [H, G, w, P]; the rows' own pages bool [H, 1, w, P]."""

    def chosen(sparse: Any, scores: Tensor, entries: Tensor, budget: int) -> Tensor:
        own = (entries > 0) & ~(entries > 0).roll(-1, -1)
        own[..., -1] = entries[..., -1] > 0
        pages: Tensor = sparse.chosen(change(scores, own), entries, budget)
        return pages | own if own_too else pages

    return _sparse(chosen=chosen)(case)  # type: ignore[no-any-return]


def _one_page_low(sparse: Any, scores: Tensor, *more: Any) -> Tensor:
    pages: Tensor = sparse.chosen(scores, *more)
    before = pages.roll(-1, -1)
    before[..., -1], before[..., 0] = False, before[..., 0] | pages[..., 0]
    return before


def _pages_from_1(case: DumpCase) -> DumpCase | None:
    table = case.dump.read
    if table is None or not table["page"].min():
        return None
    return replace(case, dump=replace(case.dump, read={**table, "page": table["page"] - 1}))


@_by
def _clocked(case: DumpCase, *later: int) -> DumpCase | None:
    """The quantizer with later clocks of keys and of values; or values with that of keys."""
    if not isinstance(case.policy.storage, Quantizer):
        return None
    changed, clocks = copy(case.policy.storage), case.policy.storage.clocks
    moved = (x._replace(exact=max(0, x.exact + by)) for x, by in zip(clocks, later, strict=False))
    at = tuple(moved) or clocks[:1] * 2
    both = property(lambda _: at)
    object.__setattr__(changed, "__class__", type("Clocked", (type(changed),), {"clocks": both}))
    return _changed(case, storage=changed)


@_by
def _reduced(case: DumpCase, over: str) -> DumpCase | None:
    scorer: Any = case.policy.scorer
    given, window = {"heads", "group"} & {*parameters(type(scorer))}, hasattr(scorer, "window")
    if window and (given or scorer.columns):
        return None  # it has other values itself
    axes = (2, 3) if window else (1, 2) if given and scorer.heads == "all" else (2,)
    return _seen(partial(see.reduced, over, axes))(case)  # type: ignore[no-any-return]


@_by
def _sums(case: DumpCase, *, stale: bool = False) -> DumpCase | None:
    """Sums of attention that start anew at each event, or keep their slots when entries leave."""
    if len(case.policy.scorer.columns) != 1:
        return None
    (name,), last = case.policy.scorer.columns, dict[Any, Tensor]()

    def other(view: View) -> dict[str, Any]:
        sums, n = view[name], int((view.pos <= view.since.view(-1, 1, 1)).sum(-1).max())
        old = last[*view.layers.tolist()][..., :n] if n else sums[..., :0]
        return {"columns": {name: torch.cat([old if stale else 0 * old, sums[..., n:]], -1)}}

    def change(scores: Tensor, view: View) -> Tensor:
        last[*view.layers.tolist()] = scores
        return scores

    return _seen(other=other, change=change)(case)  # type: ignore[no-any-return]


def _scrambled(case: DumpCase) -> DumpCase | None:
    policy, scorer = case.policy, case.policy.scorer
    if not isinstance(policy.allocator, Uniform) or scorer.columns:
        return None
    if isinstance(scorer, StreamingLLM):
        return _changed(case, scorer=see.Scrambled(scorer, by_slot=scorer.sink))
    return _changed(case, scorer=see.Scrambled(scorer, scorer.protection(case.budget).recent))


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
    entry = {**CATALOGUE, **ACCESS}.get(base)
    for other in () if entry is None else ("", *entry.presets):
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
    near = (x - 1, x + 1, 1, 3, 5, 7, 0, 2 * x, x // 2, 2, 4, 6, 8, 16, 32, 64)
    shares = (2 * value, value / 2, max(value, 1.0)) if type(value) is float else ()
    return {int: near, float: shares, bool: (True, False), type(None): (None,)}.get(hint, ())


#: Of kept sets.
CHANGES: dict[str, tuple[str, Callable[[DumpCase], DumpCase | None]]] = {
    "event-late": ("each set is that of the event before, so each event takes effect late", _late),
    "row-early": ("events fire one row early", _shifted(-1)),
    "row-late": ("events fire one row late", _shifted(1)),
    "listed-late": ("sets are listed one row late", _kept(lambda _, x: x[..., :-1], -1)),
    "listed-from-1": ("rows and positions count from 1", _kept(lambda _, x: x[..., 1:], -1)),
    "newest-lost": ("the entry of the event's row leaves",
        _kept(lambda row, x: x | (np.arange(row + 1) == row))),
    "positions-low": ("all positions are one too low", _moved(-1)),
    "positions-high": ("all positions are one too high", _moved(1)),
    "chosen-low": ("positions that scores choose are one too low", _moved(-1, chosen=True)),
    "chosen-high": ("positions that scores choose are one too high", _moved(1, chosen=True)),
    "layers-permuted": ("layers are listed in another order", _permuted(0)),
    "heads-permuted": ("KV heads are listed in another order", _permuted(1)),
    "scores-permuted": ("KV heads have each other's scores", _permuted(1, by_slot=True)),
    "one-more": ("one entry more than the budget stays", _budget(1)),
    "one-fewer": ("one entry fewer than the budget stays", _budget(-1)),
    "lost-sinks": ("the first entries are not protected", _protecting("sink")),
    "lost-window": ("the last entries are not protected", _protecting("recent")),
    "protected-fewer": ("one of the last entries is not protected", _protecting("recent", -1)),
    "protected-more": ("one entry before the last ones is protected", _protecting("recent", 1)),
    "sinks-on-top": ("the first entries stay in addition to the budget", _budget("sink")),
    "window-on-top": ("the last entries stay in addition to the budget", _budget("recent")),
    "window-short": ("the first row of the window is not read",
        _of_window(partial(see.counted, 0, 0))),
    "window-of-one": ("only the last row of the window is read (kvpress, eager)",
        _of_window(lambda view, rows: view.attn(rows[-1:]).expand(-1, -1, -1, len(rows), -1))),
    "window-pooled": ("attention of the window's own entries is pooled, too", _of_window()),
    "max-of-heads": ("the maximum over query heads instead of the mean", _reduced("max")),
    "first-head": ("the first query head of each group alone", _reduced("first")),
    "mean-of-all-heads": ("the mean over all query heads of the layer", _reduced("all")),
    "sums-anew": ("sums of attention start anew at each event", _sums()),
    "sums-by-slot": ("sums of attention keep their slots when entries leave", _sums(stale=True)),
    "unrotated": ("queries and keys are those before RoPE", _seen(
        weigh=see.unrotated, other=lambda view: {"keys": see.plain_keys(view)})),
    "window-early": ("the window ends one row before the event",
        _seen(lambda view, rows: view.attn(range(max(0, rows.start - 1), rows.stop - 1)))),
    "window-rotated": ("queries have the rotation of the event's row (kvpress)",
        _seen(see.rotated)),
    "last-row-twice": ("the row of the event counts twice", _seen(partial(see.counted, -1, 2))),
    "prompt-row-twice": ("the last row of the prompt counts twice",
        _seen(lambda view, rows: see.counted(-1, 1 + view.is_prompt, view, rows))),
    "mean-before-pool": ("heads of a group are averaged before pooling, not after (RocketKV)",
        _seen(lambda view, rows: view.attn(rows, "mean").unsqueeze(2))),
    "heads-interleaved": ("query head i has KV head i % H, not i // G", _seen(see.interleaved)),
    "keys-interleaved": ("query head i of the group i // G reads the keys of KV head i % H",
        _seen(lambda view, rows: see.regrouped(see.interleaved(view, rows)))),
    "no-mask": ("rows of the window see later entries, too",
        _seen(lambda view, rows: see.products(view, view.queries(rows)).softmax(-1))),
    "unscaled": ("logits are not multiplied by the scale",
        _seen(lambda view, rows: (view.logits(rows) / view.formula.scale).softmax(-1))),
    "no-softmax": ("logits are taken instead of attention",
        _seen(lambda view, rows: view.logits(rows).nan_to_num(neginf=0.0))),
    "softmax-over-heads": ("the softmax is over heads", _of_window(see.over_heads)),
    "shifted-left": ("each entry has the attention of the next", _seen(partial(see.neighbour, -1))),
    "shifted-right": ("each entry has that of the one before", _seen(partial(see.neighbour, 1))),
    "lowest-scores": ("the lowest scores stay", _seen(change=lambda x, _: -x)),
    "constant-scores-low": ("all scores are equal, and the first entries stay",
        _seen(change=lambda x, view: -view.pos.to(x.dtype))),
    "constant-scores-high": ("all scores are equal, and the last entries stay",
        _seen(change=lambda x, view: view.pos.to(x.dtype))),
    "top-k-order": ("entries have the order of the last top-k (kvpress)", _scrambled),
}  # fmt: skip
#: Of sparse attention and of quantizers.
ACCESSES: dict[str, tuple[str, Callable[[DumpCase], DumpCase | None]]] = {
    "own-page-always": ("a row reads its own page, whatever its score",
        _reading(lambda x, own: x.masked_fill(own, math.inf))),
    "own-page-never": ("a row's own page is no candidate",
        _reading(lambda x, own: x.masked_fill(own, -math.inf))),
    "own-page-on-top": ("a row's own page is on top of the budget",
        _reading(lambda x, own: x.masked_fill(own, -math.inf), own_too=True)),
    "pages-low": ("the numbers of pages are one too low", _sparse(chosen=_one_page_low)),
    "pages-from-1": ("pages count from 1", _pages_from_1),
    "page-more": ("one page more than the budget is read",
        _sparse(chosen=lambda x, a, b, budget: x.chosen(a, b, budget + x.page))),
    "page-fewer": ("one page fewer than the budget is read",
        _sparse(chosen=lambda x, a, b, budget: x.chosen(a, b, budget - x.page))),
    "min-for-max": ("the least logit of a page, not the largest",
        _sparse(score=lambda sparse, q, *more: -sparse.score(-q, *more))),
    "mean-key": ("the logit of the mean key of a page", _sparse(score=lambda _, q, x, __:
        q @ (x.keys.sum(2) / x.live.sum(2).clamp(min=1).unsqueeze(-1)).mT.unsqueeze(1))),
    "rounded-late": ("entries are rounded one row late", _clocked(1, 1)),
    "values-late": ("values are rounded one row late", _clocked(0, 1)),
    "values-early": ("values are rounded one row early", _clocked(0, -1)),
    "values-as-keys": ("values are rounded when keys are", _clocked()),
}  # fmt: skip
