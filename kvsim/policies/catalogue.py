"""Policies, sparse attention, quantizers and mergers by name: pieces, schedules, presets.

Pieces are named by file and class, "snapkv:SnapKV", and imported when a policy is built or shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvsim.core.pieces import Even, Everything, Schedule, Uniform
from kvsim.policies.entry import Entry, of_file, variant, with_presets
from kvsim.registry import Registry

NEVER = Schedule(interval=None, prefill=False)
PROMPT = Schedule(interval=None)
EVERY_ROW = Schedule(interval=1)
EVERY_128 = Schedule(interval=128)
EVERY_512 = Schedule(interval=512)

_SNAPKV_KVPRESS = {"window": 64, "pool": "avg", "pool_kernel": 5}

# of its default budget, 64 + 4,096 + 512
_SPARSE_VLLM = {"sink": 4672, "recent": 4672}
_BACK_END = {"pruning": "per_head", "population": "all", "protect_prompt": False}

# Where heads keep different sets, an average over heads would mix different tokens. A wrapper takes
# only the score, without the rule of TriAttention and RaaS that the prompt stays.
_SHARED: Mapping[str, Mapping[str, Any]] = {
    name: {"protect_prompt": False} for name in ("triattention", "raas")
}
_PER_HEAD = {**_SHARED, "tova": {"heads": "group"}, "rpc": {"heads": "group"}}
# One window decides which tokens propagate, and which of them the caches keep.
_WINDOW = ("window", "pool", "pool_kernel")
# Budgets that windows are meant for. 512: G-KV, section 7, also for its baselines; tables 15 to 19
# of AMS, its release and baselines. 320: the authors' window_size 64, max_capacity_prompt 256 + 64.
# 2,048: ASL, section 5.1 and appendix C. SnapKV: ablation_c1024_w32_k7_maxpool, the smallest
# published. PyramidKV: the smallest of the paper. FastKV: its scripts, 2,048 rows at 512.
_AT_320, _AT_512, _AT_2048 = {"window": 320}, {"window": 512}, {"window": 2048}


def _windows(how: str, **params: Any) -> Entry:
    summary = f"what windows attended to, {how} over events"
    params = {"redundancy": False, **params}
    return Entry(summary, "gkv:GKV", EVERY_128, params=params, meant_for=_AT_512)


_ENTRIES: Mapping[str, Entry] = {
    "full": of_file("full:Full", NEVER, allocator=Everything),
    "random": of_file("random_sets:Random", EVERY_ROW),
    "oracle": of_file("oracle:Oracle", EVERY_128),
    "streaming_llm": of_file("streaming_llm:StreamingLLM", EVERY_ROW),
    "h2o": of_file("h2o:H2O", EVERY_ROW),
    "tova": of_file("tova:TOVA", EVERY_ROW, underflows={}),
    "snapkv": of_file("snapkv:SnapKV", PROMPT, meant_for={"window": 1024}),
    "dropkv": of_file("dropkv:DropKV", PROMPT),
    "pyramidkv": of_file(
        "snapkv:SnapKV",
        PROMPT,
        by_layer="pyramidkv:Pyramid",
        params={"window": 8},
        meant_for={"window": 64},
    ),
    "observed_attention": Entry(
        "what received most attention, averaged over rows", "h2o:ObservedAttention", PROMPT
    ),
    "keydiff": of_file("keydiff:KeyDiff", PROMPT),
    "knorm": of_file("knorm:Knorm", PROMPT),
    "norm_ratio": Entry("values that are long relative to their keys", "paged:NormRatio", PROMPT),
    "lagkv": of_file("lagkv:LagKV", PROMPT),
    "expected_attention": of_file(
        "expected_attention:ExpectedAttention", PROMPT, underflows={"epsilon": 0}
    ),
    "capkv": of_file("capkv:CapKV", PROMPT),
    "compactor": of_file("compactor:Compactor", PROMPT),
    "curdkv": of_file("curdkv:CurDKV", PROMPT),
    "finch": of_file("finch:Finch", PROMPT),
    "kvcompose": of_file("kvcompose:KVCompose", PROMPT, allocator="kvcompose:Composed"),
    "kvzip": of_file("kvzip:KVzip", PROMPT, allocator="kvzip:Pooled"),
    "qfilter": of_file("qfilter:QFilter", PROMPT, required={"calibration": "prefix:64"}),
    "triattention": of_file(
        "triattention:TriAttention", EVERY_128, required={"calibration": "prefix:64"}
    ),
    "gkv": of_file("gkv:GKV", EVERY_128, meant_for=_AT_512),
    "global_max": _windows("a decayed maximum"),
    "global_mean": _windows("a moving average", fusion="mean"),
    "global_sum": _windows("a decayed sum", fusion="sum"),
    "rkv": of_file("rkv:RKV", EVERY_128, meant_for=_AT_512),
    "morphkv": Entry(
        "what a window attends to, as in G-KV's baseline",
        "gkv:Local",
        EVERY_128,
        cites="arXiv 2503.00979",
        meant_for=_AT_512,
    ),
    "cake": of_file("cake:Cake", EVERY_128, by_layer="cake:CakeBudgets"),
    "lacache": of_file("lacache:LaCache", EVERY_ROW),
    "raas": of_file("raas:RaaS", Schedule(interval=1, prefill=False)),
    "rpc": of_file("rpc:RPC", Schedule(interval=1024, prefill=False), by_layer="rpc:Growing"),
    "openvino": of_file(
        "openvino:OpenVINO",
        Schedule(interval=1, prefill=False),
        allocator="openvino:Blocks",
        meant_for={"sink": 672, "recent": 672},
    ),
    "global": Entry(
        "the best by any scorer, with its scores remembered over events",
        "gkv:Global",
        EVERY_128,
        inner=_SHARED,
    ),
    "criticalkv": of_file("criticalkv:CriticalKV", None, inner=_PER_HEAD),
    "union": of_file("union:Union", None, inner=_SHARED),
    "ams": of_file(
        "ams:AMS",
        Schedule(interval=512, prefill=False),
        inner=_PER_HEAD,
        default="tova",
        ordinal=True,
        meant_for=dict.fromkeys(
            ("window", "recent", "min_segment", "max_segment", "segment_length"), 512
        ),
    ),
    "adakv": of_file("adakv:AdaKV", None, inner=_PER_HEAD),
    "chunkkv": of_file("chunkkv:ChunkKV", None, inner=_SHARED),
    "dms": of_file("dms:DMS", EVERY_ROW, inner=_PER_HEAD),
    "paged": of_file("paged:Paged", Schedule(interval=16), inner=_SHARED, default="norm_ratio"),
    "asl": of_file("asl:ASL", PROMPT, default="snapkv", shares=_WINDOW, meant_for=_AT_2048),
    "asl_2pass": Entry(
        "the tokens of asl, which run through all layers again",
        "asl:TwoPass",
        PROMPT,
        meant_for=_AT_2048,
    ),
    "fastkv": of_file(
        "fastkv:FastKV",
        PROMPT,
        default="snapkv",
        shares=_WINDOW,
        meant_for={"window": 512, "rows": 512},
    ),
    "gemfilter": of_file("gemfilter:GemFilter", PROMPT),
    "pyramidinfer": of_file("pyramidinfer:PyramidInfer", PROMPT),
}

#: Sparse attention, quantizers and mergers, after an eviction or by themselves.
_BEHIND: Mapping[str, Entry] = {
    "quest": of_file("quest:Quest"),
    "double_sparsity": of_file(
        "double_sparsity:DoubleSparsity", required={"calibration": "prefix:64"}
    ),
    "infllm": of_file("infllm:InfLLM"),
    "pqcache": of_file("pqcache:PQCache"),
    "magicpig": of_file("magicpig:MagicPIG"),
    "rocketkv": of_file(
        "rocketkv:RocketKV", default="snapkv", inner={"snapkv": {"pool_kernel": 63}}
    ),
    "skip_softmax": of_file("skip_softmax:SkipSoftmax"),
    "topk": Entry("reads the entries that a row attends to most: a bound", "clairvoyant:TopK"),
    "topp": Entry("reads the fewest entries with a share of a row's attention", "clairvoyant:TopP"),
    "kivi": of_file("kivi:Kivi"),
    "kvquant": of_file("kvquant:KVQuant"),
    "turboquant": of_file("turboquant:TurboQuant"),
    "think": of_file("think:ThinK"),
    "int8": Entry("stores 8 bits, with a scale per token", "per_token:Integers"),
    "int4": Entry(
        "stores 4 bits, with a scale per token", "per_token:Integers", params={"bits_per_number": 4}
    ),
    "fp8": Entry("stores 8-bit floating-point numbers", "per_token:ShortFloats"),
    "nvfp4": Entry(
        "stores 4-bit floating-point numbers, with a scale per block", "per_token:BlockFloats"
    ),
    "q8_0": Entry("llama.cpp's 8 bits, with a scale per block of 32", "llama_cpp:Blocks"),
    "q4_0": Entry(
        "llama.cpp's 4 bits, with a scale per block of 32",
        "llama_cpp:Blocks",
        params={"bits_per_number": 4},
    ),
    "lookm": of_file("lookm:LookM", default="h2o"),
    "d2o": of_file("d2o:D2O", default="h2o"),
}

_PRESETS: Mapping[str, Mapping[str, Any]] = {
    "streaming_llm@original": variant(
        "the same entries; keys rotated to their slot in the cache", positions="slot"
    ),
    "random@prompt": variant(
        "the prompt and 64 recent entries stay, every 64 rows",
        target="random_sets:RandomResponse",
        schedule=Schedule(interval=64, prefill=False),
        cites="arXiv 2609.03430",
        meant_for={"recent": 2048},
    ),
    "h2o@kvpress": variant(
        "ObservedAttention: average attention received, after the prompt only",
        target="h2o:ObservedAttention",
        schedule=PROMPT,
    ),
    "h2o@sparse_vllm": variant(
        "one set per layer: votes, whose largest head counts; 128 rows of the prompt vote",
        target="sparse_vllm:LayerH2O",
        schedule=EVERY_128,
    ),
    "tova@kvpress": variant(
        "as tova, but the last token is protected", protect_last=True, schedule=PROMPT
    ),
    "snapkv@kvpress": variant("window 64, average-pool of 5", **_SNAPKV_KVPRESS, meant_for=_AT_320),
    "snapkv@gkv": variant(
        "G-KV's baseline in decoding: window 16, largest of the group, max-pool of 5",
        target="gkv:Local",
        pool="max",
        schedule=EVERY_128,
        meant_for=_AT_512,
    ),
    "snapkv@sparse_vllm": variant(
        "one set per layer: the largest head counts, not pooled; 64 first, 512 last entries stay",
        target="sparse_vllm:LayerSnapKV",
        meant_for=_SPARSE_VLLM,
    ),
    "snapkv@original": variant(
        "as snapkv, one set per query head, which a grouped cache cannot store", per_query_head=True
    ),
    "pyramidkv@kvpress": variant(
        "budgets computed anew at each event; window 64, average-pool of 5",
        **_SNAPKV_KVPRESS,
        rule="event",
        meant_for=_AT_320,
    ),
    "pyramidkv@reference": variant(
        "the rule in the AMS release, whose budgets oscillate in decoding",
        **_SNAPKV_KVPRESS,
        rule="event",
        schedule=EVERY_512,
        meant_for=_AT_512,
    ),
    "expected_attention@kvpress": variant(
        "epsilon 0; in decoding, positions count from the start of a query buffer",
        epsilon=0.0,
        origin="buffer",
    ),
    "compactor@leverage": variant("keys that stand out", parts="leverage"),
    "compactor@attention": variant("what neighbours attend to", parts="attention"),
    "kvzip@uniform": variant("the same number of entries in each head", allocator=Uniform),
    "kvzip@kvpress": variant("4 first entries stay, and join the softmax of each chunk", sink=4),
    "keydiff@vllm": variant(
        "vLLM's pull request 56673: every 512 rows, and a budget that is a share of the tokens "
        "so far, such as 30%so-far",
        schedule=EVERY_512,
    ),
    "triattention@union": variant(
        "one set for the model, ranked by the largest score of any head",
        target="triattention:EngineTriAttention",
    ),
    "triattention@per_head": variant(
        "one set per KV head for all layers, by the mean of their scores, as in its scripts",
        target="triattention:EngineTriAttention",
        pruning="per_head",
        over_layers="mean",
    ),
    "triattention@vllm": variant(
        "its vLLM back end: z-scores over all entries, the prompt competes, 128 recent stay",
        target="triattention:EngineTriAttention",
        **_BACK_END,
        over_layers="mean",
        recent=128,
        meant_for={"recent": 2048},
    ),
    "triattention@sglang": variant(
        "its SGLang back end: the largest of the group, then z-scores, then the largest layer",
        target="triattention:EngineTriAttention",
        **_BACK_END,
        normalise="kv_heads",
    ),
    "gkv@r1_qwen_7b": variant("mix_lambda for R1-Distill-Qwen-7B", mix_lambda=0.7),
    "gkv@r1_llama_8b": variant("mix_lambda for R1-Distill-Llama-8B", mix_lambda=0.9),
    "gkv@release": variant("mix_lambda of the released scripts", mix_lambda=0.5),
    "rkv@gkv": variant("the same as rkv: G-KV's baseline"),
    "rkv@original": variant(
        "largest logit of the group, softmax without the window; window 8, pool of 7",
        variant="original",
        window=8,
        pool_kernel=7,
        meant_for={},
    ),
    "rkv@ams": variant(
        "as in the AMS release: window 8, sinks kept, redundancy of the candidates alone",
        variant="ams",
        window=8,
        pool_kernel=7,
        mix_lambda=0.07,
        sink=4,
        schedule=EVERY_512,
    ),
    "rkv@sparse_vllm": variant(
        "one set per layer, keys of all heads as one; 64 first and 512 last entries stay",
        target="sparse_vllm:LayerRKV",
        schedule=Schedule(interval=128, prefill=False),
        meant_for=_SPARSE_VLLM,
    ),
    "morphkv@gkv": variant("the same as morphkv"),
    "morphkv@original": variant(
        "softmax over the entries before the window alone, summed over the window",
        target="morphkv:MorphKV",
        schedule=Schedule(interval=1, prefill=False),
        meant_for={},
    ),
    "cake@gkv": variant(
        "G-KV's baseline: standard deviation, largest of the group, equal layer budgets",
        by_layer=Even,
        window=16,
        dispersion="std",
        pool=None,
        group="max",
        decoding=True,
        meant_for=_AT_512,
    ),
    "lacache@release": variant(
        "the offset of the released code, whose neighbouring layers differ; one pass for many",
        offset="modulo",
        passes="merged",
    ),
    "rpc@ams": variant(
        "as in the AMS release: fixed budget, one set per head, sinks kept",
        target="rpc:AmsRPC",
        by_layer=Even,
        schedule=EVERY_512,
        meant_for=_AT_512,
    ),
    "openvino@sum": variant("sums of attention that are not divided", aggregation="sum"),
    "openvino@kvcrush": variant("one block more stays by KVCrush", crush=1),
    "ams@release": variant(
        "as in the released code: hyper-parameters, segments, rounding, a final cut",
        segment_mass=0.02,
        min_segment=32,
        max_segment=1024,
        min_quota=8,
        credit_decay=0.8,
        credit_mix=0.7,
        window=32,
        suffix_fill="global_max",
        mode="reference",
        inner={**_SHARED, "tova": {"protect_last": True}},
    ),
    "adakv@kvpress": variant(
        "protected entries count among the guaranteed ones", protected_in_floor=True
    ),
    "chunkkv@kvpress": variant(
        "whole chunks only, so the size can miss the budget by up to two chunks", exact=False
    ),
    "paged@release": variant(
        "norms averaged over heads first; first and newest page stay, each head its own prompt",
        reduction="norms",
        prompt="heads",
        ends=True,
        inner=_PER_HEAD,
    ),
    "fastkv@proportional": variant("a fifth of the prompt propagates", rows=0.2),
    "quest@release": variant("reads at least three pages", least=3),
    "infllm@release": variant(
        "blocks of 128, 128 first and 4,096 last entries", page=128, sink=128, local=4096
    ),
    "pqcache@release": variant("32 first entries", sink=32),
    "magicpig@release": variant("adds 1e-4 to probabilities", epsilon=1e-4),
    "skip_softmax@modelopt": variant(
        "blocks of 128, a threshold of 1e-5", page=128, threshold=1e-5
    ),
    "turboquant@prod": variant("a bit of each key's number for what is left", objective="prod"),
    "turboquant@vllm": variant(
        "Hadamard matrix, levels of norm 1, values not rotated",
        rotation="hadamard",
        unit=True,
        uniform_values=True,
    ),
    "q8_0@rotated": variant("rotated by a Hadamard matrix", rotated=True),
    "q4_0@rotated": variant("rotated by a Hadamard matrix", rotated=True, bits_per_number=4),
    "think@kvpress": variant("prunes the recent keys, too", recent=0),
    "d2o@release": variant(
        "weights are cosines, and heads share a threshold", weights="cosine", across_heads=True
    ),
}

ACCESS = with_presets(_BEHIND, _PRESETS)
#: Evictions, and all entries of packages.
CATALOGUE: Mapping[str, Entry] = Registry(
    "policy", "kvsim.policies", (Entry,), with_presets(_ENTRIES, _PRESETS), ACCESS
)
