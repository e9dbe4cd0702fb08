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
    """Print means over prompts, a row per policy, budget and part, a column per metric."""
    for name in by:
        if name not in PARTS:
            raise OptionError(f"--by is {name!r}; expected {', '.join(PARTS)}")
    means = _means(table, metrics, by)
    if form == "json":
        show.echo_json(show.cells(means))
    elif form == "csv":
        from kvsim.analysis.results import csv_text

        show.echo_text(csv_text(means).rstrip())
    else:
        show.echo_table(*_wide(means, by), right=2 + len(by))
        show.echo_text(f"\n{_meaning(means, by)}")
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
    if "stage" in by:
        chosen, _ = split_by(chosen, "stage")
    missing = [name for name in by if name not in chosen or not chosen[name].count()]
    if metrics and missing:
        raise OptionError(f"--by {missing[0]}: no value of {', '.join(metrics)} has one")
    means = averages(chosen.drop_nulls(by), by).filter(pl.col("mean").is_not_null())
    if not means.height:
        raise OptionError(
            "the runs have no mean over prompts of a metric that this version knows; they have "
            f"values of {known}"
        )
    return means.sort(*by, pl.col("metric").cast(pl.Enum(metrics)), maintain_order=True)


def _meaning(means: pl.DataFrame, by: Sequence[str]) -> str:
    most = means.group_by("metric", maintain_order=True).max().select("metric", "n")
    counts = dict(most.iter_rows())
    parts = bool(by) and max(counts.values()) > 1
    prompts = "up to " * parts + show.counts(counts, "prompt")
    labels = ", ".join(sorted(means["fidelity"].cast(str).unique()))
    return (
        f"Means over {prompts}, of layers, heads and events within a prompt first"
        f"{show.brackets(max(means['n']))}; chance: of random sets. "
        f"Fidelity, the weakest of the values in a mean: {labels}."
    )


def _wide(means: pl.DataFrame, by: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Return headers and rows, a column per metric, and next to it chance where there is one."""
    metrics = means["metric"].unique(maintain_order=True).to_list()
    with_chance = set(means.drop_nulls("chance")["metric"])
    columns = [x for name in metrics for x in (name, *[f"{name} chance"] * (name in with_chance))]
    keys = [*by, "policy", "params", "requested", "interval", "prefill"]
    rows: dict[tuple[object, ...], dict[str, str]] = {}
    for row in means.iter_rows(named=True):
        cells = rows.setdefault(tuple(row[key] for key in keys), {})
        form = show.metric_format(row["metric"])
        cells[row["metric"]] = show.interval(form, row["mean"], row["low"], row["high"])
        cells[f"{row['metric']} chance"] = show.number(row["chance"], form)
    shown = len(by) + 1
    lines = [
        [*map(str, key[:shown]), str(key[shown + 1]), *(cells.get(x, "-") for x in columns)]
        for key, cells in rows.items()
    ]
    return [*by, "policy", "budget", *columns], lines
