"""Which rule scores under which name, and what each piece of a policy takes.

Names are taken apart by `kvsim.policy`, and the values of parameters are those of its pieces; what
a rule does with them is written from the papers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import kvsim
from kvsim.core.policy import Policy, chain_of
from kvsim.errors import PolicyError
from kvsim.policies import CATALOGUE, names
from kvsim.testing.loops import Scored
from reference import (
    allocation,
    blocks,
    classic,
    engines,
    expected,
    layouts,
    leverage,
    repeated,
    windows,
)
from reference.event import Event
from reference.propagation import PROPAGATIONS

_POOLED = "window pool pool_kernel"
_RKV = f"{_POOLED} mix_lambda threshold slot_order"
_GKV = f"{_POOLED} fusion decay redundancy mix_lambda threshold cosine"
_CAKE = f"{_POOLED} gamma dispersion"
_AMS = (
    "segment_mass min_segment max_segment min_quota credit credit_decay credit_mix credit_of "
    "window pool_kernel suffix_fill mode weights segmentation segment_length sink recent"
)
_MODES = "calibration protect_prompt offsets recent pruning over_layers normalise population"
_EXPECTED = "n_future sink epsilon covariance value_norm query_buffer rope origin log"

#: The score of an event under each name, and the parameters that it knows; a preset has those of
#: its policy unless it is named. None never evicts. Of a name that is not here, or not in `OUTER`,
#: both are `RULE` of the test beside it, tests/policies/test_NAME.py.
RULES: dict[str, tuple[Callable[[Event], Scored] | None, str]] = {
    "full": (None, ""),
    "random": (classic.random, "seed"),
    "random@prompt": (engines.random, "seed recent protect_prompt"),
    "streaming_llm": (classic.streaming_llm, "sink"),
    "h2o": (classic.h2o, "recent"),
    "h2o@kvpress": (classic.observed_attention, ""),
    "h2o@sparse_vllm": (engines.layer_h2o, "recent window"),
    "observed_attention": (classic.observed_attention, ""),
    "tova": (classic.tova, "protect_last log"),
    "snapkv": (classic.snapkv, _POOLED),
    "snapkv@gkv": (windows.morphkv, _POOLED),
    "snapkv@sparse_vllm": (engines.layer_snapkv, "window sink recent pool_kernel"),
    "dropkv": (windows.dropkv, "window pool_kernel"),
    "pyramidkv": (classic.snapkv, f"{_POOLED} beta"),
    "knorm": (classic.knorm, ""),
    "keydiff": (classic.keydiff, ""),
    "norm_ratio": (layouts.norm_ratio, ""),
    "lagkv": (classic.lagkv, "sink lag cross_scoring"),
    "expected_attention": (expected.expected_attention, _EXPECTED),
    "qfilter": (expected.qfilter, "calibration"),
    "triattention": (expected.triattention, "calibration protect_prompt offsets"),
    **{
        f"triattention@{name}": (engines.triattention, _MODES)
        for name in ("union", "per_head", "vllm", "sglang")
    },
    "oracle": (expected.oracle, "by"),
    "morphkv": (windows.morphkv, _POOLED),
    "morphkv@original": (windows.morphkv_original, "window fusion"),
    "cake": (windows.cake, f"{_CAKE} tau1 tau2"),
    "cake@gkv": (windows.cake_gkv, _CAKE),
    "gkv": (windows.gkv, _GKV),
    "global_max": (windows.gkv, _GKV),
    "global_mean": (windows.gkv, _GKV),
    "global_sum": (windows.gkv, _GKV),
    "rkv": (windows.rkv, _RKV),
    "rkv@original": (windows.rkv_original, _RKV),
    "rkv@ams": (windows.rkv_ams, f"{_RKV} sink"),
    "rkv@sparse_vllm": (engines.layer_rkv, "window sink recent mix_lambda threshold"),
    "capkv": (leverage.capkv, "tau n_future sink"),
    "compactor": (leverage.compactor, "chunk blending sink recent parts"),
    "curdkv": (leverage.curdkv, "sink segment leverage"),
    "finch": (leverage.finch, "window"),
    "kvcompose": (repeated.kvcompose, "sink"),
    "kvzip": (repeated.kvzip, "sink"),
    "lacache": (layouts.lacache, "span overlap sink offset passes"),
    "openvino": (blocks.openvino, "window pool_kernel aggregation"),
    "raas": (windows.raas, "alpha share query_buffer protect_prompt"),
    "rpc": (windows.rpc, "window pool_kernel compression"),
    "rpc@ams": (windows.rpc_ams, "window pool_kernel sink"),
}

#: Allocators and wrappers likewise: of an allocator what stays of scores and protected entries, of
#: a wrapper other scores, from those of the scorer inside and whether they are signed.
OUTER: dict[str, tuple[Callable[..., Any], str]] = {
    "ams": (allocation.ams, _AMS),
    "adakv": (allocation.adakv, "floor"),
    "adakv@kvpress": (partial(allocation.adakv, inside=True), "floor"),
    "chunkkv": (allocation.chunkkv, "chunk"),
    "chunkkv@kvpress": (partial(allocation.chunkkv, exact=False), "chunk"),
    "dms": (layouts.dms, "threshold window"),
    "openvino": (blocks.blocks, "sink recent page crush anchor"),
    "paged": (layouts.paged, "page heads reduction prompt ends"),
    "global": (windows.global_score, "fusion decay"),
    "criticalkv": (expected.critical, "epsilon first_stage"),
    "union": (layouts.union, "across reduction"),
}

#: Every name that needs nothing put behind it.
NAMES: tuple[str, ...] = tuple(
    name
    for name in names()
    if (entry := CATALOGUE[name.partition("@")[0]]).kind == "scorer"
    or (entry.kind != "propagation" and entry.default)
)


@dataclass(frozen=True)
class Chain:
    """A policy taken apart: allocator or None, wrappers from the outside in, scorer.

    params: of each piece, the allocator's first (empty without one), the scorer's last.
    propagation: what stands before all of them, or None, and its parameters. built: by kvsim.
    """

    built: Policy
    allocator: str | None
    wrappers: tuple[str, ...]
    scorer: str
    params: tuple[Mapping[str, Any], ...]
    propagation: str | None
    across: Mapping[str, Any]

    @property
    def score(self) -> Callable[[Event], Scored] | None:
        """The scorer's rule."""
        return known(RULES, self.scorer)[0]

    @property
    def layers(self) -> str:
        """How many entries the layers get: by the class that says it, and its rule."""
        if self.pooled:
            return type(self.built.allocator).__name__
        budgets = self.built.layer_budgets
        return f"{type(budgets).__name__} {getattr(budgets, 'rule', '')}".strip()

    @property
    def across_layers(self) -> bool:
        """Whether the scores of a layer depend on those of the others."""
        levels = zip((self.allocator, *self.wrappers), self.params, strict=False)
        wrapped = any(name == "union" and piece["across"] == "layers" for name, piece in levels)
        return wrapped or self.shares

    @property
    def shares(self) -> bool:
        """Whether the scorer itself ranks the heads of several layers together."""
        return self.params[-1].get("pruning") in ("per_head", "union")

    @property
    def pooled(self) -> bool:
        """Whether all layers share one ranking: nothing is put around the scorer."""
        return type(self.built.allocator).__name__ in ("Pooled", "Composed")

    @property
    def average(self) -> str:
        """What a mean over heads runs over: sets per head leave only the group in common."""
        per_head = ("ams", "adakv", "adakv@kvpress", "dms", "paged@release")
        if "criticalkv" in self.wrappers or self.allocator in per_head:
            return "group"
        return "slot" if self.allocator == "ams@release" else "all"

    @property
    def signed(self) -> bool:
        """Whether the scorer's scores may be negative."""
        return bool(chain_of(self.built.scorer)[-1].scale != "positive")


