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
from itertools import chain, pairwise
from operator import attrgetter
from typing import Any, Literal, NamedTuple, get_args, get_origin

import numpy as np
from numpy.typing import NDArray

from kvsim.core.arguments import setting
from kvsim.core.lazy import Tensor, torch
from kvsim.core.parameters import parameters
from kvsim.core.policy import Policy, Protection, Uniform
from kvsim.core.view import View
from kvsim.engine.checks import DROPS, QUERY_HEADS, does
from kvsim.errors import KvsimError
from kvsim.policies import ACCESS, CATALOGUE
from kvsim.policies import policy as build_policy
from kvsim.policies.streaming_llm import StreamingLLM
from kvsim.studies.conformance.accesses import Difference
from kvsim.studies.conformance.definitions import (
    Reduced,
    Rescored,
    Scrambled,
    Seeing,
    Unprotected,
    Weigh,
    interleaved,
    neighbour,
    over_heads,
    products,
    regrouped,
    rotated,
    unrotated,
)
from kvsim.studies.conformance.judging import DumpCase

#: So large a share of the entries that chance exchanges is as by chance.
_CHANCE = 0.9


class Deviation(NamedTuple):
    """A known difference from a definition: its name, and the behaviour."""

    name: str
    description: str


def hypotheses(case: DumpCase) -> Iterator[tuple[Deviation, DumpCase]]:
    """Yield the case under each known deviation that applies to it, and by other presets."""
    changes = (_CHANGES if case.kept else {}) | _ACCESSES
    for name, (description, change) in changes.items():
        with suppress(KvsimError):  # no such budget, parameter or score
            if (changed := change(case)) is not None:
                yield Deviation(name, description), changed
    yield from _policies(case, _presets)


def guess(case: DumpCase, most: float) -> Iterator[Deviation]:
    """Yield other parameters that explain a case, as `explains` does."""
    for deviation, changed in _policies(case, _parameters):
        if explains(changed, most):
            yield deviation


def by_chance(case: DumpCase, differences: Sequence[Difference]) -> bool:
    """Whether the first sets are as large as by definition, and agree with them as by chance."""
    row = min(case.kept, default=-1)
    first = [each for each in differences if each.row == row]
    if not case.kept or any(len(each.extra) != len(each.missing) for each in first):
        return False
    protected = case.policy.protection(case.budget).size(row + 1)
    n, sets = row + 1 - protected, case.kept[row][..., 0].size
    free = case.kept[row].sum() / sets - protected
    exchanged = sum(len(each.extra) for each in first) / sets
    return bool(free > 0 and exchanged > _CHANCE * free * (1 - free / max(n, free)))


def explains(case: DumpCase, most: float) -> bool:
    """Whether the sets of a case agree with its definition but for ties, of `most` entries.

    Other scores can have so many ties that any sets agree with them.
    """
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


def _moved(by: int, case: DumpCase, *, chosen: bool = True) -> DumpCase:
    """The sets if each position, or each chosen one, is listed `by` too high; some are lost."""
    recent = case.policy.protection(case.budget).recent if chosen else 0

    def change(sets: NDArray[np.bool_]) -> NDArray[np.bool_]:
        out, end = sets.copy(), sets.shape[-1] - recent
        lost, to, of = (0, 1, 0) if by < 0 else (end - 1, 0, 1)
        out[..., to : end - of], out[..., lost] = sets[..., of : end - to], False
        out[..., lost] = out.sum(-1) < case.budget
        return out

    return replace(case, kept={row: change(sets) for row, sets in case.kept.items()})


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
    protect, scorer = replace(policy.protect, **nothing), Unprotected(inner, name)
    return _changed(case, scorer=scorer, allocator=allocator, protect=protect)


def _changed(case: DumpCase, **pieces: Any) -> DumpCase:
    return replace(case, policy=replace(case.policy, **pieces))


def _seeing(weigh: Weigh, case: DumpCase, *, pooled: bool = False) -> DumpCase:
    return _changed(case, scorer=Seeing(case.policy.scorer, weigh, pooled))


def _rescored(change: Callable[[Tensor, View], Tensor], case: DumpCase) -> DumpCase:
    return _changed(case, scorer=Rescored(case.policy.scorer, change))


def _sparse(case: DumpCase, **methods: Callable[..., Tensor]) -> DumpCase | None:
    """Sparse attention with other methods, each of which is given the piece first."""
    if case.policy.sparse is None:
        return None
    changed = copy(case.policy.sparse)
    for name, method in methods.items():
        object.__setattr__(changed, name, partial(method, case.policy.sparse))
    return _changed(case, sparse=changed)


def _reading(change: Callable[[Tensor, Tensor], Tensor], case: DumpCase) -> DumpCase | None:
    """Sparse attention by other scores [H, G, w, P]; the rows' own pages bool [H, 1, w, P]."""

    def chosen(sparse: Any, scores: Tensor, entries: Tensor, budget: int) -> Tensor:
        own = (entries > 0) & ~(entries > 0).roll(-1, -1)
        own[..., -1] = entries[..., -1] > 0
        return sparse.chosen(change(scores, own), entries, budget)  # type: ignore[no-any-return]

    return _sparse(case, chosen=chosen)


def _one_page_low(sparse: Any, scores: Tensor, *more: Any) -> Tensor:
    pages: Tensor = sparse.chosen(scores, *more)
    before = pages.roll(-1, -1)
    before[..., -1], before[..., 0] = False, before[..., 0] | pages[..., 0]
    return before


