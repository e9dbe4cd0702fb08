"""Objects as a notebook shows them: their properties, their source, and a small picture.

HTML of a few kilobytes, with pictures as SVG in the colours of the page, so that dark themes work.
Texts of traces and runs are escaped. Traces are not read and matplotlib is not loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import singledispatch
from pathlib import Path

import numpy as np
import polars as pl
from markupsafe import Markup
from numpy.typing import NDArray

from kvsim.analysis.comparison import Comparison, compare
from kvsim.analysis.folder import Saved, lacking
from kvsim.analysis.overview import PREDICTIONS, SUMMARY, summarise
from kvsim.analysis.results import REQUESTED, labelled
from kvsim.analysis.sentences import lines
from kvsim.analysis.table import OF_RECORD
from kvsim.core.policy import Even, Policy
from kvsim.core.record import Record
from kvsim.core.storing import Spec
from kvsim.core.trace import Trace
from kvsim.errors import PolicyError
from kvsim.schema import object_at, plural, schedule, visible
from kvsim.sweeps.outcome import Run

#: Rows and columns of the picture of a record, and the shades between gone and retained.
_ROWS, _COLUMNS, _SHADES = 24, 48, 5
#: Lines of a table, and characters of a text, that are shown.
_LINES, _TEXT = 16, 80
_WIDTH = 480
#: Colours of kept entries and of the needle, readable on white and on black.
_KEPT, _MARK = "#3f7fbf", "#d1603d"
#: The budget of the picture of a policy, which shows protected entries.
_BUDGET = 128

_CELL = Markup('<td style="text-align:left;padding:1px 10px 1px 0;vertical-align:top">{}</td>')
_TABLE = Markup('<table style="margin:4px 0">{}</table>')


def html(shown: object) -> str:
    """Return the HTML of a Trace, Record, Policy, Run, saved run or Comparison."""
    return Markup("<div>{}</div>").format(Markup("\n").join(_parts(shown)))


@singledispatch
def _parts(shown: object) -> Iterable[Markup]:
    yield _text(repr(shown))


@_parts.register
def _trace(trace: Trace) -> Iterable[Markup]:
    facts = object_at(trace.meta, "model")
    of = f" of {facts['layers']}" if isinstance(facts.get("layers"), int) else ""
    after, part = trace.n_pos - trace.prompt_len, trace.evicting
    yield _title("Trace", trace.name)
    yield _facts(
        {
            "model": facts.get("name", ""),
            "shape": f"{plural(trace.n_layers, 'layer')}{of}, {part.n_qheads} query heads, "
            f"{part.n_heads} KV heads, {part.dim} dimensions"
            + (f" ({part.value_dim} of values)" if part.value_dim != part.dim else "")
            + "; some layers have others" * bool(trace.header.sizes),
            "tokens": f"{trace.n_pos}: prompt {trace.prompt_len}, response {after}",
            "labels": ", ".join(f"{name} {value}" for name, value in trace.labels.items()),
            "recorded": ", ".join(trace.source_dtypes),
            "stored": _place(trace.path),
            "digest": "" if trace.path is None else trace.digest[:19],
        }
    )
    context = trace.context_len or trace.prompt_len
    ends = [("prompt", 0, context), ("question", context, trace.prompt_len)]
    spans = [(name, *span) for name, each in trace.spans.items() for span in each][:8]
    yield _strip([*ends, ("response", trace.prompt_len, trace.n_pos)], trace.n_pos, spans)


@_parts.register
def _record(record: Record) -> Iterable[Markup]:
    layers, heads, n_pos = record.evicted_at.shape
    share = "" if record.share is None else f" ({record.share})"
    yield _title("Record", f"{record.policy} on {record.trace}")
    yield _facts(
        {
            "budget": f"{record.budget}{share} entries per KV head",
            "evicts after": schedule(**vars(record.schedule)),
            "parameters": ", ".join(f"{name}={value}" for name, value in record.params.items()),
            "shape": f"{plural(layers, 'layer')}, {heads} heads, {plural(n_pos, 'position')}",
            "events": f"{len(record.events)} that evict",
            "reads": f"some pages of {record.reads.page}" if record.reads else "",
            "stored": f"as {Spec.of(record.codec).name}" if record.codec else "",
            "trace": record.digest[:19],
            "note": record.remark.replace("\n", "; "),
        }
    )
    yield _retained(record)


@_parts.register
def _policy(policy: Policy) -> Iterable[Markup]:
    at = policy.schedule
    pieces = [repr(piece) for level in policy.levels for piece in level if piece != Even()]
    readers = policy.reader.needs if policy.reader else frozenset()
    needs = [*sorted(policy.scorer.needs | readers), *["later rows"] * policy.scorer.clairvoyant]
    yield _title("Policy", policy.name)
    yield _facts(
        {
            "pieces": ", ".join(pieces),
            "evicts after": schedule(**vars(at)),
            "needs": ", ".join(needs),
            "budget": "" if policy.bounds else "does not bind",
        }
    )
    if policy.bounded:
        protection = policy.at(_BUDGET).protection(_BUDGET)
        first, last = min(protection.sink, _BUDGET), min(protection.recent, _BUDGET)
        yield _strip(
            [
                ("protected", 0, first),
                (f"chosen of a budget of {_BUDGET}", first, _BUDGET - last),
                ("protected", max(first, _BUDGET - last), _BUDGET),
            ],
            _BUDGET,
        )


@_parts.register
def _run(run: Run | Saved) -> Iterable[Markup]:
    parameters = run.describe() if isinstance(run, Run) else run.parameters
    traces = list(parameters.get("traces", ()))
    yield _title("Run", "" if isinstance(run, Run) else str(run.path))
    yield _facts(
        {
            "traces": f"{len(traces)}: {', '.join(map(str, traces))}",
            "budgets": ", ".join(map(str, parameters.get("budgets", ()))),
            "cells": lacking(parameters),
            "computed": "" if isinstance(run, Run) else str(parameters.get("created", "")),
        }
    )
    measured = set(run.table.drop_nulls(["policy", "value"])["metric"])
    with suppress(PolicyError):  # one policy alone, or no prompt with values of all
        yield from _verdict(compare(run))
    if measured:
        names = [name for name in (*PREDICTIONS, *SUMMARY) if name in measured] or sorted(measured)[
            :6
        ]
        means = summarise(labelled(run.table), names)
        hidden = [name for name in OF_RECORD if name not in ("policy", "budget")]
        yield _table(means.with_columns(budget=REQUESTED).drop(hidden))


@_parts.register
def _comparison(comparison: Comparison) -> Iterable[Markup]:
    yield _title("Comparison", comparison.metric)
    yield from _verdict(comparison)
    shown = ("rank", "policy", "mean", "low", "high", "could_be_best", "worse_by")
    yield _table(comparison.overall.select(pl.col("requested").alias("budget"), *shown))


def _verdict(comparison: Comparison) -> Iterable[Markup]:
    for line in lines(comparison):
        yield Markup('<p style="margin:2px 0">{}</p>').format(_text(line, 400))
    yield _dots(comparison)


def _text(text: str, most: int = _TEXT) -> Markup:
    plain = visible(text).replace("\n", " ")
    return Markup("{}").format(plain if len(plain) <= most else f"{plain[: most - 3]}...")


def _title(kind: str, name: str) -> Markup:
    return Markup("<b>{}</b> {}").format(kind, _text(name))


def _facts(facts: Mapping[str, str]) -> Markup:
    name_of = Markup('<span style="opacity:.65">{}</span>')
    given = {name: _text(str(text), 240) for name, text in facts.items() if text}
    return _TABLE.format(_joined(_line([name_of.format(x), text]) for x, text in given.items()))


def _table(frame: pl.DataFrame) -> Markup:
    rows = [frame.columns, *frame.head(_LINES).rows()]
    more = f"{frame.height - _LINES} more lines" if frame.height > _LINES else ""
    return _TABLE.format(_joined(_line(map(_cell, row)) for row in rows)) + more


def _line(cells: Iterable[Markup]) -> Markup:
    return Markup("<tr>{}</tr>").format(_joined(map(_CELL.format, cells)))


def _joined(parts: Iterable[Markup]) -> Markup:
    return Markup("").join(parts)


def _cell(value: object) -> Markup:
    if isinstance(value, float):
        return _text(f"{value:.3g}")
    return _text("-" if value is None else str(value), 40)


def _place(path: Path | str | None) -> str:
    """Return where a trace is stored; of a long path its end: notebooks are passed on."""
    if path is None or isinstance(path, str):
        return path or "in memory"
    return str(path) if len(path.parts) <= 2 else f".../{'/'.join(path.parts[-2:])}"


def _svg(height: int, label: str, content: Iterable[Markup]) -> Markup:
    return Markup(
        '<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{1}" width="{2}" '
        'height="{3}" viewBox="0 0 {2} {3}" fill="currentColor" font-size="11" '
        'font-family="sans-serif" style="max-width:100%">{0}</svg>'
    ).format(_joined(content), label, _WIDTH, height)


def _label(x: float, y: float, text: str, anchor: str = "start") -> Markup:
    form = Markup('<text x="{:.0f}" y="{:.0f}" text-anchor="{}">{}</text>')
    return form.format(x, y, anchor, _text(text, 60))


def _strip(
    parts: Sequence[tuple[str, int, int]], total: int, spans: Sequence[tuple[str, int, int]] = ()
) -> Markup:
    """Parts of a sequence next to each other, and spans of it below."""
    box = Markup('<rect x="{:.1f}" y="{}" width="{:.1f}" height="{}" fill="{}" opacity="{}"/>')
    scale = _WIDTH / max(1, total)
    out = []
    for place, (name, start, stop) in enumerate(parts):
        if start < stop:
            width = scale * (stop - start)
            shade = (0.75, 0.35, 0.55)[place % 3]
            out.append(box.format(scale * start, 0, max(1, width - 1), 12, _KEPT, shade))
            if width > 7 * len(name):
                out.append(_label(scale * start, 25, name))
    for name, start, stop in spans:
        out.append(box.format(scale * start, 0, max(2, scale * (stop - start)), 12, _MARK, 1))
        out.append(_label(scale * start, 38, name))
    return _svg(42 if spans else 29, f"{total} positions: " + ", ".join(x[0] for x in parts), out)


def _retained(record: Record) -> Markup:
    """The share of heads and layers in which a row still sees a position."""
    n_pos, height = record.n_pos, 6 * _ROWS
    rows = np.unique(np.linspace(0, n_pos - 1, min(_ROWS, n_pos)).round().astype(int))
    edges = np.unique(np.linspace(0, n_pos, min(_COLUMNS, n_pos) + 1).round().astype(int))
    seen = np.stack([record.kept(int(row)).mean((0, 1)) for row in rows])  # [row, pos]
    share = np.add.reduceat(seen, edges[:-1], axis=1) / np.diff(edges)
    level = np.ceil(share * _SHADES).astype(int)
    x, y = _WIDTH / n_pos, height / len(rows)
    out = [
        Markup('<path d="{}" fill="{}" opacity="{:.2f}"/>').format(
            "".join(_runs(level == shade, edges * x, y)), _KEPT, shade / _SHADES
        )
        for shade in range(1, _SHADES + 1)
    ]
    end = y * np.searchsorted(rows, record.prompt_len)
    line = Markup('<path d="M0 {:.1f}H{}" stroke="currentColor" stroke-dasharray="2 3"/>')
    out += [line.format(end, _WIDTH), _label(_WIDTH, max(10, end - 3), "end of the prompt", "end")]
    out.append(
        _label(0, height + 13, "position; rows downwards; full blue: in all heads and layers")
    )
    what = f"what {record.policy} retains, {len(rows)} of {n_pos} rows"
    return _svg(height + 18, what, out)


def _runs(mask: NDArray[np.bool_], edges: NDArray[np.float64], height: float) -> Iterable[str]:
    """Yield a rectangle for each run of marked cells [row, column], as parts of a path."""
    for row, marked in enumerate(mask):
        steps = np.flatnonzero(np.diff(marked, prepend=False, append=False))
        for start, stop in steps.reshape(-1, 2):
            start_at, width = edges[start], edges[stop] - edges[start]
            yield f"M{start_at:.0f} {row * height:.0f}h{width:.0f}v{height:.0f}h-{width:.0f}z"


def _dots(comparison: Comparison) -> Markup:
    """Mean and interval of each policy, the first ones of each budget."""
    rows = comparison.overall.sort("entries", "mean", maintain_order=True).to_dicts()
    rows = rows[:_LINES]
    ends = [x for row in rows for x in (row["mean"], row["low"], row["high"]) if x is not None]
    least, most = min([0.0, *ends]), max([*ends, 1e-9])
    scale = (_WIDTH - 230) / (most - least)
    dot = Markup('<circle cx="{:.1f}" cy="{}" r="3.5" fill="{}"/>')
    bar = Markup('<path d="M{:.1f} {}H{:.1f}" stroke="{}" stroke-width="2" opacity=".5"/>')
    out = []
    for place, row in enumerate(rows):
        y = 14 * place + 10
        colour = "currentColor" if row["rank"] is None else _KEPT
        out.append(_label(150, y + 4, f"{row['policy'][:18]}, {row['requested']}", "end"))
        if row["low"] is not None:
            at = (160 + scale * (row[end] - least) for end in ("low", "high"))
            out.append(bar.format(next(at), y, next(at), colour))
        out.append(dot.format(160 + scale * (row["mean"] - least), y, colour))
        out.append(_label(_WIDTH, y + 4, f"{row['mean']:.3g}", "end"))
    out.append(
        _label(160, 14 * len(rows) + 14, f"{comparison.metric}, {comparison.better} is better")
    )
    return _svg(14 * len(rows) + 20, f"{comparison.metric} by policy and budget", out)