def known(table: Mapping[str, Any], name: str) -> Any:
    """The row of a name, of a preset without one that of its policy; else that of its test."""
    base = name.partition("@")[0]
    if base in table:
        return table.get(name, table[base])
    try:
        return import_module(f"tests.policies.test_{base}").RULE
    except (ImportError, AttributeError) as error:
        beside = f"tests/policies/test_{base}.py"
        raise PolicyError(f"the reference knows no {name!r}; expected RULE in {beside}") from error


def _values(known: str, *pieces: Any) -> dict[str, Any]:
    """The values of the parameters that a rule knows, of the first piece that has them."""
    own = ((name, [x for x in pieces if hasattr(x, name)]) for name in known.split())
    return {name: getattr(having[0], name) for name, having in own}


def parse(policy: str, params: Mapping[str, Any] | None = None) -> Chain:
    """Take a policy apart; what is to be calibrated is so by all rows if nothing is given."""
    names, given = policy.split("+"), dict(params or {})
    propagation = names.pop(0) if names[0].partition("@")[0] in PROPAGATIONS else None
    inner = CATALOGUE.get((names or [propagation or ""])[-1].partition("@")[0])
    if inner is not None and not inner.innermost and inner.default:
        names.append(inner.default)
    scorer = names.pop() if names else "full"
    if scorer.partition("@")[0] in ("qfilter", "triattention"):
        given.setdefault("calibration", "oracle")
    takes = known(RULES, scorer)[1]
    built = kvsim.policy(policy, **given)
    *wrapping, innermost = chain_of(built.scorer)
    own = [_values(takes, innermost, built.layer_budgets)]
    kinds = [CATALOGUE[x.partition("@")[0]].kind for x in names]
    allocator = names.pop(0) if kinds[:1] == ["allocator"] else None
    if built.allocator.label == innermost.label and innermost.label in OUTER:
        allocator = innermost.label  # its own
    wrappers = [_values(known(OUTER, x)[1], y) for x, y in zip(names, wrapping, strict=True)]
    outer = {} if allocator is None else _values(known(OUTER, allocator)[1], built.allocator)
    across = _values(known(PROPAGATIONS, propagation) if propagation else "", built.propagation)
    pieces = (outer, *wrappers, *own)
    return Chain(built, allocator, tuple(names), scorer, pieces, propagation, across)


