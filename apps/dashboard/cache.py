"""Results of kvsim that the server caches: opened traces, records, tables, tiles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import streamlit as st
from numpy.typing import NDArray

import kvsim
from kvsim import Policy, Record, Trace
from kvsim.plots import NEEDED
from kvsim.policies.fit import fitted

from .tiles import Tile, reading_tile, retention_tile


@dataclass(frozen=True)
class Source:
    """A trace or a run with its time of writing, so that a replaced one is read again."""

    path: str
    written: float

    @classmethod
    def of(cls, path: Path) -> Source:
        """Build it from the folder of a trace or of a run, or a packed trace."""
        files = (path, path / "zarr.json", path / "results.parquet")
        written = (file.stat().st_mtime for file in files if file.is_file())
        return cls(str(path), next(written, 0.0))


@dataclass(frozen=True)
class Choice:
    """A policy with its parameters, budget and schedule; fit: scale its lengths to the budget.

    interval, prefill: None for the policy's own.
    """

    policy: str
    params: Mapping[str, Any]
    budget: int
    interval: int | None
    prefill: bool | None = None
    fit: bool = False

    def built(self) -> Policy:
        """Build the policy."""
        policy = kvsim.policy(self.policy, **self.params)
        return fitted(policy) if self.fit else policy


@st.cache_resource(max_entries=8, show_spinner=False)
def trace(source: Source) -> Trace:
    """Open a trace; its arrays are read on use."""
    return kvsim.open_trace(source.path)


@st.cache_resource(max_entries=48, show_spinner="replaying the policy over the trace")
def record(
    source: Source, choice: Choice, layer: int | None = None, *, internals: bool = False
) -> Record:
    """Replay all layers, or only one; internals: keep the decisions of events."""
    return kvsim.replay(
        trace(source),
        choice.built(),
        choice.budget,
        interval=choice.interval,
        prefill=choice.prefill,
        layers=None if layer is None else [layer],
        internals=internals,
    )


@st.cache_data(show_spinner=False)
def together(choice: Choice) -> bool:
    """Whether the layers share a budget or a ranking, so that no layer can be replayed alone."""
    return choice.built().across_layers


@st.cache_data(max_entries=32, show_spinner="pooling the map of positions")
def retention(source: Source, choice: Choice, alone: int | None, layer: int, head: int) -> Tile:
    """Kept positions of a head after the events; alone: the only replayed layer, None for all."""
    replayed = record(source, choice, alone)
    return retention_tile(replayed, replayed.layers.index(layer), head)


@st.cache_data(max_entries=32, show_spinner="pooling the map of what rows read")
def reading(source: Source, choice: Choice, alone: int | None, layer: int, head: int) -> Tile:
    """Return the positions that each row of a head reads, holds or has lost."""
    replayed = record(source, choice, alone)
    return reading_tile(replayed, replayed.layers.index(layer), head)


@st.cache_data(max_entries=64, show_spinner="finding rows that need each position")
def needed(source: Source, layer: int, head: int) -> NDArray[np.int64]:
    """The last row whose full attention on each position is at least `NEEDED`; -1 without one.

    For some query head of the KV head's group. An entry that is evicted after an earlier row is
    missed.
    """
    opened, step = trace(source), 64
    heads = slice(head * opened.group, (head + 1) * opened.group)
    last = np.full(opened.n_pos, -1)
    for start in range(0, opened.n_pos, step):
        rows = slice(start, min(start + step, opened.n_pos))
        weights = opened.attention(layer, rows, slice(0, rows.stop))[heads].amax(0)
        row, pos = (weights >= NEEDED).numpy().nonzero()
        np.maximum.at(last, pos, start + row)
    return last
