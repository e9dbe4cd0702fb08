"""The sections of runs: results, figures, pairs, splits by label, provenance."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial

import polars as pl
from markupsafe import Markup, escape

from kvsim.analysis.evidence import OUTCOMES, shared
from kvsim.analysis.folder import Saved
from kvsim.analysis.overview import fidelity_shares
from kvsim.analysis.results import labelled
from kvsim.analysis.sentences import answer, tabulated
from kvsim.analysis.summaries import averages, main_variants
from kvsim.plots.summary import over_budgets, pareto
from kvsim.plots.summary import ranking as ranked
from kvsim.report import html
from kvsim.report.html import details, lines, section, table_of, tag
from kvsim.report.study import Study
from kvsim.report.traces import SECTIONS
from kvsim.schema import FIDELITY_MEANING, merged, plural, schedule


def sections(
    table: pl.DataFrame,
    runs: Sequence[Saved],
    remarks: Sequence[str],
    metrics: Sequence[str],
    traces: Study | None,
) -> Iterator[str]:
    """The sections of runs and traces; a section without content is empty.

    table: of all runs, with the metrics of the traces. remarks: of the runs. metrics: beside the
    one that ranks. Results of one policy are called by what tells them apart
    (`kvsim.analysis.results.labels`).
    """
    shown = labelled(table)
    if runs:
        metric, better = shared([run.table for run in runs])
        yield _verdict(shown, metric, [*better, *remarks], metrics)
        yield _results(shown)
    for kind, material in (("traces", traces), ("results", table)):
        if material is not None:
            yield from (each.write(material) for each in SECTIONS.values() if each.of == kind)
    if runs:
        yield _provenance(table, runs)


#: The metrics of the first table; all others are in the Parquet file.
_SHOWN = (
    *OUTCOMES,
    *("output_error", "layer_error", "weighted_error", "retained_mass", "wipeout", "retained_iou"),
    *("middle_coverage", "burst_share", "entries_seen"),
    *("needle_recall", "needle_wipeout", "regret", "possible_share"),
)


def _verdict(
    table: pl.DataFrame, metric: str | None, remarks: Sequence[str], metrics: Sequence[str]
) -> str:
    comparison, said = answer(table, _SHOWN, metric)
    if comparison is None:
        note = html.broken(said) + html.broken(merged(remarks), "Note: ")
        return section("Verdict", note, "") if note else ""
    head, rows = tabulated(comparison)
    means = averages(main_variants(table, metrics))
    for name in (name for name in metrics if name in set(means["metric"])):
        head.append(html.metric_name(name))
        for row in rows:
            part = means.filter(metric=name, requested=row[0], policy=row[1])
            row.append(html.cell(part))
    one = comparison.table["requested"].n_unique() == 1
    draw = ranked if one else over_budgets
    figure = html.image("The metric that ranks", partial(draw, table, comparison.metric))
    note = html.broken([each.removesuffix(".") for each in said])
    note += html.broken(merged([*comparison.remarks, *remarks]), "Note: ")
    return section("Verdict", note, lines([table_of(head, rows, right=2), figure]))


def _results(table: pl.DataFrame) -> str:
    note = Markup(
        "Means over {}, of layers, heads and events within a prompt first (layers of <i>layer "
        "error</i> are added up); in brackets the 95 % bootstrap interval over at least 6 prompts. "
        "<i>chance</i> is what random sets of the same size would reach. A number of prompts in "
        "parentheses means that the others could not be measured."
    ).format(plural(table.drop_nulls(["policy", "value"])["trace"].n_unique(), "prompt"))
    means = averages(main_variants(table, _SHOWN))
    drawn = {
        "Metrics against the budget": over_budgets,
        "Metrics against the entries that rows really saw": pareto,
    }
    images = (html.image(alt, partial(draw, table)) for alt, draw in drawn.items())
    every = lines([_wide(means), *images])
    return section("Results", note, details(every, "every metric"))


def _wide(means: pl.DataFrame) -> str:
    names = [name for name in _SHOWN if name in set(means["metric"])]
    budgets = means["requested"].drop_nulls().unique(maintain_order=True)
    head = ["policy", "budget", *(html.metric_name(name) for name in names)]
    rows = []
    for policy in means["policy"].unique(maintain_order=True):
        for budget in budgets:
            part = means.filter(policy=policy, requested=budget)
            if part.height:
                cells = [html.cell(part.filter(metric=name), chance=True) for name in names]
                after = schedule(part["interval"][0], prefill=part["prefill"][0])
                name = escape(policy) + html.small(f"after: {after}")
                rows.append([name, budget, *cells])
    return table_of(head, rows, right=2)


def _provenance(table: pl.DataFrame, runs: Sequence[Saved]) -> str:
    levels = dict(sorted(fidelity_shares(table).select("fidelity", "share").iter_rows()))
    shares = ", ".join(f"{share:.0%} {name}" for name, share in levels.items())
    meanings = Markup(" ").join(
        Markup("<i>{}</i>: {}.").format(name, meaning)
        for name, meaning in FIDELITY_MEANING.items()
        if name in levels
    )
    note = Markup("Fidelity of the values: {}. {}").format(shares, meanings)
    parts = []
    for run in runs:
        parts.append(tag("p", tag("code", str(run.path))))
        parts.append(details(tag("pre", json.dumps(run.parameters, indent=2)), "run.json"))
    return section("Where this comes from", note, lines(parts))