def defaults(policy: str) -> dict[str, Any]:
    """Every parameter of a policy as `parse` takes it, with the value that it has if not given."""
    chain = parse(policy)
    pieces = chain.params if chain.allocator else chain.params[1:]
    if chain.propagation:
        pieces = (chain.across, *pieces)
    found: dict[str, Any] = {}
    for depth, piece in enumerate(pieces):
        for name, value in piece.items():
            found["scorer__" * depth + name if name in found else name] = value
    return found


def own_protection(params: Mapping[str, Any], budget: int) -> tuple[int, int]:
    """(sink, recent) that AMS keeps: within the budget; the reference mode keeps recent first."""
    sink, recent = int(params["sink"]), int(params["recent"])
    if params["mode"] == "reference":
        recent = min(recent, budget)
        return min(sink, budget - recent), recent
    sink = min(sink, budget)
    return sink, min(recent, budget - sink)


def smallest_budget(
    name: str,
    params: Mapping[str, Any],
    row: int,
    *,
    prompt_len: int = 0,
    protect: tuple[int, int, bool] = (0, 0, False),
) -> int:
    """The fewest entries that a policy can keep at an event after `row`: its protected size."""
    chain = parse(name, params)
    scorer = chain.params[-1]
    if chain.allocator == "openvino":
        ends = [n * int(chain.params[0]["page"]) for n in blocks.sizes(chain.params[0])]
        scorer = dict(zip(("sink", "recent"), ends, strict=True))
    if chain.allocator == "chunkkv@kvpress" and not chain.layers.startswith(
        ("Pyramid fixed", "CakeBudgets")
    ):
        return 1  # the size of what is protected does not bind
    sink = int(scorer.get("sink") or 0)
    recent = int(scorer.get("recent") or scorer.get("window") or 0)
    if scorer.get("protect_last"):
        recent = 1
    if scorer.get("protect_prompt") or chain.layers == "Growing":
        sink = max(sink, prompt_len)
    sink, recent = max(sink, protect[0]), max(recent, protect[1])
    if protect[2]:
        sink = max(sink, prompt_len)
    for budget in range(1, row + 2):
        first, last = sink, recent
        if chain.allocator in ("ams", "ams@release"):
            its = own_protection(chain.params[0], budget)
            first, last = max(first, its[0]), max(last, its[1])
        if chain.propagation in ("asl", "asl_2pass"):
            last = max(last, int(chain.across["window"]))
        if min(row + 1, first + last) <= budget:
            return budget
    return row + 1
