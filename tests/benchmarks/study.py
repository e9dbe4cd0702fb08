"""A study at the size of real ones, stage by stage, against its plan: full and compact traces.

    python tests/benchmarks/study.py            # half an hour
    python tests/benchmarks/study.py --smallest # seconds; what the test suite runs

A random model whose layers have the heads of Llama-3.1-8B (32 query heads on 8, dimension 128) and
narrow MLPs, with a given response. Traces store 16 bits. Memory is the peak of each stage less that
of the process with the model. Each stage is printed when it ends, the report at the end.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from lengths import resident, taken
from transformers import PreTrainedModel

import kvsim
from harness import random_model, report
from kvsim import store
from kvsim.runner.judging import Judge
from kvsim.runner.model import RunningModel
from kvsim.store.forecast import Forecast, Meter

POLICIES = (
    *("streaming_llm", "h2o", "snapkv", "tova", "expected_attention", "gkv", "ams", "pyramidkv"),
    *("adakv+snapkv", "keydiff", "knorm", "lagkv"),
)


T = TypeVar("T")


class Size(NamedTuple):
    """Shape of the model, tokens, and budgets. layers: of the study that figures are scaled to."""

    heads: int
    dim: int
    prompt: int
    response: int
    budgets: tuple[int, ...]
    layers: int = 32


AIM = (Size(8, 128, 32_768, 1024, (512, 1024, 2048)),)
SMALLEST = (Size(1, 32, 3_000, 64, (64, 256)),)
LAYERS, GROUP = 2, 4


def build(size: Size) -> PreTrainedModel:
    """A random model of two layers."""
    heads = {"num_attention_heads": GROUP * size.heads, "num_key_value_heads": size.heads}
    heads |= {"hidden_size": GROUP * size.heads * size.dim, "head_dim": size.dim}
    positions = size.prompt + size.response
    sizes = {"vocab_size": 1024, "intermediate_size": 1024, "max_position_embeddings": positions}
    return random_model(**sizes, **heads, num_hidden_layers=LAYERS)


def run(size: Size) -> tuple[dict[str, float], list[str]]:
    """Facts, and lines of the report."""
    model, lines, facts = build(size), list[str](), dict[str, float]()
    ids = torch.randint(0, 1024, (size.prompt + size.response,)).tolist()
    policies = [kvsim.policy(name) for name in POLICIES]

    of_model = resident("VmRSS")

    def stage(name: str, call: Callable[..., T], *given: Any, **options: Any) -> T:
        before, began = resident("VmRSS"), time.perf_counter()
        spent, result = taken(partial(call, *given, **options))
        facts[f"{name}, seconds"] = wall = time.perf_counter() - began
        facts[f"{name}, MiB"] = peak = before + spent["memory"] - of_model
        lines.append(f"{name:32}{wall:10.1f} s{spent['seconds']:10.1f} CPU s{peak:10.0f} MiB")
        print(lines[-1], file=sys.stderr, flush=True)
        return result

    with tempfile.TemporaryDirectory() as folder:
        plans: list[Forecast] = []
        full, compact = (Path(folder, name, "a.zarr") for name in ("full", "compact"))
        given = {"response": ids[size.prompt :], "store_dtype": "float16", "planned": plans.append}
        trace = stage("capture", kvsim.capture, model, None, ids[: size.prompt], out=full, **given)
        small = stage("compact", lambda: kvsim.open_trace(trace.compacted(512).save(compact)))
        for one in (full, compact):
            found = stage(f"verify --deep, {one.parent.name}", store.verify, one, deep=True)
            assert found.ok, found.problems
        cells = [(policy, budget) for policy in policies for budget in size.budgets]

        def replayed(of: kvsim.Trace) -> list[kvsim.Record]:
            return [kvsim.replay(of, policy, budget) for policy, budget in cells]

        records = stage(f"replay, {len(cells)} cells, full", replayed, trace)
        same = stage(f"replay, {len(cells)} cells, compact", replayed, small)
        for mine, other in zip(records, same, strict=True):
            assert np.array_equal(mine.evicted_at, other.evicted_at), mine.policy
        errors = "output errors of these, compact"
        stage(errors, lambda: [kvsim.measure(small, x, metrics=["output_error"]) for x in same])
        judge = Judge(RunningModel(model), small)
        stage("judge, the first", judge.outcomes, same[:1])
        stage("judge, the others", judge.outcomes, same[1:])
        (plan,) = plans
        for name in ("full", "compact"):
            actual = Meter().actual([Path(folder, name)])
            facts |= {f"{name}, {unit}": actual[unit] for unit in ("bytes", "files")}
    facts |= {"planned bytes": plan.written, "planned files": plan.files}
    facts |= {"planned MiB": plan.memory / 2**20 - of_model, "planned seconds": plan.seconds}
    heads = f"{GROUP * size.heads} query heads on {size.heads}, dim {size.dim}"
    budgets = ", ".join(map(str, size.budgets))
    head = [
        f"torch {torch.__version__}, {torch.get_num_threads()} threads; {LAYERS} layers of {heads}",
        f"{size.prompt} + {size.response} tokens, {len(policies)} policies, budgets {budgets}",
    ]
    for name, unit, by, key in (
        ("bytes", "MiB on the disk", 2**20, "full, bytes"),
        ("files", "files", 1, "full, files"),
        ("MiB", "MiB beside the model", 1, "capture, MiB"),
        ("seconds", "s", 1, "capture, seconds"),
    ):
        planned, took = facts[f"planned {name}"] / by, facts[key] / by
        lines.append(f"the capture's plan {planned:.0f} {unit}, and it took {took:.0f}")
    for name in ("full", "compact"):
        gib, files = facts[f"{name}, bytes"] / 2**30, facts[f"{name}, files"]
        of_study = f"of {size.layers} layers {gib * size.layers / LAYERS:.1f} GiB"
        lines.append(f"{name} trace {gib:.2f} GiB in {files:.0f} files, {of_study}")
    return facts, head + lines


if __name__ == "__main__":
    report(__doc__, run, AIM, SMALLEST, "study")
