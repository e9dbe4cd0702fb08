"""The budgets that the lengths of policies are meant for: those of the paper, or of its code.

The preset `scaled` of a policy shrinks its windows and segments in proportion to smaller budgets,
where half of the budget does not hold them (`kvsim.core.policy.Length`). A policy whose paper names
no budget for its lengths is not here.
"""

from __future__ import annotations

from collections.abc import Mapping

# G-KV, section 7, also for its baselines: window 16 at budget 512.
_GKV = {"window": 512}
#: By the name of a policy or preset: its parameters that are lengths, each with the budget.
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
