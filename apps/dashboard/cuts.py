"""Numbers of the segments of an event that the page *Segments* draws."""

from __future__ import annotations

import numpy as np
import polars as pl

from kvsim.analysis.arrays import Floats, Ints
from kvsim.studies.segments.segments import Segmented


def curve(event: Segmented, name: str, most: int) -> tuple[Ints, Floats]:
    """Positions, at most so many, and the mass of that name added up to each, in all 1."""
    sums = getattr(event, name).cumsum()
    places = np.unique(np.linspace(0, len(sums) - 1, min(most, len(sums))).astype(np.int64))
    return event.pos[places], sums[places] / (sums[-1] or 1.0)


def spread(event: Segmented, positions: Ints) -> Ints:
    """How many of any positions lie where each segment does, up to the next's first; [S]."""
    edges = np.concatenate([[0], event.boundaries, [event.row + 1]])
    return np.histogram(positions[positions <= event.row], edges)[0]


def moves(event: Segmented, before: Segmented) -> Ints:
    """Pairs [m, 2] of the nearest boundary before, the lower of two, and one that it could have."""
    old, new = before.boundaries, event.boundaries
    new = new[new <= before.row]
    if not len(old):
        return np.zeros((0, 2), np.int64)
    return np.stack([old[np.abs(new[:, None] - old).argmin(1)], new], axis=1)


def table(event: Segmented) -> pl.DataFrame:
    """A row for each segment: where it lies, its share of the masses, quota and entries."""
    size = len(event.quota)
    columns = {
        "event": np.full(size, event.row),
        "segment": np.arange(size),
        "first": event.starts,
        "last": np.append(event.boundaries, event.row + 1) - 1,
        "entries": event.counts(),
    }
    for name in ("observed", "credit", "mass"):
        columns[name] = np.bincount(event.segment, getattr(event, name), size)
    columns["quota"] = event.quota
    columns |= {name: event.counts(getattr(event, name)) for name in ("kept", "protected")}
    return pl.DataFrame(columns)


def thinned(positions: Ints, total: int, most: int) -> Ints:
    """The first of ascending positions in each of at most `most` equal cells of 0 to `total`."""
    return positions[np.unique(positions // -(-total // most), return_index=True)[1]]
