"""Mean and covariance of rows of queries, block by block."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from kvsim.core.lazy import Tensor

#: First rows left out of the stored moments: attention sinks.
SINKS = 4

#: Number of rows, their mean, and the sum of the products of their deviations.
Moments = tuple[int, Tensor, Tensor]


def moments(
    blocks: Iterable[Tensor], covariance: bool = True, before: Moments | None = None
) -> tuple[int, Tensor, Tensor | None]:
    """Number, mean [L, ..., d] and covariance [L, ..., d, d] of the rows of blocks [L, ..., w, d].

    The covariance divides by the number of rows; None where it is not requested. before: those of
    other rows (`merged`).
    """
    for block in blocks:
        before = merged(before, block, covariance=covariance)
    count, mean, spread = cast("Moments", before)
    return count, mean, spread / count if covariance else None


def merged(before: Moments | None, block: Tensor, *, covariance: bool = True) -> Moments:
    """Merge number, mean [L, ..., d], products of deviations [L, ..., d, d] of rows with a block.

    block [L, ..., w, d]. No cancellation (Chan, Golub and LeVeque 1983, doi
    10.1080/00031305.1983.10483115). Without `covariance` the products are unchanged.
    """
    rows, mean = block.shape[-2], block.mean(-2)
    within = mean.new_zeros(()) if before is None else before[2]
    if covariance:
        centred = block - mean.unsqueeze(-2)
        within = centred.mT @ centred
    if before is None:
        return rows, mean, within
    count, earlier, spread = before
    shift, total = mean - earlier, count + rows
    if covariance:
        between = shift.unsqueeze(-1) * shift.unsqueeze(-2) * (count * rows / total)
        within = spread + within + between
    return total, earlier + shift * (rows / total), within
