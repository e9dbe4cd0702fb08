"""The rulings of docs/rulings.md: their traces, their dumps, and the command that writes them anew.

    PYTHONPATH=tests python -m conformance.rulings CHECKOUTS [NAME ...]

CHECKOUTS is a folder with a checkout of each repository, OWNER+NAME; NAME limits the drivers of
released.py that are run. The dumps in docs/rulings hold kept sets alone, no code and no text.
docs/rulings/rulings.json has what was run and what the referee says; docs/rulings.py makes the page
of it, and tests/studies/referee/test_rulings.py rules every dump again.
"""

import json
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from conformance.released_rules import RULES

import kvsim
from kvsim.core.attention import Rope
from kvsim.core.trace import Trace
from kvsim.studies.referee.dump import Dump

FOLDER = Path(__file__).parents[2] / "docs" / "rulings"
RESULTS = FOLDER / "rulings.json"


@dataclass(frozen=True)
class Case:
    """One dump: the trace it was computed on, and the definition that it is compared with."""

    name: str
    trace: str
    policy: str
    dump: Dump
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Release:
    """What was run of a repository, and how: a line of the page."""

    repository: str
    runs: str
    cases: list[Case]
    how: str = "unmodified file"


@cache
def shared(name: str) -> Trace:
    """A trace by its name on the page.

    sample: the one that ships. by-query-head: the same with a KV head for each query head, as
    implementations that repeat keys see it. random-16: 16 layers of noise, for rules of depth.
    NAME:N is a trace of which N positions are the prompt.
    """
    source, _, prompt = name.partition(":")
    if prompt:
        trace = shared(source)
        states = (trace.q, trace.k, trace.v)
        return _built(name, *states, int(prompt), trace.rope, trace.scale)
    if name == "sample":
        return kvsim.open_trace("sample")
    if name == "by-query-head":
        trace = shared("sample")
        group = trace.q.shape[1] // trace.n_heads
        k, v = (x.repeat_interleave(group, 1) for x in (trace.k, trace.v))
        return _built(name, trace.q, k, v, trace.prompt_len, trace.rope, trace.scale)
    generator = torch.Generator().manual_seed(16)
    q, k, v = torch.randn(3, 16, 2, 320, 16, generator=generator)
    # layers attend more or less sharply, so that methods which compare layers have a reason
    q = q * torch.linspace(0.5, 3, 16)[:, None, None, None]
    return _built(name, q, k, v, 280, Rope([1.0 / 100 ** (i / 8) for i in range(8)]))


def _built(name: str, q: Any, k: Any, v: Any, prompt: int, rope: Rope, scale: Any = None) -> Trace:
    return Trace.from_arrays(q, k, v, prompt_len=prompt, rope=rope, scale=scale, name=name)


TRACES = ("sample", "by-query-head", "random-16")


def ruled(case: Case) -> dict[str, Any]:
    """What the referee says of a case, as rulings.json has it."""
    policy = kvsim.policy(case.policy, **case.settings)
    ruling = kvsim.conform(case.dump, policy, trace=shared(case.trace))
    first = ruling.apart[0] if ruling.apart else None
    explained = [each.name for each in ruling.deviations]
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
        "budget": ruling.budget,
        "events": ruling.events,
        "compared": ruling.compared,
        "apart": len(ruling.apart),
        "ties": len(ruling.ties),
        "first": first
        and {
            "row": first.row,
            "layer": first.layer,
            "head": first.head,
            "keeps": len(first.extra),
            "evicts": len(first.missing),
            "gap": None if first.gap is None else float(f"{first.gap:.2g}"),
        },
        "counts": all(not (each.extra and each.missing) for each in ruling.apart),
        "explained": explained,
    }


def main() -> None:
    """Run the drivers, and write dumps and results."""
    from conformance.released import COMMITS, RELEASES
    from conformance.released_more import MORE

    checkouts, *names = sys.argv[1:]
    FOLDER.mkdir(exist_ok=True)
    results = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    for name, driver in {**RELEASES, **MORE}.items():
        if names and name not in names:
            continue
        release: Release = driver(Path(checkouts))
        for case in release.cases:
            case.dump.save(FOLDER / f"{case.name}.npz", overwrite=True)
        facts = results.get(name, {})
        facts |= {"repository": release.repository, "runs": release.runs, "how": release.how}
        facts["commit"] = COMMITS[release.repository]
        facts["cases"] = [ruled(case) for case in release.cases]
        results[name] = facts
        for each in facts["cases"]:
            first = each["first"] or ""
            print(
                name,
                each["dump"],
                each["compared"],
                each["apart"],
                each["ties"],
                first,
                each["explained"],
                flush=True,
            )
    text = json.dumps(results, indent=1) + "\n"
    RESULTS.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
