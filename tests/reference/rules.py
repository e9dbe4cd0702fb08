"""Every policy and preset by name, how names are crossed, and where a keyword goes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvsim.errors import PolicyError
from kvsim.testing.loops import Scored
from reference import classic, expected, layouts, leverage, repeated, windows
from reference.event import Event
from reference.propagation import ALONE, PROPAGATIONS

#: From an event, what a wrapped scorer gave and whether it is signed, to other scores.
Wrap = Callable[..., Scored]


@dataclass(frozen=True)
class Rule:
    """A policy as the reference knows it.

    interval and prefill: its own schedule; `interval` None fires after the prefill alone.
    layers: how many entries the layers get: "even", "pyramid" and its presets, "cake", "growing",
    "pooled" (all heads of all layers share one ranking, unless something is put around the scorer),
    "composed" (layers share one by what their heads rank alike, on the same condition).
    """

    score: Callable[[Event], Scored] | None  # None: never evicts
    params: Mapping[str, Any] = field(default_factory=dict)
    interval: int | None = 1
    prefill: bool = True
    accumulates: bool = False
    per_query_head: bool = False
    signed: bool = False
    layers: str = "even"


@dataclass(frozen=True)
class Outer:
    """An allocator or a wrapper as the reference knows it. wrap: None for an allocator."""

    params: Mapping[str, Any]
    wrap: Wrap | None = None
    interval: int | None = 0  # 0: the schedule of what it is put around
    prefill: bool = True


_SNAP = {"window": 32, "pool": "max", "pool_kernel": 7}
_SNAP_KVPRESS = {"window": 64, "pool": "avg", "pool_kernel": 5}
_EXPECTED = {
    "n_future": 512,
    "sink": 4,
    "epsilon": 0.01,
    "covariance": True,
    "value_norm": "v",
    "query_buffer": 256,
    "rope": "mean",
    "origin": "next",
    "log": False,
}
_GKV = {
    "window": 16,
    "fusion": "max",
    "decay": 0.8,
    "redundancy": True,
    "mix_lambda": 0.7,
    "threshold": 0.5,
    "cosine": "kernel",
    "pool": None,
    "pool_kernel": 5,
}
_RKV = {
    "window": 16,
    "pool": "max",
    "pool_kernel": 5,
    "mix_lambda": 0.1,
    "threshold": 0.5,
    "slot_order": "position",
}
_CAKE = {
    "window": 32,
    "gamma": 200.0,
    "dispersion": "var",
    "pool": "avg",
    "pool_kernel": 5,
    "tau1": 1.0,
    "tau2": 1.0,
}
_COMPACTOR = {"chunk": 256, "blending": 0.5, "sink": 8, "recent": 4, "parts": "both"}
_LADDER = {"span": None, "overlap": 0, "sink": 4, "offset": "ladder", "passes": "each"}
_PAGED = {"page": 16, "heads": "all", "reduction": "mean", "prompt": "entries", "ends": False}
_CALIBRATED = {"calibration": None}
_AMS = {
    "segment_mass": 0.1,
    "min_segment": 16,
    "max_segment": 256,
    "min_quota": 1,
    "credit": True,
    "credit_decay": 0.9,
    "credit_mix": 0.9,
    "credit_of": "mass",
    "window": 128,
    "pool_kernel": 5,
    "suffix_fill": "head_max",
    "mode": "strict",
    "weights": "mass",
    "segmentation": "mass",
    "segment_length": 128,
    "sink": 4,
    "recent": 32,
}
_AMS_RELEASE = {
    **_AMS,
    "segment_mass": 0.02,
    "min_segment": 32,
    "max_segment": 1024,
    "min_quota": 8,
    "credit_decay": 0.8,
    "credit_mix": 0.7,
    "window": 32,
    "suffix_fill": "global_max",
    "mode": "reference",
}


def _gkv(**changes: Any) -> Rule:
    return Rule(windows.gkv, {**_GKV, **changes}, 128, signed=True)


def _alone(score: Callable[[Event], Scored], params: Mapping[str, Any], **other: Any) -> Rule:
    """A policy that acts after the prefill alone."""
    return Rule(score, params, None, **other)


#: Every policy and preset that stands alone.
RULES: dict[str, Rule] = {
    "full": Rule(None),
    "random": Rule(classic.random, {"seed": 0}),
    "streaming_llm": Rule(classic.streaming_llm, {"sink": 4}),
    "streaming_llm@original": Rule(classic.streaming_llm, {"sink": 4}),
    "h2o": Rule(classic.h2o, {"recent": None}, accumulates=True),
    "h2o@kvpress": _alone(classic.observed_attention, {}),
    "observed_attention": _alone(classic.observed_attention, {}),
    "tova": Rule(classic.tova, {"protect_last": False, "log": False}),
    "tova@kvpress": _alone(classic.tova, {"protect_last": True, "log": False}),
    "snapkv": _alone(classic.snapkv, _SNAP),
    "snapkv@kvpress": _alone(classic.snapkv, _SNAP_KVPRESS),
    "snapkv@original": _alone(classic.snapkv, _SNAP, per_query_head=True),
    "snapkv@gkv": Rule(windows.morphkv, {"window": 16, "pool": "max", "pool_kernel": 5}, 128),
    "dropkv": _alone(windows.dropkv, {"window": 8, "pool_kernel": 11}),
    "pyramidkv": _alone(classic.snapkv, {**_SNAP, "window": 8, "beta": 20.0}, layers="pyramid"),
    "pyramidkv@kvpress": _alone(
        classic.snapkv, {**_SNAP_KVPRESS, "beta": 20.0}, layers="pyramid@kvpress"
    ),
    "pyramidkv@reference": _alone(
        classic.snapkv, {**_SNAP_KVPRESS, "beta": 20.0}, layers="pyramid@reference"
    ),
    "knorm": _alone(classic.knorm, {}, signed=True),
    "keydiff": _alone(classic.keydiff, {}, signed=True),
    "norm_ratio": _alone(layouts.norm_ratio, {}),
    "lagkv": _alone(classic.lagkv, {"sink": 4, "lag": 128, "cross_scoring": False}),
    "expected_attention": _alone(expected.expected_attention, _EXPECTED),
    "expected_attention@kvpress": _alone(
        expected.expected_attention, {**_EXPECTED, "epsilon": 0.0, "origin": "buffer"}
    ),
    "qfilter": _alone(expected.qfilter, _CALIBRATED, signed=True),
    "triattention": Rule(
        expected.triattention,
        {**_CALIBRATED, "protect_prompt": True, "offsets": "mean"},
        128,
        signed=True,
    ),
    "oracle": Rule(expected.oracle, {"by": "mass"}, 128),
    "morphkv": Rule(windows.morphkv, {"window": 16, "pool": None, "pool_kernel": 5}, 128),
    "morphkv@gkv": Rule(windows.morphkv, {"window": 16, "pool": None, "pool_kernel": 5}, 128),
    "morphkv@original": Rule(
        windows.morphkv_original, {"window": 32, "fusion": "sum"}, 1, prefill=False
    ),
    "cake": Rule(windows.cake, _CAKE, 128, layers="cake"),
    "cake@gkv": Rule(
        windows.cake_gkv,
        {"window": 16, "gamma": 200.0, "dispersion": "std", "pool": None, "pool_kernel": 5},
        128,
    ),
    "gkv": _gkv(),
    "gkv@r1_qwen_7b": _gkv(mix_lambda=0.7),
    "gkv@r1_llama_8b": _gkv(mix_lambda=0.9),
    "gkv@release": _gkv(mix_lambda=0.5),
    "global_max": _gkv(redundancy=False, fusion="max"),
    "global_mean": _gkv(redundancy=False, fusion="mean"),
    "global_sum": _gkv(redundancy=False, fusion="sum"),
    "rkv": Rule(windows.rkv, _RKV, 128, signed=True),
    "rkv@gkv": Rule(windows.rkv, _RKV, 128, signed=True),
    "rkv@original": Rule(
        windows.rkv_original, {**_RKV, "window": 8, "pool_kernel": 7}, 128, signed=True
    ),
    "rkv@ams": Rule(
        windows.rkv_ams,
        {**_RKV, "window": 8, "pool_kernel": 7, "mix_lambda": 0.07, "sink": 4},
        512,
        signed=True,
    ),
    "capkv": _alone(leverage.capkv, {"tau": 5.0, "n_future": 512, "sink": 4}),
    "compactor": _alone(leverage.compactor, _COMPACTOR, signed=True),
    "compactor@leverage": _alone(
        leverage.compactor, {**_COMPACTOR, "parts": "leverage"}, signed=True
    ),
    "compactor@attention": _alone(
        leverage.compactor, {**_COMPACTOR, "parts": "attention"}, signed=True
    ),
    "curdkv": _alone(leverage.curdkv, {"sink": 4, "segment": 16, "leverage": "product"}),
    "finch": _alone(leverage.finch, {"window": 32}),
    "kvcompose": _alone(repeated.kvcompose, {"sink": 0}, layers="composed"),
    "kvzip": _alone(repeated.kvzip, {"sink": 0}, layers="pooled"),
    "kvzip@uniform": _alone(repeated.kvzip, {"sink": 0}),
    "kvzip@kvpress": _alone(repeated.kvzip, {"sink": 4}, layers="pooled"),
    "lacache": Rule(layouts.lacache, _LADDER),
    "lacache@release": Rule(layouts.lacache, {**_LADDER, "offset": "modulo", "passes": "merged"}),
    "raas": Rule(
        windows.raas,
        {"alpha": 1e-4, "share": None, "query_buffer": 256, "protect_prompt": True},
        1,
        prefill=False,
    ),
    "rpc": Rule(
        windows.rpc,
        {"window": 32, "pool_kernel": 7, "compression": 4},
        1024,
        prefill=False,
        layers="growing",
    ),
    "rpc@ams": Rule(windows.rpc_ams, {"window": 32, "pool_kernel": 7, "sink": 4}, 512),
}

#: Every allocator and wrapper, to be put before a policy: `adakv+snapkv`.
OUTER: dict[str, Outer] = {
    "ams": Outer(_AMS, interval=512, prefill=False),
    "ams@release": Outer(_AMS_RELEASE, interval=512, prefill=False),
    "adakv": Outer({"floor": 0.2}),
    "adakv@kvpress": Outer({"floor": 0.2}),
    "chunkkv": Outer({"chunk": 20}),
    "chunkkv@kvpress": Outer({"chunk": 20}),
    "dms": Outer({"threshold": 0.01, "window": 128}, interval=1),
    "global": Outer({"fusion": "max", "decay": 0.8}, windows.global_score, 128),
    "criticalkv": Outer({"epsilon": 1e-4, "first_stage": 0.5}, expected.critical),
    "union": Outer({"across": "heads", "reduction": "max"}, layouts.union),
    "paged": Outer(_PAGED, None, 16),
    "paged@release": Outer(
        {**_PAGED, "reduction": "norms", "prompt": "heads", "ends": True}, None, 16
    ),
}
#: Allocators whose heads hold sets of their own.
_PER_HEAD = ("ams", "adakv", "adakv@kvpress", "dms", "paged@release")
#: What stands inside where nothing is named.
INSIDE = {
    "ams": "tova",
    "ams@release": "tova",
    "paged": "norm_ratio",
    "paged@release": "norm_ratio",
}


#: Every name that needs nothing put behind it.
NAMES: tuple[str, ...] = (*RULES, *INSIDE)


@dataclass(frozen=True)
class Chain:
    """A policy taken apart: allocator or None, wrappers from the outside in, scorer.

    params: of each piece, the allocator's first (empty without one), the scorer's last.
    propagation: what stands before all of them, or None, and its parameters.
    """

    allocator: str | None
    wrappers: tuple[str, ...]
    scorer: str
    params: tuple[Mapping[str, Any], ...]
    propagation: str | None = None
    across: Mapping[str, Any] = field(default_factory=dict)

    @property
    def rule(self) -> Rule:
        """The scorer's rule."""
        return RULES[self.scorer]

    @property
    def schedule(self) -> tuple[int | None, bool]:
        """(interval, prefill) of its own: that of the outermost piece that has one.

        A propagation has: the prompt alone.
        """
        if self.propagation is not None:
            return None, True
        for name in (self.allocator, *self.wrappers):
            if name is not None and OUTER[name].interval != 0:
                return OUTER[name].interval, OUTER[name].prefill
        return self.rule.interval, self.rule.prefill

    @property
    def across_layers(self) -> bool:
        """Whether the scores of a layer depend on those of the others."""
        chain = (self.allocator, *self.wrappers)
        levels = zip(chain, self.params, strict=False)
        return any(name == "union" and piece["across"] == "layers" for name, piece in levels)

    @property
    def pooled(self) -> bool:
        """Whether all layers share one ranking."""
        return (
            self.rule.layers in ("pooled", "composed")
            and self.allocator is None
            and not self.wrappers
        )

    @property
    def average(self) -> str:
        """What a mean over heads runs over: sets per head leave only the group in common."""
        if "criticalkv" in self.wrappers or self.allocator in _PER_HEAD:
            return "group"
        return "slot" if self.allocator == "ams@release" else "all"

    @property
    def calibration(self) -> Any:
        """The calibration queries of a scorer that has some, None where they are the trace's."""
        given = self.params[-1].get("calibration")
        return None if isinstance(given, str) else given

    @property
    def signed(self) -> bool:
        """Whether the scorer's scores may be negative."""
        params = self.params[-1]
        mixes = params.get("redundancy", True) and params.get("mix_lambda", 0.0) < 1
        return (self.rule.signed and bool(mixes)) or bool(params.get("log"))


