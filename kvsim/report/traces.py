"""The sections of traces: what they say before any policy evicts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl
from markupsafe import Markup

from kvsim.analysis.registry import METRICS
from kvsim.analysis.summaries import averages
from kvsim.registry import Ordered
from kvsim.report.html import cell, details, section, table_of, tag
from kvsim.report.study import Section, Study
from kvsim.schema import object_at, plural

#: Layers at most in a table without a click.
_LAYERS = 8

#: A column: its heading, the metric and the variant, and whether chance stands below.
Column = tuple[str, str, str, bool]


def _traces(study: Study) -> str:
    count = len(study.traces)
    note = (
        "The sections down to the claims of the papers say what these traces are like before any "
        "policy evicts. Of one prompt there are no intervals."
        if count == 1
        else f"The sections down to the claims of the papers say what {count} traces are like "
        "before any policy evicts: means over prompts, of layers and heads within a prompt first; "
        "in brackets the 95 % bootstrap interval over at least 6 prompts. A number of prompts in "
        "parentheses means that the others could not be measured. Figures of one trace are of "
        f"{study.first.trace.name}."
    )
    rows = [
        [
            trace.name,
            str(object_at(trace.meta, "model").get("name", "")),
            *(str(n) for n in (trace.n_pos, trace.prompt_len, trace.n_layers)),
            str(trace.part().n_qheads),
            tag("code", trace.digest),
        ]
        for trace in study.traces
    ]
    head = ["trace", "model", "tokens", "of the prompt", "layers", "query heads", "digest"]
    return section("What the traces say", note, details(table_of(head, rows), "the traces"))


def trace_averages(study: Study, table: pl.DataFrame, by: Sequence[str] = ()) -> pl.DataFrame:
    """Return `averages` that count all traces, those without a row included."""
    return averages(table, by).with_columns(of=pl.lit(len(study.traces)))


def by_layer(study: Study, columns: Sequence[Column], *, together: bool = True) -> str:
    """A row for each layer, below one for all of them `together`; many layers on demand."""
    wanted = [
        (pl.col("metric") == name) & (pl.col("variant") == variant)
        for _, name, variant, _ in columns
    ]
    table = study.table.filter(pl.any_horizontal(wanted))
    layers = trace_averages(study, table, by=["layer"])
    parts = [(str(layer), layers.filter(layer=layer)) for layer in sorted(layers["layer"].unique())]
    hover = Markup('<span title="{}">{}</span>')
    head = ["layer", *(hover.format(METRICS[name].summary, title) for title, name, _, _ in columns)]

    def shown(parts: Sequence[tuple[str, pl.DataFrame]]) -> Markup:
        rows = [
            [label, *(cell(part.filter(metric=n, variant=v), chance=c) for _, n, v, c in columns)]
            for label, part in parts
        ]
        return table_of(head, rows, right=1)

    first = [("all", trace_averages(study, table))] if together else []
    if len(parts) <= _LAYERS:
        return shown([*first, *parts])
    return (shown(first) if first else "") + details(shown(parts), plural(len(parts), "layer"))


def places(n_layers: int, most: int) -> list[int]:
    """Return up to `most` layers, from the first to the last."""
    places = np.linspace(0, n_layers - 1, min(n_layers, most))
    return [int(place) for place in places.round()]


#: Sections of traces in their order on the page, then those of results.
SECTIONS: Ordered[Section] = Ordered(
    "section",
    "kvsim.sections",
    (Section,),
    {"traces": Section(_traces)},
)
