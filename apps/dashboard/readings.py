"""Sentences that describe charts, computed from the drawn numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvsim.analysis.arrays import Ints
from kvsim.analysis.kept.states import TOKEN_STATES, TokenStates
from kvsim.schema import plural
from kvsim.studies.segments.segments import Segmented

from .cuts import spread
from .elements import excerpt

_MISSED, _UNREAD = TOKEN_STATES.index("missed"), TOKEN_STATES.index("held, not read")
_KEPT = (TOKEN_STATES.index("retained"), _UNREAD)


def texts(states: Mapping[str, TokenStates], needle: tuple[int, int] | None = None) -> str:
    """Describe how much of a text each policy keeps and misses; states: by policy."""
    parts = []
    for name, state in states.items():
        counts = state.counts()
        past, unread = state.row + 1, counts["held, not read"]
        parts.append(
            f"{name} keeps {counts['retained'] + unread} of {past:,} tokens"
            + (f", of which the next row does not read {unread}," if unread else "")
            + f" and misses {counts['missed']} that later rows would attend to"
        )
    sentence = f"{'; '.join(parts)}."
    if needle is not None:
        size = needle[1] - needle[0]
        codes = {name: state.codes[slice(*needle)] for name, state in states.items()}
        each = (
            f"{name} keeps {np.isin(code, _KEPT).sum()} and misses {(code == _MISSED).sum()}"
            for name, code in codes.items()
        )
        sentence += f" Of the needle's {plural(size, 'token')}, {'; '.join(each)}."
    return sentence


def response(period: Mapping[str, Any], total: float) -> str:
    """Describe the loss of the response's tokens between two events; total: in nats."""
    count, changed, kl = (period[name] for name in ("tokens", "changed", "kl"))
    where = f", first at position {period['first']}" if changed else ""
    return (
        f"After row {period['event']}, {plural(count, 'token')} lose {kl:.3g} nats, "
        f"{kl / count:.3g} each and {kl / (total or 1):.0%} of all; the most likely token of "
        f"{changed} changes{where}."
    )


def _cell(edges: Ints, place: int, texts: Sequence[str] | None, kind: str = "position") -> str:
    """Name a cell: its positions or rows, and the beginning of its text."""
    first, last = int(edges[place]), int(edges[place + 1]) - 1
    where = f"{kind} {first}" if first == last else f"{kind}s {first} to {last}"
    if texts is None:
        return where
    text = "".join(text[:24] for text in texts[first : min(last + 1, first + 16)])
    return f"{where} (\u201c{excerpt(text.strip() or text, 24)}\u201d)"


def segments(event: Segmented, alone: Ints, scorer: str, texts: Sequence[str] | None) -> str:
    """Describe the segments of an event, and where AMS and its scorer differ most."""
    counts, kept = event.counts(), event.counts(event.kept)
    held = spread(event, alone)
    edges = np.append(event.starts, event.row + 1)
    if len(counts) == 1:
        meaning = f"All {counts[0]} entries of this head are one segment, so no part has a quota"
    else:
        density = np.bincount(event.segment, event.mass, len(counts)) / counts
        dense, thin = int(density.argmax()), int(density.argmin())
        meaning = (
            f"The {len(counts)} segments are stretches of the text of which this head keeps "
            f"{kept.min()} to {kept.max()} entries each: attention mass per held entry "
            f"is highest, {density[dense]:.2%} of all, at {_cell(edges, dense, texts)}, where "
            f"{kept[dense]} of {counts[dense]} stay, and lowest, {density[thin]:.2%}, at "
            f"{_cell(edges, thin, texts)}, where {kept[thin]} of {counts[thin]} stay"
        )
    most = int(np.abs(kept - held).argmax())
    return (
        f"{meaning}. AMS differs most from {scorer} alone at {_cell(edges, most, None)}: "
        f"{kept[most]} entries against {held[most]}."
    )
