"""The paper of each policy of the catalogue, and the budgets that lengths in it are meant for."""

from __future__ import annotations

from collections.abc import Mapping

#: By policy.
PAPERS: Mapping[str, str] = {
    "streaming_llm": "arXiv 2309.17453",
    "h2o": "arXiv 2306.14048",
    "tova": "arXiv 2401.06104",
    "snapkv": "arXiv 2404.14469",
    "dropkv": "openreview UVbaJoD3Qa",
    "pyramidkv": "arXiv 2406.02069",
    "observed_attention": "arXiv 2306.14048",
    "keydiff": "arXiv 2504.15364",
    "knorm": "arXiv 2406.11430",
    "norm_ratio": "arXiv 2509.04377",
    "lagkv": "arXiv 2504.04704",
    "expected_attention": "arXiv 2510.00636",
    "kvzip": "arXiv 2505.23416",
    "qfilter": "arXiv 2503.02812",
    "triattention": "arXiv 2604.04921",
    "gkv": "arXiv 2512.00504",
    "global_max": "arXiv 2512.00504",
    "global_mean": "arXiv 2512.00504",
    "global_sum": "arXiv 2512.00504",
    "rkv": "arXiv 2505.24133",
    "morphkv": "arXiv 2503.00979",
    "cake": "arXiv 2503.12491",
    "lacache": "arXiv 2507.14204",
    "raas": "arXiv 2502.11147",
    "rpc": "arXiv 2505.13866",
    "global": "arXiv 2512.00504",
    "criticalkv": "arXiv 2502.03805",
    "ams": "arXiv 2605.23200",
    "adakv": "arXiv 2407.11550",
    "chunkkv": "arXiv 2502.00299",
    "paged": "arXiv 2509.04377",
    "asl": "arXiv 2601.07667",
    "asl_2pass": "arXiv 2601.07667",
    "fastkv": "arXiv 2502.01068",
    "gemfilter": "arXiv 2409.17422",
    "pyramidinfer": "arXiv 2405.12532",
}

# G-KV, section 7, also for its baselines: window 16 at budget 512.
_GKV = {"window": 512}
#: By policy or preset: its parameters that are lengths, and the budget of the paper or its code for
#: which each is meant; none where the paper names no budget. The preset `scaled` shrinks them with
#: smaller budgets, where half of the budget does not hold them (`kvsim.core.policy.Length`).
MEANT_FOR: Mapping[str, Mapping[str, int]] = {
    # Tables 15 to 19: T_keep 512; so the release, and its baselines
    "ams": dict.fromkeys(("window", "recent", "min_segment", "max_segment", "segment_length"), 512),
    "rkv@ams": {"window": 512},
    "rpc@ams": {"window": 512},
    # the smallest budget of the published configurations, ablation_c1024_w32_k7_maxpool
    "snapkv": {"window": 1024},
    # the defaults of the authors' code: window_size 64, max_capacity_prompt 256 + 64
    "snapkv@kvpress": {"window": 320},
    "pyramidkv@kvpress": {"window": 320},
    # the smallest budget of the paper's experiments
    "pyramidkv": {"window": 64},
    # section 5.1 and appendix C: a budget of 2048 with window 32
    "asl": {"window": 2048},
    "asl_2pass": {"window": 2048},
    # the released scripts: window 8 and 2048 rows at budget 512
    "fastkv": {"window": 512, "rows": 512},
    **dict.fromkeys(
        ("gkv", "global_max", "global_mean", "global_sum", "rkv", "morphkv", "snapkv@gkv"), _GKV
    ),
    "cake@gkv": _GKV,
    "morphkv@original": {},
    "rkv@original": {},
    # the baseline of AMS at T_keep 512
    "pyramidkv@reference": {"window": 512},
}
