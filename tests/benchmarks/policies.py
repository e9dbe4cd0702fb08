"""What policies cost: scoring and choosing, beside measuring the outcome.

    python tests/benchmarks/policies.py            # the sizes of the aim, a few minutes
    python tests/benchmarks/policies.py --smallest # seconds; what the test suite runs

Prints for every policy the time of a whole replay (scoring and choosing at all events) in units of
the ideal time of its output error: 4 x dim x the entries that query heads see in rows after the
prompt, at the fp32 matrix rate.
"""

import sys
from pathlib import Path

import torch

import kvsim
from kvsim.policies import CATALOGUE, names

sys.path.append(str(Path(__file__).parents[1]))
from against import Size, arrays, fresh
from probes import repeated

from harness import best, matrix_rate, report
from traces import short_lengths

AIM = Size(1, 4, 7, 128, tokens=4096, prompt=512, budget=512, interval=512, repeats=3)
SMALLEST = Size(1, 2, 2, 32, tokens=320, prompt=128, budget=64, interval=64, matrix=256, repeats=1)


def run(size: Size) -> tuple[dict[str, float], list[str]]:
    """Replay of each policy in units of the ideal output-error time."""
    given = arrays(size)
    generator = torch.Generator().manual_seed(1)
    hidden = size.heads * size.group * size.dim
    given["o_proj"] = torch.randn(
        (size.layers, size.heads * size.group, size.dim, hidden), generator=generator
    )
    given |= repeated(given["q"], given["k"], size.prompt)
    rate = matrix_rate(size.matrix)
    head = f"threads {torch.get_num_threads()}, torch {torch.__version__}"
    units, lines = {}, [head, f"{size}"]
    for name in (*names(), "ams+expected_attention", "adakv+expected_attention"):
        if name in ("full", "oracle", "random"):
            continue
        base = name.partition("+")[0]
        entry = CATALOGUE[base.partition("@")[0]]
        if entry.kind == "propagation":  # part of the prefill, not of an event
            continue
        full = name if "+" in name or entry.innermost or entry.default else f"{name}+tova"
        # the prompt fills the budget here; a policy that pins it would keep nothing else
        pinned = {"protect_prompt": False} if "protect_prompt" in entry.parameters else {}
        policy = kvsim.policy(full, **{**entry.required, **pinned, **short_lengths(base)})
        if name == "rpc":
            continue  # its cache grows, so there is no ideal time at this budget
        trace = fresh(size, given)
        record = kvsim.replay(trace, policy, size.budget, interval=size.interval)
        seconds = best(
            lambda p=policy: kvsim.replay(
                fresh(size, given), p, size.budget, interval=size.interval
            ),
            size.repeats,
        )
        per_head = size.group if record.evicted_at.shape[1] == size.heads else 1
        seen = sum(int(record.kept(row).sum()) for row in range(size.prompt, size.tokens))
        ideal = 4 * size.dim * seen * per_head / rate
        units[full] = seconds / ideal
        rate = max(rate, matrix_rate(size.matrix)) if len(units) % 10 == 0 else rate
    for name, unit in sorted(units.items(), key=lambda pair: pair[1]):
        lines.append(f"{name:34} {unit:6.3f}")
    return units, lines


if __name__ == "__main__":
    report(__doc__, run, (AIM,), (SMALLEST,), "policies")
