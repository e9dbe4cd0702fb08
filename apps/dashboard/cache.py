"""Results of kvsim that the server caches: opened traces, records, tables, tiles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import streamlit as st
from numpy.typing import NDArray

import kvsim
from kvsim import Record, Trace
from kvsim.analysis.attention.heads import head_table
from kvsim.analysis.kept.states import head_course, longest_gaps

from .tiles import Tile, attention_tile, retention_tile


@dataclass(frozen=True)
class Source:
    """A trace and when its metadata was written, so that a new recording is read anew."""

    path: str
    written: float

    @classmethod
    def of(cls, path: Path) -> Source:
        """Build it from a folder or a packed file."""
        metadata = path if path.is_file() else path / "zarr.json"
        return cls(str(path), metadata.stat().st_mtime if metadata.exists() else 0.0)


@dataclass(frozen=True)
class Choice:
    """A policy, its parameters (name and value), budget and schedule."""

    policy: str
    params: tuple[tuple[str, Any], ...]
    budget: int
    interval: int | None
    prefill: bool | None = None

    @classmethod
    def of(
        cls,
        policy: str,
        budget: int,
        interval: int | None = None,
        prefill: bool | None = None,
        **params: Any,
    ) -> Choice:
        """Build it from keywords; interval and prefill None are the policy's own."""
        return cls(policy, tuple(sorted(params.items())), budget, interval, prefill)

    @property
    def keywords(self) -> Mapping[str, Any]:
        """The parameters by name."""
        return dict(self.params)


class Retained(NamedTuple):
    """A tile of what events leave of a head, and the longest gap [E, 2] after each event."""

    tile: Tile
    gaps: NDArray[np.int64]


@st.cache_resource(max_entries=8, show_spinner=False)
def trace(source: Source) -> Trace:
    """Open a trace; its arrays are read on use."""
    return kvsim.open_trace(source.path)


@st.cache_resource(max_entries=48, show_spinner="replaying")
def record(
    source: Source, choice: Choice, layer: int | None = None, *, internals: bool = False
) -> Record:
    """Replay all layers, or one alone; internals: keep the decisions of events."""
    return kvsim.replay(
        trace(source),
        kvsim.policy(choice.policy, **choice.keywords),
        choice.budget,
        interval=choice.interval,
        prefill=choice.prefill,
        layers=None if layer is None else [layer],
        internals=internals,
    )


@st.cache_data(show_spinner=False)
def together(choice: Choice) -> bool:
    """Whether the layers share one budget, so that no layer can be replayed alone."""
    return kvsim.policy(choice.policy, **choice.keywords).layer_budgets.across_layers


@st.cache_data(max_entries=64, show_spinner="counting")
def course(
    source: Source, choice: Choice, alone: int | None, layer: int, head: int
) -> pl.DataFrame:
    """Numbers of a head after each event; alone: the layer that was replayed, None for all."""
    return head_course(record(source, choice, alone), layer, head)


@st.cache_data(max_entries=32, show_spinner="drawing")
def retention(source: Source, choice: Choice, alone: int | None, layer: int, head: int) -> Retained:
    """What the events leave of every position of a head, and its longest gaps."""
    replayed = record(source, choice, alone)
    tile = retention_tile(replayed, replayed.layers.index(layer), head)
    return Retained(tile, longest_gaps(replayed, layer, head, tile.rows))


@st.cache_data(max_entries=32, show_spinner="computing attention")
def attention(source: Source, layer: int, qhead: int, rows: range, positions: range) -> Tile:
    """Attention of one query head, pooled."""
    return attention_tile(trace(source), layer, qhead, rows, positions)


@st.cache_data(max_entries=64, show_spinner="measuring heads")
def heads(source: Source, layer: int) -> pl.DataFrame:
    """What the query heads of a layer attend to, a row each."""
    return head_table(trace(source), layer)
