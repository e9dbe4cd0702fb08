"""Ranks of the tokens of a prompt in every layer, cached, and their picture."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
import polars as pl
import streamlit as st

from kvsim.analysis.attention.sparsity import sparsity_table
from kvsim.analysis.attention.windows import overlap_table
from kvsim.plots.style import COLOURS
from kvsim.policies.asl import ASL
from kvsim.studies.layers.ranking import Ranking, RankPattern, rank_pattern
from kvsim.studies.layers.ranking import ranking as rank
from kvsim.studies.layers.tables import Diagnosis, diagnose

from . import cache, elements, line_charts

#: Columns of a picture: it is sent as numbers.
COLUMNS = 512


@st.cache_resource(max_entries=16, show_spinner="ranking tokens in every layer")
def ranking(source: cache.Source, window: int) -> Ranking:
    """Rank the prompt in all layers."""
    return rank(cache.trace(source), ASL(window=window))


@st.cache_resource(max_entries=64, show_spinner=False)
def diagnosis(
    source: cache.Source, window: int, k: int, tau: float, first_layer: int, look_back: int
) -> Diagnosis:
    """Run ASL's test with these parameters; the budget is k and the window."""
    rule = ASL(window=window, tau=tau, first_layer=first_layer, look_back=look_back)
    return diagnose(cache.trace(source), ranking(source, window), k + window, rule=rule)


@st.cache_data(max_entries=64, show_spinner=False)
def pattern(source: cache.Source, window: int, look_back: int, k: int, by: str) -> RankPattern:
    """Ranks of the tokens that the last layers have among their first k."""
    return rank_pattern(ranking(source, window), look_back, k, by=by, columns=COLUMNS)


@st.cache_data(max_entries=16, show_spinner="measuring sparsity")
def sparsity(source: cache.Source) -> pl.DataFrame:
    """Sparsity by layer."""
    return sparsity_table(cache.trace(source))


@st.cache_data(max_entries=64, show_spinner="comparing windows")
def overlap(source: cache.Source, layer: int, window: int) -> pl.DataFrame:
    """Overlap of the top keys of windows in one layer."""
    return overlap_table(cache.trace(source), layer, window=window)


def draw(
    pattern: RankPattern, ranked: int, texts: Sequence[str] | None, selected: int | None
) -> None:
    """Show the ranks of tokens by layer, on a logarithmic scale: dark is a high rank."""
    layers, columns = pattern.ranks.shape
    names = [_name(pattern, column, texts) for column in range(columns)]
    ticks = [10**power for power in range(len(str(ranked)))]
    figure = go.Figure(
        go.Heatmap(
            z=np.log10(pattern.ranks).astype(np.float32),
            x=names,
            y=list(range(layers)),
            customdata=pattern.ranks.astype(np.float32),
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
    step = max(1, layers // 16)
    figure.update_yaxes(title="layer", autorange="reversed", tickmode="linear", dtick=step)
    line_charts.draw(figure, "pattern", height=max(220, min(640, 26 * layers + 110)))


def _name(pattern: RankPattern, column: int, texts: Sequence[str] | None) -> str:
    """Return the label of a column: position and token of its first token, and how many follow."""
    first, stop = pattern.edges[column], pattern.edges[column + 1]
    position = int(pattern.tokens[first])
    text = "" if texts is None else f" {elements.shortened(texts[position])}"
    more = f" and {stop - first - 1} more" if stop - first > 1 else ""
    return f"position {position}{text}{more}"
