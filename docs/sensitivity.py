# ruff: noqa: INP001, T201 - a script, not a module, and it prints a table
"""Which weights of layers make layer errors order policies at one budget: a part of fidelity.md.

    python docs/sensitivity.py           print the table of the stored values
    python docs/sensitivity.py --measure measure the sensitivity of layers, and layer errors, again

`sensitivity-results.parquet` has for each model, prompt, policy and budget the error of each layer,
and without policy and budget the sensitivity of each layer. `part`: `choice` for the half of the
prompts under the half of the policies on which weights were chosen, `test` for the others under the
others. Live KL is that of `validity-results.parquet`, of the same prompts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import polars as pl
import validity
from numpy.typing import NDArray
from scipy.optimize import nnls

import kvsim
from kvsim.sweeps import replay_all

RESULTS = Path(__file__).with_name("sensitivity-results.parquet")
_KEYS = ("model", "prompt", "policy", "budget")

Values = NDArray[np.float64]
Score = Callable[[Values, Values], Values]


def values(model: str) -> pl.DataFrame:
    """Errors and sensitivity of layers, and live KL, of each prompt, policy and budget."""
    stored = pl.read_parquet(RESULTS).filter(model=model)
    live = validity.values().filter(metric="response_kl", fidelity="closed", model=model)
    of_prompt = stored.filter(pl.col("policy").is_null())
    return (
        stored.filter(pl.col("policy") != "random")
        .join(of_prompt.select("prompt", sensitivity="layers"), on="prompt")
        .join(live.select(*_KEYS, kl="value"), on=_KEYS)
        .sort("prompt", "policy")
    )


def fitted(model: str) -> Values:
    """Weights of squared errors that fit live KL on the part `choice`, relative to its root."""
    rows = values(model).filter(part="choice")
    kl = rows["kl"].to_numpy().astype(np.float64)
    scale = 1 / np.sqrt(np.maximum(kl, 1e-3))
    squares = np.array(rows["layers"].to_list()) ** 2
    weights: Values = nnls(squares * scale[:, None], kl * scale)[0]
    return weights


def scores(model: str) -> dict[str, Score]:
    """Numbers of replays, from errors and sensitivity of layers [n, layer]."""
    weights = fitted(model)
    return {
        "`layer_error`: sum of errors": lambda x, _: x.sum(-1),
        "sum of squares": lambda x, _: (x**2).sum(-1),
        "sum of errors times the root of sensitivity": lambda x, s: (x * np.sqrt(s)).sum(-1),
        "`weighted_error`: sum of squares times sensitivity": lambda x, s: (x**2 * s).sum(-1),
        "squares, weights fitted to live KL": lambda x, _: x**2 @ weights,
    }


def cell(rows: pl.DataFrame, score: Score) -> str:
    """Rank correlations with live KL."""
    predicted = score(*(np.array(rows[name].to_list()) for name in ("layers", "sensitivity")))
    shape = rows["prompt"].n_unique(), -1
    return validity.cell(predicted.reshape(shape), rows["kl"].to_numpy().reshape(shape))


def part() -> Iterator[str]:
    """The lines of the table."""
    budgets = [(model, b) for model, (_, all_of, _) in validity.STUDIES.items() for b in all_of]
    yield f"| other prompts, other policies | {' | '.join(f'{m} {b}' for m, b in budgets)} |"
    yield "| --- " + "| ---: " * len(budgets) + "|"
    rows = {model: values(model).filter(part="test") for model in validity.STUDIES}
    by_model = {model: scores(model) for model in validity.STUDIES}
    for label in by_model["tiny"]:
        cells = (cell(rows[m].filter(budget=b), by_model[m][label]) for m, b in budgets)
        yield f"| {label} | {' | '.join(cells)} |"


def measure() -> pl.DataFrame:
    """Record the prompts and replay the policies of `validity` again; takes ten minutes."""
    out = []
    for name, _, trace, cells, terms in validity.recorded():
        table = replay_all([trace], *cells, metrics=["layer_error"], **terms).table
        out.append(_stored(name, trace, table))
    parts = pl.read_parquet(RESULTS).select(*_KEYS, "part")
    return pl.concat(out).join(parts, on=_KEYS, nulls_equal=True, maintain_order="left")


def _stored(model: str, trace: kvsim.Trace, table: pl.DataFrame) -> pl.DataFrame:
    errors = (
        table.sort("layer")
        .group_by("policy", "budget", maintain_order=True)
        .agg(layers=pl.col("value").cast(pl.Float32))
        .with_columns(pl.col("budget").cast(pl.Int32))
    )
    sensitivity = {
        "policy": [None],
        "budget": [None],
        "layers": [[*trace.header.layer_sensitivity]],
    }
    both = pl.concat([errors, pl.DataFrame(sensitivity, schema=errors.schema)])
    named = both.with_columns(model=pl.lit(model), prompt=pl.lit(trace.name))
    return named.select(*_KEYS, "layers")


if __name__ == "__main__":
    if "--measure" in sys.argv[1:]:
        measure().write_parquet(RESULTS)
    print("\n".join(part()))
