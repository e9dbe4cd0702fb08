"""The quantities that are measured: their types, and what tests call them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

#: Of one trace: (policy, budget, quantity) -> value; budget 0 for what belongs to the trace.
Numbers = dict[tuple[str, int, str], float]

#: What the quantities of a record are called in tests.
TITLES = {
    "error": "output error",
    "mass": "retained mass",
    "retained_iou": "IoU of consecutive kept sets",
    "middle coverage": "share kept of the middle third",
    "longest run": "longest run of dropped tokens",
    "boundary shift": "tokens from a boundary to the nearest one of the event before",
    "wipeout 8 0": "wipe-out of regions of 8",
    "mean place": "mean place of what is kept, 0 to 1",
    "mean place of older": "mean place of what is kept behind the recent half, 0 to 1",
    "distance from uniform": "largest distance of the places kept from even ones",
    "similarity": "mean cosine of two kept keys",
}
