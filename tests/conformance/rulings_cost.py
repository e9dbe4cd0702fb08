"""What the deviations of docs/rulings.md cost: judged KL of a definition and of the same deviating.

    PYTHONPATH=tests python -m conformance.rulings_cost TRACE [TRACE ...]

The traces are of SmolLM2-135M, of which `kvsim capture --model smollm2` records every layer.
Results are written to docs/rulings/costs.json.
"""

import json
import sys

import polars as pl
from conformance.released_rules import blended, grouped, stairs
from conformance.rulings import FOLDER

import kvsim
from kvsim import policy
from kvsim.analysis.live.table import measure_judged
from kvsim.analysis.table import JUDGED
from kvsim.recorder import load_model
from kvsim.runner.judging import Judge
from kvsim.runner.model import RunningModel

BUDGET, INTERVAL = 96, 32


def pairs():
    """By deviation: the definition and the deviating policy, the latter's budget, the interval."""
    rocket = policy("snapkv", window=32, pool_kernel=63)
    ada, pyramid = policy("adakv+snapkv", window=32), policy("pyramidkv", window=8)
    original, slots = policy("rkv@original"), policy("rkv@original", slot_order="topk")
    streaming = policy("streaming_llm")
    return {
        "mean-before-pool": (rocket, grouped(rocket), BUDGET, None),
        "blended quotas": (ada, blended(ada), BUDGET, None),
        "stairs and a window on top": (pyramid, stairs(pyramid), BUDGET, None),
        "one-fewer": (streaming, streaming, BUDGET - 1, INTERVAL),
        "top-k order of R-KV": (original, slots, BUDGET, INTERVAL),
        "sinks-on-top": (streaming, streaming, BUDGET + 4, INTERVAL),
    }


def main():
    """Judge each pair on all traces."""
    model, _ = load_model("smollm2")
    running = RunningModel(model)
    judged = [(trace, Judge(running, trace)) for trace in map(kvsim.open_trace, sys.argv[1:])]
    costs = {}
    for name, (rule, other, budget, interval) in pairs().items():
        values = [
            [
                _kl(judge, trace, kvsim.replay(trace, each, size, interval=interval, prefill=True))
                for trace, judge in judged
            ]
            for each, size in ((rule, BUDGET), (other, budget))
        ]
        costs[name] = {"prompts": len(judged), "definition": values[0], "deviating": values[1]}
        print(name, costs[name], flush=True)
        (FOLDER / "costs.json").write_text(json.dumps(costs, indent=1) + "\n", "utf-8")


def _kl(judge, trace, record):
    """Mean KL of the rows of the response, nats."""
    table = measure_judged(trace, [record], judge.outcomes([record]), JUDGED)
    return round(table.filter(pl.col("metric") == "response_kl")["value"].mean(), 5)


if __name__ == "__main__":
    main()
