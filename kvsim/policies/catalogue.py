"""Every policy, reader and codec by name: its pieces, its schedule and its presets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvsim.core.policy import Even, Everything, Schedule, Uniform
from kvsim.policies.access import ACCESS
from kvsim.policies.adakv import AdaKV
from kvsim.policies.ams import AMS
from kvsim.policies.asl import ASL, TwoPass
from kvsim.policies.cake import Cake, CakeBudgets
from kvsim.policies.capkv import CapKV
from kvsim.policies.chunkkv import ChunkKV
from kvsim.policies.compactor import Compactor
from kvsim.policies.criticalkv import CriticalKV
from kvsim.policies.curdkv import CurDKV
from kvsim.policies.dms import DMS
from kvsim.policies.dropkv import DropKV
from kvsim.policies.entry import Entry, Preset
from kvsim.policies.expected_attention import ExpectedAttention
from kvsim.policies.fastkv import FastKV
from kvsim.policies.finch import Finch
from kvsim.policies.full import Full
from kvsim.policies.gemfilter import GemFilter
from kvsim.policies.gkv import GKV, Global, Local
from kvsim.policies.h2o import H2O, ObservedAttention
from kvsim.policies.keydiff import KeyDiff
from kvsim.policies.knorm import Knorm
from kvsim.policies.kvcompose import Composed, KVCompose
from kvsim.policies.kvzip import KVzip, Pooled
from kvsim.policies.lacache import LaCache
from kvsim.policies.lagkv import LagKV
from kvsim.policies.lengths import MEANT_FOR
from kvsim.policies.morphkv import MorphKV
from kvsim.policies.oracle import Oracle
from kvsim.policies.paged import NormRatio, Paged
from kvsim.policies.pyramidinfer import PyramidInfer
from kvsim.policies.pyramidkv import Pyramid
from kvsim.policies.qfilter import QFilter
from kvsim.policies.raas import RaaS
from kvsim.policies.random_sets import Random
from kvsim.policies.rkv import RKV
from kvsim.policies.rpc import RPC, AmsRPC, Growing
from kvsim.policies.snapkv import SnapKV
from kvsim.policies.streaming_llm import StreamingLLM
from kvsim.policies.tova import TOVA
from kvsim.policies.triattention import TriAttention
from kvsim.policies.union import Union
from kvsim.registry import Registry

_NEVER = Schedule(interval=None, prefill=False)
_PROMPT = Schedule(interval=None)
_EVERY_ROW = Schedule(interval=1)
_EVERY_128 = Schedule(interval=128)
_EVERY_512 = Schedule(interval=512)

_SNAPKV_KVPRESS = {"window": 64, "pool": "avg", "pool_kernel": 5}

# Where heads keep sets of their own, an average over all of them compares different tokens; and
# what is wrapped is the score alone, without the rule of TriAttention and RaaS that the prompt
# stays.
_SHARED: Mapping[str, Mapping[str, Any]] = {
    name: {"protect_prompt": False} for name in ("triattention", "raas")
}
_PER_HEAD = {**_SHARED, "tova": {"heads": "group"}, "rpc": {"heads": "group"}}
# One window decides which tokens propagate, and what the caches keep of them.
_WINDOW = ("window", "pool", "pool_kernel")


def _windows(how: str, **params: Any) -> Entry:
    """The global score of G-KV alone."""
    summary = f"what windows attended to, {how} over events"
    return Entry(summary, GKV, _EVERY_128, params={"redundancy": False, **params})


_ENTRIES: Mapping[str, Entry] = {
    "full": Entry("everything (reference)", Full, _NEVER, policy={"allocator": Everything()}),
    "random": Entry("a random set (baseline)", Random, _EVERY_ROW),
    "oracle": Entry(
        "what later rows attend to most: looks ahead; with by=optimum the reference for regret",
        Oracle,
        _EVERY_128,
    ),
    "streaming_llm": Entry("the first and the most recent entries", StreamingLLM, _EVERY_ROW),
    "h2o": Entry("recent entries and those that received most attention so far", H2O, _EVERY_ROW),
    "tova": Entry("what the last row attends to most, one ranking for all heads", TOVA, _EVERY_ROW),
    "snapkv": Entry("what a window of rows attends to, pooled over neighbours", SnapKV, _PROMPT),
    "dropkv": Entry(
        "what would move the output of the last rows most if it were dropped", DropKV, _PROMPT
    ),
    "pyramidkv": Entry(
        "as snapkv, with budgets that decrease with depth",
        SnapKV,
        _PROMPT,
        layer_budgets=Pyramid,
        params={"window": 8},
    ),
    "observed_attention": Entry(
        "what received most attention, averaged over rows", ObservedAttention, _PROMPT
    ),
    "keydiff": Entry("keys that point away from the mean direction of all keys", KeyDiff, _PROMPT),
    "knorm": Entry("keys of small norm", Knorm, _PROMPT),
    "norm_ratio": Entry("values that are long relative to their keys", NormRatio, _PROMPT),
    "lagkv": Entry(
        "entries whose keys and values vary most relative to the next partition", LagKV, _PROMPT
    ),
    "expected_attention": Entry(
        "what future queries, assumed normal, would attend to, times the norm of the value",
        ExpectedAttention,
        _PROMPT,
    ),
    "capkv": Entry(
        "what adds most to the span of values whose keys lie along the mean query", CapKV, _PROMPT
    ),
    "compactor": Entry(
        "keys that stand out from the others, and what neighbours attend to", Compactor, _PROMPT
    ),
    "curdkv": Entry("keys and values that are long among their neighbours", CurDKV, _PROMPT),
    "finch": Entry("what the question at the end of the prompt attends to", Finch, _PROMPT),
    "kvcompose": Entry(
        "what rows that repeat the context attend to; layers share one budget by ranks of heads",
        KVCompose,
        _PROMPT,
        policy={"allocator": Composed()},
    ),
    "kvzip": Entry(
        "what rows that repeat the context attend to most; all heads share one budget",
        KVzip,
        _PROMPT,
        policy={"allocator": Pooled()},
    ),
    "qfilter": Entry(
        "keys along the main direction of calibration queries",
        QFilter,
        _PROMPT,
        required={"calibration": "prefix:64"},
    ),
    "triattention": Entry(
        "keys with the largest expected logits at many distances to later queries",
        TriAttention,
        _EVERY_128,
        required={"calibration": "prefix:64"},
    ),
    "gkv": Entry(
        "what recent and earlier windows attended to, less redundancy of keys", GKV, _EVERY_128
    ),
    "global_max": _windows("a decayed maximum"),
    "global_mean": _windows("a moving average", fusion="mean"),
    "global_sum": _windows("a decayed sum", fusion="sum"),
    "rkv": Entry("what a window attends to, less redundancy of keys", RKV, _EVERY_128),
    "morphkv": Entry(
        "what a window attends to, as in G-KV's baseline",
        Local,
        _EVERY_128,
        paper="arXiv 2503.00979",
    ),
    "cake": Entry(
        "what gets much or varying attention; layers share one budget by their attention",
        Cake,
        _EVERY_128,
        layer_budgets=CakeBudgets,
    ),
    "lacache": Entry(
        "other tokens in each layer, and ever fewer of older text, by position alone",
        LaCache,
        _EVERY_ROW,
    ),
    "raas": Entry(
        "the prompt, and what was attended to most recently",
        RaaS,
        Schedule(interval=1, prefill=False),
    ),
    "rpc": Entry(
        "the prompt, and a share of the generated tokens, by the attention of recent rows",
        RPC,
        Schedule(interval=1024, prefill=False),
        layer_budgets=Growing,
    ),
    "global": Entry(
        "the best by any scorer, with its scores remembered over events",
        Global,
        _EVERY_128,
        inner=_SHARED,
    ),
    "criticalkv": Entry(
        "half by any scorer, the rest by its score times the norm of the projected value",
        CriticalKV,
        None,
        inner=_PER_HEAD,
    ),
    "union": Entry(
        "one set for all heads of a layer, or of all layers, by any scorer",
        Union,
        None,
        inner=_SHARED,
    ),
    "ams": Entry(
        "a quota of every segment of equal attention mass, chosen by any scorer",
        AMS,
        Schedule(interval=512, prefill=False),
        inner=_PER_HEAD,
        default="tova",
    ),
    "adakv": Entry(
        "the best entries of all heads of a layer together, by any scorer",
        AdaKV,
        None,
        inner=_PER_HEAD,
    ),
    "chunkkv": Entry(
        "whole chunks of neighbours, the same in all heads, by any scorer",
        ChunkKV,
        None,
        inner=_SHARED,
    ),
    "dms": Entry(
        "what scores at least a threshold at an age, by any scorer; no budget",
        DMS,
        _EVERY_ROW,
        inner=_PER_HEAD,
    ),
    "paged": Entry(
        "whole pages of neighbours in a paged cache, by any scorer",
        Paged,
        Schedule(interval=16),
        inner=_SHARED,
        default="norm_ratio",
    ),
    "asl": Entry(
        "as many tokens as the budget, beyond the layer where their ranking settles",
        ASL,
        _PROMPT,
        default="snapkv",
        shares=_WINDOW,
    ),
    "asl_2pass": Entry("the tokens of asl, which run through all layers again", TwoPass, _PROMPT),
    "fastkv": Entry(
        "a budget of entries; only some tokens propagate beyond a given layer",
        FastKV,
        _PROMPT,
        default="snapkv",
        shares=_WINDOW,
    ),
    "gemfilter": Entry(
        "tokens with the last row's largest logits in an early layer, run through all layers again",
        GemFilter,
        _PROMPT,
    ),
    "pyramidinfer": Entry(
        "fewer tokens from layer to layer, by the attention of recent rows; no budget",
        PyramidInfer,
        _PROMPT,
    ),
}

_PRESETS: Mapping[str, Preset] = {
    "streaming_llm@original": Preset(
        "the same entries; keys rotated to their slot in the cache", policy={"positions": "slot"}
    ),
    "h2o@kvpress": Preset(
        "ObservedAttention: average attention received, after the prompt only",
        piece=ObservedAttention,
        policy={"schedule": _PROMPT},
    ),
    "tova@kvpress": Preset(
        "as tova, but the last token is protected",
        params={"protect_last": True},
        policy={"schedule": _PROMPT},
    ),
    "snapkv@kvpress": Preset("window 64, average-pool of 5", params=_SNAPKV_KVPRESS),
    "snapkv@gkv": Preset(
        "G-KV's baseline in decoding: window 16, largest of the group, max-pool of 5",
        piece=Local,
        params={"pool": "max"},
        policy={"schedule": _EVERY_128},
    ),
    "snapkv@original": Preset(
        "as snapkv, one set per query head, which a grouped cache cannot store",
        policy={"per_query_head": True},
    ),
    "pyramidkv@kvpress": Preset(
        "budgets computed anew at each event; window 64, average-pool of 5",
        params={**_SNAPKV_KVPRESS, "rule": "event"},
    ),
    "pyramidkv@reference": Preset(
        "the rule in the AMS release, whose budgets oscillate in decoding",
        params={**_SNAPKV_KVPRESS, "rule": "event"},
        policy={"schedule": _EVERY_512},
    ),
    "expected_attention@kvpress": Preset(
        "epsilon 0; in decoding, positions count from the start of a query buffer",
        params={"epsilon": 0.0, "origin": "buffer"},
    ),
    "compactor@leverage": Preset("keys that stand out", params={"parts": "leverage"}),
    "compactor@attention": Preset("what neighbours attend to", params={"parts": "attention"}),
    "kvzip@uniform": Preset(
        "the same number of entries in each head", policy={"allocator": Uniform()}
    ),
    "kvzip@kvpress": Preset(
        "4 first entries stay, and join the softmax of each chunk", params={"sink": 4}
    ),
    "gkv@r1_qwen_7b": Preset("mix_lambda for R1-Distill-Qwen-7B", params={"mix_lambda": 0.7}),
    "gkv@r1_llama_8b": Preset("mix_lambda for R1-Distill-Llama-8B", params={"mix_lambda": 0.9}),
    "gkv@release": Preset("mix_lambda of the released scripts", params={"mix_lambda": 0.5}),
    "rkv@gkv": Preset("the same as rkv: G-KV's baseline"),
    "rkv@original": Preset(
        "largest logit of the group, softmax without the window; window 8, pool of 7",
        params={"variant": "original", "window": 8, "pool_kernel": 7},
    ),
    "rkv@ams": Preset(
        "as in the AMS release: window 8, sinks kept, redundancy of the candidates alone",
        params={"variant": "ams", "window": 8, "pool_kernel": 7, "mix_lambda": 0.07, "sink": 4},
        policy={"schedule": _EVERY_512},
    ),
    "morphkv@gkv": Preset("the same as morphkv"),
    "morphkv@original": Preset(
        "softmax over the entries before the window alone, summed over the window",
        piece=MorphKV,
        policy={"schedule": Schedule(interval=1, prefill=False)},
    ),
    "cake@gkv": Preset(
        "G-KV's baseline: standard deviation, largest of the group, equal layer budgets",
        layer_budgets=Even,
        params={"window": 16, "dispersion": "std", "pool": None, "group": "max", "decoding": True},
    ),
    "lacache@release": Preset(
        "the offset of the released code, whose neighbouring layers differ; one pass for many",
        params={"offset": "modulo", "passes": "merged"},
    ),
    "rpc@ams": Preset(
        "as in the AMS release: fixed budget, one set per head, sinks kept",
        piece=AmsRPC,
        layer_budgets=Even,
        policy={"schedule": _EVERY_512},
    ),
    "ams@release": Preset(
        "as in the released code: hyper-parameters, segments, rounding, a final cut",
        params={
            "segment_mass": 0.02,
            "min_segment": 32,
            "max_segment": 1024,
            "min_quota": 8,
            "credit_decay": 0.8,
            "credit_mix": 0.7,
            "window": 32,
            "suffix_fill": "global_max",
            "mode": "reference",
        },
        inner={**_SHARED, "tova": {"protect_last": True}},
    ),
    "adakv@kvpress": Preset(
        "protected entries count among the guaranteed ones", params={"protected_in_floor": True}
    ),
    "chunkkv@kvpress": Preset(
        "whole chunks only, so the size can miss the budget by up to two chunks",
        params={"exact": False},
    ),
    "paged@release": Preset(
        "norms averaged over heads first; first and newest page stay, each head its own prompt",
        params={"reduction": "norms", "prompt": "heads", "ends": True},
        inner=_PER_HEAD,
    ),
    "fastkv@proportional": Preset("a fifth of the prompt propagates", params={"rows": 0.2}),
}

_EVICTIONS: Mapping[str, Entry] = {
    name: replace(
        entry,
        meant_for=MEANT_FOR.get(name, {}),
        presets={
            full.removeprefix(f"{name}@"): replace(preset, meant_for=MEANT_FOR.get(full))
            for full, preset in _PRESETS.items()
            if full.startswith(f"{name}@")
        },
    )
    for name, entry in _ENTRIES.items()
}

#: Evictions, and everything that packages bring.
CATALOGUE: Mapping[str, Entry] = Registry("policy", "kvsim.policies", (Entry,), _EVICTIONS, ACCESS)