def parse(policy: str, params: Mapping[str, Any] | None = None) -> Chain:
    """Take a name apart and give each keyword to the outermost piece that has it.

    `scorer__NAME` starts one piece further in, `scorer__scorer__NAME` two. SnapKV behind a
    propagation has its window and pooling unless it is given its own.
    """
    propagation, names = _names(policy)
    own: list[dict[str, Any]] = [dict(OUTER[name].params) for name in names[:-1]]
    own.append(dict(RULES[names[-1]].params))
    if len(names) > 1 and "protect_prompt" in own[-1]:
        own[-1]["protect_prompt"] = False
    if names[-1] == "tova" and "ams@release" in names:
        own[-1]["protect_last"] = True
    across = dict(PROPAGATIONS.get(propagation or "", {}))
    if propagation:
        own.insert(0, across)
    given = params or {}
    _give(policy, own, {key: x for key, x in given.items() if not key.startswith("scorer__")})
    if propagation and names[-1] == "snapkv":
        own[-1].update({name: across[name] for name in _SNAP})
    _give(policy, own, {key: x for key, x in given.items() if key.startswith("scorer__")})
    if propagation:
        own.pop(0)
    allocator = None
    if len(names) > 1 and OUTER[names[0]].wrap is None:
        allocator = names[0]
    else:
        own.insert(0, {})
    wrappers = tuple(names[1 if allocator else 0 : -1])
    ordinal = allocator in ("ams", "ams@release") and not wrappers and "log" in own[-1]
    if ordinal and not any(key.rpartition("scorer__")[2] == "log" for key in given):
        # AMS looks at the order alone, and with an epsilon nothing comes near 0
        own[-1]["log"] = own[-1].get("epsilon", 0.0) == 0
    if any(OUTER[name].wrap is None for name in wrappers):
        raise PolicyError(f"{policy} has an allocator inside; it comes first")
    return Chain(allocator, wrappers, names[-1], tuple(own), propagation, across)


