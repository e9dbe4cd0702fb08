"""The paper of each policy of the catalogue."""

from __future__ import annotations

from collections.abc import Mapping

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
