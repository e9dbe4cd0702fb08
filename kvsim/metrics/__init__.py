"""Metrics: what a Record says about a Trace, as numbers.

`retention` reads kept sets, `output` recomputes attention over what rows see, `overlap` looks at
the trace alone; `catalogue` names them all and `table` makes tidy tables.
"""

from kvsim.metrics.catalogue import METRICS, Metric, metric
from kvsim.metrics.output import OutputError, output_error
from kvsim.metrics.overlap import window_overlap
from kvsim.metrics.retention import entries_seen, retained_iou, wipeout
from kvsim.metrics.table import COLUMNS, fidelity, measure, selection_fidelity

__all__ = [
    "COLUMNS",
    "METRICS",
    "Metric",
    "OutputError",
    "entries_seen",
    "fidelity",
    "measure",
    "metric",
    "output_error",
    "retained_iou",
    "selection_fidelity",
    "window_overlap",
    "wipeout",
]
