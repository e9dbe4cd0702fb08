"""The figures of the study, as `kvsim layers` and `kvsim.plots` have them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Final

from kvsim.plots.registry import Figure

_layers = partial(
    Figure, "kvsim.studies.layers.figures", command="layers TRACE --budget N --figures DIR"
)

FIGURES: Final[Mapping[str, Figure]] = {
    "variance_curves": _layers(
        "Relative rank variance by layer, with the threshold and the selection layer.",
        ("curves",), source="ASL, Fig. 6"),
    "selection_histogram": _layers(
        "Number of traces that select at each layer.",
        ("distribution",), source="ASL, Figs. 9-10"),
    "layer_attention": _layers(
        "Attention of the last rows of the prompt in every layer.",
        ("trace",), source="ASL, Fig. 3"),
    "selection_grid": _layers(
        "Selection layer over first tested layer and look-back.",
        ("grid",), source="ASL, Fig. 8"),
    "rank_pattern": _layers(
        "Ranks in every layer of the tokens that the last layers rank first.",
        ("curve",), source="ASL, Fig. 4"),
}  # fmt: skip
