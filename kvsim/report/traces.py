"""The sections of traces: a list of them, and their properties before any eviction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import polars as pl
from markupsafe import Markup

from kvsim import plots
from kvsim.analysis.attention.expectation import STEPS
from kvsim.analysis.prompt.tables import distribution, selection_table
from kvsim.analysis.registry import METRICS
from kvsim.analysis.subject import SHARES, budget_label
from kvsim.analysis.summaries import Interval, averages
from kvsim.report.html import broken, cell, details, image, interval, lines, section, table_of, tag
from kvsim.report.study import METHODS, RATIOS, Study
from kvsim.schema import first_of, plural
from kvsim.store.metadata import object_at

#: Layers at most in a table without a click, in a figure with a panel and in one with a row each.
_LAYERS, _PANELS, _ROWS = 8, 7, 4

#: A column: its heading, the metric and the variant, and whether chance stands below.
Column = tuple[str, str, str, bool]


def trace_sections(study: Study) -> Iterator[str]:
    """The traces, expected and observed attention, layers, reconstruction, queries."""
    return (make(study) for make in (_traces, _expectation, _layers, _reconstruction, _queries))


def _traces(study: Study) -> str:
    count = len(study.traces)
    note = (
        "The sections down to the claims of the papers say what these traces are like before any "
        "policy evicts. Of one prompt there are no intervals."
        if count == 1
        else f"The sections down to the claims of the papers say what {count} traces are like "
        "before any policy evicts: means over prompts, of layers and heads within a prompt first; "
        "in brackets the 95 % bootstrap interval over at least 6 prompts. A number of prompts in "
        "parentheses means that the others could not be measured. Figures of one trace are of "
        f"{study.first.trace.name}."
    )
    note += broken(_left_out(study))
    rows = [
        [
            trace.name,
            str(object_at(trace.meta, "model").get("name", "")),
            *(str(n) for n in (trace.n_pos, trace.prompt_len, trace.n_layers, trace.n_qheads)),
            tag("code", trace.digest),
        ]
        for trace in study.traces
    ]
    head = ["trace", "model", "tokens", "of the prompt", "layers", "query heads", "digest"]
    return section("What the traces say", note, details(table_of(head, rows), "the traces"))


#: Titles of the analyses that a trace may lack.
_ANALYSES = {
    "expectation": "expected and observed attention",
    "ranking": "how layers rank the prompt",
    "normality": "how far queries are from normal",
    "projections": "the gap of log mean exponentials",
}


def _left_out(study: Study) -> list[str]:
    reasons: dict[tuple[str, str], list[str]] = {}
    for trace, missing in zip(study.traces, study.left_out, strict=True):
        for why in dict.fromkeys(missing[name] for name in _ANALYSES if name in missing):
            parts = [title for name, title in _ANALYSES.items() if missing.get(name) == why]
            reasons.setdefault((why, ", ".join(parts)), []).append(trace.name)
    left_out = [
        f"Left out, because of {why}: {parts} (of {first_of(traces)})"
        for (why, parts), traces in reasons.items()
    ]
    if study.errors.is_empty():
        lead = "Left out: what one eviction does to the output, because"
        left_out += [f"{lead} {why}" for why in study.refused]
    return left_out


def _expectation(study: Study) -> str:
    if "expectation_steps" not in set(study.table["metric"]):
        return ""
    note = (
        "Attention that the response pays to the prompt's keys behind the first four, compared "
        "with what Expected Attention expects of it: Spearman correlation over the keys, mean over "
        "query heads. From left to right one assumption more: the mean of ratios becomes a ratio "
        "of means, queries are normal, they are rotated by the mean rotation ahead, and they are "
        "those of the prompt. Fidelity: exact."
    )
    head = [(step.replace("_", " "), "expectation_steps", step, False) for step in STEPS]
    first = study.first.expectation
    shown, fewer = (_places(study.first.trace.n_layers, most) for most in (_PANELS, _ROWS))
    loss = partial(plots.attention_loss, study.table, layers=shown)
    pictures = [
        image("Agreement by step", partial(plots.agreement_steps, study.table, layers=shown)),
        image("Attention lost with keys removed", loss),
    ]
    if first is not None:
        alt = f"Expected against observed attention, {first.trace}"
        pictures.append(image(alt, lambda: plots.expected_observed(first, layers=fewer), "png"))
    title = "Expected and observed attention"
    return section(title, note, lines([_by_layer(study, head), *pictures]))


def _layers(study: Study) -> str:
    if not study.diagnoses:
        return ""
    note = Markup(
        "The attention of the prompt's last {} rows ranks the tokens before them in every layer, "
        "as ASL does. V is the variance over neighbouring layers of a token's rank; "
        "<i>relative</i> is V over that of the first layer that ASL tests, where k tokens "
        "propagate with these rows, a share of those ranked; <i>union</i> is how many tokens are "
        "among the first k in one of the layers compared, over k. Fidelity: exact."
    ).format(study.first.rule.window)
    head: list[Column] = [("entropy, nats", "layer_entropy", "", False)]
    head += [(f"relative, k={k}", "rank_relative", f"k={k}", False) for k in SHARES]
    head += [(f"union, k={k}", "rank_union", f"k={k}", True) for k in SHARES]
    middle = [each for each in study.diagnoses if each.requested == budget_label(SHARES[1])]
    pictures = [
        image("Relative rank variance by layer", lambda: plots.variance_curves(middle)),
        image(f"Ranks in every layer, {middle[0].trace}", lambda: plots.rank_pattern(middle[0])),
    ]
    body = [_by_layer(study, head, together=False), _selections(study), *pictures]
    if any(each.layer is not None for each in study.diagnoses):
        chosen = distribution(selection_table(study.diagnoses))
        deepest = max(trace.n_layers for trace in study.traces)
        body.append(image("Selection layers", lambda: plots.selection_histogram(chosen, deepest)))
    return section("How layers rank the prompt", note, lines(body))


def _selections(study: Study) -> str:
    """Where ASL selects under its own rule and others, or why nowhere."""
    table = _averages(study, study.table.filter(metric="selection_layer"))
    if not table["n"].sum():
        first = study.diagnoses[0]
        return tag(
            "p",
            "At no k, threshold or rule tried does ASL select on any of these prompts. "
            f"{first.trace} at k={SHARES[0]}: {first.curve.verdict()}.",
        )
    head = ["rule", "layer after which it selects", "prompts that select"]
    rows: dict[bool, list[list[str]]] = {True: [], False: []}
    for row in table.to_dicts():
        usual = row["variant"].endswith(f"tau={study.first.rule.tau:g}")
        rows[usual].append([row["variant"], interval(row) or "-", f"{row['n']} of {row['of']}"])
    variants = details(table_of(head, rows[False]), "other thresholds, look-backs and first layers")
    return table_of(head, rows[True]) + variants


def _reconstruction(study: Study) -> str:
    policies = set(study.errors["policy"])
    if not policies:
        return ""
    note = (
        "A policy evicts a share of the entries once, after four fifths of the "
        "trace; how far the output of a layer's attention, all heads as one vector, then moves, "
        "relative to its length: mean over the rows after and over layers. Each policy has its "
        "default parameters. Fidelity: open behind the first layer, exact in it."
    )
    note += broken(study.refused, "Not measured: ")
    by_trace = study.errors.group_by("policy", "ratio", "trace", maintain_order=True).agg(
        pl.col("relative_head_error").mean()
    )
    rows = [
        [tag("code", name), *(_error(study, by_trace, name, ratio) for ratio in RATIOS)]
        for name in METHODS
        if name in policies
    ]
    head = ["policy", *(f"{ratio:.0%} evicted" for ratio in RATIOS)]
    drawn = image("Error by share evicted", lambda: plots.reconstruction_error(study.errors))
    title = "What one eviction does to the output"
    return section(title, note, lines([table_of(head, rows, right=1), drawn]))


def _error(study: Study, by_trace: pl.DataFrame, name: str, ratio: float) -> str:
    values = by_trace.filter(policy=name, ratio=ratio)["relative_head_error"].to_numpy()
    mean, count = Interval.of(values.astype(np.float64)), len(study.traces)
    few = f" ({mean.n} of {count})" if mean.n < count else ""
    return mean.text(".3f") + few if mean.n else "-"


def _queries(study: Study) -> str:
    names = ("normal_distance", "projection_gap")
    if study.table.filter(pl.col("metric").is_in(names)).is_empty():
        return ""
    note = Markup(
        "Expected Attention takes queries before RoPE to be normal. "
        "<i>Distance</i> is the Kolmogorov-Smirnov distance of a dimension from the normal that "
        "fits it, next to that of as many independent normal samples; the <i>gap</i> is what the "
        "method needs: by how many nats log mean exp(logit) of a key is off, less what normal "
        "samples lack, without the queries of the first four tokens and with them. Fidelity: exact."
    )
    head: list[Column] = [
        ("distance", "normal_distance", "", True),
        ("gap", "projection_gap", "skip=4", False),
        ("gap, all queries", "projection_gap", "skip=0", False),
    ]
    reading, trace = study.first, study.first.trace
    middle = trace.n_layers // 2
    pictures = [
        image(f"Queries next to normal, {trace.name}", lambda: plots.state_ridges(trace, middle)),
        image(f"Quantiles, {trace.name}", lambda: plots.state_quantiles(trace, middle), "png"),
    ]
    if reading.normality is not None:
        normality = reading.normality
        alt = f"Distance from normal by head, {trace.name}"
        pictures.append(image(alt, lambda: plots.normal_distance(normality)))
    if 4 in reading.projections:
        alt = f"Gap of the mean exponential, {trace.name}"
        pictures.append(image(alt, lambda: plots.projection_gap(reading.projections[4])))
    body = lines([_by_layer(study, head), *pictures])
    return section("How queries are distributed", note, body)


def _averages(study: Study, table: pl.DataFrame, by: Sequence[str] = ()) -> pl.DataFrame:
    """As `averages`, of all traces, those without a row included."""
    return averages(table, by).with_columns(of=pl.lit(len(study.traces)))


def _by_layer(study: Study, columns: Sequence[Column], *, together: bool = True) -> str:
    """A row for each layer, below one for all of them `together`; many layers on demand."""
    wanted = [
        (pl.col("metric") == name) & (pl.col("variant") == variant)
        for _, name, variant, _ in columns
    ]
    table = study.table.filter(pl.any_horizontal(wanted))
    layers = _averages(study, table, by=["layer"])
    parts = [(str(layer), layers.filter(layer=layer)) for layer in sorted(layers["layer"].unique())]
    hover = Markup('<span title="{}">{}</span>')
    head = ["layer", *(hover.format(METRICS[name].summary, title) for title, name, _, _ in columns)]

    def shown(parts: Sequence[tuple[str, pl.DataFrame]]) -> Markup:
        rows = [
            [label, *(cell(part.filter(metric=n, variant=v), chance=c) for _, n, v, c in columns)]
            for label, part in parts
        ]
        return table_of(head, rows, right=1)

    first = [("all", _averages(study, table))] if together else []
    if len(parts) <= _LAYERS:
        return shown([*first, *parts])
    return (shown(first) if first else "") + details(shown(parts), plural(len(parts), "layer"))


def _places(n_layers: int, most: int) -> list[int]:
    places = np.linspace(0, n_layers - 1, min(n_layers, most))
    return [int(place) for place in places.round()]
