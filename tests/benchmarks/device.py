"""Capture, replay and judge on a GPU: equal to the CPU, and how fast.

    python tests/benchmarks/device.py                  # Llama-8B's layers and tiny: eight minutes
    python tests/benchmarks/device.py --smallest       # small layers, seconds

Where there is no GPU it says so, and ends with status 0. Equal means: arrays of traces within 1e-4
of their largest number (fp32 products, another order of additions), kept sets outside ties (scores
within 1e-4 of each other), judged values within 1e-2 of those of the CPU, or 1e-5.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

import kvsim
from harness import options, random_model
from kvsim.core.record import Record
from kvsim.core.trace import Trace
from kvsim.recorder import load_model
from kvsim.runner.judgments import judge

POLICIES = ("streaming_llm", "snapkv", "tova", "h2o", "expected_attention", "adakv+snapkv", "gkv")
ARRAYS, TIES, JUDGED, SMALL = 1e-4, 1e-4, 1e-2, 1e-5

#: Sizes of two layers: those of Llama-3.1-8B, and small ones. Tokens of prompt and response.
LAYERS = {
    "Llama-3.1-8B, 2 layers": (
        {"hidden_size": 4096, "intermediate_size": 14336, "head_dim": 128}
        | {"num_attention_heads": 32, "num_key_value_heads": 8},
        (1024, 64),
    ),
    "small layers": (
        {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16},
        (96, 24),
    ),
}


def timed(call: Callable[[], Any], device: str) -> tuple[float, Any]:
    """Seconds of a call, with all that it started on a device, and its result."""
    began, result = time.perf_counter(), call()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - began, result


def captured(model: Any, ids: Sequence[int], prompt: int) -> Trace:
    """A trace in memory of a prompt and its response."""
    return kvsim.capture(model, None, [*ids[:prompt]], response=[*ids[prompt:]], o_proj=True)


def array_error(trace: Trace, other: Trace) -> float:
    """The largest difference of two traces, relative to the largest number of the array."""
    errors = []
    for name in ("q", "k", "v", "attn_out", "lse"):
        a, b = trace.read(name).double(), other.read(name).double()
        errors.append(float((a - b).abs().max() / a.abs().max()))
    return max(errors)


def differing(first: Record, second: Record) -> tuple[int, float]:
    """Heads whose kept sets differ first, and the widest gap of the scores of what differs."""
    heads, widest = 0, 0.0
    plans = {(each.row, layer): each for each in first.internals for layer in each.layers}
    for layer, head in zip(*(first.evicted_at != second.evicted_at).any(-1).nonzero(), strict=True):
        one, two = first.evicted_at[layer, head], second.evicted_at[layer, head]
        row = min(one[one != two].min(), two[one != two].min())
        changed = ((one == row) != (two == row)).nonzero()[0]
        plan = plans[int(row), first.layers[layer]]
        at = plan.layers.index(first.layers[layer])
        place = {int(pos): slot for slot, pos in enumerate(plan.pos[at, head])}
        scores = plan.scores[at, head]
        exchanged = scores[[place[int(pos)] for pos in changed]]
        largest = abs(scores[plan.pos[at, head] >= 0]).max()
        heads += 1
        widest = max(widest, float(exchanged.max() - exchanged.min()) / float(largest or 1))
    return heads, widest


def judged_error(first: Any, second: Any) -> float:
    """The largest relative difference of two Tables of judged values."""
    a, b = (torch.tensor(each["value"].to_list()).double() for each in (first, second))
    gap = (a - b).abs()
    return float(((gap / a.abs().clamp(min=1e-30)) * (gap > SMALL)).max())


def compare(name: str, model: Any, ids: Sequence[int], prompt: int, device: str) -> list[str]:
    """Capture, replay and judge on the CPU and a device; returns the lines of the report."""
    here = captured(model, ids, prompt)
    budget, options = max(40, prompt // 4), {"interval": 16, "internals": True}
    records = [kvsim.replay(here, each, budget, **options) for each in POLICIES]
    expected = judge(model, here, records)
    moved = model.to(device)
    timed(lambda: captured(moved, ids, prompt), device)  # kernels are loaded
    seconds, there = timed(lambda: captured(moved, ids, prompt), device)
    error = array_error(here, there)
    assert error <= ARRAYS, f"{name}: arrays differ by {error:.2g}, expected {ARRAYS}"
    line = f"{name}: arrays within {error:.1e}; capture {len(ids) / seconds:,.0f} tokens/s"
    total, ties, widest = 0.0, 0, 0.0
    for policy, record in zip(POLICIES, records, strict=True):
        call = lambda policy=policy: kvsim.replay(here, policy, budget, device=device, **options)  # noqa: E731  timed
        seconds, other = timed(call, device)
        heads, gap = differing(record, other)
        assert gap <= TIES, f"{name}, {policy}: scores of exchanged entries differ by {gap:.2g}"
        total, ties, widest = total + seconds, ties + heads, max(widest, gap)
    of_replays = (
        f"  {len(POLICIES)} replays: kept sets equal, {ties} heads up to ties ({widest:.1e}); "
        f"{total:.2f} s, {len(POLICIES) * len(ids) / total:,.0f} tokens/s"
    )
    seconds, values = timed(lambda: judge(moved, here, records), device)
    error = judged_error(expected, values)
    assert error <= JUDGED, f"{name}: judged values differ by {error:.2g}, expected {JUDGED}"
    of_judge = f"  judge: values within {error:.1e}; {seconds:.2f} s for {len(records)} records"
    return [line, of_replays, of_judge]


def run(device: str, layers: str) -> list[str]:
    """Compare two layers of random weights, and tiny."""
    sizes, (prompt, response) = LAYERS[layers]
    generator = torch.Generator().manual_seed(0)

    def ids(vocabulary: int, n: int) -> list[int]:
        return torch.randint(3, vocabulary, (n,), generator=generator).tolist()

    model = random_model(vocab_size=1000, max_position_embeddings=4096, **sizes)
    lines = compare(layers, model, ids(1000, prompt + response), prompt, device)
    model, _ = load_model("tiny")
    return lines + compare("tiny", model, ids(model.config.vocab_size, 160), 120, device)


if __name__ == "__main__":
    smallest = options(__doc__).parse_args().smallest
    if torch.cuda.is_available():
        print(*run("cuda", [*LAYERS][smallest]), sep="\n")
    else:
        print("no GPU here, expected a CUDA device; nothing was compared")
