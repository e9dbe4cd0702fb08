"""Figures of records of one trace: positions retained and missed, output error, text by state."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl
import scipy
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray

from kvsim.analysis.arrays import Ints
from kvsim.analysis.axes import record_layer, trace_head, trace_layer
from kvsim.analysis.kept.retention import RECENT, SINK
from kvsim.analysis.kept.states import TOKEN_STATES, has_reads, read_entries, token_states
from kvsim.analysis.kept.text import retention_lift
from kvsim.analysis.output.error import check_record, output_error
from kvsim.analysis.table import fidelity
from kvsim.core.record import Record
from kvsim.errors import PolicyError
from kvsim.plots.style import (
    COLOURS,
    GONE,
    GRID,
    KEPT,
    MISSED,
    UNREAD,
    caption,
    drawn_records,
    escaped,
    finish,
    legend_of,
    name_axes,
    plain,
    series,
    short_text,
)
from kvsim.store.opening import TraceLike, as_trace

#: Attention of a row on one entry from which losing the entry is drawn as a miss.
NEEDED = 0.05

# Ratio of the largest mean error to the smallest from which errors are drawn on a log axis.
_WIDE = 10

# Pixels per side of a map; longer traces are pooled.
_PIXELS = 640

# Colour and weight of each state: they differ in print, and for readers without red or green.
_STYLE = (
    {"color": "#8a8a8a"},
    {"color": COLOURS[0], "fontweight": "bold"},
    {"color": COLOURS[2], "fontstyle": "italic"},
    {"color": MISSED, "fontweight": "bold"},
    {"color": COLOURS[5]},
)
# backgrounds let light and dark pages keep the colour of their text
_CSS = (
    "color:#767676",
    f"background:{KEPT}66;font-weight:bold",
    "color:#767676;font-style:italic",
    f"background:{MISSED}80;font-weight:bold",
    f"background:{UNREAD}66",
)
#: Characters of a line, and lines of a figure.
COLUMNS, LINES = 100, 60
#: Characters of a token up to which a page shows it whole.
LONGEST = 64
# Points of a character's height, and inches of its width in matplotlib's own monospaced font.
_SIZE = 8.0
_WIDTH = 0.602 * _SIZE / 72


def retention_map(
    trace: TraceLike, records: Record | Sequence[Record], *, layer: int = 0, head: int = 0
) -> Figure:
    """Positions that each row sees, and evicted ones that it would attend to; a panel per record.

    Rows of panels are budgets and columns are policies. Blue is seen, light blue is held and read
    by no query head of the group, pale is evicted, red is one of these although the row's full
    attention on it, for some query head of the group, is at least 5 % (drawn larger than it is).
    The number is the mean retained mass of rows after the prompt. A
    bar marks the needle of the prompt, if it has one.
    """
    trace, records = as_trace(trace).evicting, drawn_records(records)
    layer, head = trace_layer(trace, layer), trace_head(trace, head)
    heads = slice(head * trace.group, (head + 1) * trace.group)
    attention = trace.attention(layer, slice(0, trace.n_pos))[heads].amax(0)
    needed = (attention >= NEEDED).cpu().numpy()
    needles = trace.spans.get("needle", ())
    budgets = sorted({record.budget for record in records})
    names = list(dict.fromkeys(record.policy for record in records))
    figure = Figure(figsize=(max(6.0, 2.6 * len(names) + 0.6), 2.75 * len(budgets) + 0.9), dpi=150)
    axes = figure.subplots(len(budgets), len(names), squeeze=False, sharex=True, sharey=True)
    for axis in axes.flat:
        axis.set_axis_off()
    colours = ListedColormap(["white", KEPT, UNREAD, GONE, MISSED])
    for record, result in zip(records, output_error(trace, records, prompt=False), strict=True):
        axis = axes[budgets.index(record.budget)][names.index(record.policy)]
        axis.set_axis_on()
        index = record_layer(record, layer)
        last = record.evicted_at[index, heads.start if record.per_query_head else head]
        extent = (0, record.n_pos, record.n_pos, 0)
        image: dict[str, Any] = {"vmin": 0, "vmax": 4, "interpolation": "nearest"}
        whole = slice(0, record.n_pos)
        read = read_entries(record, index, whole)[head] if has_reads(record, index) else None
        axis.imshow(_cells(last, needed, read), cmap=colours, extent=extent, **image)
        axis.set_xlim(-0.02 * record.n_pos, record.n_pos)  # the frame would hide the first token
        axis.axhline(record.prompt_len, color="black", linewidth=0.6, linestyle=":")
        for start, end in needles:
            axis.axvspan(start, end, 0.97, 1.0, color="black", linewidth=0)
        mass = result.mass[index, heads]
        if mass.size:
            look: dict[str, Any] = {"ha": "right", "fontsize": 8, "transform": axis.transAxes}
            axis.text(0.96, 0.9, f"mass kept {mass.mean():.2f}", **look)
        axis.tick_params(labelsize=7)
    for axis, name in zip(axes[0], names, strict=True):
        axis.set_title(name, fontsize=9)
    for row, budget in zip(axes, budgets, strict=True):
        name_axes(row[0], y=f"budget {budget}\nrow")
    for axis in axes[-1]:
        name_axes(axis, "position")
    unread = {"held, not read": UNREAD} if any(record.reads for record in records) else {}
    states = {"seen": KEPT, **unread, "evicted": GONE}
    missed = "not seen" if unread else "evicted"
    states[f"{missed}, but the row would attend >= {NEEDED:.0%} to it"] = MISSED
    handles = {state: Patch(color=colour) for state, colour in states.items()}
    if needles:
        handles["needle"] = Patch(color="black")
    legend_of(figure, handles, columns=4)
    labels = {
        fidelity(trace, record, kind, layer) for record in records for kind in ("sets", "rows")
    }
    where = f"layer {trace.layer_ids[layer]}, KV head {head}"
    caption(figure, f"{trace.name}: {where}; dotted: end of the prompt", labels)
    figure.tight_layout(rect=(0, 0.35 / figure.get_figheight(), 1, 1))
    return figure


def error_over_rows(
    trace: TraceLike, records: Record | Sequence[Record], *, smooth: int = 16
) -> Figure:
    """Output error of every row after the prompt, mean over layers and heads; a panel per budget.

    smooth: rows of the running mean.
    """
    trace, records = as_trace(trace).evicting, drawn_records(records)
    budgets = sorted({record.budget for record in records})
    figure = Figure(figsize=(8.5, 2.6 * len(budgets) + 0.6), dpi=150)
    axes = figure.subplots(len(budgets), 1, squeeze=False, sharex=True, sharey=True)[:, 0]
    names = list(dict.fromkeys(record.policy for record in records))
    styles, sizes = series(names), []
    for record, result in zip(records, output_error(trace, records, prompt=False), strict=True):
        error = result.error.mean((0, 1), dtype=np.float64)
        rows = np.arange(trace.prompt_len, trace.n_pos)
        axis = axes[budgets.index(record.budget)]
        step = max(1, len(rows) // 12)  # markers of different lines at different rows
        marked = (names.index(record.policy) * step // len(names), step)
        look: dict[str, Any] = {"lw": 1.2, "ms": 4, "markevery": marked, **styles[record.policy]}
        means = pl.Series(error).rolling_mean(smooth, min_samples=1).to_numpy()
        axis.plot(rows, means, label=record.policy, **look)
        sizes.append(error.mean())
    labels = {
        fidelity(trace, record, "rows", layer) for record in records for layer in record.layers
    }
    for axis, budget in zip(axes, budgets, strict=True):
        plain(axis, y="relative output error", title=f"budget {budget}")
        if max(sizes) > _WIDE * min((size for size in sizes if size), default=1):
            axis.set_yscale("log")
        else:
            axis.set_ylim(bottom=0)
    name_axes(axes[-1], "row")
    subject = f"{trace.name}: |o_full - o_seen| / |o_full|, running mean of {smooth} rows"
    finish(figure, axes[0], f"{subject}\nmean over layers and query heads", labels, columns=6)
    return figure


def _cells(
    last: NDArray[np.int32], needed: NDArray[np.bool_], read: NDArray[np.bool_] | None = None
) -> NDArray[np.int64]:
    """0 future, 1 seen, 2 not read, 3 evicted, 4 not seen and needed; [row, pos].

    Pooled to _PIXELS. Rows that were not propagated to the layer are 0 throughout.
    """
    total = len(last)
    row, pos = np.arange(total)[:, None], np.arange(total)[None, :]
    past, gone = pos <= row, (pos <= row) & (row > last)
    cells = past.astype(np.int64) + 2 * gone
    if read is not None:
        cells += past & ~gone & ~read
        gone = gone | (past & ~read)
    # a single cell would vanish on the page
    grown = scipy.ndimage.maximum_filter(
        gone & needed, 2 * max(1, total // 300) + 1, mode="constant"
    )
    cells[grown & past] = 4
    cells[last < np.arange(total)] = 0
    factor = -(-total // _PIXELS)
    if factor == 1:
        return cells
    short = total // factor * factor
    blocks = cells[:short, :short].reshape(short // factor, factor, short // factor, factor)
    pooled: NDArray[np.int64] = blocks.max((1, 3))
    return pooled


def token_text(
    trace: TraceLike,
    record: Record,
    *,
    layer: int = -1,
    head: int = 0,
    row: int | None = None,
    start: int = 0,
) -> Figure:
    """The text of a trace, with a style each for retained, evicted and not yet scored tokens.

    Under a reader, tokens that stay and that the next row does not read have one too.

    G-KV (arXiv 2512.00504), App. J. One head of one layer after an event; the protected entries of
    the window count as retained. Characters that cannot be printed are escaped, and a newline ends
    the line too. As many tokens as fit 60 lines of 100 characters, from position `start` on.

    row: of the event; the layer's last by default. Errors are those of `token_states`.
    """
    trace = as_trace(trace).evicting
    layer, head = trace_layer(trace, layer), trace_head(trace, head)
    states = token_states(trace, record, layer=layer, head=head, row=row)
    placed = _placed(states.text[start:])
    height = 1 + max((line for line, _, _ in placed), default=0)
    figure = Figure(figsize=(COLUMNS * _WIDTH + 0.4, 1), dpi=150)
    last = start + len(placed)
    part = "" if (start, last) == (0, trace.n_pos) else f", positions {start} to {last - 1}"
    subject = (
        f"{trace.name}: {record.policy}, budget {record.budget}, layer {trace.layer_ids[layer]}, "
        f"KV head {head}\nafter row {states.row}{part}"
    )
    caption(figure, subject, {fidelity(trace, record, "sets", layer)})
    across, high = COLUMNS * _WIDTH, 0.155 * height
    above = 0.15 + 0.17 * (1 + figure.get_suptitle().count("\n"))
    total = high + above + 0.45
    figure.set_figheight(total)
    wide = figure.get_figwidth()
    axis = figure.add_axes((0.2 / wide, 0.4 / total, across / wide, high / total))
    axis.set(xlim=(0, COLUMNS), ylim=(height, 0))
    axis.set_axis_off()
    for (line, column, shown), code in zip(placed, states.codes[start:], strict=False):
        style: dict[str, Any] = {**_STYLE[code], "family": "monospace", "fontsize": _SIZE}
        axis.text(column, line + 0.8, shown, parse_math=False, **style)
    counts = zip(states.counts().items(), _STYLE, strict=True)
    handles = {
        f"{name} ({n})": Patch(color=style["color"])
        for (name, n), style in counts
        if name != "missed" and (n or name != "held, not read")
    }
    legend_of(figure, handles, columns=3)
    return figure


def token_html(
    trace: TraceLike,
    record: Record,
    *,
    layer: int = -1,
    head: int = 0,
    row: int | None = None,
    start: int = 0,
    stop: int | None = None,
    needed: Ints | None = None,
) -> str:
    """The text of `token_text` as an HTML fragment: a `pre` with a `span` for each run of a state.

    The text of tokens is untrusted: all of it is escaped, none of it is in an attribute, and each
    has at most `LONGEST` characters.
    Positions from `start` up to and without `stop` are shown. needed: `last_needed` of the head,
    which distinguishes evicted tokens that a later row would attend to (`token_states`).
    """
    trace = as_trace(trace).evicting
    states = token_states(trace, record, layer=layer, head=head, row=row, needed=needed)
    codes, pieces = states.codes[start:stop], states.text[start:stop]
    edges = np.flatnonzero(np.diff(codes, prepend=-1)).tolist()
    spans = []
    for first, last in zip(edges, [*edges[1:], len(codes)], strict=True):
        code = codes[first]
        text = html.escape("".join(map(visible_token, pieces[first:last])))
        spans.append(f'<span title="{TOKEN_STATES[code]}" style="{_CSS[code]}">{text}</span>')
    return f'<pre style="white-space:pre-wrap;overflow-wrap:anywhere">{"".join(spans)}</pre>'


def lift_bars(
    trace: TraceLike,
    record: Record,
    *,
    layer: int = -1,
    heads: Sequence[int] | None = None,
    least: int = 3,
    tokens: int = 12,
) -> Figure:
    """Share kept of a token string over the share kept of all tokens, with its interval.

    G-KV (arXiv 2512.00504), App. I, by `kvsim.analysis.kept.text`: rate over mean rate after
    the layer's last event, Wilson's 95 % interval. The first 4 and the last 32 positions are left
    out, because many policies protect them.

    heads: of the record, all by default. least: strings on fewer positions are left out. tokens: so
    many of the largest lifts, and so many of the smallest. Raises NeedsError if the trace has no
    text of tokens.
    """
    trace = as_trace(trace).evicting
    check_record(trace, record)
    layer = trace_layer(trace, layer)
    table = retention_lift(trace, record, layer, heads=heads, sink=SINK, recent=RECENT)
    table = table.filter((table["count"] >= least) & table["lift"].is_not_null())
    if not table.height:
        raise PolicyError(
            f"no token of {trace.name} is on {least} positions of which {record.policy} keeps "
            "anything; take a longer trace, a larger budget, or fewer positions"
        )
    if table.height > 2 * tokens:
        table = table[[*range(tokens), *range(table.height - tokens, table.height)]]
    low, rate, high, mean = (table[name].to_numpy() for name in ("low", "rate", "high", "mean"))
    places = np.arange(table.height)
    figure = Figure(figsize=(6.4, 0.19 * table.height + 1.5), dpi=150)
    axis = figure.subplots()
    axis.barh(places, rate / mean, 0.75, color=COLOURS[5])
    ends = np.stack([rate - low, high - rate]).clip(0) / mean
    axis.errorbar(rate / mean, places, xerr=ends, fmt="none", ecolor="black", elinewidth=0.8)
    axis.axvline(1.0, color="black", lw=1, ls=":")
    pairs = table.select("token", "count").rows()
    names = [f"{short_text(token, 24)}  ({count})" for token, count in pairs]
    axis.set_yticks(places, names, family="monospace", parse_math=False)
    axis.margins(y=0.01)
    axis.invert_yaxis()
    axis.set_xlim(left=0)
    axis.grid(axis="x", color=GRID, linewidth=0.5)
    axis.set_axisbelow(True)
    ratio = "share of the token kept / share of all kept (dotted: as all)"
    name_axes(axis, ratio, "token (positions)")
    heads_text = "all heads" if heads is None else f"heads {', '.join(map(str, heads))}"
    subject = (
        f"{trace.name}: {record.policy}, budget {record.budget}\n"
        f"layer {trace.layer_ids[layer]}, {heads_text}, with 95 % interval"
    )
    caption(figure, subject, {fidelity(trace, record, "sets", layer)})
    figure.tight_layout()
    return figure


def _placed(text: Sequence[str]) -> list[tuple[int, int, str]]:
    """(line, column, characters) of each token until the lines are used up."""
    line, column, placed = 0, 0, []
    for token in text:
        shown = short_text(token, COLUMNS)
        if column + len(shown) > COLUMNS:
            line, column = line + 1, 0
        if line >= LINES:
            break
        placed.append((line, column, shown))
        column += len(shown)
        if "\n" in token:
            line, column = line + 1, 0
    return placed


def visible_token(text: str) -> str:
    """Text of a token, newlines shown and control characters escaped; a long one is cut."""
    text = text if len(text) <= LONGEST else f"{text[:LONGEST]}\u2026"
    return "".join(c if c.isprintable() else "\\n\n" if c == "\n" else escaped(c) for c in text)
