"""Intervals of proportions.

Beside the errors and not in a package: the cards of the shipped model and the metrics both need
them, and neither may import the other.
"""

from __future__ import annotations

import math


def wilson(hits: float, n: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a proportion (Wilson 1927, J. Am. Stat. Assoc. 22:209)."""
    z = 1.959964
    centre = (hits + z * z / 2) / (n + z * z)
    half = z / (n + z * z) * math.sqrt(hits * (n - hits) / n + z * z / 4)
    return max(0.0, centre - half), min(1.0, centre + half)
