# ruff: noqa: INP001, T201 - a script, not a module, and it says what it did
"""How near policies come to the optimum, and what learning from it adds: parts of optimum.md.

    python docs/learned.py                 both models; resumes
    python docs/learned.py --write-only    the page of what is measured already: seconds
    python docs/learned.py --traces DIR --models tiny

Traces come from the commands that the page names, and are not made here. What was measured is kept
in `docs/optimum-results.jsonl`, a line each: `values` has a number for each prompt of the set
`test`, in the order of their numbers; some older lines have the mean and its interval instead.
docs/optimum_page.py makes the page of it.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import polars as pl
import torch
from study import NAMED, ROOT, append, finished, read

import kvsim
from kvsim.analysis.output.optimum import OptimumTerms
from kvsim.analysis.summaries import main_variants, per_prompt
from kvsim.core.policy import Policy
from kvsim.core.record import Record
from kvsim.core.trace import Trace
from kvsim.policies import describe, names, parameters
from kvsim.recorder import load_model
from kvsim.store.opening import as_traces
from kvsim.studies.learning.learn import CAUSAL, learn
from optimum_page import BUDGETS, FULL, KINDS, PROJECTIONS, SEEDED, write

PAGE, RESULTS = ROOT / "docs/optimum.md", ROOT / "docs/optimum-results.jsonl"
INTERVAL = 32
METRIC = "possible_share"
#: What a scorer may see, one kind of information more each time.
KNOWLEDGE: dict[str, dict[str, Any]] = {
    "position": {"features": ("position",)},
    "+ attention": {"features": ("position", "attention")},
    "+ keys": {"features": ("position", "attention", "keys")},
    FULL: {"features": CAUSAL},
    PROJECTIONS: {"features": (*CAUSAL, "projections")},
    "+ the next 8 rows": {"features": (*CAUSAL, "future"), "ahead": 8},
}
#: Scorers of the same features that are learned in other ways.
SIMPLER: dict[str, dict[str, Any]] = {"linear": {"hidden": 0}, "random features": {"fixed": True}}
SEEDS = (0, 1, 2)
#: Parameters of hand-written policies at each of BUDGETS, by model, policy and set of prompts. They
#: retained most mass there among 15 settings, which a search proposed (now removed).
TUNED: dict[tuple[str, str, str], tuple[dict[str, Any], dict[str, Any]]] = {
    ("tiny", "h2o", "learned"): ({"recent": 15}, {"recent": 30}),
    ("tiny", "snapkv", "learned"): ({"window": 23, "pool": None}, {"window": 40, "pool": None}),
    ("smollm2", "h2o", "learned"): ({"recent": 51}, {"recent": 93}),
    ("smollm2", "snapkv", "learned"): ({"window": 12, "pool": None}, {"window": 29, "pool": None}),
    ("smollm2", "snapkv", "needle"): ({"window": 21, "pool": None}, {"window": 23, "pool": None}),
}
#: What runs on the model beside the learned scorer, and the prompts with answers: how many tokens
#: of a response they take.
LIVE = ("h2o", "tova", "gkv@scaled", "snapkv@scaled")
ANSWERS = {"tiny": ("unseen", 512), "smollm2": ("smollm2-tasks", 24)}
#: What else of the catalogue comes near the optimum on SmolLM2.
STRONG = ("morphkv@scaled", "observed_attention")
#: Sets of prompts of a model: a folder of traces, and which of them.
SETS: dict[str, dict[str, tuple[str, slice]]] = {
    "tiny": {"learned": ("tiny", slice(20)), "unseen": ("tiny", slice(20, None))},
    "smollm2": {
        "learned": ("smollm2-text", slice(9)),
        "unseen": ("smollm2-text", slice(9, None)),
        "smollm2-tasks": ("smollm2-tasks", slice(None)),
        "needle": ("smollm2-needle", slice(None)),
        "other chats": ("smollm2-chat", slice(12)),
        "chat": ("smollm2-chat", slice(12, None)),
    },
}
#: Policies that are replayed together, which share the optimum.
TOGETHER = 16


@dataclass(frozen=True)
class Model:
    """A model and its traces."""

    name: str
    traces: Path

    @cached_property
    def sets(self) -> dict[str, list[Trace]]:
        """Traces by name of the set: `learned` from, `unseen` of the same kind, and others."""
        of_folders = {folder: self._numbered(folder) for folder, _ in SETS[self.name].values()}
        return {name: of_folders[folder][part] for name, (folder, part) in SETS[self.name].items()}

    def _numbered(self, folder: str) -> list[Trace]:
        """The traces of a folder by number, so that tasks alternate."""
        return sorted(as_traces(self.traces / folder), key=lambda trace: trace.name[-3:])

    @property
    def catalogue(self) -> dict[str, Policy]:
        """Every policy that a budget binds, its lengths scaled; wrappers have SnapKV inside.

        Policies with calibration have the first prompt that is learned from. Those that need what
        the traces do not have, rows that repeat the context, are left out.
        """
        recorded = self.sets["unseen"][0].source.shapes.keys()
        built = []
        for name in names():
            scores = describe(name).kind in ("scorer", "propagation") or name.startswith("ams")
            whole = name if scores else f"{name}+snapkv"
            options = {"calibration": self.sets["learned"][0], "protect_prompt": False}
            options_of = {key: x for key, x in options.items() if key in parameters(whole)}
            built.append(kvsim.policy(whole, **options_of).fitted())
        return {
            policy.name: policy
            for policy in built
            if policy.bounded and policy.scorer.needs <= recorded
        }


# ------------------------------------------------------------------------------------- measurement


class Results:
    """Lines that are measured once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.rows = read(path)

    def has(self, key: Mapping[str, Any]) -> bool:
        """Whether there are lines with these values."""
        return any(all(row.get(name) == x for name, x in key.items()) for row in self.rows)

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        """Write lines, and keep them."""
        self.rows += rows
        append(self._path, rows)
        print(*(f"{row['model']}: {row['part']}, {row['name']}" for row in rows[:1]), flush=True)


