"""Are queries normal? How far each dimension of each head is from the normal that fits it.

Devoto, Jeblick and Jegou, arXiv 2510.00636, Fig. 1 and 7 to 9. Measured on queries before RoPE is
the Kolmogorov-Smirnov distance: an effect size and no test, since a test rejects any model at
thousands of samples. The first tokens are outliers in most models, and left out by default.
"""

from __future__ import annotations

import numpy as np

from kvsim.analysis.arrays import Floats
from kvsim.core.lazy import Tensor, torch
from kvsim.core.trace import Trace
from kvsim.core.view import LOGIT_BYTES
from kvsim.studies.expectation.expectation import check_rows

#: Fewest samples that are compared with a normal distribution.
LEAST_SAMPLES = 4

# Columns of normal samples that stand for chance.
_BY_CHANCE = 64


def state_normality(trace: Trace, *, skip: int = 4) -> Floats:
    """Distance from normal of queries before RoPE, rows from `skip` on; [layer, qhead, dim].

    NaN where all are equal. Raises PolicyError for fewer than 4 rows.
    """
    check_rows(trace, skip, trace.n_pos, LEAST_SAMPLES)
    rows, distances = slice(skip, trace.n_pos), []
    for layer in range(trace.n_layers):
        rotated = trace.read("q", slice(layer, layer + 1), rows)
        samples = trace.ropes[layer].unrotate(rotated, trace.positions[rows])[0]
        drawn = samples.mT.double()  # [qhead, dim, row]
        parts = drawn.flatten(0, 1).split(max(1, LOGIT_BYTES // (8 * drawn.shape[-1])))
        distances.append(torch.cat([*map(normal_ks, parts)]).view(drawn.shape[:2]).numpy())
    return np.stack(distances)


def normal_ks(samples: Tensor) -> Tensor:
    """Kolmogorov-Smirnov distance of samples [..., n] from the normal of their mean and deviation.

    Returns:
        [...]; NaN where the samples do not vary. The deviation divides by n.
    """
    ascending = samples.double().sort(dim=-1).values
    # of equal samples the mean may differ by rounding, and so the deviation from 0
    varied = ascending[..., :1] < ascending[..., -1:]
    deviation = ascending.std(-1, correction=0, keepdim=True).where(varied, torch.nan)
    below = torch.special.ndtr((ascending - ascending.mean(-1, keepdim=True)) / deviation)
    n = samples.shape[-1]
    rank = torch.arange(n, dtype=below.dtype, device=below.device)
    return torch.maximum((rank + 1) / n - below, below - rank / n).amax(-1)


def ks_by_chance(n: int) -> float:
    """Mean distance of n independent normal samples, and so of queries that are normal."""
    source = torch.Generator().manual_seed(0)
    drawn = torch.randn(_BY_CHANCE, n, generator=source, dtype=torch.float64)
    return float(normal_ks(drawn).mean())
