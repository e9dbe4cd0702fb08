"""`kvsim compare`: which policy is best at each budget, and how sure that is; or means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kvsim.cli import plotting, shared, show
from kvsim.cli.runs import budget_text, fidelity_line
from kvsim.cli.shared import OptionError
from kvsim.schema import LABELS, merged, plural

if TYPE_CHECKING:
    import polars as pl

    from kvsim.analysis.comparison import Comparison

#: Columns that values may be split by.
PARTS = ("stage", "layer", "turn", *LABELS, "model", "variant")


def compare(
    runs: shared.Runs,
    metric: Annotated[
        list[str] | None,
        shared.several(
            "NAME[,NAME...]",
            "The metric that ranks policies, with a better direction, as `kvsim metrics` lists it. "
            "Default: the first that all runs have of response_kl (live, judged), weighted_error, "
            "layer_error, output_error. Several metrics, and --by, print means and no ranks.",
        ),
    ] = None,
    by: Annotated[
        list[str] | None,
        shared.several(
            "NAME[,NAME...]",
            f"Print means instead, split by these: {', '.join(PARTS)}. stage: early, middle and "
            "late layers, as in Table 14 of AMS; turn: for prompts with several; variant: all "
            "variants of a metric; the others, except layer and model, are labels of prompts.",
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A policy that each other one is compared with, by p-values corrected for their "
            "number.",
        ),
    ] = None,
    margin: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="A policy counts as good as the best if it is worse by at most this share "
            "(default: 0.1), or number if values may be below 0.",
        ),
    ] = None,
    policy: shared.PoliciesOfRuns = None,
    budget: shared.BudgetsOfRuns = None,
    form: Annotated[
        Literal["table", "csv"],
        typer.Option("--format", help="How the result is printed; csv has every number."),
    ] = "table",
    as_json: shared.Json = False,
) -> None:
    """Say which policies of finished runs could be the best at each budget, and how sure that is.

    Also how much worse each may be, by task if the order depends on it. Fewer than 6 prompts say
    nothing about other prompts.
    """
    means = bool(by) or len(metric or ()) > 1
    one = "is of one metric that ranks; leave it, or --by, out"
    conflicts = {
        f"--json and --format {form} were both given; expected one": as_json and form != "table",
        f"--against {one}": means and against is not None,
        f"--margin {one}": means and margin is not None,
    }
    shared.refuse(conflicts)

    from kvsim.analysis.comparison import compare as compared
    from kvsim.analysis.evidence import shared as shared_metric
    from kvsim.analysis.results import csv_text
    from kvsim.analysis.sentences import lines

    saved, table, remarks = plotting.read(runs, policy, budget)
    if means:
        echo_means(table, remarks, metric, by or (), "json" if as_json else form)
        return
    ranking, better = (metric[0], []) if metric else shared_metric([x.table for x in saved])
    comparison = compared(table, ranking, against=against, margin=margin)
    remarks = list(dict.fromkeys([*better, *comparison.remarks, *remarks]))
    if as_json:
        fidelity = show.fidelity_shares(table.filter(metric=ranking))
        show.echo_json(_document(comparison, remarks, fidelity))
        return
    if form == "csv":
        show.echo_text(csv_text(comparison.table).rstrip())
        return
    notes = [*_meaning(comparison), fidelity_line(table.filter(metric=ranking))]
    notes += [f"Note: {remark}." for remark in merged(remarks)]
    verdict = [*lines(comparison)] or ["No verdict: no budget has two policies to compare."]
    show.echo_text("\n".join((*verdict, "", _lead(comparison), "")))
    show.echo_table(*_ranking(comparison), right=2)
    show.echo_text("\n".join(("", *notes)))


def _document(
    comparison: Comparison, remarks: Sequence[str], fidelity: Mapping[str, float]
) -> dict[str, Any]:
    from kvsim.analysis.sentences import lines

    return {
        "metric": comparison.metric,
        "better": comparison.better,
        "against": comparison.against,
        "margin": comparison.scale.margin,
        "prompts": comparison.traces,
        "verdict": [verdict.describe() for verdict in comparison.verdicts],
        "verdict_text": [*lines(comparison)],
        "cells": show.cells(comparison.table),
        "fidelity": fidelity,
        "remarks": remarks,
    }


def _lead(comparison: Comparison) -> str:
    from kvsim.analysis.registry import METRICS

    entry, counts = METRICS[comparison.metric], comparison.overall["n"].unique().sort()
    fewest, count = counts[0], counts[-1]
    prompts = f"{fewest} to {count} prompts" if fewest < count else f"{count} prompts"
    prompts = "one prompt" if count == 1 else prompts
    layers = "summed over layers" if entry.layers == "sum" else "of layers, heads and events"
    return (
        f"{comparison.metric} ({entry.unit}, {comparison.better} is better): mean over {prompts}, "
        f"{layers} within a prompt first{show.brackets(count)}."
    )


def _ranking(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Headers and rows of the ranking over all tasks, without columns that say nothing."""
    from kvsim.analysis.sentences import bound
    from kvsim.core.arguments import share_of

    form = show.metric_format(comparison.metric)
    signed = "+" + form.lstrip("+")
    rows = []
    for row in comparison.overall.iter_rows(named=True):
        share = share_of(row["requested"])
        ranks = dict.fromkeys(x for x in (row["rank_low"], row["rank_high"]) if x is not None)
        cells = {
            "budget": budget_text(round(row["entries"]), share, row["per_query_head"]),
            "policy": row["policy"],
            "rank": show.number(row["rank"], "d"),
            "ranks": " to ".join(map(str, ranks)) or "-",
            "mean": show.interval(form, row["mean"], row["low"], row["high"]),
            "leads on": "-" if row["leads"] is None else f"{row['leads']} of {row['n']}",
            "could be best": {True: "yes", False: "no", None: "-"}[row["could_be_best"]],
            "worse by at most": bound(row["worse_by"], comparison.metric, comparison.scale) or "-",
            f"minus {comparison.against}": show.number(row["difference"], signed),
            "p (Holm)": show.number(row["p_holm"], ".2g"),
            "verdict": row["verdict"] or "-",
            "entries seen": show.number(row["seen"], ".0f") + "!" * row["unfair"],
        }
        rows.append(cells)
    shown = [name for name in rows[0] if any(row[name] != "-" for row in rows)]
    return shown, [[row[name] for name in shown] for row in rows]