def scorer(model: Model, kind: str, on: str = "learned", seed: int = 0, **options: Any) -> Policy:
    """A scorer learned on a set of the model's prompts, made once."""
    parts = (model.name, *([on] if on != "learned" else []), kind, *([f"{seed}"] if seed else []))
    name = "-".join("".join(filter(str.isalnum, part)) for part in parts)
    file = model.traces / "scorers" / f"{name}.safetensors"
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        options |= {"interval": INTERVAL, "held_out": 0, "seed": seed}
        learn(model.sets[on], BUDGETS, file, **options)
    return kvsim.policy(f"learned:{file}")


def measured(
    traces: Sequence[Trace], policies: Mapping[str, Policy], budgets: Sequence[int] = BUDGETS
) -> list[dict[str, Any]]:
    """A line for each policy and budget: the share of the possible of each prompt."""
    tables = []
    for trace in traces:
        records, optima = [], []
        for (label, policy), budget in itertools.product(policies.items(), budgets):
            record = kvsim.replay(trace, policy, budget, interval=INTERVAL, prefill=True)
            terms = OptimumTerms.of(trace, policy, record).unprotected
            key = trace.digest, terms.key
            if key not in _OPTIMA:
                _OPTIMA[key] = terms.optimum(trace)
            records.append(replace(record, policy=label))
            optima.append(_OPTIMA[key])
        table = kvsim.measure(trace, records, METRIC, unprotected=optima)
        tables.append(per_prompt(main_variants(table, [METRIC])))
    return lines(pl.concat(tables))


# Policies of one budget share it.
_OPTIMA: dict[Hashable, Record] = {}


def lines(values: pl.DataFrame) -> list[dict[str, Any]]:
    """A line for each result of a table of `per_prompt`, prompts in its order."""
    grouped = values.group_by("policy", "requested", "metric", maintain_order=True)
    rows = grouped.agg(values=pl.col("value").round(6)).to_dicts()
    return [{"name": row.pop("policy"), "budget": int(row.pop("requested")), **row} for row in rows]


def put(
    results: Results, model: Model, part: str, test: str, policies: Mapping[str, Any], **more: Any
) -> None:
    """Measure policies on a set of prompts, unless that is done; each value makes the policy."""
    key = {"model": model.name, "part": part, "test": test, **more}
    missing = {name: x for name, x in policies.items() if not results.has({**key, "name": name})}
    for first in range(0, len(missing), TOGETHER):
        part_of = [*missing][first : first + TOGETHER]
        rows = measured(model.sets[test], {name: missing[name]() for name in part_of})
        results.add([{**key, **row} for row in rows])


