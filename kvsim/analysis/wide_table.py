"""Tables with a column for each number, for values that do not fit the Table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import polars as pl


def wide(parts: Iterable[Mapping[str, Any]], columns: Mapping[str, Any]) -> pl.DataFrame:
    """The rows of all parts, with typed columns in this order; NaN is null.

    A part maps names of columns to arrays of one shape, or to a value that all of its rows share;
    what is no column is left out.
    """
    frames = [pl.DataFrame(schema=columns)]
    for part in parts:
        wanted = {name: part[name] for name in columns}
        arrays = {name: x.ravel() for name, x in wanted.items() if isinstance(x, np.ndarray)}
        shared = {name: pl.lit(x) for name, x in wanted.items() if name not in arrays}
        frames.append(
            pl.DataFrame(arrays)
            .with_columns(pl.selectors.float().fill_nan(None))
            .with_columns(**shared)
            .select(pl.col(name).cast(kind) for name, kind in columns.items())
        )
    return pl.concat(frames)
