"""Page *Fidelity*: how far each number of a run can be trusted."""

from __future__ import annotations

import polars as pl
import streamlit as st

from kvsim.analysis.evidence import EVIDENCE
from kvsim.analysis.registry import METRICS
from kvsim.schema import FIDELITY_MEANING

from .. import controls, downloads, elements, line_charts, readings, runs


def page() -> None:
    """Show the levels of a run's values."""
    elements.title(
        "Fidelity",
        "How far the numbers of a run can be trusted: some are exactly those of a live run, others "
        "are approximations. Each bar shows the share of values at each level.",
    )
    run = runs.run()
    counted = runs.shares(run.origin, ("metric", "layer"))
    if not counted.height:
        st.info("This run has no values.")
        runs.provenance(run)
        st.stop()
    measured = _by_metric(run)
    present = set(counted["fidelity"].cast(pl.String))
    for level, meaning in FIDELITY_MEANING.items():
        absent = "" if level in present else " None in this run."
        st.markdown(f"**{level}**: {meaning}.{absent}")
    _by_layer(run, counted, measured)
    runs.provenance(run)


def _by_metric(run: runs.Run) -> list[str]:
    st.subheader("By metric", anchor=False)
    by_metric = runs.shares(run.origin, ("metric",))
    measured: list[str] = by_metric["metric"].unique(maintain_order=True).to_list()
    line_charts.shares(by_metric, "metric", measured, key="by-metric")
    elements.reading(readings.shares(by_metric, "metric"))
    downloads.table(by_metric, f"{run.name}-fidelity-by-metric", key="by-metric")
    return measured


def _by_layer(run: runs.Run, counted: pl.DataFrame, measured: list[str]) -> None:
    st.subheader("By layer", anchor=False)
    start = next((measured.index(name) for name in EVIDENCE[1:] if name in measured), 0)
    metric = controls.choose("Metric by layer", "metric", measured, start)
    by_layer = counted.filter(metric=metric).with_columns(
        place=pl.when(pl.col("layer").is_null())
        .then(pl.lit("no layer"))
        .otherwise(pl.format("layer {}", "layer"))
    )
    order = by_layer.sort("layer", nulls_last=True)["place"].unique(maintain_order=True).to_list()
    line_charts.shares(by_layer, "place", order, key="by-layer")
    elements.reading(readings.shares(by_layer, "place"))
    if metric in METRICS:
        st.caption(f"{metric.replace('_', ' ')}: {METRICS[metric].summary}.")
    downloads.table(
        counted.filter(metric=metric), f"{run.name}-fidelity-of-{metric}-by-layer", key="by-layer"
    )
