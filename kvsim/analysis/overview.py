"""Summary of a run, one row per policy and budget, for commands and notebooks."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from kvsim.analysis.output.metrics import REGRET
from kvsim.analysis.registry import METRICS
from kvsim.analysis.results import REQUESTED, of_model
from kvsim.analysis.summaries import main_variants, per_prompt
from kvsim.analysis.table import FACTS, OF_RECORD

#: Metrics of the summary, in the order in which they are shown.
SUMMARY = (
    *("entries_seen", "output_error", "layer_error", "weighted_error", "retained_mass", "wipeout"),
    *("retained_iou", "needle_recall", "needle_wipeout"),  # of traces with a needle
)

#: Metrics of the predictions of the model, live or as a judge of the replay.
PREDICTIONS = ("response_kl", "nll_increase", "top_agreement")

#: Metrics of the predictions of a running model.
LIVE_SUMMARY = (
    *("entries_seen", *PREDICTIONS, "layer_error", "output_error"),
    *("retained_iou", "needle_recall", "answer_right", "answer_score", "answer_kept"),
    "peak_share",
)


def fidelity_shares(table: pl.DataFrame, by: Sequence[str] = ()) -> pl.DataFrame:
    """Return the share of each level of fidelity among the values that a summary shows.

    Of the metrics of `SUMMARY` and `LIVE_SUMMARY`, or of all in a Table that has none of them.
    Each counts once in a layer of a cell, however many heads and events have values, so that the
    share of a run is the same whatever else was measured. Columns: `by`, fidelity, values, share.
    """
    measured = {*METRICS} & {*table.drop_nulls(["policy", "value"])["metric"]}
    shown = measured & {*SUMMARY, *LIVE_SUMMARY} or measured
    of_cell = ("trace", "policy", "params", "budget", "share", "interval", "prefill", "metric")
    values = main_variants(table, shown).drop_nulls("value")
    values = values.unique([*of_cell, "layer", "fidelity"], maintain_order=True)
    counted = values.group_by(*by, "fidelity", maintain_order=True).agg(values=pl.len())
    count, total = pl.col("values"), pl.col("values").sum()
    return counted.with_columns(share=count / (total.over(*by) if by else total))


def summarise(
    table: pl.DataFrame, metrics: Sequence[str] = (*PREDICTIONS, *SUMMARY, *REGRET)
) -> pl.DataFrame:
    """One row per policy, parameters and budget as requested, with the mean of each metric.

    One per model, too, where traces are of several. Facts about the policy (`FACTS`) are columns.

    Means over layers and heads within a trace, then over traces, of each metric's main variant;
    layers of some metrics are added up (`layer_error`; `Metric.layers`). `wipeout` is that of
    32-token regions of which nothing is left, after the last event; `iou_chance` is the chance of
    `retained_iou`; `exact` is the share of the values of the row whose fidelity is exact
    (`fidelity_shares`). Null where a policy has no value of the main variant. Metrics that this
    version does not know have no column.
    """
    metrics = [name for name in metrics if name in METRICS]
    model = of_model(table)
    keys = ["policy", "params", "requested", "interval", "prefill", *model]
    chosen = table.drop_nulls("policy").filter(pl.col("metric").is_in(metrics))
    chosen = chosen.with_columns(requested=REQUESTED)
    wide = chosen.unique([*keys, "trace"], keep="first", maintain_order=True)
    budget = pl.col("budget").mean().round().cast(pl.Int64)
    wide = wide.group_by(keys, maintain_order=True).agg(budget, pl.col("share", *FACTS).first())
    values = per_prompt(main_variants(chosen, metrics), model)
    by_metric = values.group_by(*keys, "metric", maintain_order=True)
    means = by_metric.agg(pl.col("value", "chance").mean())
    of_metric = means.pivot(on="metric", index=keys, values="value", maintain_order=True)
    chance = means.filter(metric="retained_iou").select(*keys, iou_chance="chance")
    levels = fidelity_shares(table.with_columns(requested=REQUESTED), keys)
    exact = levels.group_by(keys).agg(
        exact=pl.col("share").filter(pl.col("fidelity") == "exact").sum()
    )
    for more in (of_metric, chance, exact):
        wide = wide.join(more, on=keys, how="left", nulls_equal=True, maintain_order="left")
    measured = [name for name in metrics if name in wide.columns]
    if "retained_iou" in measured:
        measured.insert(measured.index("retained_iou") + 1, "iou_chance")
    return wide.select(*OF_RECORD, *model, *measured, "exact")
