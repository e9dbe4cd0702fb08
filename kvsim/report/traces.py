"""The sections of traces: which they are, and what they say before any policy evicts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

import numpy as np
import polars as pl

from kvsim.analysis.attention.expectation import STEPS
from kvsim.analysis.prompt.tables import distribution, selection_table
from kvsim.analysis.registry import METRICS
from kvsim.analysis.subject import SHARES, budget_label
from kvsim.analysis.summaries import Interval, averages, first_of
from kvsim.plots import (
    agreement_steps,
    attention_loss,
    expected_observed,
    normal_distance,
    projection_gap,
    rank_pattern,
    reconstruction_error,
    selection_histogram,
    state_quantiles,
    state_ridges,
    variance_curves,
)
from kvsim.report.html import cell, details, image, interval, section, table_of
from kvsim.report.study import METHODS, RATIOS, Study
from kvsim.schema import plural

#: Layers at most in a table without a click, in a figure with a panel and in one with a row each.
_LAYERS, _PANELS, _ROWS = 8, 7, 4

#: A column: its heading, the metric and the variant, and whether chance stands below.
Column = tuple[str, str, str, bool]


def trace_sections(found: Study) -> Iterator[str]:
    """The traces, expected and observed attention, layers, reconstruction, queries."""
    for make in (_traces, _expectation, _layers, _reconstruction, _queries):
        yield make(found)


def _traces(found: Study) -> str:
    count = len(found.traces)
    note = (
        "The sections down to the claims of the papers say what these traces are like before any "
        "policy evicts. Of one prompt there are no intervals."
        if count == 1
        else f"The sections down to the claims of the papers say what {count} traces are like "
        "before any policy evicts: means over prompts, of layers and heads within a prompt first; "
        "in brackets the 95 % bootstrap interval over prompts. A number of prompts in parentheses "
        "means that the others could not be measured. Figures of one trace are of "
        f"{escape(found.first.trace.name)}."
    )
    note += "".join(f"<br>{escape(one)}." for one in _left_out(found))
    rows = [
        [
            escape(trace.name),
            escape(str(trace.meta.get("model", {}).get("name", ""))),
            *(str(n) for n in (trace.n_pos, trace.prompt_len, trace.n_layers, trace.n_qheads)),
            f"<code>{escape(trace.digest)}</code>",
        ]
        for trace in found.traces
    ]
    head = ["trace", "model", "tokens", "of the prompt", "layers", "query heads", "digest"]
    return section("What the traces say", note, details(table_of(head, rows), "the traces"))


#: What a page calls the analyses that a trace may have none of.
_ANALYSES = {
    "expectation": "expected beside observed attention",
    "ranking": "how layers rank the prompt",
    "normality": "how far queries are from normal",
    "projections": "the gap of log mean exponentials",
}


def _left_out(found: Study) -> list[str]:
    """Which analyses are left out of which traces, and why; a line for each reason."""
    reasons: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for trace, missing in zip(found.traces, found.left_out, strict=True):
        by_reason: dict[str, list[str]] = {}
        for name, said in _ANALYSES.items():
            if name in missing:
                by_reason.setdefault(missing[name], []).append(said)
        for why, parts in by_reason.items():
            reasons.setdefault((why, tuple(parts)), []).append(trace.name)
    lines = [
        f"Left out, because of {why}: {', '.join(parts)} (of {first_of(traces)})"
        for (why, parts), traces in reasons.items()
    ]
    if found.errors.is_empty():
        said = "Left out: what one eviction does to the output, because"
        lines += [f"{said} {one}" for one in found.refused]
    return lines


def _expectation(found: Study) -> str:
    if "expectation_steps" not in set(found.table["metric"]):
        return ""
    note = (
        "Attention that the response pays to the prompt's keys behind the first four, beside what "
        "Expected Attention expects of it: Spearman correlation over the keys, mean over query "
        "heads. From left to right one assumption more: the mean of ratios becomes a ratio of "
        "means, queries are normal, they turn by the mean rotation ahead, and they are those of "
        "the prompt. Fidelity: exact."
    )
    head = [(step.replace("_", " "), "expectation_steps", step, False) for step in STEPS]
    one = found.first.expectation
    shown, fewer = (_some(found.first.trace.n_layers, most) for most in (_PANELS, _ROWS))
    pictures = [
        image("Agreement by step", lambda: agreement_steps(found.table, layers=shown)),
        image(
            "Attention lost with keys removed", lambda: attention_loss(found.table, layers=shown)
        ),
    ]
    if one is not None:
        said = f"Expected against observed attention, {one.trace}"
        pictures.append(image(said, lambda: expected_observed(one, layers=fewer), "png"))
    title = "Expected beside observed attention"
    return section(title, note, "\n".join([_by_layer(found, head), *pictures]))


def _layers(found: Study) -> str:
    if not found.diagnoses:
        return ""
    note = (
        f"The attention of the prompt's last {found.first.rule.window} rows ranks the tokens "
        "before them in every layer, as ASL does. V is the variance over neighbouring layers of a "
        "token's rank; <i>relative</i> is V over that of the first layer that ASL tests, where k "
        "tokens go on beside these rows, a share of those ranked; <i>union</i> is how many tokens "
        "are among the first k in one of the layers compared, over k. Fidelity: exact."
    )
    head: list[Column] = [("entropy, nats", "layer_entropy", "", False)]
    head += [(f"relative, k={k}", "rank_relative", f"k={k}", False) for k in SHARES]
    head += [(f"union, k={k}", "rank_union", f"k={k}", True) for k in SHARES]
    middle = [one for one in found.diagnoses if one.asked == budget_label(SHARES[1])]
    pictures = [
        image("Relative rank variance by layer", lambda: variance_curves(middle)),
        image(f"Ranks in every layer, {middle[0].trace}", lambda: rank_pattern(middle[0])),
    ]
    body = [_by_layer(found, head, together=False), _selections(found), *pictures]
    if any(one.layer is not None for one in found.diagnoses):
        chosen = distribution(selection_table(found.diagnoses))
        deepest = max(trace.n_layers for trace in found.traces)
        body.append(image("Selection layers", lambda: selection_histogram(chosen, deepest)))
    return section("How layers rank the prompt", note, "\n".join(body))


def _selections(found: Study) -> str:
    """Where ASL selects under its own rule and others, or why nowhere."""
    table = _averages(found, found.table.filter(metric="selection_layer"))
    if not table["n"].sum():
        first = found.diagnoses[0]
        return (
            "<p>At no k, threshold or rule tried does ASL select on any of these prompts. "
            f"{escape(first.trace)} at k={SHARES[0]}: {escape(first.curve.verdict())}.</p>"
        )
    own = f"tau={found.first.rule.tau:g}"
    head = ["rule", "layer after which it selects", "prompts that select"]
    usual, others = (
        table_of(
            head, _selection_rows(table.filter(pl.col("variant").str.ends_with(own) == is_own))
        )
        for is_own in (True, False)
    )
    return usual + details(others, "other thresholds, look-backs and first layers")


def _selection_rows(table: pl.DataFrame) -> list[list[str]]:
    return [
        [escape(row["variant"]), escape(interval(row)) or "-", f"{row['n']} of {row['of']}"]
        for row in table.to_dicts()
    ]


def _reconstruction(found: Study) -> str:
    known = found.errors["policy"].unique(maintain_order=True).to_list()
    if not known:
        return ""
    note = (
        "A policy evicts a share of the entries once, after four fifths of the "
        "trace; how far the output of a layer's attention, all heads as one vector, then moves, "
        "relative to its length: mean over the rows after and over layers. Each policy has its "
        "default parameters. Fidelity: open behind the first layer, exact in it."
    )
    note += "".join(f"<br>Not measured: {escape(one)}." for one in found.refused)
    by_trace = found.errors.group_by("policy", "ratio", "trace", maintain_order=True).agg(
        pl.col("relative_head_error").mean()
    )
    rows = [
        [
            f"<code>{escape(name)}</code>",
            *(_error(found, by_trace, name, ratio) for ratio in RATIOS),
        ]
        for name in METHODS
        if name in known
    ]
    head = ["policy", *(f"{ratio:.0%} evicted" for ratio in RATIOS)]
    drawn = image("Error by share evicted", lambda: reconstruction_error(found.errors))
    title = "What one eviction does to the output"
    return section(title, note, table_of(head, rows, right=1) + "\n" + drawn)


def _error(found: Study, by_trace: pl.DataFrame, name: str, ratio: float) -> str:
    values = by_trace.filter(policy=name, ratio=ratio)["relative_head_error"].to_numpy()
    one, of = Interval.of(values.astype(np.float64)), len(found.traces)
    return one.text(".3f") + (f" ({one.n} of {of})" if one.n < of else "") if one.n else "-"


def _queries(found: Study) -> str:
    names = ("normal_distance", "projection_gap")
    if found.table.filter(pl.col("metric").is_in(names)).is_empty():
        return ""
    note = (
        "Expected Attention takes queries before RoPE to be normal. "
        "<i>Distance</i> is the Kolmogorov-Smirnov distance of a dimension from the normal that "
        "fits it, beside that of as many independent normal samples; the <i>gap</i> is what the "
        "method needs: by how many nats log mean exp(logit) of a key is off, less what normal "
        "samples lack, without the queries of the first four tokens and with them. Fidelity: exact."
    )
    head: list[Column] = [
        ("distance", "normal_distance", "", True),
        ("gap", "projection_gap", "skip=4", False),
        ("gap, all queries", "projection_gap", "skip=0", False),
    ]
    one, trace = found.first, found.first.trace
    middle = trace.n_layers // 2
    pictures = [
        image(f"Queries beside normal, {trace.name}", lambda: state_ridges(trace, middle)),
        image(f"Quantiles, {trace.name}", lambda: state_quantiles(trace, middle), "png"),
    ]
    if one.normality is not None:
        normality = one.normality
        said = f"Distance from normal by head, {trace.name}"
        pictures.append(image(said, lambda: normal_distance(normality)))
    if 4 in one.projections:
        said = f"Gap of the mean exponential, {trace.name}"
        pictures.append(image(said, lambda: projection_gap(one.projections[4])))
    return section(
        "How queries are distributed", note, "\n".join([_by_layer(found, head), *pictures])
    )


def _averages(found: Study, table: pl.DataFrame, by: Sequence[str] = ()) -> pl.DataFrame:
    """As `averages`, of all traces, those without a row included."""
    return averages(table, by).with_columns(of=pl.lit(len(found.traces)))


def _by_layer(found: Study, columns: Sequence[Column], *, together: bool = True) -> str:
    """A row for each layer, below one for all of them `together`; many layers on demand."""
    wanted = [
        (pl.col("metric") == name) & (pl.col("variant") == variant)
        for _, name, variant, _ in columns
    ]
    table = found.table.filter(pl.any_horizontal(wanted))
    layers = _averages(found, table, by=["layer"])
    parts = [(str(layer), layers.filter(layer=layer)) for layer in sorted(layers["layer"].unique())]
    head = [
        "layer",
        *(
            f'<span title="{escape(METRICS[name].summary)}">{escape(said)}</span>'
            for said, name, _, _ in columns
        ),
    ]

    def rows(parts: Sequence[tuple[str, pl.DataFrame]]) -> list[list[str]]:
        return [
            [
                label,
                *(
                    cell(part.filter(metric=name, variant=variant), chance=chance)
                    for _, name, variant, chance in columns
                ),
            ]
            for label, part in parts
        ]

    first = [("all", _averages(found, table))] if together else []
    if len(parts) <= _LAYERS:
        return table_of(head, rows([*first, *parts]), right=1)
    every = details(table_of(head, rows(parts), right=1), plural(len(parts), "layer"))
    return (table_of(head, rows(first), right=1) if first else "") + every


def _some(n_layers: int, most: int) -> list[int]:
    """At most so many layers, evenly spaced, the first and the last among them."""
    places = np.linspace(0, n_layers - 1, min(n_layers, most))
    return [int(place) for place in places.round()]
