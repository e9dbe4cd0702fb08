"""What kvsim has computed once is kept: opened traces, records, pictures, tables."""

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
from kvsim.analysis.attention.heads import HeadProfile, head_profile
from kvsim.analysis.kept.course import head_course, longest_gaps
from kvsim.analysis.tiles import Tile, attention_tile, retention_tile


@dataclass(frozen=True)
class Source:
    """A trace as it was when its metadata was written: what is recorded anew is new."""

    path: str
    written: float

    @classmethod
    def of(cls, path: Path) -> Source:
        """The folder, or the packed file, as it is now."""
        metadata = path if path.is_file() else path / "zarr.json"
        return cls(str(path), metadata.stat().st_mtime if metadata.exists() else 0.0)


@dataclass(frozen=True)
class Choice:
    """A policy, its parameters (name and value) and the terms on which it evicts."""

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
        """From keywords; interval and prefill None are the policy's own."""
        return cls(policy, tuple(sorted(params.items())), budget, interval, prefill)

    @property
    def keywords(self) -> Mapping[str, Any]:
        """The parameters by name."""
        return dict(self.params)


class Retained(NamedTuple):
    """A map of what events leave of a head; and the longest gap [E, 2] after each."""

    tile: Tile
    gaps: NDArray[np.int64]


@st.cache_resource(max_entries=8, show_spinner=False)
def trace(source: Source) -> Trace:
    """The opened trace; its arrays are read when they are asked for."""
    return kvsim.open_trace(source.path)


@st.cache_resource(max_entries=48, show_spinner="replaying")
def record(
    source: Source, choice: Choice, layer: int | None = None, *, internals: bool = False
) -> Record:
    """A replay of all layers, or of one alone; with what its events decided on request."""
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
    """Whether the layers share one budget, so that none can be replayed alone."""
    return kvsim.policy(choice.policy, **choice.keywords).layer_budgets.across_layers


@st.cache_data(max_entries=64, show_spinner="counting")
def course(
    source: Source, choice: Choice, alone: int | None, layer: int, head: int
) -> pl.DataFrame:
    """What the events leave of a head; `alone`: the layer that was replayed, None for all."""
    return head_course(record(source, choice, alone), layer, head)


@st.cache_data(max_entries=32, show_spinner="drawing")
def retention(source: Source, choice: Choice, alone: int | None, layer: int, head: int) -> Retained:
    """What the events leave of every position of a head, and its longest gaps."""
    found = record(source, choice, alone)
    tile = retention_tile(found, found.layers.index(layer), head)
    return Retained(tile, longest_gaps(found, layer, head, tile.rows))


@st.cache_data(max_entries=32, show_spinner="computing attention")
def attention(source: Source, layer: int, qhead: int, rows: range, positions: range) -> Tile:
    """Pooled attention of one query head."""
    return attention_tile(trace(source), layer, qhead, rows, positions)


@st.cache_data(max_entries=64, show_spinner="measuring heads")
def profile(source: Source, layer: int) -> HeadProfile:
    """Where the heads of a layer put their attention."""
    return head_profile(trace(source), layer)
