"""What is compared: the rows of the tables, and what claims need beside them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import kvsim
from kvsim import Policy, policy
from kvsim.core.policy import Protection
from kvsim.policies import names, parameters

#: Parameters made for thousands of tokens, and the most that they are here.
LARGEST = {"window": 8, "lag": 8, "chunk": 8}
#: AMS likewise. Its window and recent entries are not those of the scorer inside.
AMS = {"min_segment": 4, "max_segment": 32, "window": 16, "recent": 8, "min_quota": 1}
#: What AMS protects at these sizes.
KEEP = Protection(sink=4, recent=AMS["recent"])
#: Fixed segments, the paper's 128 in the ratio of its window.
SEGMENT = 16

CROSSES = (
    *(f"ams+{x}" for x in ("expected_attention", "keydiff", "rkv@ams", "triattention")),
    "ams+snapkv@gkv",
    *(f"adakv+{x}" for x in ("expected_attention", "snapkv")),
    "chunkkv+expected_attention",
    *(f"global+{x}" for x in ("snapkv@gkv", "tova", "expected_attention", "knorm")),
    "criticalkv+expected_attention",
)

#: The two settings of AMS that the papers give, beside the one made for these traces.
PAPER, RELEASE = "ams, the paper's sizes", "ams@release, the release's sizes"


def scaled(name: str, calibration: str | None = None, **params: Any) -> Policy:
    """The policy with the parameters that are larger than these traces bear made smaller."""
    known = parameters(name)
    if "protect_prompt" in known:  # the prompt is longer than any of the budgets
        params.setdefault("protect_prompt", False)
    if "calibration" in known:
        params["calibration"] = calibration
    for key, value in policy(name, **params).params.items():
        own = name.startswith("ams") and "__" not in key
        most = (AMS if own and key in AMS else LARGEST).get(key.rpartition("__")[2])
        if most is not None and value > most and key not in params:
            params[key] = most
    return policy(name, **params)


def table_policies(calibration: str) -> dict[str, Policy]:
    """The rows of the tables, each called by its label: the names of the catalogue, and crosses."""
    out = {}
    for name in names():
        kind = kvsim.policies.describe(name).kind
        if kind == "propagation":  # part of the prefill: see across_policies
            continue
        if kind == "scorer" or name.startswith("ams"):
            out[name] = scaled(name, calibration)
        elif "@" in name:  # a preset of what needs a scorer
            out[f"{name}+expected_attention"] = scaled(f"{name}+expected_attention", calibration)
    out["oracle, by output"] = policy("oracle", by="output")
    out |= {name: scaled(name, calibration) for name in CROSSES}
    out[PAPER], out[RELEASE] = policy("ams"), policy("ams@release")
    return {label: replace(one, name=label) for label, one in out.items()}


def variants() -> list[Policy]:
    """What claims need beside the rows of the tables, at the same events."""
    one = partial(scaled, "ams")
    whole = partial(scaled, "global_max")
    return [
        policy("tova", heads="group"),
        policy("tova", protect=KEEP),
        policy("keydiff", protect=KEEP),
        one(credit=False),
        one(suffix_fill="observed"),
        one(weights="length"),
        one(weights="equal"),
        one(segmentation="fixed", segment_length=SEGMENT),
        *(one(window=w) for w in (4, 8, 32)),
        *(whole(decay=d) for d in (0.0, 0.5, 0.9)),
        whole(pool="max"),
        *(scaled("gkv", mix_lambda=m) for m in (0.5, 0.9)),
    ]


def prompt_policies() -> list[Policy]:
    """What is compared at the one event after the prompt, where Expected Attention is at home."""
    inside = [scaled(x) for x in ("snapkv", "tova", "streaming_llm", "keydiff", "knorm")]
    crossed = [scaled(f"adakv+{x}") for x in ("expected_attention", "snapkv")]
    made = partial(policy, "expected_attention")
    return [
        made(),
        *inside,
        *crossed,
        made(covariance=False),
        made(value_norm="none"),
        made(epsilon=0.0),
        *(made(n_future=n) for n in (128, 256, 1024)),
    ]


#: In front of the labels of these, because there they have other parameters.
ACROSS = "across: "


def across_policies() -> list[Policy]:
    """What drops rows of the prompt on the way down, beside SnapKV with the same window.

    ASL is forced to select at the only layer at which it can in a model of three.
    """
    window = {"window": LARGEST["window"]}
    forced = {"tau": 1.01, **window}
    found = {
        "snapkv": policy("snapkv", pool="avg", **window),
        "asl": policy("asl", **forced),
        "asl, full before": policy("asl", kv_before="full", **forced),
        "asl_2pass": policy("asl_2pass", **forced),
        "fastkv": policy("fastkv", rows=None, **window),
        "gemfilter": policy("gemfilter"),
        "pyramidinfer": policy("pyramidinfer", least=16),
    }
    return [replace(one, name=ACROSS + label) for label, one in found.items()]
