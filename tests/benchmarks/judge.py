"""What a judged cell costs: next to the forward pass of the response alone, and to a live run.

    python tests/benchmarks/judge.py                  # SmolLM2, 400 + 256 tokens: two minutes
    python tests/benchmarks/judge.py --smallest       # tiny, seconds; what the test suite runs

One process, one thread, in turns: the plain forward pass of the rows of the response over a full
cache (the floor), records judged together, and teacher-forced live cells of the same policies, an
event after the prompt and every 32 rows. Then the judged cell against the length of the prompt, of
the response and the number of cells, and the peak memory.
"""

import resource
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

import kvsim
from harness import cpu_seconds, report
from kvsim.core.policy import Schedule
from kvsim.core.trace import Trace
from kvsim.recorder import load_model
from kvsim.recorder.cache import full_cache
from kvsim.runner.closed import ClosedLoop
from kvsim.runner.judging import Judge
from kvsim.runner.model import RunningModel

POLICIES = ("snapkv", "h2o", "tova", "expected_attention", "adakv+snapkv", "gkv", "ams", "keydiff")
BUDGET, INTERVAL, TURNS = 96, 32, 3


@dataclass(frozen=True)
class Shape:
    """A model and the tokens of prompt and response, and those that the cost is followed over."""

    model: str
    prompt: int
    response: int
    prompts: tuple[int, ...]
    responses: tuple[int, ...]


SHAPES = {
    "full": Shape("smollm2", 400, 256, (200, 400, 800, 1600), (64, 128, 256, 512)),
    "smallest": Shape("tiny", 100, 40, (100,), (40,)),
}


def recorded(run: RunningModel, prompt: int, response: int) -> Trace:
    """A trace of random tokens."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = run.model.config.vocab_size
    ids = torch.randint(vocabulary, (prompt + response,), generator=generator).tolist()
    return kvsim.capture(run.model, None, ids[:prompt], response=ids[prompt:])


def cells(run: RunningModel, trace: Trace) -> tuple[Judge, list[Any]]:
    """The judge of a trace, after its pass with the full cache, and the records of all policies."""
    judge = Judge(run, trace)
    judge.check()
    terms = {"interval": INTERVAL, "prefill": True}
    return judge, [kvsim.replay(trace, name, BUDGET, **terms) for name in POLICIES]


def floor(run: RunningModel, trace: Trace) -> Callable[[], object]:
    """The forward pass of the rows of the response, over the full cache of the prompt."""
    tokens, start = trace.read("tokens").tolist(), trace.prompt_len
    caches = []
    with torch.inference_mode():
        for _ in range(TURNS):
            caches.append(full_cache(run.model))
            run.forward(tokens[:start], 0, caches[-1], 1)

    def forward() -> None:
        with torch.inference_mode():
            run.forward(tokens[start:], start, caches.pop(), len(tokens) - start)

    return forward


def run(shape: Shape) -> tuple[dict[str, float], list[str]]:
    """The ratios of a judged cell to the floor, and of a live cell to it; and lines to print."""
    torch.set_num_threads(1)
    running = RunningModel(load_model(shape.model)[0])
    trace = recorded(running, shape.prompt, shape.response)
    judge, records = cells(running, trace)
    loop = ClosedLoop(running, trace, None, None)
    loop.check()
    plain, turns = floor(running, trace), []
    for _ in range(TURNS):
        policies = [kvsim.policy(name) for name in POLICIES]
        schedules = [Schedule(INTERVAL, prefill=True)] * len(policies)
        pairs = list(zip(policies, schedules, strict=True))
        turns.append(
            (
                cpu_seconds(plain)[0],
                cpu_seconds(lambda: judge.outcomes(records))[0] / len(records),
                cpu_seconds(lambda: judge.outcomes(records[:1]))[0],
                cpu_seconds(lambda: [loop.run(p, BUDGET, s) for p, s in pairs])[0] / len(pairs),  # noqa: B023
            )
        )
    least, together, alone, live = (median(each) for each in zip(*turns, strict=True))
    lines = [f"{shape.model}, {shape.prompt} + {shape.response} tokens, {len(POLICIES)} policies"]
    lines.append(f"forward pass of the response: {least:.3f} s")
    lines.append(
        f"judged cell, {len(records)} together: {together:.3f} s, {together / least:.2f} of it"
    )
    lines.append(f"judged cell alone: {alone:.3f} s, {alone / least:.2f} of it")
    lines.append(f"live cell, teacher-forced: {live:.3f} s, {live / together:.1f} judged cells")
    for what, lengths in (("prompt", shape.prompts), ("response", shape.responses)):
        for length in lengths:
            sizes = {"prompt": shape.prompt, "response": shape.response} | {what: length}
            judge, records = cells(running, recorded(running, **sizes))
            spent = cpu_seconds(lambda: judge.outcomes(records))[0] / len(records)  # noqa: B023
            lines.append(f"{what} of {length} tokens: {spent:.3f} s a cell")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    lines.append(f"peak memory of the process: {peak:.2f} GiB")
    return {"judged": together / least, "live": live / together}, lines


if __name__ == "__main__":
    report(__doc__, run, (SHAPES["full"],), (SHAPES["smallest"],))
