"""`kvsim table`: means of finished runs as a table for a paper or a program."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from kvsim.cli import plotting, shared, show
from kvsim.cli.comparing import latex, markdown
from kvsim.cli.shared import OptionError
from kvsim.schema import LABELS, merged

if TYPE_CHECKING:
    import polars as pl

Form = Literal["table", "csv", "latex", "markdown", "json"]

#: Columns that values may be split by.
_PARTS = ("stage", "layer", "turn", *LABELS, "model", "variant")


def table(
    runs: shared.Runs,
    metric: Annotated[
        list[str] | None,
        shared.several(
            "NAME[,NAME...]",
            "What to show, a column each, of metrics with variants the main one; default: the "
            "main metrics of the runs, in latex and markdown the first two that rank policies.",
        ),
    ] = None,
    by: Annotated[
        list[str] | None,
        shared.several(
            "NAME[,NAME...]",
            f"Split the values by these: {', '.join(_PARTS)}. stage: early, middle and late "
            "layers, as in Table 14 of AMS; turn: of prompts with several; model: where there are "
            "several; variant: all of those of a metric, such as rows=question; the others but "
            "layer are labels of prompts.",
        ),
    ] = None,
    policy: shared.PoliciesOfRuns = None,
    budget: shared.BudgetsOfRuns = None,
    form: Annotated[
        Form, typer.Option("--format", help="csv and json have a row per metric, and every number.")
    ] = "table",
) -> None:
    """Print means of finished runs over prompts, with their 95 % intervals.

    Layers, heads and events are averaged within a prompt first. Nothing is replayed.
    """
    by = by or []
    for name in by:
        if name not in _PARTS:
            raise OptionError(f"--by is {name!r}; expected {', '.join(_PARTS)}")

    data = plotting.read(runs, policy, budget)
    assert data.table is not None  # noqa: S101 - for type checkers; runs always have one
    paper = form in ("latex", "markdown")
    means = _means(data.table, metric, by, most=2 if paper else None)
    if form == "csv":
        from kvsim.analysis.results import csv_text

        show.echo_text(csv_text(means).rstrip())
    elif form == "json":
        show.echo_json(show.cells(means))
    else:
        headers, rows = _wide(means, by)
        if form == "table":
            show.echo_table(headers, rows, right=2 + len(by))
        else:
            show.echo_text({"latex": latex, "markdown": markdown}[form](headers, rows))
        notes = [_meaning(means, by), *(f"Note: {remark}." for remark in merged(data.remarks))]
        show.echo_text("\n".join("% " * (form == "latex") + note for note in ("", *notes)))


def _means(
    table: pl.DataFrame, metrics: list[str] | None, by: list[str], *, most: int | None
) -> pl.DataFrame:
    """Return means over prompts: parts, policy, budget, metric, numbers; most: default metrics."""
    import polars as pl

    from kvsim.analysis.evidence import ranking
    from kvsim.analysis.overview import LIVE_SUMMARY, SUMMARY
    from kvsim.analysis.registry import METRICS
    from kvsim.analysis.registry import metric as metric_named
    from kvsim.analysis.summaries import averages, main_variants, split_by

    measured = set(table.drop_nulls(["policy", "value"])["metric"])
    if metrics is None:
        main = dict.fromkeys((*(ranking(table) if most else ()), *SUMMARY, *LIVE_SUMMARY))
        metrics = [name for name in main if name in measured] or sorted(measured & set(METRICS))
        metrics = metrics[:most]
    if not metrics:
        raise OptionError(
            "the runs have no value of a policy by a metric that this version knows; they have "
            f"{', '.join(sorted(measured)) or 'none'}"
        )
    for name in metrics:
        metric_named(name)
        if name not in measured:
            raise OptionError(
                f"--metric {name}: the runs have no value of it; they have "
                f"{', '.join(sorted(measured)) or 'none'}"
            )
    chosen = main_variants(table, metrics)
    if "variant" in by:
        chosen = table.filter(pl.col("policy").is_not_null(), pl.col("metric").is_in(metrics))
    if "stage" in by:
        chosen, _ = split_by(chosen, "stage")
    missing = [name for name in by if name not in chosen or not chosen[name].count()]
    if missing:
        raise OptionError(
            f"--by {missing[0]}: no value of {', '.join(metrics)} has one; leave it out, or record "
            "prompts with this label"
        )
    means = averages(chosen.drop_nulls(by), by).filter(pl.col("mean").is_not_null())
    if not means.height:
        raise OptionError(
            f"the runs have no mean of {', '.join(metrics)} over prompts; `kvsim metrics "
            f"{metrics[0]}` says what its values are"
        )
    return means.sort(*by, pl.col("metric").cast(pl.Enum(metrics)), maintain_order=True)


def _meaning(means: pl.DataFrame, by: list[str]) -> str:
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


def _wide(means: pl.DataFrame, by: list[str]) -> tuple[list[str], list[list[str]]]:
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