def _give(policy: str, own: list[dict[str, Any]], params: Mapping[str, Any]) -> None:
    """Each keyword to the outermost of the pieces that has it."""
    for key, value in params.items():
        depth = key.count("scorer__")
        name = key.removeprefix("scorer__" * depth)
        having = [piece for piece in own[depth:] if name in piece]
        if not having:
            raise PolicyError(f"{policy} has no parameter {key!r}")
        having[0][name] = value


def _names(policy: str) -> tuple[str | None, list[str]]:
    """The propagation, and the names behind it, with those that go without saying."""
    names = policy.split("+")
    propagation = names.pop(0) if names[0] in PROPAGATIONS else None
    if propagation in ALONE:
        if names:
            raise PolicyError(f"{propagation} stands alone")
        names.append("full")
    elif not names:
        names.append("snapkv")
    if names[-1] in INSIDE:
        names.append(INSIDE[names[-1]])
    if names[-1] not in RULES or any(name not in OUTER for name in names[:-1]):
        raise PolicyError(f"the reference knows no {policy!r}")
    return propagation, names


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
    if chain.allocator == "chunkkv@kvpress" and chain.rule.layers not in ("pyramid", "cake"):
        return 1  # the size of what is protected does not bind
    sink = int(scorer.get("sink") or 0)
    recent = int(scorer.get("recent") or scorer.get("window") or 0)
    if scorer.get("protect_last"):
        recent = 1
    if scorer.get("protect_prompt") or chain.rule.layers == "growing":
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
