"""Agreement of two scores of the same entries: ranks and correlations.

Scores are [..., n], one number per entry. Of equal scores the lower position ranks first, as in
selection.
"""

from __future__ import annotations

import numpy as np
import scipy

from kvsim.analysis.arrays import Floats, Ints


def pearson(a: Floats, b: Floats) -> Floats:
    """Correlation over the last axis; NaN where either score does not vary."""
    a, b = np.broadcast_arrays(a, b)
    varied = (np.ptp(a, axis=-1) > 0) & (np.ptp(b, axis=-1) > 0)
    correlations = np.full(varied.shape, np.nan)
    correlations[varied] = scipy.stats.pearsonr(a[varied], b[varied], axis=-1).statistic
    return correlations


def spearman(a: Floats, b: Floats) -> Floats:
    """Rank correlation over the last axis; NaN where either score does not vary."""
    return pearson(scipy.stats.rankdata(a, axis=-1), scipy.stats.rankdata(b, axis=-1))


def places(scores: Floats) -> Ints:
    """Place of each entry in the order of the scores, 0 for the highest; [..., n]."""
    return np.argsort(np.argsort(-scores, axis=-1, kind="stable"), axis=-1)
