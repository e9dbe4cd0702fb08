"""The conformance reports of docs/conformance.md: their traces, and what `conform` says of a dump.

Version 0.1.0 has the drivers that wrote most dumps with checkouts of the implementations
(tests/conformance/released.py), and kvpress 0.5.5 wrote its own through kvsim's recorder.
tests/studies/conformance/test_reports.py compares every dump again.

PYTHONPATH=tests python -m conformance.cases   add the verdicts that cases.json lacks
"""

import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from conformance.released_rules import RULES

import kvsim
from kvsim.core.attention import Rope
from kvsim.core.trace import Trace
from kvsim.studies.conformance.dump import Dump, read_dump

FOLDER = Path(__file__).parents[2] / "docs" / "conformance"
RESULTS = FOLDER / "cases.json"
OWN = "its own"


@dataclass(frozen=True)
class Case:
    """One dump: the trace it was computed on, and the definition that it is compared with."""

    name: str
    trace: str
    policy: str
    dump: Dump
    settings: dict[str, Any] = field(default_factory=dict)


@cache
def shared(name: str) -> Trace | None:
    """A trace by its name on the page.

    its own: the states that the dump holds. sample: the one that ships. by-query-head: the same
    with a KV head for each query head, as implementations that repeat keys see it. random-16: 16
    layers of noise, for rules of depth.
    NAME:N is a trace of which N positions are the prompt.
    """
    if name == OWN:
        return None
    source, _, prompt = name.partition(":")
    if prompt:
        trace = shared(source)
        states = map(trace.read, "qkv")
        return _built(name, *states, int(prompt), trace.ropes[0], trace.formulas[0].scale)
    if name == "sample":
        return kvsim.open_trace("sample")
    if name == "by-query-head":
        trace = shared("sample")
        group = trace.read("q").shape[1] // trace.n_heads
        k, v = (x.repeat_interleave(group, 1) for x in map(trace.read, "kv"))
        return _built(
            name, trace.read("q"), k, v, trace.prompt_len, trace.ropes[0], trace.formulas[0].scale
        )
    generator = torch.Generator().manual_seed(16)
    q, k, v = torch.randn(3, 16, 2, 320, 16, generator=generator)
    # layers attend more or less sharply, so that methods which compare layers have a reason
    q = q * torch.linspace(0.5, 3, 16)[:, None, None, None]
    return _built(name, q, k, v, 280, Rope([1.0 / 100 ** (i / 8) for i in range(8)]))


def _built(name: str, q: Any, k: Any, v: Any, prompt: int, rope: Rope, scale: Any = None) -> Trace:
    return Trace.from_arrays(q, k, v, prompt_len=prompt, rope=rope, scale=scale, name=name)


def case_of(facts: dict[str, Any]) -> Case:
    """The dump of a row of cases.json, and what it is compared with."""
    name = facts["dump"]
    dump = read_dump(FOLDER / f"{name}.npz")
    return Case(name, facts["trace"], facts["policy"], dump, facts["settings"])


def ruled(case: Case) -> dict[str, Any]:
    """What `conform` says of a case, as cases.json has it."""
    settings = dict(case.settings)
    budget = settings.pop("budget", None)  # of a dump whose sets grow
    policy = kvsim.policy(case.policy, **settings)
    report = kvsim.conform(case.dump, policy, budget, trace=shared(case.trace))
    first = report.apart[0] if report.apart else None
    explained = [each.name for each in report.deviations]
    if first and not explained:
        explained = [
            name
            for name, (base, rule) in RULES.items()
            if case.policy.startswith(base)
            and kvsim.conform(case.dump, rule(policy), trace=shared(case.trace)).equal
        ][:1]
    return {
        "dump": case.name,
        "trace": case.trace,
        "policy": case.policy,
        "settings": case.settings,
        "budget": report.budget,
        "events": report.events,
        "compared": report.compared,
        "apart": len(report.apart),
        "ties": len(report.ties),
        "first": first
        and {
            "row": first.row,
            "layer": first.layer,
            "head": first.head,
            "keeps": len(first.extra),
            "evicts": len(first.missing),
            "gap": None if first.gap is None else float(f"{first.gap:.2g}"),
        },
        "counts": all(not (each.extra and each.missing) for each in report.apart),
        "explained": explained,
    }


if __name__ == "__main__":
    releases = json.loads(RESULTS.read_text("utf-8"))
    for release in releases.values():
        cases = release["cases"]
        release["cases"] = [x if "compared" in x else ruled(case_of(x)) for x in cases]
    RESULTS.write_text(json.dumps(releases, indent=1, ensure_ascii=False) + "\n", "utf-8")
