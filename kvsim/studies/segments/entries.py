"""The figures of the study, as `kvsim plot` and `kvsim.plots` have them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Final

from kvsim.plots.registry import Figure

_segments = partial(Figure, "kvsim.studies.segments.figures")

FIGURES: Final[Mapping[str, Figure]] = {
    "mass_curve": _segments(
        "Cumulative attention mass, the segments that it is cut into, and their quotas.",
        ("trace", "plans"), ("layer", "head"), "AMS, Fig. 3", requires="`ams` around any scorer"),
}  # fmt: skip
