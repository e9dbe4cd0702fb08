"""Page *Fidelity*: how far each number of a run can be trusted, and what differs between levels."""

from __future__ import annotations

import polars as pl
import streamlit as st

from kvsim.analysis.evidence import EVIDENCE
from kvsim.analysis.registry import METRICS
from kvsim.errors import PolicyError
from kvsim.schema import FIDELITY_MEANING

from .. import cache, controls, downloads, elements, line_charts, readings, runs

#: The option for no other run.
NOTHING = "no other run"


def page() -> None:
    """Show the levels of a run's values, and the same values at two levels."""
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
    _two_levels(run)
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


def _two_levels(run: runs.Run) -> None:
    st.subheader("The same values at two levels", anchor=False)
    folders = controls.runs().items()
    others = {name: path for name, path in folders if cache.Source.of(path) != run.origin}
    about = "a run of the same traces, policies and budgets at another level of fidelity"
    other = controls.choose("Compare with the run", "other", [NOTHING, *others], help=about)
    origins = [run.origin]
    if other != NOTHING:
        origins.append(runs.read(others[other]).origin)
    try:
        differences = runs.levels(tuple(origins), ())
    except PolicyError as error:
        st.warning("These runs cannot be compared.")
        st.text(str(error))
        return
    if differences.height:
        _differences(run, tuple(origins), differences)
        return
    st.info(
        "No value is there at two levels. Two kinds of runs have such values, each with a replay "
        "(open): a prefill that was computed again (semi), measured and saved in Python "
        "(`kvsim.recompute`), and a live run (closed), of `kvsim live`."
    )


def _differences(
    run: runs.Run, origins: tuple[runs.Origin, ...], differences: pl.DataFrame
) -> None:
    st.markdown(
        "The stronger level minus the weaker one, value by value: same trace, policy, budget, "
        "schedule, metric, layer and head. The difference is what the weaker level left out."
    )
    metrics = differences["metric"].unique(maintain_order=True).to_list()
    metric = controls.choose("Metric compared", "compared", metrics)
    variant = runs.variant(differences.filter(metric=metric), metric, "compared_variant")
    selected = {"metric": metric, "variant": variant}
    st.dataframe(
        differences.filter(**selected).drop("params", "prefill", "metric", "variant"),
        hide_index=True,
    )
    by_layer = runs.levels(origins, ("layer",)).filter(**selected)
    line_charts.between(by_layer, key="between")
    elements.reading(readings.between(by_layer))
    elements.fidelity(differences["stronger"])
    downloads.table(differences, f"{run.name}-levels", key="levels")
    downloads.table(by_layer, f"{run.name}-levels-of-{metric}-by-layer", key="levels-by-layer")
