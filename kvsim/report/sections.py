"""The sections of runs: results, figures, pairs, splits by label, provenance."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from html import escape

import polars as pl

from kvsim.analysis.registry import METRICS
from kvsim.analysis.results import labelled
from kvsim.analysis.summaries import averages, compare, layers_of, uneven
from kvsim.plots.style import asked_order
from kvsim.plots.summary import over_budgets, pareto
from kvsim.report.answers import answers
from kvsim.report.html import called, cell, details, image, interval, section, table_of
from kvsim.report.runs import Saved
from kvsim.report.study import Study
from kvsim.report.traces import trace_sections
from kvsim.schema import LABELS, schedule


def sections(
    table: pl.DataFrame, runs: Sequence[Saved], base: str | None, found: Study | None
) -> Iterator[str]:
    """The sections of runs and traces, those that have nothing to say empty.

    table: of all runs, with the metrics of the traces. Results of one policy are called by what
    tells them apart (`kvsim.analysis.results.labels`).
    """
    shown = labelled(table)
    if runs:
        yield _summary(shown, runs)
        yield _figures(shown)
        yield _paired(shown, base)
        yield from _splits(shown)
        yield _of_traces(shown)
    if found is not None:
        yield from trace_sections(found)
    yield answers(table)
    if runs:
        yield _provenance(runs)


#: The metrics of the first table; all others are in the Parquet file.
_SHOWN = (
    *("output_error", "retained_mass", "wipeout", "retained_iou", "middle_coverage"),
    *("burst_share", "entries_seen", "regret"),
)


def _main(table: pl.DataFrame, names: Iterable[str]) -> pl.DataFrame:
    """The main variants of some metrics of policies."""
    wanted = [
        (pl.col("metric") == name) & (pl.col("variant") == METRICS[name].main) for name in names
    ]
    return table.filter(pl.col("policy").is_not_null() & pl.any_horizontal(wanted))


def _summary(table: pl.DataFrame, runs: Sequence[Saved]) -> str:
    found = averages(_main(table, _SHOWN))
    prompts = table["trace"].n_unique()
    note = (
        f"Means over {prompts} prompt{'s' * (prompts != 1)}, of layers, heads and events within a "
        "prompt first; in brackets the 95 % bootstrap interval over prompts. "
        "<i>chance</i> is what random sets of the same size would reach. A number of prompts in "
        "parentheses means that the others could not be measured."
    )
    remarks = dict.fromkeys(one for run in runs for one in run.parameters.get("remarks", ()))
    remarks |= dict.fromkeys(filter(None, [uneven(layers_of(table))]))
    note += "".join(f"<br>Note: {escape(one)}." for one in remarks)
    return section("Results", note, _wide(found, "policy", with_chance=True))


def _wide(found: pl.DataFrame, first: str, *, with_chance: bool = False) -> str:
    """A row for each value of `first` and budget, a column for each metric."""
    names = [name for name in _SHOWN if name in set(found["metric"])]
    budgets = asked_order(found["asked"].drop_nulls().to_list())
    head = [first, "budget", *(called(name) for name in names)]
    rows = []
    for policy in found[first].unique(maintain_order=True):
        for asked in budgets:
            part = found.filter(pl.col(first) == policy, pl.col("asked") == asked)
            if part.height:
                cells = [cell(part.filter(metric=name), chance=with_chance) for name in names]
                rows.append([escape(str(policy)) + _schedule(part), escape(asked), *cells])
    return table_of(head, rows, right=2)


def _schedule(part: pl.DataFrame) -> str:
    """After which rows a policy evicts, in small print, where the frame says it."""
    if "interval" not in part.columns:
        return ""
    said = schedule(part["interval"][0], prefill=part["prefill"][0])
    return f"<br><small>after: {said}</small>"


def _figures(table: pl.DataFrame) -> str:
    drawn = {
        "Metrics against the budget": over_budgets,
        "Metrics against the entries that rows really saw": pareto,
    }
    images = [image(said, partial(draw, table)) for said, draw in drawn.items()]
    return section("Figures", "", "\n".join(images)) if any(images) else ""


def _paired(table: pl.DataFrame, base: str | None) -> str:
    shown = _main(table, _SHOWN)
    policies = shown["policy"].unique(maintain_order=True).to_list()
    if len(policies) < 2 and base is None:
        return ""
    # what has the metrics of kept sets has evicted something
    evicting = [name for name in policies if "wipeout" in set(shown.filter(policy=name)["metric"])]
    base = base or (evicting or policies)[0]
    found = compare(shown, base)
    note = (
        f"Each policy minus <code>{escape(base)}</code> on the same prompts at the same budget, "
        "as they were replayed: schedules may differ, and with them the entries that rows saw. An "
        "interval without 0 is a difference that other prompts would likely show too."
    )
    return section(f"Beside {escape(base)}", note, _wide(found, "policy"))


def _splits(table: pl.DataFrame) -> Iterator[str]:
    """A table for each label of the prompts that has several values."""
    for label in LABELS:
        if table[label].drop_nulls().n_unique() < 2:
            continue
        found = averages(_main(table, ["output_error", "wipeout", "retained_iou"]), by=[label])
        rows = [
            [
                *(escape(str(row[name])) for name in (label, "policy", "asked")),
                *(called(row["metric"]), escape(interval(row)), str(row["n"])),
            ]
            for row in found.sort(label, maintain_order=True).to_dicts()
            if row["mean"] is not None
        ]
        head = [label, "policy", "budget", "metric", "mean", "prompts"]
        yield section(f"By {label}", "", details(table_of(head, rows, right=4)))


def _of_traces(table: pl.DataFrame) -> str:
    of_runs = [name for name, entry in METRICS.items() if entry.default]
    found = averages(table.filter(pl.col("policy").is_null(), pl.col("metric").is_in(of_runs)))
    rows = [
        [
            *(called(row["metric"]), escape(row["variant"]), escape(interval(row))),
            "" if row["chance"] is None else f"{row['chance']:.3f}",
            f"{row['n']} of {row['of']}",
        ]
        for row in found.to_dicts()
        if row["mean"] is not None
    ]
    if not rows:
        return ""
    head = ["metric", "variant", "mean", "chance", "prompts"]
    note = "What the traces are like, whatever evicts from them."
    return section("The traces", note, details(table_of(head, rows, right=2)))


def _provenance(runs: Sequence[Saved]) -> str:
    levels = pl.concat([run.table for run in runs])["fidelity"].cast(pl.String)
    shares = ", ".join(
        f"{levels.eq(name).mean():.0%} {name}" for name in sorted(levels.unique().drop_nulls())
    )
    note = (
        f"Fidelity of all values in the runs: {shares}. <i>exact</i>: a live run that is fed the "
        "same tokens would show it. <i>open</i>: computed from the recorded queries, keys and "
        "values; in a live run errors also add up from layer to layer."
    )
    parts = []
    for run in runs:
        text = escape(json.dumps(run.parameters, indent=2))
        name = f"<code>{escape(str(run.path))}</code>"
        failed = len(run.parameters.get("failures", ()))
        lost = f" {failed} cells failed." if failed else ""
        parts.append(f"<p>{name}.{lost}</p>" + details(f"<pre>{text}</pre>", "run.json"))
    return section("Where this comes from", note, "\n".join(parts))