def measure(results: Results, model: Model, other: Model) -> None:
    """Everything that the page shows of a model; other: whose scorer is tried on it."""
    policies = {name: lambda policy=policy: policy for name, policy in model.catalogue.items()}
    kinds = KNOWLEDGE | SIMPLER
    learned = {kind: lambda kind=kind: scorer(model, kind, **kinds[kind]) for kind in kinds}
    put(results, model, "policies", "unseen", policies)
    put(results, model, "beside", "unseen", {kind: learned[kind] for kind in KINDS})
    put_tuned(results, model, "beside", "unseen", "learned")
    put(results, model, "knowledge", "unseen", {kind: learned[kind] for kind in KNOWLEDGE})
    if "chat" in model.sets:
        of_tasks = {on: lambda on=on: scorer(model, FULL, on) for on in ("needle", "other chats")}
        by_hand = {name: policies[name] for name in (*LIVE, *STRONG)}
        put(results, model, "tasks", "chat", of_tasks | {"text": learned[FULL]} | by_hand)
        put_tuned(results, model, "tasks", "chat", "needle")
    for seed in SEEDS[1:]:
        again = {
            kind: lambda kind=kind, seed=seed: scorer(model, kind, seed=seed, **kinds[kind])
            for kind in SEEDED
        }
        put(results, model, "seeds", "unseen", again, seed=seed)
    of_models = {
        other.name: lambda: scorer(other, FULL),
        model.name: learned[FULL],
        "h2o": lambda: kvsim.policy("h2o"),
    }
    for test in [name for name in ("unseen", "smollm2-tasks") if name in model.sets]:
        put(results, model, "transfer", test, of_models)
    for metric, name in itertools.product(("response_kl", "answer_right"), ("learned", *LIVE)):
        key = {"model": model.name, "part": "live", "metric": metric, "name": name}
        if not results.has(key):
            results.add(live(model, metric, name))


def put_tuned(results: Results, model: Model, part: str, test: str, on: str) -> None:
    """Measure policies with the parameters of `TUNED` for a set; they are kept with the results."""
    for (of_model, name, searched), chosen in TUNED.items():
        if (of_model, searched) != (model.name, on):
            continue
        label = f"{name}, tuned" if on == "learned" else f"{name}, tuned on {on} prompts"
        key = {"model": model.name, "part": part, "test": test, "name": label}
        for budget, values in zip(BUDGETS, chosen, strict=True):
            if not results.has({**key, "budget": budget}):
                rows = measured(model.sets[test], {label: kvsim.policy(name, **values)}, [budget])
                results.add([{**key, **row, "parameters": json.dumps(values)} for row in rows])


def live(model: Model, metric: str, name: str) -> list[dict[str, Any]]:
    """Closed loop: the model itself under the learned scorer, or under another policy.

    Fed with its response for the distance of its distributions, and writing for its answers.
    """
    loaded, tokenizer = load_model(model.name)
    test, new_tokens = ("unseen", 0) if metric == "response_kl" else ANSWERS[model.name]
    policy = scorer(model, FULL) if name == "learned" else kvsim.policy(name)
    run = kvsim.live(
        loaded,
        model.sets[test],
        replace(policy, name=name),
        BUDGETS,
        tokenizer=tokenizer,
        interval=INTERVAL,
        max_new_tokens=new_tokens,
        metrics=[metric],
    )
    key = {"model": model.name, "part": "live", "test": test}
    return [
        {**key, **row} for row in lines(per_prompt(main_variants(finished(run).table, [metric])))
    ]


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--traces", type=Path, default=ROOT / "traces/optimum")
    parser.add_argument("--models", nargs="*", choices=NAMED, default=[*NAMED])
    parser.add_argument("--write-only", action="store_true")
    args = parser.parse_args()
    results = Results(RESULTS)
    if not args.write_only:
        torch.set_num_threads(1)
        every = {name: Model(name, args.traces) for name in NAMED}
        for name in args.models:
            (other,) = (model for model in every.values() if model.name != name)
            measure(results, every[name], other)
    write(results.rows, PAGE)


if __name__ == "__main__":
    main()
