"""The sample trace that ships with kvsim, recorded from the model `tiny`."""

from __future__ import annotations

from pathlib import Path

from kvsim.errors import TraceNotFoundError

__all__ = ["sample_trace"]

_PACKAGE = Path(__file__).parents[1]


def sample_trace() -> Path:
    """Return the path of the sample trace, for `kvsim.open_trace`.

    A wheel has it inside the package, a checkout under ``traces/``.
    """
    places = (_PACKAGE / "_sample.zarr", _PACKAGE.parent / "traces" / "sample.zarr")
    for place in places:
        if place.is_dir():
            return place
    raise TraceNotFoundError(
        f"there is no sample trace, expected it at {places[0]} or {places[1]}; install kvsim again"
    )
