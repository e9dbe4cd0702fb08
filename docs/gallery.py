# ruff: noqa: INP001 - a script, not a module, and it says what it did
"""Two pictures of figures.md from ten texts of SmolLM2: lift_bars and iou_by.

    python docs/gallery.py               draw them from gallery.parquet: seconds
    python docs/gallery.py --measure     record the texts and replay policies over them: minutes

A text has 1,024 tokens of prompt and 128 of response; events follow the prompt and every 32 rows.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import polars as pl
from scoring_plan import Workload
from scoring_prompts import prompt_of
from study import picture

import kvsim
from kvsim.analysis.kept.text import kept_positions, lifts
from kvsim.plots import iou_by
from kvsim.plots.records import _draw_lifts
from kvsim.recorder import load_model

DOCS = Path(__file__).parent
VALUES = DOCS / "gallery.parquet"
POLICIES = ("random", "streaming_llm", "h2o", "tova", "snapkv", "expected_attention")
TEXTS, BUDGET, EVENTS, LIFTED = 10, 128, 32, "snapkv"
#: Positions of all texts that a token string must hold.
LEAST = 20


@cache
def _model() -> tuple[Any, Any]:
    return load_model("smollm2")


def measure(number: int) -> pl.DataFrame:
    """Return the IoU of each policy by layer, and of one the share kept of each token string."""
    model, tokenizer = _model()
    prompt = prompt_of(Workload("documents", response=128), number, tokenizer)
    trace = kvsim.capture(model, tokenizer, prompt, sensitivity=False)
    parts = []
    for name in POLICIES:
        record = kvsim.replay(trace, name, BUDGET, interval=EVENTS, prefill=True)
        table = kvsim.measure(trace, record, "retained_iou").filter(variant="")
        of_layer = table.group_by(pl.exclude("head", "value", "chance"), maintain_order=True)
        parts.append(of_layer.agg(pl.col("value", "chance").mean()))
        if name == LIFTED:
            kept = kept_positions(trace, record, trace.n_layers - 1)
    return pl.concat([*parts, kept], how="diagonal")


def stored(tables: Iterable[pl.DataFrame]) -> pl.DataFrame:
    """Return the values of all texts, those of a token string summed over its positions."""
    values = pl.concat(tables)
    strings = values.drop_nulls("token").group_by("token", maintain_order=True)
    sums = strings.agg(pl.col("rate", "count").sum())
    return pl.concat(
        [values.drop_nulls("metric").drop("token", "rate", "count"), sums], how="diagonal"
    )


def draw() -> None:
    """Draw both pictures from the stored values."""
    values = pl.read_parquet(VALUES)
    picture(iou_by(values.drop_nulls("metric")), DOCS / "figures" / "iou_by.png")
    kept = values.drop_nulls("token").select("token", "rate", "count")
    last = values.filter(pl.col("layer") == pl.col("layer").max(), policy=LIFTED)
    subject = f"{TEXTS} texts of SmolLM2: {LIFTED}, budget {BUDGET}\nlast layer, all heads"
    figure = _draw_lifts(
        lifts(kept), LEAST, f"{subject}, with 95 % interval", last["fidelity"].unique()
    )
    picture(figure, DOCS / "figures" / "lift_bars.png")


if __name__ == "__main__":
    if sys.argv[1:] == ["--measure"]:
        stored(map(measure, range(TEXTS))).write_parquet(VALUES, compression="zstd")
    draw()
