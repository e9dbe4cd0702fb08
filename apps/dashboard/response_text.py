"""KL of the tokens of a response: between events of a policy, and as text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl

from kvsim import Record
from kvsim.plots.text import KL_COLOURS, KL_NAMES, kl_classes, styled_html

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
