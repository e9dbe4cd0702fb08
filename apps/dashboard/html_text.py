"""Text of tokens as HTML, by their state or their KL, and KL between the events of a policy."""

from __future__ import annotations

import html
from collections.abc import Sequence

import numpy as np
import polars as pl

from kvsim import Record, Trace
from kvsim.analysis.arrays import Ints
from kvsim.analysis.kept.states import TOKEN_STATES, token_states
from kvsim.plots.style import KEPT, MISSED, UNREAD, escaped
from kvsim.plots.text import KL_COLOURS, KL_NAMES, kl_classes

# backgrounds let light and dark pages keep the colour of their text
_CSS = (
    "color:#767676",
    f"background:{KEPT}66;font-weight:bold",
    "color:#767676;font-style:italic",
    f"background:{MISSED}80;font-weight:bold",
    f"background:{UNREAD}66",
)
#: Characters of a token up to which a page shows it whole.
LONGEST = 64
#: The colours in words.
KL_LEGEND = "KL in nats: " + " &ensp; ".join(
    f'<span style="{style}">&nbsp;{name}&nbsp;</span>'
    for name, style in (
        *(
            (name, f"background:{colour}")
            for name, colour in zip(KL_NAMES, KL_COLOURS, strict=True)
        ),
        ("most likely token changed", "text-decoration:underline"),
        ("the first", "outline:2px solid"),
    )
)


def kl_by_event(tokens: pl.DataFrame, record: Record) -> pl.DataFrame:
    """Sums of a part of `kl_by_token` between each event of a record and the next.

    Columns: event, start and last (positions), tokens, kl, changed, and first, the position of the
    first changed one. Row r predicts position r + 1, and the rows behind an event see what it left.
    """
    events, differs = np.array([-1, *record.events]), pl.col("changed") > 0
    latest = np.searchsorted(events, tokens["position"].to_numpy() - 1) - 1
    position = pl.col("position")
    sums = tokens.group_by(pl.Series("event", events[latest]), maintain_order=True).agg(
        *(position.first().alias("start"), position.last().alias("last")),
        *(pl.len().alias("tokens"), pl.col("kl").sum(), differs.sum()),
        first=position.filter(differs).first(),
    )
    return sums.filter(pl.col("event") >= 0)


def kl_html(text: Sequence[str], tokens: pl.DataFrame) -> str:
    """Tokens in the colours of `kl_text` as an HTML fragment, escaped as in `token_html`.

    text: of all tokens. tokens: those to show, of `kl_by_token`.
    """
    changed = tokens["changed"].to_numpy() > 0
    marks = np.where(changed, ";text-decoration:underline", "")
    marks[np.flatnonzero(changed)[:1]] = ";outline:2px solid"
    styles = [
        (f"KL {KL_NAMES[at]}", f"background:{KL_COLOURS[at]}{mark}")
        for at, mark in zip(kl_classes(tokens["kl"].to_numpy()), marks, strict=True)
    ]
    return styled_html([text[at] for at in tokens["position"]], styles)


def token_html(
    trace: Trace,
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
    Positions from `start` up to and without `stop` are shown. needed: the last row that attends to
    each, which distinguishes evicted tokens that a later row would attend to (`token_states`).
    """
    trace = trace.part()
    states = token_states(trace, record, layer=layer, head=head, row=row, needed=needed)
    styles = dict(enumerate(zip(TOKEN_STATES, _CSS, strict=True)))
    return styled_html(states.text[start:stop], [styles[code] for code in states.codes[start:stop]])


def styled_html(pieces: Sequence[str], styles: Sequence[tuple[str, str]]) -> str:
    """Return a `pre` with a `span` for each run of tokens of one title and CSS; text is escaped."""
    spans, first = [], 0
    for last in range(1, len(pieces) + 1):
        if last < len(pieces) and styles[last] == styles[first]:
            continue
        title, css = styles[first]
        text = html.escape("".join(map(_visible, pieces[first:last])))
        spans.append(f'<span title="{html.escape(title)}" style="{css}">{text}</span>')
        first = last
    return f'<pre style="white-space:pre-wrap;overflow-wrap:anywhere">{"".join(spans)}</pre>'


def _visible(text: str) -> str:
    """Text of a token, newlines shown and control characters escaped; a long one is cut."""
    text = text if len(text) <= LONGEST else f"{text[:LONGEST]}\u2026"
    return "".join(c if c.isprintable() else "\\n\n" if c == "\n" else escaped(c) for c in text)
