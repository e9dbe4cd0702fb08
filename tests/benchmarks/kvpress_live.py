"""A grid of policies and budgets: replayed by kvsim from one capture, and run live with kvpress.

    python tests/benchmarks/kvpress_live.py                 # tiny: a minute
    python tests/benchmarks/kvpress_live.py --model smollm2 # half an hour
    python tests/benchmarks/kvpress_live.py --smallest      # seconds; what the test suite runs

Same model, prompt and number of new tokens, one process, one thread. A cell of kvpress is one
greedy generation under a press that compresses after the prompt and then every some rows. kvsim
captures the generation with the full cache once, to disk, and `kvsim.sweep` replays and measures
all cells, main metrics, into a folder. Before the cells of each budget kvsim does its whole work
once more, so that both see the same machine; its seconds are the mean of these turns. CPU time
counts, because with one thread it is the wall time of a machine that does nothing else.
"""

import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import kvsim
from kvsim.recorder import load_model
from kvsim.sweeps import Run

with warnings.catch_warnings():  # what it imports warns about Python 3.13
    warnings.simplefilter("ignore")
    import kvpress

from harness import options, publish


@dataclass(frozen=True)
class Shape:
    """What is generated, and the grid. interval: rows between events; window: of SnapKV."""

    model: str
    prompt: int
    new: int
    budgets: tuple[int, ...]
    interval: int
    window: int
    presses: tuple[str, ...] | None = None
    judge: bool = False  # whether kvsim also runs the model under the kept sets of each cell


AIM = {name: Shape(name, 512, 256, (64, 96, 128, 192, 256), 64, 32) for name in ("tiny", "smollm2")}
SMALLEST = Shape("tiny", 64, 12, (24,), 8, 4, ("KnormPress", "AdaKV(SnapKVPress)"))

Make = Callable[[Shape, float], Any]


def _snapkv(shape: Shape, ratio: float) -> Any:
    return kvpress.SnapKVPress(ratio, window_size=shape.window)


def _expected(_: Shape, ratio: float) -> Any:
    return kvpress.ExpectedAttentionPress(ratio)


def _plain(name: str, **arguments: Any) -> Make:
    return lambda _, ratio: getattr(kvpress, name)(ratio, **arguments)


_SNAPKV, _EXPECTED = "snapkv@kvpress", "expected_attention@kvpress"
#: Each press with the policy of kvsim next to it (docs/kvpress.md says how far they are the same),
#: and whether the policy takes the window.
PAIRS: dict[str, tuple[Make, str, bool]] = {
    "RandomPress": (_plain("RandomPress", seed=0), "random", False),
    "KnormPress": (_plain("KnormPress"), "knorm", False),
    "KeyDiffPress": (_plain("KeyDiffPress"), "keydiff", False),
    "StreamingLLMPress": (_plain("StreamingLLMPress"), "streaming_llm", False),
    "LagKVPress": (_plain("LagKVPress", lag_size=16), "lagkv", False),
    "TOVAPress": (_plain("TOVAPress"), "tova@kvpress", False),
    "SnapKVPress": (_snapkv, _SNAPKV, True),
    "PyramidKVPress": (
        lambda shape, ratio: kvpress.PyramidKVPress(ratio, window_size=shape.window),
        "pyramidkv@kvpress",
        True,
    ),
    "ExpectedAttentionPress": (_expected, _EXPECTED, False),
    "CriticalKV(SnapKVPress)": (
        lambda *given: kvpress.CriticalKVPress(_snapkv(*given)),
        f"criticalkv+{_SNAPKV}",
        True,
    ),
    "AdaKV(SnapKVPress)": (
        lambda *given: kvpress.AdaKVPress(_snapkv(*given)),
        f"adakv@kvpress+{_SNAPKV}",
        True,
    ),
    "AdaKV(ExpectedAttentionPress)": (
        lambda *given: kvpress.AdaKVPress(_expected(*given)),
        f"adakv@kvpress+{_EXPECTED}",
        False,
    ),
}


