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
        each = {name: part[name] for name in columns}
        flat = {name: x.ravel() if isinstance(x, np.ndarray) else x for name, x in each.items()}
        typed = (pl.col(name).cast(kind) for name, kind in columns.items())
        known = pl.DataFrame(flat).with_columns(pl.selectors.float().fill_nan(None))
        frames.append(known.select(typed))
    return pl.concat(frames)
