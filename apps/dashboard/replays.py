"""Replays of policies on the chosen trace, and the text of one head by token state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import streamlit as st

from kvsim import Record, Trace
from kvsim.analysis.arrays import Ints, event_rows
from kvsim.analysis.kept.states import TokenStates, has_reads, token_states
from kvsim.analysis.table import fidelity
from kvsim.engine.source import check_unwindowed
from kvsim.errors import KvsimError
from kvsim.plots import NEEDED
from kvsim.plots.style import KEPT, MISSED, UNREAD

from . import cache, controls, elements, readings
from .html_text import token_html
from .tiles import Tile

#: Tokens of the text that are shown at once.
WINDOW = 4096

LEGEND = (
    f'<span style="background:{KEPT}66;font-weight:bold">kept</span> &ensp; '
    '<span style="color:#767676">evicted</span> &ensp; '
    f'<span style="background:{MISSED}80;font-weight:bold">evicted, though a later row would give '
    f"it at least {NEEDED:.0%} of its attention</span> &ensp; "
    '<span style="color:#767676;font-style:italic">came later</span>'
)

_UNREAD = f' &ensp; <span style="background:{UNREAD}66">held, and not read by the next row</span>'


@dataclass(frozen=True)
class Settings:
    """Settings of a page's controls."""

    trace: Trace
    source: cache.Source
    layer: int
    head: int
    budget: int
    interval: int | None
    fit: bool = True
    all_layers: bool = False
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Replayed:
    """A record of a policy; alone: the only replayed layer, None for all layers."""

    settings: Settings
    choice: cache.Choice
    alone: int | None
    record: Record

    @property
    def name(self) -> str:
        """The policy as it was replayed."""
        return self.record.policy

    @property
    def head(self) -> int:
        """The chosen KV head on the record's axis; of several query heads the first."""
        head = self.settings.head
        return head * self.settings.trace.group if self.record.per_query_head else head

    @property
    def _layer(self) -> tuple[cache.Source, cache.Choice, int | None, int]:
        """The cache's key of the replay of the chosen layer."""
        return self.settings.source, self.choice, self.alone, self.settings.layer

    @property
    def picture(self) -> Tile:
        """Positions of the head's entries after the events."""
        return cache.retention(*self._layer, self.head)

    @property
    def events(self) -> Ints:
        """Rows after which something leaves the layer."""
        return event_rows(self.record.gone_after[self.record.layers.index(self.settings.layer)])

    @property
    def fidelity(self) -> str:
        """How far the kept sets can be trusted."""
        return fidelity(self.settings.trace, self.record, "sets", self.settings.layer)

    @property
    def reads(self) -> bool:
        """Whether rows may leave entries of the layer unread."""
        return has_reads(self.record, self.record.layers.index(self.settings.layer))

    @property
    def map_of_reads(self) -> Tile:
        """Return the positions of the head that each row reads, holds or has lost."""
        return cache.reading(*self._layer, self.head)

    def place(self, row: int) -> dict[str, Any] | None:
        """Keywords of functions of a text: the last event up to a row; None before the first.

        Where rows read parts of what is held, the row itself.
        """
        events = self.events[self.events <= row]
        if not len(events) and not self.reads:
            return None
        layer, head = self.settings.layer, self.settings.head
        needed = cache.needed(self.settings.source, layer, head)
        at = row if self.reads else int(events[-1])
        return {"layer": layer, "head": head, "row": at, "needed": needed}

    def states(self, row: int) -> TokenStates | None:
        """States of the tokens at the last event up to a row; None before the first."""
        place = self.place(row)
        if place is None:
            return None
        return token_states(self.settings.trace, self.record, **place)


def replay(settings: Settings, name: str) -> Replayed | str:
    """Replay only the layer, or all layers where they share a budget; else return the reason."""
    trace, layer = settings.trace, settings.layer
    try:
        check_unwindowed(trace, layer)
        params = controls.settings(name, settings.params)
        prefill = True if settings.interval else None  # the same events for all policies
        terms = (settings.budget, settings.interval, prefill, settings.fit)
        choice = cache.Choice(name, params, *terms)
        alone = None if cache.together(choice) else layer
        if alone is None and not settings.all_layers:
            return (
                f"{name}: the layers share one budget, so one of them cannot be replayed alone; "
                "switch on 'All layers' on the left to replay them together"
            )
        return Replayed(settings, choice, alone, cache.record(settings.source, choice, alone))
    except KvsimError as error:
        return str(error)


def unable(reason: str) -> None:
    """Show why a policy cannot be replayed."""
    st.warning("This policy cannot be replayed with these settings.", icon=":material/block:")
    st.text(reason)


def legend(states: Mapping[str, TokenStates | None], settings: Settings) -> None:
    """Explain two texts and their colours; nothing before the first event."""
    scored = {name: state for name, state in states.items() if state is not None}
    if scored:
        needles = settings.trace.header.spans.get("needle", ())
        elements.reading(readings.texts(scored, needles[0] if needles else None))
        unread = any(state.counts()["held, not read"] for state in scored.values())
        st.html(LEGEND + (_UNREAD if unread else ""))


def text(replay: Replayed, row: int, start: int = 0) -> None:
    """Show the text by the state of its tokens, with the colours of `token_html`."""
    place = replay.place(row)
    if place is None:
        st.caption("Nothing has been evicted by then.")
        return
    trace, stop = replay.settings.trace, start + WINDOW
    st.html(token_html(trace, replay.record, **place, start=start, stop=stop))
