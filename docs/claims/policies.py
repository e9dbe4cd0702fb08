"""Compared policies: the rows of the tables, and those that only claims need."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import kvsim
from claims.plan import Plan, Sizes
from kvsim import Policy, policy
from kvsim.core.policy import Protection
from kvsim.policies import names, parameters

CROSSES = (
    *(f"ams+{x}" for x in ("expected_attention", "keydiff", "rkv@ams", "triattention")),
    "ams+snapkv@gkv",
    *(f"adakv+{x}" for x in ("expected_attention", "snapkv")),
    "chunkkv+expected_attention",
    *(f"global+{x}" for x in ("snapkv@gkv", "tova", "expected_attention", "knorm")),
    "criticalkv+expected_attention",
    "union+expected_attention",
    "paged+expected_attention",
)

#: Presets that claims compare, beside which others are left out where a plan has none.
NEEDED = ("snapkv@gkv", "morphkv@gkv", "ams@release")

_ENGINES = ("@sparse_vllm", "@sglang", "@per_head", "@union", "@vllm", "@prompt")

#: The two settings of AMS that the papers give, beside the one made for these traces.
PAPER, RELEASE = "ams, the paper's sizes", "ams@release, the release's sizes"


def scaled(sizes: Sizes, name: str, calibration: str | None = None, **params: Any) -> Policy:
    """The policy with the parameters that are larger than these traces bear made smaller."""
    accepted = parameters(name)
    if "protect_prompt" in accepted:  # the prompt is longer than any of the budgets
        params.setdefault("protect_prompt", False)
    if "calibration" in accepted:
        params["calibration"] = calibration
    for key, value in policy(name, **params).params.items():
        of_ams = name.startswith("ams") and "__" not in key and key in sizes.ams
        most = (sizes.ams if of_ams else sizes.largest).get(key.rpartition("__")[2])
        if most is not None and value > most and key not in params:
            params[key] = most
    return policy(name, **params)


def of_engine(label: str) -> bool:
    """Whether a policy is the rule of an engine, which docs/conformance.md compares."""
    return label.startswith("openvino") or (label in names() and label.endswith(_ENGINES))


def table_policies(plan: Plan, calibration: str) -> dict[str, Policy]:
    """The rows of the tables, each called by its label: the names of the catalogue, and crosses."""
    build = partial(scaled, plan.sizes)
    if plan.only:
        return {name: replace(build(name), name=name) for name in plan.only}
    out = {}
    for name in names():
        kind = kvsim.policies.describe(name).entry.kind
        if kind == "propagation":  # part of the prefill: see across_policies
            continue
        if "@" in name and not plan.presets and name not in NEEDED:
            continue
        if of_engine(name):
            continue
        if kind == "scorer" or name.startswith("ams"):
            out[name] = build(name, calibration)
        elif "@" in name:  # a preset of what needs a scorer
            out[f"{name}+expected_attention"] = build(f"{name}+expected_attention", calibration)
    out["oracle, by output"] = policy("oracle", by="output")
    out |= {name: build(name, calibration) for name in CROSSES}
    if plan.sizes.ams:
        out[PAPER], out[RELEASE] = policy("ams"), policy("ams@release")
    return {label: replace(one, name=label) for label, one in out.items()}


def variants(sizes: Sizes) -> list[Policy]:
    """Policies that only claims need, at the same events as the rows of the tables."""
    build = partial(scaled, sizes)
    keep = Protection(sink=4, recent=sizes.recent)
    return [
        policy("tova", heads="group"),
        policy("tova", protect=keep),
        policy("keydiff", protect=keep),
        build("ams", credit=False),
        build("ams", suffix_fill="observed"),
        build("ams", weights="length"),
        build("ams", weights="equal"),
        build("ams", segmentation="fixed", segment_length=sizes.segment),
        *(build("ams", window=window) for window in sizes.windows),
        *(build("global_max", decay=decay) for decay in (0.0, 0.5, 0.9)),
        build("global_max", pool="max"),
        *(build("gkv", mix_lambda=share) for share in (0.5, 0.9)),
    ]


def prompt_policies(sizes: Sizes) -> list[Policy]:
    """Policies compared at the one event after the prompt, the setting of Expected Attention."""
    inside = [scaled(sizes, x) for x in ("snapkv", "tova", "streaming_llm", "keydiff", "knorm")]
    crossed = [scaled(sizes, f"adakv+{x}") for x in ("expected_attention", "snapkv")]
    return [policy("expected_attention"), *inside, *crossed, *expectations()]


def expectations() -> list[Policy]:
    """Variants of Expected Attention."""
    expected = partial(policy, "expected_attention")
    return [
        expected(covariance=False),
        expected(value_norm="none"),
        expected(epsilon=0.0),
        *(expected(n_future=n) for n in (128, 256, 1024)),
    ]


#: In front of the labels of these, because there they have other parameters.
ACROSS = "across: "


def across_policies(sizes: Sizes) -> list[Policy]:
    """Policies that drop rows of the prompt on the way down, and SnapKV with the same window.

    On short traces ASL is forced to select at the only layer at which it can in a model of three.
    """
    window = {} if sizes.across is None else {"window": sizes.across}
    forced = window if sizes.across is None else {"tau": 1.01, **window}
    least = {} if sizes.across is None else {"least": 2 * sizes.across}
    out = {
        "snapkv": policy("snapkv", pool="avg", **window),
        "asl": policy("asl", **forced),
        "asl, full before": policy("asl", kv_before="full", **forced),
        "asl_2pass": policy("asl_2pass", **forced),
        "fastkv": policy("fastkv", rows=None, **window),
        "gemfilter": policy("gemfilter"),
        "pyramidinfer": policy("pyramidinfer", **least),
    }
    return [replace(one, name=ACROSS + label) for label, one in out.items()]
