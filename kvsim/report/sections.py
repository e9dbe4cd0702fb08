"""The sections of a page: verdict, results, traces, those of studies, provenance."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import FunctionType

import polars as pl
from markupsafe import Markup

from kvsim.analysis.evidence import OUTCOMES, shared
from kvsim.analysis.folder import Saved
from kvsim.analysis.overview import fidelity_shares
from kvsim.analysis.results import labelled
from kvsim.analysis.sentences import answer, tabulated
from kvsim.analysis.summaries import averages, main_variants
from kvsim.core.trace import Trace
from kvsim.plots.summary import over_budgets, pareto
from kvsim.registry import Registry
from kvsim.report import html
from kvsim.report.html import details, lines, section, table_of, tag
from kvsim.schema import FIDELITY_MEANING, merged, object_at, plural

#: Sections of studies and packages: functions of the Table of all runs and traces that return HTML
#: (`kvsim.report.html`), possibly empty.
SECTIONS: Registry[Callable[[pl.DataFrame], str]] = Registry(
    "section", "kvsim.sections", (FunctionType,), {}
)


def sections(
    table: pl.DataFrame,
    runs: Sequence[Saved],
    remarks: Sequence[str],
    metrics: Sequence[str],
    traces: Sequence[Trace],
) -> Iterator[str]:
    """Yield the sections of runs and traces.

    table: of all runs, with the metrics of the traces. remarks: of the runs. metrics: besides the
    one that ranks. Labels name the parameters in which results of one policy differ
    (`kvsim.analysis.results.labels`).
    """
    shown = labelled(table)
    if runs:
        metric, better = shared([run.table for run in runs])
        yield _verdict(shown, metric, [*better, *remarks], metrics)
        yield _results(shown)
    if traces:
        yield _traces(traces, table)
    yield from (write(table) for write in SECTIONS.values())
    if runs:
        yield _provenance(table, runs)


#: The metrics of the first table; all others are in the Parquet file.
_SHOWN = (
    *OUTCOMES,
    *("output_error", "layer_error", "weighted_error", "retained_mass", "wipeout", "retained_iou"),
    *("middle_coverage", "burst_share", "entries_seen"),
    *("needle_recall", "needle_wipeout", "regret"),
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
            part = means.filter(metric=name, requested=row[0], policy=row[1]).to_dicts()
            row.append("".join(map(html.interval, part)) or "-")
    figure = html.image("The metric that ranks", partial(over_budgets, table, comparison.metric))
    note = html.broken([each.removesuffix(".") for each in said])
    note += html.broken(merged([*comparison.remarks, *remarks]), "Note: ")
    return section("Verdict", note, lines([table_of(head, rows, right=2), figure]))


def _results(table: pl.DataFrame) -> str:
    note = Markup(
        "Means over {}, after layers, heads and events within a prompt (layers of <i>layer "
        "error</i> are added up); in brackets the 95 % bootstrap interval over at least 6 prompts. "
        "<i>chance</i> is the value of random sets of the same size. A number of prompts in "
        "parentheses means that the others could not be measured."
    ).format(plural(table.drop_nulls(["policy", "value"])["trace"].n_unique(), "prompt"))
    means = averages(main_variants(table, _SHOWN))
    drawn = {
        "Metrics against the budget": over_budgets,
        "Metrics against the entries that rows saw": pareto,
    }
    one = means["requested"].drop_nulls().n_unique() == 1 and not (table["access"] != "").any()
    shown = list(drawn.items())[: 1 if one else 2]  # of one budget both are the same ranking
    images = (html.image(alt, partial(draw, table)) for alt, draw in shown)
    columns = ("policy", "requested", "interval", "prefill", "metric")
    every = lines([_means(means, columns), *images])
    return section("Results", note, details(every, "every metric"))


def _means(means: pl.DataFrame, columns: Sequence[str]) -> str:
    rows = [
        [*(str(row[name]) for name in columns), html.interval(row), html.chance(row)]
        for row in means.to_dicts()
    ]
    return table_of([*columns, "mean", "chance"], rows, right=len(columns))


def _traces(traces: Sequence[Trace], table: pl.DataFrame) -> str:
    note = (
        "What the traces are like before any policy evicts: means over prompts, of layers and "
        "heads within a prompt first; in brackets the 95 % bootstrap interval over at least 6 "
        "prompts. A number of prompts in parentheses means that the others could not be measured."
    )
    of_traces = [
        [
            trace.name,
            str(object_at(trace.meta, "model").get("name", "")),
            *(str(n) for n in (trace.n_pos, trace.prompt_len, trace.n_layers)),
            str(trace.part().n_qheads),
            tag("code", trace.digest),
        ]
        for trace in traces
    ]
    head = ["trace", "model", "tokens", "of the prompt", "layers", "query heads", "digest"]
    names = [trace.name for trace in traces]
    of_these = table.filter(pl.col("policy").is_null(), pl.col("trace").is_in(names))
    means = averages(of_these).with_columns(of=len(traces))
    every = _means(means, ("metric", "variant"))
    body = [details(table_of(head, of_traces), "the traces"), details(every, "every metric")]
    return section("What the traces say", note, lines(body))


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
