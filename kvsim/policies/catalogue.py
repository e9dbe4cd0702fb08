"""Every policy by name: its pieces, its schedule, its presets and its paper."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvsim.core.policy import Even, Everything, Schedule
from kvsim.policies.adakv import AdaKV
from kvsim.policies.ams import AMS
from kvsim.policies.asl import ASL, TwoPass
from kvsim.policies.cake import Cake, CakeBudgets
from kvsim.policies.chunkkv import ChunkKV
from kvsim.policies.criticalkv import CriticalKV
from kvsim.policies.dropkv import DropKV
from kvsim.policies.expected_attention import ExpectedAttention
from kvsim.policies.fastkv import FastKV
from kvsim.policies.full import Full
from kvsim.policies.gemfilter import GemFilter
from kvsim.policies.gkv import GKV, Global, Local
from kvsim.policies.h2o import H2O, ObservedAttention
from kvsim.policies.keydiff import KeyDiff
from kvsim.policies.knorm import Knorm
from kvsim.policies.lagkv import LagKV
from kvsim.policies.morphkv import MorphKV
from kvsim.policies.naming import Entry, Preset
from kvsim.policies.oracle import Oracle
from kvsim.policies.pyramidinfer import PyramidInfer
from kvsim.policies.pyramidkv import Pyramid
from kvsim.policies.qfilter import QFilter
from kvsim.policies.random_sets import Random
from kvsim.policies.rkv import RKV
from kvsim.policies.rpc import RPC, AmsRPC, Growing
from kvsim.policies.snapkv import SnapKV
from kvsim.policies.streaming_llm import StreamingLLM
from kvsim.policies.tova import TOVA
from kvsim.policies.triattention import TriAttention

_NEVER = Schedule(interval=None, prefill=False)
_PROMPT = Schedule(interval=None)
_EVERY_ROW = Schedule(interval=1)
_EVERY_128 = Schedule(interval=128)
_EVERY_512 = Schedule(interval=512)

_SNAPKV_KVPRESS = {"window": 64, "pool": "avg", "pool_kernel": 5}

# Where heads keep sets of their own, an average over all of them compares different tokens; and
# what is wrapped is the score alone, without TriAttention's rule that the prompt stays.
_PER_HEAD: Mapping[str, Mapping[str, Any]] = {
    "tova": {"heads": "group"},
    "rpc": {"heads": "group"},
    "triattention": {"protect_prompt": False},
}
# One window decides which tokens propagate, and what the caches keep of them.
_WINDOW = ("window", "pool", "pool_kernel")
_SHARED: Mapping[str, Mapping[str, Any]] = {"triattention": {"protect_prompt": False}}

_ENTRIES: Mapping[str, Entry] = {
    "full": Entry("everything: the reference", Full, _NEVER, policy={"allocator": Everything()}),
    "random": Entry("a random set: the null", Random, _EVERY_ROW),
    "oracle": Entry(
        "what later rows attend to most: looks ahead, to measure regret against", Oracle, _EVERY_128
    ),
    "streaming_llm": Entry("the first and the most recent entries", StreamingLLM, _EVERY_ROW),
    "h2o": Entry("recent entries and those that received most attention so far", H2O, _EVERY_ROW),
    "tova": Entry("what the last row attends to, one ranking for all heads", TOVA, _EVERY_ROW),
    "snapkv": Entry("what a window of rows attends to, pooled over neighbours", SnapKV, _PROMPT),
    "dropkv": Entry(
        "what would move the output of the last rows most if it were dropped", DropKV, _PROMPT
    ),
    "pyramidkv": Entry(
        "SnapKV with budgets that fall with depth, fixed once",
        SnapKV,
        _PROMPT,
        layer_budgets=Pyramid,
        params={"window": 8},
    ),
    "observed_attention": Entry(
        "what received most attention on average, after the prompt", ObservedAttention, _PROMPT
    ),
    "keydiff": Entry("keys that point away from the mean direction of the cache", KeyDiff, _PROMPT),
    "knorm": Entry("short keys", Knorm, _PROMPT),
    "lagkv": Entry(
        "entries whose keys and values stand out against the next partition", LagKV, _PROMPT
    ),
    "expected_attention": Entry(
        "what normal queries at the next positions would attend to, times the value's size",
        ExpectedAttention,
        _PROMPT,
    ),
    "qfilter": Entry(
        "keys along the main direction of calibration queries",
        QFilter,
        _PROMPT,
        required={"calibration": "prefix:64"},
    ),
    "triattention": Entry(
        "keys by a trigonometric series in the distance to later queries",
        TriAttention,
        _EVERY_128,
        required={"calibration": "prefix:64"},
    ),
    "gkv": Entry(
        "what recent and earlier windows attended to, less what is redundant", GKV, _EVERY_128
    ),
    "global_max": Entry(
        "what any window attended to, the decayed maximum",
        GKV,
        _EVERY_128,
        params={"redundancy": False},
    ),
    "global_mean": Entry(
        "what windows attended to, a moving average",
        GKV,
        _EVERY_128,
        params={"redundancy": False, "fusion": "mean"},
    ),
    "global_sum": Entry(
        "what windows attended to, a decayed sum",
        GKV,
        _EVERY_128,
        params={"redundancy": False, "fusion": "sum"},
    ),
    "rkv": Entry("what a window attends to, less what is redundant", RKV, _EVERY_128),
    "morphkv": Entry("what a window attends to, as G-KV compares with it", Local, _EVERY_128),
    "cake": Entry(
        "what is attended to much or unsteadily; layers share one budget by their attention",
        Cake,
        _EVERY_128,
        layer_budgets=CakeBudgets,
    ),
    "rpc": Entry(
        "the prompt, and a growing share of the rest that recent rows attend to",
        RPC,
        Schedule(interval=1024, prefill=False),
        layer_budgets=Growing,
    ),
    "global": Entry(
        "the global score of any scorer: its values remembered over events",
        Global,
        _EVERY_128,
        inner=_SHARED,
    ),
    "criticalkv": Entry(
        "half by any scorer, the rest by its score times the value behind the output projection",
        CriticalKV,
        None,
        inner=_PER_HEAD,
    ),
    "ams": Entry(
        "a share of every segment of equal attention mass, the best of it by any scorer",
        AMS,
        Schedule(interval=512, prefill=False),
        inner=_PER_HEAD,
        default="tova",
    ),
    "adakv": Entry(
        "what wins a competition of the heads of a layer, by any scorer",
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
    "asl": Entry(
        "a budget of tokens from the layer on where their ranking has settled",
        ASL,
        _PROMPT,
        default="snapkv",
        shares=_WINDOW,
    ),
    "asl_2pass": Entry("the same tokens, which run through all layers again", TwoPass, _PROMPT),
    "fastkv": Entry(
        "some of the tokens from a given layer on",
        FastKV,
        _PROMPT,
        default="snapkv",
        shares=_WINDOW,
    ),
    "gemfilter": Entry(
        "tokens that the last row points at in an early layer; they run through all layers again",
        GemFilter,
        _PROMPT,
    ),
    "pyramidinfer": Entry(
        "fewer tokens from layer to layer, by the attention of recent rows; no budget",
        PyramidInfer,
        _PROMPT,
    ),
}

_PAPERS: Mapping[str, str] = {
    "streaming_llm": "arXiv 2309.17453",
    "h2o": "arXiv 2306.14048",
    "tova": "arXiv 2401.06104",
    "snapkv": "arXiv 2404.14469",
    "dropkv": "openreview UVbaJoD3Qa",
    "pyramidkv": "arXiv 2406.02069",
    "observed_attention": "arXiv 2306.14048",
    "keydiff": "arXiv 2504.15364",
    "knorm": "arXiv 2406.11430",
    "lagkv": "arXiv 2504.04704",
    "expected_attention": "arXiv 2510.00636",
    "qfilter": "arXiv 2503.02812",
    "triattention": "arXiv 2604.04921",
    "gkv": "arXiv 2512.00504",
    "global_max": "arXiv 2512.00504",
    "global_mean": "arXiv 2512.00504",
    "global_sum": "arXiv 2512.00504",
    "rkv": "arXiv 2505.24133",
    "morphkv": "arXiv 2503.00979",
    "cake": "arXiv 2503.12491",
    "rpc": "arXiv 2505.13866",
    "global": "arXiv 2512.00504",
    "criticalkv": "arXiv 2502.03805",
    "ams": "arXiv 2605.23200",
    "adakv": "arXiv 2407.11550",
    "chunkkv": "arXiv 2502.00299",
    "asl": "arXiv 2601.07667",
    "asl_2pass": "arXiv 2601.07667",
    "fastkv": "arXiv 2502.01068",
    "gemfilter": "arXiv 2409.17422",
    "pyramidinfer": "arXiv 2405.12532",
}

_PRESETS: Mapping[str, Preset] = {
    "streaming_llm@original": Preset(
        "keys rotated to their slot in the cache", policy={"positions": "slot"}
    ),
    "h2o@kvpress": Preset(
        "ObservedAttention: average attention received, after the prompt only",
        piece=ObservedAttention,
        policy={"schedule": _PROMPT},
    ),
    "tova@kvpress": Preset(
        "the last token is kept; after the prompt only",
        params={"protect_last": True},
        policy={"schedule": _PROMPT},
    ),
    "snapkv@kvpress": Preset("window 64, average-pool of 5", params=_SNAPKV_KVPRESS),
    "snapkv@gkv": Preset(
        "for decoding, as G-KV has it: window 16, the group's largest, max-pool of 5",
        piece=Local,
        params={"pool": "max"},
        policy={"schedule": _EVERY_128},
    ),
    "snapkv@original": Preset(
        "one set per query head, which a grouped cache cannot store",
        policy={"per_query_head": True},
    ),
    "pyramidkv@kvpress": Preset(
        "budgets from what each layer holds at the event; window 64, average-pool of 5",
        params={**_SNAPKV_KVPRESS, "rule": "event"},
    ),
    "pyramidkv@reference": Preset(
        "the same as the AMS release carries it, which oscillates in decoding",
        params={**_SNAPKV_KVPRESS, "rule": "event"},
        policy={"schedule": _EVERY_512},
    ),
    "expected_attention@kvpress": Preset(
        "epsilon 0; in decoding positions and samples counted in its buffer",
        params={"epsilon": 0.0, "origin": "buffer"},
    ),
    "gkv@r1_qwen_7b": Preset("best for R1-Distill-Qwen-7B", params={"mix_lambda": 0.7}),
    "gkv@r1_llama_8b": Preset("best for R1-Distill-Llama-8B", params={"mix_lambda": 0.9}),
    "gkv@release": Preset("as the released scripts", params={"mix_lambda": 0.5}),
    "rkv@gkv": Preset("the same as rkv: G-KV's baseline, comparable with it"),
    "rkv@original": Preset(
        "largest logits of the group, softmax without the window; window 8, pool of 7",
        params={"variant": "original", "window": 8, "pool_kernel": 7},
    ),
    "rkv@ams": Preset(
        "as the AMS release has it: window 8, sinks kept, redundancy before the window",
        params={"variant": "ams", "window": 8, "pool_kernel": 7, "mix_lambda": 0.07, "sink": 4},
        policy={"schedule": _EVERY_512},
    ),
    "morphkv@gkv": Preset("the same as morphkv"),
    "morphkv@original": Preset(
        "every row, softmax over distant entries alone, summed over the window",
        piece=MorphKV,
        policy={"schedule": Schedule(interval=1, prefill=False)},
    ),
    "cake@gkv": Preset(
        "G-KV's baseline: standard deviation, the group's largest, layers alike",
        layer_budgets=Even,
        params={"window": 16, "dispersion": "std", "pool": None, "group": "max", "decoding": True},
    ),
    "rpc@ams": Preset(
        "as the AMS release has it: fixed budget, sets per head, sinks kept",
        piece=AmsRPC,
        layer_budgets=Even,
        policy={"schedule": _EVERY_512},
    ),
    "ams@release": Preset(
        "the released code: its hyper-parameters, segments, rounding and final cut",
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
        inner=_SHARED,
    ),
    "adakv@kvpress": Preset(
        "protected entries count among a head's safe ones", params={"protected_in_floor": True}
    ),
    "chunkkv@kvpress": Preset(
        "whole chunks alone, so that sizes miss the budget by a chunk or two",
        params={"exact": False},
    ),
    "fastkv@proportional": Preset("a fifth of the prompt propagates", params={"rows": 0.2}),
}

CATALOGUE: Mapping[str, Entry] = {
    name: replace(
        entry,
        paper=_PAPERS.get(name, ""),
        presets={
            full.removeprefix(f"{name}@"): preset
            for full, preset in _PRESETS.items()
            if full.startswith(f"{name}@")
        },
    )
    for name, entry in _ENTRIES.items()
}