def _meaning(comparison: Comparison) -> list[str]:
    out = ["leads on: prompts on which no other policy is better."]
    if comparison.table["could_be_best"].count():
        out[0] += (
            " could be best: the policies marked yes hold the best one with 95 %, at this budget. "
            "worse by at most: than the best one, each with 95 % on its own."
        )
    if comparison.table["rank_low"].count():
        out[0] += " ranks: the first and the last possible one, all of them right with 95 %."
    if comparison.table["p"].count():
        out[0] += (
            f" Differences to {comparison.against} are paired by prompt; p: from flips of their "
            f"signs, corrected for {plural(comparison.table['p'].count(), 'comparison')} (Holm); "
            "equivalent: neither is worse by more than the margin."
        )
    if comparison.table["unfair"].any():
        out.append(
            "!: rows see over 5 % more entries than under another policy at the same budget, so "
            "part of the difference may be due to that."
        )
    return out


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
        "\nMeans over prompts, after layers, heads and events within a prompt"
        f"{show.brackets(max(means['n']))}; chance: the value of random sets; fidelity: the "
        "weakest label of the values in a mean."
    )
    show.echo_notes(remarks)


def _means(table: pl.DataFrame, metrics: Sequence[str] | None, by: Sequence[str]) -> pl.DataFrame:
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