def seconds(call: Callable[[], Any]) -> tuple[float, float, Any]:
    """Wall and CPU seconds of a call, and its result."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = call()
    return time.perf_counter() - wall, time.process_time() - cpu, result


def both_phases(shape: Shape, name: str, budget: int) -> Any:
    """A press that keeps `budget` entries after the prompt and after each interval."""
    make = PAIRS[name][0]
    # half an entry more, because a ratio in floating point would round to one entry fewer;
    # PyramidKV rounds by itself
    half = 0 if name == "PyramidKVPress" else 0.5
    return kvpress.PrefillDecodingPress(
        make(shape, max(0.0, 1 - (budget + half) / shape.prompt)),
        kvpress.DecodingPress(
            make(shape, 0.0), shape.interval, budget, max(shape.interval, shape.window)
        ),
    )


def generation(
    model: PreTrainedModel, shape: Shape, prompt: Sequence[int], name: str, budget: int
) -> list[int]:
    """The response of the model under a press, greedy, of `shape.new` tokens."""
    ids = torch.tensor([list(prompt)])
    how = {"do_sample": False, "eos_token_id": None, "max_new_tokens": shape.new}
    kvpress.attention_patch.patch_attention_functions()  # without it AdaKV masks nothing
    try:
        with torch.inference_mode(), both_phases(shape, name, budget)(model):
            out = model.generate(ids, attention_mask=torch.ones_like(ids), **how)
    finally:
        ALL_ATTENTION_FUNCTIONS._local_mapping.clear()
    response = out[0, shape.prompt :].tolist()
    assert len(response) == shape.new, response
    return response


def replayed(
    model: PreTrainedModel, shape: Shape, prompt: Sequence[int], names: Sequence[str]
) -> dict[str, float]:
    """CPU seconds of a capture to disk, and of a sweep of all cells into a folder; wall seconds."""
    policies = [
        {policy: {"window": shape.window}} if windowed else policy
        for _, policy, windowed in (PAIRS[name] for name in names)
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.zarr"

        def capture() -> kvsim.Trace:
            return kvsim.capture(
                model, None, list(prompt), max_new_tokens=shape.new, out=path, progress=False
            )

        def sweep() -> Run:
            run = kvsim.sweep(
                traces=[str(path)],
                policies=policies,
                budgets=list(shape.budgets),
                interval=shape.interval,
                prefill=True,
                records=shape.judge,
                out=Path(folder) / "run",
            )
            if shape.judge:
                kvsim.judge(model, path, list(run.records))
            return run

        wall, cpu, trace = seconds(capture)
        assert trace.n_pos == shape.prompt + shape.new, trace
        wall_sweep, cpu_sweep, run = seconds(sweep)
    assert not run.failures, run.failures
    assert run.parameters["done"] == len(names) * len(shape.budgets)
    return {"capture": cpu, "sweep": cpu_sweep, "wall": wall + wall_sweep}


def run(shape: Shape) -> tuple[dict[str, float], list[str]]:
    """Measure both, and return ratios and lines of the report."""
    logging.getLogger("kvpress").setLevel(logging.ERROR)  # of ratios that it replaces by itself
    torch.set_num_threads(1)
    ALL_ATTENTION_FUNCTIONS._local_mapping.clear()  # as if kvpress were not there
    names = shape.presses or tuple(PAIRS)
    model, tokenizer = load_model(shape.model)
    prompt = tokenizer("\n".join(topics.topics.values())[: 20 * shape.prompt])["input_ids"]
    prompt = prompt[: shape.prompt]
    before = model.generation_config.eos_token_id, model.config.eos_token_id
    model.generation_config.eos_token_id = model.config.eos_token_id = None  # all of one length
    turns, wall, cpu = [], 0.0, 0.0
    try:
        for budget in shape.budgets:
            turns.append(replayed(model, shape, prompt, names))
            for name in names:
                call = partial(generation, model, shape, prompt, name, budget)
                wall_of_one, cpu_of_one, _ = seconds(call)
                wall, cpu = wall + wall_of_one, cpu + cpu_of_one
    finally:
        model.generation_config.eos_token_id, model.config.eos_token_id = before
    cells = len(names) * len(shape.budgets)
    capture, sweep, wall_of_kvsim = (
        sum(turn[x] for turn in turns) / len(turns) for x in ("capture", "sweep", "wall")
    )
    ratios = {
        "wall": wall / wall_of_kvsim,
        "cpu": cpu / (capture + sweep),
        "ten times the cells": 10 * cpu / (capture + 10 * sweep),
    }
    budgets = ", ".join(map(str, shape.budgets))
    versions = (f"{package} {version(package)}" for package in ("kvpress", "transformers", "torch"))
    return ratios, [
        f"{', '.join(versions)}, one thread; CPU seconds",
        f"{shape.model}: {shape.prompt} + {shape.new} tokens, {len(names)} policies",
        f"budgets {budgets}; events after the prompt and every {shape.interval} rows",
        f"kvpress {cpu:8.1f}: {cells} generations of {cpu / cells:.2f}",
        f"kvsim   {capture + sweep:8.1f}: capture {capture:.1f}, {cells} cells {sweep:.1f}",
        f"ratio   {ratios['cpu']:8.1f} (of wall time {ratios['wall']:.1f})",
        f"extrapolated to {10 * cells} cells {ratios['ten times the cells']:.0f}",
    ]


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--model", choices=list(AIM), default="tiny")
    parser.add_argument("--judge", action="store_true", help="judge the cells of kvsim, too")
    given = parser.parse_args()
    shape = SMALLEST if given.smallest else AIM[given.model]
    _, lines = run(replace(shape, judge=given.judge))
    publish(lines, given.doc, f"kvpress {given.model}")
