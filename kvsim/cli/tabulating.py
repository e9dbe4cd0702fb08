"""`kvsim compare --by`: means of finished runs as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from kvsim.cli import show
from kvsim.cli.shared import OptionError
from kvsim.schema import LABELS

if TYPE_CHECKING:
    import polars as pl

#: Columns that values may be split by.
PARTS = ("stage", "layer", "turn", *LABELS, "model", "variant")


def echo_means(
    table: pl.DataFrame,
    remarks: Sequence[str],
    metrics: Sequence[str] | None,
    by: Sequence[str],
    form: Literal["table", "csv", "json"],
) -> None:
    """Print means over prompts, a row per policy, budget, part and metric."""
    for name in by:
        if name not in PARTS:
            raise OptionError(f"--by is {name!r}; expected {', '.join(PARTS)}")
    means = _means(table, metrics, by)
    if form == "json":
        show.echo_json(show.cells(means))
        return
    if form == "csv":
        from kvsim.analysis.results import csv_text

        show.echo_text(csv_text(means).rstrip())
        return
    rows = []
    for row in means.iter_rows(named=True):
        form_of = show.metric_format(row["metric"])
        cells = {name: str(row[name]) for name in (*by, "policy")}
        cells |= {"budget": row["requested"], "metric": row["metric"]}
        cells["mean"] = show.interval(form_of, row["mean"], row["low"], row["high"])
        cells["chance"] = show.number(row["chance"], form_of)
        rows.append(cells | {"prompts": f"{row['n']} of {row['of']}", "fidelity": row["fidelity"]})
    show.echo_rows(rows, right=3 + len(by))
    show.echo_text(
        "\nMeans over prompts, of layers, heads and events within a prompt first"
        f"{show.brackets(max(means['n']))}; chance: of random sets; fidelity: the weakest of the "
        "values in a mean."
    )
    show.echo_notes(remarks)


def _means(table: pl.DataFrame, metrics: Sequence[str] | None, by: Sequence[str]) -> pl.DataFrame:
    """Return means over prompts: parts, policy, budget, metric, numbers."""
    import polars as pl

    from kvsim.analysis.overview import LIVE_SUMMARY, SUMMARY
    from kvsim.analysis.registry import METRICS
    from kvsim.analysis.registry import metric as metric_named
    from kvsim.analysis.summaries import averages, main_variants, split_by

    measured = set(table.drop_nulls(["policy", "value"])["metric"])
    if metrics is None:
        main = dict.fromkeys((*SUMMARY, *LIVE_SUMMARY))
        metrics = [name for name in main if name in measured] or sorted(measured & set(METRICS))
    known = ", ".join(sorted(measured)) or "none"
    for name in metrics:
        metric_named(name)
        if name not in measured:
            raise OptionError(f"--metric {name}: the runs have no value of it; they have {known}")
    chosen = main_variants(table, metrics)
    if "variant" in by:
        chosen = table.filter(pl.col("policy").is_not_null(), pl.col("metric").is_in(metrics))
    chosen, _ = split_by(chosen, by)
    means = averages(chosen.drop_nulls(by), by).filter(pl.col("mean").is_not_null())
    if not means.height:
        raise OptionError(
            f"no value of {', '.join(metrics) or 'a metric that this version knows'} has "
            f"{' and '.join(by)}; the runs have {known}"
        )
    return means.sort(*by, pl.col("metric").cast(pl.Enum(metrics)), maintain_order=True)
