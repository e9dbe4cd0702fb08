"""The course of one head: what every event leaves of it, in numbers, and its longest gap."""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

from kvsim.analysis.kept.bursts import dropped_bursts
from kvsim.analysis.kept.coverage import kept_coverage
from kvsim.analysis.kept.retention import wipeout
from kvsim.core.record import Record

Ints = NDArray[np.int64]

#: Positions of a region, of those that `wipeout` and a tile of retention count.
REGION = 32


def head_course(record: Record, layer: int, head: int) -> pl.DataFrame:
    """A row for each event of a layer: what one of its heads holds then, by the metrics' rules.

    event: its row; kept: entries; share: of all positions there; wipeout: share of the regions of
    `REGION` positions of which nothing is left (`wipeout`, length=32, threshold=0); longest: the
    longest run of dropped positions (`burst_length`, longest); middle: the share kept of the
    middle third of the text (`middle_coverage`). Null where a metric has no value.

    Args:
        record: of any policy.
        layer: index in the trace.
        head: on the record's head axis.
    """
    gone = record.gone_after[record.layers.index(layer)]
    coverage = kept_coverage(gone)
    numbers = {
        "share": coverage.overall,
        "wipeout": wipeout(gone, REGION).cumulative,
        "longest": dropped_bursts(gone).longest,
        "middle": coverage.middle,
    }
    return pl.DataFrame(
        {
            "event": coverage.rows,
            "kept": coverage.kept.sum(1)[head],
            **{name: values[head] for name, values in numbers.items()},
        }
    ).with_columns(pl.col("share", "wipeout", "middle").fill_nan(None))


def held(record: Record, layer: int, head: int, row: int) -> Ints:
    """The positions that a head holds after the event that follows a row, ascending."""
    gone = record.gone_after[record.layers.index(layer), head]
    return np.flatnonzero(gone[: row + 1] > row)


def longest_gaps(record: Record, layer: int, head: int, rows: Ints) -> Ints:
    """The longest run of dropped positions after each event, the first of several; [E, 2].

    First position, and the one behind the last; both are 0 where nothing is dropped.
    """
    out = np.zeros((len(rows), 2), np.int64)
    for place, row in enumerate(rows.tolist()):
        kept = np.concatenate([[-1], held(record, layer, head, row), [row + 1]])
        widest = int(np.diff(kept).argmax())
        if kept[widest + 1] - kept[widest] > 1:
            out[place] = kept[widest] + 1, kept[widest + 1]
    return out
