"""A study at the size of real ones, stage by stage, against its plan: full and compact traces.

    python tests/benchmarks/study.py --folder study # an hour; continues what a run there has left
    python tests/benchmarks/study.py --smallest     # seconds; what the test suite runs

A random model whose layers have the heads of Llama-3.1-8B (32 query heads on 8, dimension 128) and
narrow MLPs, with a given response. Traces store 16 bits. Memory is the peak of each stage less that
of the process with the model. Each stage is printed and kept when it ends, the report at the end.
"""

import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from lengths import resident, taken
from transformers import PreTrainedModel

import kvsim
from harness import options, publish, random_model
from kvsim import store
from kvsim.runner.judging import Judge
from kvsim.runner.model import RunningModel
from kvsim.store.forecast import Forecast

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


class Stages:
    """Runs stages that a folder does not have yet; lines and facts of all."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.lines, self.facts = folder, list[str](), dict[str, float]()
        self.of_model = resident("VmRSS")

    def __call__(self, name: str, call: Callable[[], T]) -> T:
        """Return the result of a call, now or before."""
        file, began = self.folder / f"{name}.pickle", time.perf_counter()
        if not file.exists():
            before = resident("VmRSS")
            spent, result = taken(call)
            wall, peak = time.perf_counter() - began, before + spent["memory"] - self.of_model
            line = f"{name:32}{wall:10.1f} s{spent['seconds']:10.1f} CPU s{peak:10.0f} MiB"
            print(line, file=sys.stderr, flush=True)
            file.write_bytes(pickle.dumps(({"seconds": wall, "MiB": peak}, line, result)))
        found, line, result = pickle.loads(file.read_bytes())  # noqa: S301  written here
        self.facts.update({f"{name}, {unit}": value for unit, value in found.items()})
        self.lines.append(line)
        return result


def run(size: Size, folder: Path | None = None) -> tuple[dict[str, float], list[str]]:
    """Facts, and lines of the report; folder: of the traces, and of the stages that have ended."""
    if folder is None:
        with tempfile.TemporaryDirectory() as new:
            return run(size, Path(new))
    model = build(size)
    ids = torch.randint(0, 1024, (size.prompt + size.response,)).tolist()
    policies = [kvsim.policy(name) for name in POLICIES]
    stage = Stages(folder)
    full, compact = (folder / name / "a.zarr" for name in ("full", "compact"))

    def captured() -> Forecast:
        plans: list[Forecast] = []
        given = {"response": ids[size.prompt :], "store_dtype": "float16", "planned": plans.append}
        kvsim.capture(model, None, ids[: size.prompt], out=full, overwrite=True, **given)
        return plans[0]

    def compacted() -> None:
        kvsim.open_trace(full).compacted(512).save(compact, overwrite=True)

    def verified(one: Path) -> None:
        found = store.verify(one, deep=True)
        assert found.ok, found.problems

    cells = [(policy, budget) for policy in policies for budget in size.budgets]

    def replayed(one: Path) -> list[kvsim.Record]:
        trace = kvsim.open_trace(one)
        return [kvsim.replay(trace, *cell) for cell in cells]

    plan = stage("capture", captured)
    stage("compact", compacted)
    for one in (full, compact):
        stage(f"verify --deep, {one.parent.name}", lambda one=one: verified(one))
    records = stage(f"replay, {len(cells)} cells, full", lambda: replayed(full))
    same = stage(f"replay, {len(cells)} cells, compact", lambda: replayed(compact))
    for mine, other in zip(records, same, strict=True):
        assert np.array_equal(mine.evicted_at, other.evicted_at), mine.policy
    small = kvsim.open_trace(compact)

    def errors() -> None:
        for record in same:
            kvsim.measure(small, record, metrics=["output_error"])

    def judged(some: list[kvsim.Record]) -> None:
        judge.outcomes(some)

    stage("output errors of these, compact", errors)
    judge = Judge(RunningModel(model), small)
    stage("judge, the first", lambda: judged(same[:1]))
    stage("judge, the others", lambda: judged(same[1:]))
    return report(stage, plan, size)


def report(stage: Stages, plan: Forecast, size: Size) -> tuple[dict[str, float], list[str]]:
    """Facts and lines, with what traces take and what the plan of the capture said."""
    facts, lines = stage.facts, stage.lines
    for name in ("full", "compact"):
        files = [path for path in (stage.folder / name).rglob("*") if path.is_file()]
        facts |= {f"{name}, bytes": sum(path.stat().st_size for path in files)}
        facts |= {f"{name}, files": len(files)}
    facts |= {"planned bytes": plan.written, "planned files": plan.files}
    facts |= {"planned MiB": plan.memory / 2**20 - stage.of_model}
    heads = f"{GROUP * size.heads} query heads on {size.heads}, dim {size.dim}"
    budgets = ", ".join(map(str, size.budgets))
    head = [
        f"torch {torch.__version__}, {torch.get_num_threads()} threads; {LAYERS} layers of {heads}",
        f"{size.prompt} + {size.response} tokens, {len(POLICIES)} policies, budgets {budgets}",
    ]
    for name, unit, by, key in (
        ("bytes", "MiB on the disk", 2**20, "full, bytes"),
        ("files", "files", 1, "full, files"),
        ("MiB", "MiB beside the model", 1, "capture, MiB"),
    ):
        planned, took = facts[f"planned {name}"] / by, facts[key] / by
        lines.append(f"the capture's plan {planned:.0f} {unit}, and it took {took:.0f}")
    for name in ("full", "compact"):
        gib, files = facts[f"{name}, bytes"] / 2**30, facts[f"{name}, files"]
        of_study = f"of {size.layers} layers {gib * size.layers / LAYERS:.1f} GiB"
        lines.append(f"{name} trace {gib:.2f} GiB in {files:.0f} files, {of_study}")
    return facts, head + lines


def main() -> None:
    """Run what is left of a study, and write its report."""
    parser = options(__doc__)
    parser.add_argument("--folder", type=Path, help="keeps traces and stages; else none is kept")
    given = parser.parse_args()
    if given.folder:
        given.folder.mkdir(parents=True, exist_ok=True)
    _, lines = run(*(SMALLEST if given.smallest else AIM), given.folder)
    publish(lines, given.doc, "study")


if __name__ == "__main__":
    main()
