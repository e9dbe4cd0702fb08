"""The sample trace that comes with kvsim, recorded from the shipped model `tiny`."""

from __future__ import annotations

from pathlib import Path

from kvsim.errors import TraceNotFoundError

__all__ = ["sample_trace"]

_PACKAGE = Path(__file__).parents[1]


def sample_trace() -> Path:
    """The path of the sample trace, to be given to `kvsim.open_trace`.

    A wheel holds it inside the package, a checkout under ``traces/``.
    """
    places = (_PACKAGE / "_sample.zarr", _PACKAGE.parent / "traces" / "sample.zarr")
    for place in places:
        if place.is_dir():
            return place
    raise TraceNotFoundError(
        f"the sample trace is at neither {places[0]} nor {places[1]}; install kvsim again"
    )