def _reduced(over: Literal["max", "first", "all"], case: DumpCase) -> DumpCase | None:
    scorer = case.policy.scorer
    of_parameter = {"heads", "group"} & {*parameters(type(scorer))}  # has other values itself
    if of_parameter or scorer.columns or not hasattr(scorer, "window"):
        return None
    return _changed(case, scorer=Reduced(scorer, over))


def _scrambled(case: DumpCase) -> DumpCase | None:
    policy, scorer = case.policy, case.policy.scorer
    if not isinstance(policy.allocator, Uniform) or scorer.columns:
        return None
    if isinstance(scorer, StreamingLLM):
        return _changed(case, scorer=Scrambled(scorer, by_slot=scorer.sink))
    return _changed(case, scorer=Scrambled(scorer, scorer.protection(case.budget).recent))


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
    "window-rotated": ("queries of the window are rotated to the row of the event (kvpress)",
        partial(_seeing, rotated)),
    "window-of-one": ("only the last row of the window is read (kvpress, eager)", _one_row),
    "top-k-order": ("entries have the order of the last top-k, not of the text (kvpress)",
        _scrambled),
    "window-rotated, top-k-order": ("both window-rotated and top-k-order",
        lambda case: _scrambled(_seeing(rotated, case))),
    "max-of-heads": ("the maximum over query heads instead of the mean", partial(_reduced, "max")),
    "first-head": ("the first query head of each group alone", partial(_reduced, "first")),
    "mean-before-pool": (
        "attention is averaged over each group before it is pooled, not after (RocketKV)",
        partial(_seeing, lambda view, last: view.attn(last, "mean").unsqueeze(2))),
    "mean-of-all-heads": ("the mean over all query heads of the layer instead of each group",
        partial(_reduced, "all")),
    "heads-interleaved": ("query head i belongs to KV head i % H, not to i // G",
        partial(_seeing, interleaved)),
    "keys-interleaved": ("query head i of the group i // G reads the keys of KV head i % H",
        partial(_seeing, lambda view, last: regrouped(interleaved(view, last)))),
    "newest-lost": ("the entry of the event's row leaves", lambda case: replace(case,
        kept={row: x | (np.arange(row + 1) == row) for row, x in case.kept.items()})),
    "listed-late": ("each set is listed one row after the row that its event follows",
        lambda case: replace(case, kept={row - 1: x[..., :-1] for row, x in case.kept.items()})),
    "window-short": ("the first row of the window is not read", partial(_seeing, lambda view, last:
        (x := view.attn(last)) * (torch.arange(x.shape[3]) > 0).unsqueeze(-1))),
    "chosen-low": ("positions that scores choose are one too low", partial(_moved, -1)),
    "chosen-high": ("positions that scores choose are one too high", partial(_moved, 1)),
    "positions-low": ("all positions are one too low", partial(_moved, -1, chosen=False)),
    "unrotated": ("queries and keys are those before RoPE", partial(_seeing, unrotated)),
    "no-mask": ("rows of the window see later entries, too",
        partial(_seeing, lambda view, last: products(view, view.queries(last)).softmax(-1))),
    "unscaled": ("logits are not multiplied by the scale", partial(_seeing,
        lambda view, last: (view.logits(last) / view.formula.scale).softmax(-1))),
    "no-softmax": ("logits are taken instead of attention", partial(_seeing,
        lambda view, last: view.logits(last).nan_to_num(neginf=0.0))),
    "softmax-over-heads": ("the softmax is over heads, not over entries",
        partial(_seeing, over_heads)),
    "shifted-left": ("each entry has the attention of the next", partial(_seeing,
        partial(neighbour, -1))),
    "shifted-right": ("each entry has the attention of the one before", partial(_seeing,
        partial(neighbour, 1))),
    "window-pooled": ("attention of the window's own entries is pooled, too",
        partial(_seeing, lambda view, last: view.attn(last), pooled=True)),
    "lowest-scores": ("the lowest scores stay", partial(_rescored, lambda x, _: -x)),
    "constant-scores-low": ("all scores are equal, and the first entries stay",
        partial(_rescored, lambda x, view: -view.pos.to(x.dtype))),
    "constant-scores-high": ("all scores are equal, and the last entries stay",
        partial(_rescored, lambda x, view: view.pos.to(x.dtype))),
}  # fmt: skip
#: Of sparse attention.
_ACCESSES: dict[str, tuple[str, Callable[[DumpCase], DumpCase | None]]] = {
    "own-page-always": ("a row reads its own page, whatever its score",
        partial(_reading, lambda x, own: x.masked_fill(own, math.inf))),
    "own-page-never": ("a row's own page is no candidate",
        partial(_reading, lambda x, own: x.masked_fill(own, -math.inf))),
    "pages-low": ("the numbers of pages are one too low", partial(_sparse, chosen=_one_page_low)),
    "min-for-max": ("the least logit that a page could have, not the largest",
        partial(_sparse, score=lambda sparse, q, *more: -sparse.score(-q, *more))),
    "mean-key": ("the logit of the mean key of a page", partial(_sparse, score=lambda _, q, x, __:
        q @ (x.keys.sum(2) / x.live.sum(2).clamp(min=1).unsqueeze(-1)).mT.unsqueeze(1))),
}  # fmt: skip
