"""Every policy by name: its pieces, its schedule, its presets and its paper."""

from __future__ import annotations

from collections.abc import Mapping
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

CATALOGUE: Mapping[str, Entry] = {
    "full": Entry(
        "everything: the reference", "", Full, _NEVER, policy={"allocator": Everything()}
    ),
    "random": Entry("a random set: the null", "", Random, _EVERY_ROW),
    "oracle": Entry(
        "what later rows attend to most: looks ahead, to measure regret against",
        "",
        Oracle,
        _EVERY_128,
    ),
    "streaming_llm": Entry(
        "the first and the most recent entries",
        "arXiv 2309.17453",
        StreamingLLM,
        _EVERY_ROW,
        {
            "original": Preset(
                "keys rotated to their slot in the cache", policy={"positions": "slot"}
            )
        },
    ),
    "h2o": Entry(
        "recent entries and those that received most attention so far",
        "arXiv 2306.14048",
        H2O,
        _EVERY_ROW,
        {
            "kvpress": Preset(
                "ObservedAttention: average attention received, after the prompt only",
                piece=ObservedAttention,
                policy={"schedule": _PROMPT},
            )
        },
    ),
    "tova": Entry(
        "what the last row attends to, one ranking for all heads",
        "arXiv 2401.06104",
        TOVA,
        _EVERY_ROW,
        {
            "kvpress": Preset(
                "the last token is kept; after the prompt only",
                params={"protect_last": True},
                policy={"schedule": _PROMPT},
            )
        },
    ),
    "snapkv": Entry(
        "what a window of rows attends to, pooled over neighbours",
        "arXiv 2404.14469",
        SnapKV,
        _PROMPT,
        {
            "kvpress": Preset("window 64, average-pool of 5", params=_SNAPKV_KVPRESS),
            "gkv": Preset(
                "for decoding, as G-KV has it: window 16, the group's largest, max-pool of 5",
                piece=Local,
                params={"pool": "max"},
                policy={"schedule": _EVERY_128},
            ),
            "original": Preset(
                "one set per query head, which a grouped cache cannot store",
                policy={"per_query_head": True},
            ),
        },
    ),
    "dropkv": Entry(
        "what would move the output of the last rows most if it were dropped",
        "openreview UVbaJoD3Qa",
        DropKV,
        _PROMPT,
    ),
    "pyramidkv": Entry(
        "SnapKV with budgets that fall with depth, fixed once",
        "arXiv 2406.02069",
        SnapKV,
        _PROMPT,
        {
            "kvpress": Preset(
                "budgets from what each layer holds at the event; window 64, average-pool of 5",
                params={**_SNAPKV_KVPRESS, "rule": "event"},
            ),
            "reference": Preset(
                "the same as the AMS release carries it, which oscillates in decoding",
                params={**_SNAPKV_KVPRESS, "rule": "event"},
                policy={"schedule": _EVERY_512},
            ),
        },
        layer_budgets=Pyramid,
        params={"window": 8},
    ),
    "observed_attention": Entry(
        "what received most attention on average, after the prompt",
        "arXiv 2306.14048",
        ObservedAttention,
        _PROMPT,
    ),
    "keydiff": Entry(
        "keys that point away from the mean direction of the cache",
        "arXiv 2504.15364",
        KeyDiff,
        _PROMPT,
    ),
    "knorm": Entry("short keys", "arXiv 2406.11430", Knorm, _PROMPT),
    "lagkv": Entry(
        "entries whose keys and values stand out against the next partition",
        "arXiv 2504.04704",
        LagKV,
        _PROMPT,
    ),
    "expected_attention": Entry(
        "what normal queries at the next positions would attend to, times the value's size",
        "arXiv 2510.00636",
        ExpectedAttention,
        _PROMPT,
        {
            "kvpress": Preset(
                "epsilon 0; in decoding positions and samples counted in its buffer",
                params={"epsilon": 0.0, "origin": "buffer"},
            )
        },
    ),
    "qfilter": Entry(
        "keys along the main direction of calibration queries",
        "arXiv 2503.02812",
        QFilter,
        _PROMPT,
        required={"calibration": "prefix:64"},
    ),
    "triattention": Entry(
        "keys by a trigonometric series in the distance to later queries",
        "arXiv 2604.04921",
        TriAttention,
        _EVERY_128,
        required={"calibration": "prefix:64"},
    ),
    "gkv": Entry(
        "what recent and earlier windows attended to, less what is redundant",
        "arXiv 2512.00504",
        GKV,
        _EVERY_128,
        {
            "r1_qwen_7b": Preset("best for R1-Distill-Qwen-7B", params={"mix_lambda": 0.7}),
            "r1_llama_8b": Preset("best for R1-Distill-Llama-8B", params={"mix_lambda": 0.9}),
            "release": Preset("as the released scripts", params={"mix_lambda": 0.5}),
        },
    ),
    "global_max": Entry(
        "what any window attended to, the decayed maximum",
        "arXiv 2512.00504",
        GKV,
        _EVERY_128,
        params={"redundancy": False},
    ),
    "global_mean": Entry(
        "what windows attended to, a moving average",
        "arXiv 2512.00504",
        GKV,
        _EVERY_128,
        params={"redundancy": False, "fusion": "mean"},
    ),
    "global_sum": Entry(
        "what windows attended to, a decayed sum",
        "arXiv 2512.00504",
        GKV,
        _EVERY_128,
        params={"redundancy": False, "fusion": "sum"},
    ),
    "rkv": Entry(
        "what a window attends to, less what is redundant",
        "arXiv 2505.24133",
        RKV,
        _EVERY_128,
        {
            "gkv": Preset("the same as rkv: G-KV's baseline, comparable with it"),
            "original": Preset(
                "largest logits of the group, softmax without the window; window 8, pool of 7",
                params={"variant": "original", "window": 8, "pool_kernel": 7},
            ),
            "ams": Preset(
                "as the AMS release has it: window 8, sinks kept, redundancy before the window",
                params={
                    "variant": "ams",
                    "window": 8,
                    "pool_kernel": 7,
                    "mix_lambda": 0.07,
                    "sink": 4,
                },
                policy={"schedule": _EVERY_512},
            ),
        },
    ),
    "morphkv": Entry(
        "what a window attends to, as G-KV compares with it",
        "arXiv 2503.00979",
        Local,
        _EVERY_128,
        {
            "gkv": Preset("the same as morphkv"),
            "original": Preset(
                "every row, softmax over distant entries alone, summed over the window",
                piece=MorphKV,
                policy={"schedule": Schedule(interval=1, prefill=False)},
            ),
        },
    ),
    "cake": Entry(
        "what is attended to much or unsteadily; layers share one budget by their attention",
        "arXiv 2503.12491",
        Cake,
        _EVERY_128,
        {
            "gkv": Preset(
                "G-KV's baseline: standard deviation, the group's largest, layers alike",
                layer_budgets=Even,
                params={
                    "window": 16,
                    "dispersion": "std",
                    "pool": None,
                    "group": "max",
                    "decoding": True,
                },
            )
        },
        layer_budgets=CakeBudgets,
    ),
    "rpc": Entry(
        "the prompt, and a growing share of the rest that recent rows attend to",
        "arXiv 2505.13866",
        RPC,
        Schedule(interval=1024, prefill=False),
        {
            "ams": Preset(
                "as the AMS release has it: fixed budget, sets per head, sinks kept",
                piece=AmsRPC,
                layer_budgets=Even,
                policy={"schedule": _EVERY_512},
            )
        },
        layer_budgets=Growing,
    ),
    "global": Entry(
        "the global score of any scorer: its values remembered over events",
        "arXiv 2512.00504",
        Global,
        _EVERY_128,
        inner=_SHARED,
    ),
    "criticalkv": Entry(
        "half by any scorer, the rest by its score times the value behind the output projection",
        "arXiv 2502.03805",
        CriticalKV,
        None,
        inner=_PER_HEAD,
    ),
    "ams": Entry(
        "a share of every segment of equal attention mass, the best of it by any scorer",
        "arXiv 2605.23200",
        AMS,
        Schedule(interval=512, prefill=False),
        {
            "release": Preset(
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
            )
        },
        inner=_PER_HEAD,
        default="tova",
    ),
    "adakv": Entry(
        "what wins a competition of the heads of a layer, by any scorer",
        "arXiv 2407.11550",
        AdaKV,
        None,
        {
            "kvpress": Preset(
                "protected entries count among a head's safe ones",
                params={"protected_in_floor": True},
            )
        },
        inner=_PER_HEAD,
    ),
    "chunkkv": Entry(
        "whole chunks of neighbours, the same in all heads, by any scorer",
        "arXiv 2502.00299",
        ChunkKV,
        None,
        {
            "kvpress": Preset(
                "whole chunks alone, so that sizes miss the budget by a chunk or two",
                params={"exact": False},
            )
        },
        inner=_SHARED,
    ),
    "asl": Entry(
        "a budget of tokens from the layer on where their ranking has settled",
        "arXiv 2601.07667",
        ASL,
        _PROMPT,
        default="snapkv",
        shares=_WINDOW,
    ),
    "asl_2pass": Entry(
        "the same tokens, which run through all layers again",
        "arXiv 2601.07667",
        TwoPass,
        _PROMPT,
    ),
    "fastkv": Entry(
        "some of the tokens from a given layer on",
        "arXiv 2502.01068",
        FastKV,
        _PROMPT,
        {"proportional": Preset("a fifth of the prompt propagates", params={"rows": 0.2})},
        default="snapkv",
        shares=_WINDOW,
    ),
    "gemfilter": Entry(
        "tokens that the last row points at in an early layer; they run through all layers again",
        "arXiv 2409.17422",
        GemFilter,
        _PROMPT,
    ),
    "pyramidinfer": Entry(
        "fewer tokens from layer to layer, by the attention of recent rows; no budget",
        "arXiv 2405.12532",
        PyramidInfer,
        _PROMPT,
    ),
}
