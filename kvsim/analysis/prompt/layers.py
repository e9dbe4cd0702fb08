"""Overlap, sparsity and rank patterns of layers, at shares, windows and tokens of one's choice.

The numbers are those of the metrics `window_overlap` and `sparsity`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from kvsim.analysis.arrays import Floats, Ints, mean_known
from kvsim.analysis.attention.overlap import window_overlap
from kvsim.analysis.attention.sparsity import attention_sparsity
from kvsim.analysis.prompt.ranking import Ranking
from kvsim.analysis.wide import wide
from kvsim.core.trace import Trace

#: Shares of the keys that count as top.
TOPS = tuple(place / 20 for place in range(1, 21))
#: Shares of the maximum, p, in `sparsity_table`: those that the paper names.
PEAK_SHARES = (0.01, 0.05)


def overlap_table(
    trace: Trace, layer: int, *, window: int | None = None, shares: Sequence[float] = TOPS
) -> pl.DataFrame:
    """Share of the last window's top keys that earlier windows had; a row for each share.

    G-KV (arXiv 2512.00504), Fig. 1; see `window_overlap`, which raises TraceError for
    a trace too short for four windows.

    Returns:
        share, then means over heads: `oldest`, `second`, `third` window, `union` of the three,
        `equal_budget` (as many keys as one set has), `chance` of one set and `chance_union`.
    """
    found = window_overlap(trace, layer, window=window, shares=shares)
    oldest, second, third = found.before
    windows = {"share": found.shares, "oldest": oldest, "second": second, "third": third}
    names = ("union", "equal_budget", "chance", "chance_union")
    return pl.DataFrame(windows | {name: getattr(found, name) for name in names})


def sparsity_table(trace: Trace) -> pl.DataFrame:
    """Share of the keys that score below p times the maximum, by layer, mean over heads.

    G-KV (arXiv 2512.00504), Fig. 9; see `kvsim.analysis.attention_sparsity`.

    Returns:
        layer, p, then by the keys that the maximum is taken over: `sequence`, `behind_sink` and
        `domain`; null where a trace is too short.
    """
    columns = ("layer", "p", "sequence", "behind_sink", "domain")
    of_layers = [
        attention_sparsity(trace, layer, shares=PEAK_SHARES) for layer in range(trace.n_layers)
    ]
    parts = (
        {"layer": layer, "p": sparsity.shares}
        | {name: mean_known(getattr(sparsity, name)) for name in columns[2:]}
        for layer, sparsity in enumerate(of_layers)
    )
    return wide(parts, {"layer": pl.Int64} | dict.fromkeys(columns[1:], pl.Float64))


@dataclass(frozen=True)
class RankPattern:
    """How the layers rank some tokens.

    tokens: their positions, in the order of the columns. edges: the first token (its place among
    them) of each column, and one more, where the last column ends. ranks [L, column]: geometric
    means of the ranks, 1 the best.
    """

    tokens: Ints
    edges: Ints
    ranks: Floats


def rank_pattern(
    ranking: Ranking, look_back: int, k: int, *, by: str = "rank", columns: int = 1024
) -> RankPattern:
    """Ranks of the tokens among the first k in one of the last `look_back` layers.

    After ASL (arXiv 2601.07667), Fig. 4.

    Args:
        ranking: of a trace.
        look_back: layers, from the last one.
        k: tokens that propagate next to the window.
        by: order of the tokens: `rank` in the last layer, or `position`.
        columns: at most so many; where there are more tokens, neighbours share one.
    """
    tokens = ranking.members(ranking.n_layers - 1, look_back, k)
    if by == "rank":
        tokens = tokens[np.argsort(ranking.ranks[-1, tokens].numpy(), kind="stable")]
    width = max(1, -(-len(tokens) // columns))
    starts = np.arange(0, len(tokens), width)
    edges = np.append(starts, len(tokens))
    ranks = np.log(ranking.ranks[:, tokens].numpy().astype(np.float64))
    if not len(tokens):
        return RankPattern(tokens, edges, ranks)
    means = np.add.reduceat(ranks, starts, axis=1) / np.diff(edges)
    return RankPattern(tokens, edges, np.exp(means))
