"""How layers rank a prompt: kept while knobs are turned, and the picture of ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
import polars as pl
import streamlit as st

import cached
import lines
import shown
from kvsim.analysis.prompt.layers import RankPattern, overlap_table, rank_pattern, sparsity_table
from kvsim.analysis.prompt.ranking import Ranking
from kvsim.analysis.prompt.ranking import ranking as rank
from kvsim.analysis.prompt.tables import Diagnosis, diagnose
from kvsim.plots.style import COLOURS
from kvsim.policies.asl import ASL

#: Columns of a picture: it is sent as numbers.
COLUMNS = 512


@st.cache_resource(max_entries=16, show_spinner="ranking tokens in every layer")
def ranking(source: cached.Source, window: int) -> Ranking:
    """The ranks of all layers."""
    return rank(cached.trace(source), ASL(window=window))


@st.cache_resource(max_entries=64, show_spinner=False)
def diagnosis(
    source: cached.Source, window: int, k: int, tau: float, first_layer: int, look_back: int
) -> Diagnosis:
    """ASL's test with these knobs; budget: k and the window."""
    rule = ASL(window=window, tau=tau, first_layer=first_layer, look_back=look_back)
    return diagnose(cached.trace(source), ranking(source, window), k + window, rule=rule)


@st.cache_data(max_entries=64, show_spinner=False)
def pattern(source: cached.Source, window: int, look_back: int, k: int, by: str) -> RankPattern:
    """The ranks of what is among the first k."""
    return rank_pattern(ranking(source, window), look_back, k, by=by, columns=COLUMNS)


@st.cache_data(max_entries=16, show_spinner="measuring sparsity")
def sparsity(source: cached.Source) -> pl.DataFrame:
    """By layer."""
    return sparsity_table(cached.trace(source))


@st.cache_data(max_entries=64, show_spinner="comparing windows")
def overlap(source: cached.Source, layer: int, window: int) -> pl.DataFrame:
    """Of one layer."""
    return overlap_table(cached.trace(source), layer, window=window)


def draw(
    found: RankPattern, ranked: int, texts: Sequence[str] | None, selected: int | None
) -> None:
    """Ranks of tokens by layer, on a scale of logarithms: dark is a high rank."""
    layers, columns = found.ranks.shape
    names = [_name(found, column, texts) for column in range(columns)]
    ticks = [10**power for power in range(len(str(ranked)))]
    figure = go.Figure(
        go.Heatmap(
            z=np.log10(found.ranks).astype(np.float32),
            x=names,
            y=list(range(layers)),
            customdata=found.ranks.astype(np.float32),
            hovertemplate="%{x}<br>layer %{y}: rank %{customdata:.4g}<extra></extra>",
            zmin=0,
            zmax=float(np.log10(max(2, ranked))),
            colorscale="Viridis",
            colorbar={
                "title": {"text": "rank"},
                "tickvals": [float(np.log10(tick)) for tick in ticks],
                "ticktext": [f"{tick:,}" for tick in ticks],
            },
        )
    )
    if selected is not None:
        figure.add_hline(selected + 0.5, line={"color": COLOURS[1], "width": 2})
    figure.update_xaxes(title="tokens, in order", type="category", showticklabels=False, ticks="")
    figure.update_yaxes(title="layer", autorange="reversed", tickmode="linear", dtick=_step(layers))
    lines.draw(figure, "pattern", height=max(220, min(640, 26 * layers + 110)))


def _step(layers: int) -> int:
    """Layers between two labels of an axis."""
    return max(1, layers // 16)


def _name(found: RankPattern, column: int, texts: Sequence[str] | None) -> str:
    """A column: position and token, or those of the first and how many there are."""
    first, stop = found.edges[column], found.edges[column + 1]
    position = int(found.tokens[first])
    text = "" if texts is None else f" {shown.shortened(texts[position])}"
    more = f" and {stop - first - 1} more" if stop - first > 1 else ""
    return f"position {position}{text}{more}"
