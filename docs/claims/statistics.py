"""Source of the page's numbers: the values of every prompt in a file, looked up by row."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from claims.plan import Plan
from kvsim.analysis.results import Result
from kvsim.analysis.summaries import over_layers
from kvsim.analysis.table import COLUMNS
from kvsim.schema import FIDELITY
from kvsim.studies.claims.evidence import Evidence, Seconds, of

Floats = NDArray[np.float64]

#: Columns of stored rows before those of a Table: the prompt, the piece, and the trace.
STORED = ("prompt", "piece", "digest", "tokens", "prompt_tokens")
#: Seconds of an event, as rows: the length of the cache is the budget, the variant the repetition.
_SECONDS = "event_seconds"
#: Metrics of policies that the page looks at layer by layer; of others it has means over layers.
_LAYERED = ("segment_count", "sparsity_compressed")


@dataclass(frozen=True)
class Results:
    """The values of every trace, and the digests of the traces."""

    plan: Plan
    evidence: Evidence
    digests: Sequence[str] = ()

    def of(
        self,
        label: str,
        budget: int,
        metric: str,
        variant: str | None = None,
        layer: int | None = None,
    ) -> Floats:
        """A value for each prompt, NaN where there is none."""
        return self.evidence.value(metric, variant, layer, of=(self.result(label), str(budget)))

    def has(self, label: str) -> bool:
        """Whether a policy was measured."""
        return bool(self._found(label))

    def result(self, label: str) -> Result:
        """The row of the tables; of policies that drop rows, the one after the prompt."""
        found = self._found(label)
        if not found:
            raise KeyError(label)
        return found[0][1]

    def _found(self, label: str) -> Sequence[Any]:
        setting = of(label)
        return self.evidence.found(setting) or self.evidence.of_prompt().found(setting)


def write_values(
    path: Path, plan: Plan, rows: pl.DataFrame, seconds: Seconds, made: Mapping[str, str]
) -> None:
    """Write the rows of all prompts and the seconds of events: all that a page is made of."""
    of_events = [
        dict.fromkeys(rows.columns)
        | {"metric": _SECONDS, "policy": label, "variant": str(repeat), "budget": length}
        | {"value": value}
        for label, taken in seconds.of.items()
        for repeat, each in enumerate(taken.tolist())
        for length, value in zip(seconds.lengths, each, strict=True)
    ]
    table = pl.concat([_of_page(rows), pl.DataFrame(of_events, schema=rows.schema)])
    table.with_columns(pl.col("value", "chance").cast(pl.Float32)).write_parquet(
        path,
        compression_level=19,
        metadata={"made": json.dumps(dict(made)), "plan": str(plan)},
    )


def _of_page(rows: pl.DataFrame) -> pl.DataFrame:
    """The rows with one for all layers, of policies where the page does not look at each."""
    around = "(ams.*|" + "|".join(_bases(rows)) + ")$"
    compared = pl.col("metric").eq("retained_iou") & pl.col("policy").str.contains("^" + around)
    last = pl.col("metric").eq("punctuation_lift") & pl.col("policy").eq("gkv")
    layered = pl.col("policy").is_null() | pl.col("metric").is_in(_LAYERED) | compared | last
    meant = [x for x in rows.columns if x not in ("layer", "value", "chance", "fidelity")]
    of_all = (
        over_layers(rows.filter(~layered), meant)
        .group_by(meant, maintain_order=True)
        .agg(pl.col("value", "chance").mean(), pl.col("fidelity").last())
        .with_columns(layer=pl.lit(None, pl.Int64))
        .select(rows.columns)
    )
    return pl.concat([rows.filter(layered), of_all])


def _bases(rows: pl.DataFrame) -> list[str]:
    """Policies that AMS stands around too, as patterns."""
    names = rows["policy"].drop_nulls().unique(maintain_order=True).to_list()
    inside = [name.removeprefix("ams+") for name in names if name.startswith("ams+")]
    return ["tova", *(name.replace("+", r"\+") for name in inside if name in names)]


def stored_rows(path: Path) -> pl.DataFrame:
    """Rows of the prompts of such a file."""
    return pl.read_parquet(path).with_columns(
        pl.col("value", "chance").cast(pl.Float64),
        pl.col("fidelity").cast(pl.String).cast(pl.Enum(FIDELITY)),
    )


def read_values(path: Path, plan: Plan) -> Results:
    """Read what `write_values` wrote for this plan."""
    written = pl.read_parquet_metadata(path)
    if written["plan"] != str(plan):
        raise SystemExit(f"{path} has values of {written['plan']}; expected {plan}")
    rows = stored_rows(path)
    events = pl.col("metric") == _SECONDS
    seconds = rows.filter(events)
    lengths = seconds["budget"].unique(maintain_order=True).to_list()
    taken = {
        str(label): each["value"].to_numpy().reshape(-1, len(lengths))
        for (label,), each in seconds.partition_by(
            "policy", as_dict=True, maintain_order=True
        ).items()
    }
    rows = rows.filter(~events).drop_nulls("trace")  # files of 0.1.0 have what stages took
    traces = rows.unique("prompt", keep="first", maintain_order=True)
    return Results(
        plan,
        Evidence(rows.select(list(COLUMNS)), Seconds(lengths, taken) if taken else None),
        traces["digest"].to_list(),
    )
