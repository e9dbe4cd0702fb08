"""The mean exponential of projections, which Expected Attention takes from a normal distribution.

Its score of a key is the mean of exp(x) over queries, x = s q.k, which is exp(mean + variance / 2)
for normal x. How far recorded queries are from that is the gap of each key,

    log mean exp(x) - (mean + variance / 2)

in nats (Devoto, Jeblick and Jegou, arXiv 2510.00636, eq. 7): 0 for normal x, positive for a heavier
upper tail. A mean over n samples cannot reach what the rarest of them would add: beyond a variance
of about 2 log n it falls short for normal x too. `normal_gap` says by how much; only the difference
tells of the distribution.

Queries and keys are those of full attention: every number is `exact`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor

from kvsim.analysis.arrays import Floats
from kvsim.analysis.prompt.tables import task_of
from kvsim.analysis.wide import places, wide
from kvsim.core.attention import Formula
from kvsim.core.trace import Trace
from kvsim.core.view import LOGIT_BYTES
from kvsim.engine.source import TraceSource
from kvsim.errors import PolicyError
from kvsim.policies.calibration import row_blocks
from kvsim.policies.expected_attention import expected_logits, moments
from kvsim.schema import FIDELITY

#: Reads queries of rows start..stop-1; [1, H, G, w, d].
Read = Callable[[int, int], Tensor]

#: Columns of `projection_table`.
PROJECTION_COLUMNS: dict[str, Any] = {
    **dict.fromkeys(("trace", "task"), pl.String),
    "rotated": pl.Boolean,
    **dict.fromkeys(("skip", "samples", "layer", "head", "qhead", "pos"), pl.Int64),
    **dict.fromkeys(("mean", "variance", "gap", "normal_gap"), pl.Float64),
    "fidelity": pl.Enum(FIDELITY),
}

# Deviations at which the gap of normal samples is computed; between them it is interpolated.
_DEVIATIONS = 256


@dataclass(frozen=True)
class Projections:
    """Projections of the queries of rows skip..skip+samples-1 on the keys of these positions.

    mean, variance, gap, normal_gap [layer, qhead, key], key 0 at position `skip`; in nats (variance
    in their squares). rotated: queries and keys after RoPE; else queries before it, and keys
    rotated back by the mean rotation of the n_future positions behind the rows, as the policy does.
    """

    trace: str
    task: str
    rotated: bool
    skip: int
    samples: int
    group: int
    mean: Floats = field(repr=False)
    variance: Floats = field(repr=False)
    gap: Floats = field(repr=False)
    normal_gap: Floats = field(repr=False)


def key_projections(
    trace: Trace,
    *,
    skip: int = 4,
    stop: int | None = None,
    rotated: bool = False,
    n_future: int = 512,
    device: str = "cpu",
) -> Projections:
    """The gap of every key of positions skip..stop-1 over the queries of the same rows.

    stop: all rows by default. All of these queries are taken for every key, those before it too:
    they are samples of queries to come. Raises PolicyError for fewer than 2 rows.
    """
    stop = trace.n_pos if stop is None else stop
    check_rows(trace, skip, stop, 2)
    layers = []
    with torch.inference_mode():
        for layer in range(trace.n_layers):
            source = TraceSource(trace, [layer], torch.device(device))
            keys = source.keys[:, :, skip:stop]
            read = source.queries if rotated else unrotated(source)
            if not rotated:
                keys = source.rope.rotate_mean(keys, 1 - stop - n_future, n_future)
            _, mu, sigma = moments(row_blocks(read, skip, stop))
            scale = source.formula.scale
            middle = expected_logits(keys, mu, None, scale).double()
            half = expected_logits(keys, torch.zeros_like(mu), sigma, scale).double()
            exact = torch.tensor(-torch.inf, dtype=torch.float64, device=keys.device)
            for _, z in logit_blocks(read, skip, stop, keys, source.formula):
                exact = torch.logaddexp(exact, z.logsumexp(3))
            exact = exact - math.log(stop - skip)  # the mean over queries of exp(scale q.k)
            parts = middle, 2 * half, exact - middle - half
            layers.append([part[0].flatten(0, 1).cpu().numpy() for part in parts])
    mean, variance, gap = (np.stack(part) for part in zip(*layers, strict=True))
    return Projections(
        *(trace.name, task_of(trace), rotated, skip, stop - skip, trace.group),
        *(mean, variance, gap, normal_gap(variance, stop - skip)),
    )


def logit_blocks(
    read: Read, start: int, stop: int, keys: Tensor, formula: Formula
) -> Iterator[tuple[slice, Tensor]]:
    """(rows, logits [1, H, G, w, n]) of rows start..stop-1 over all keys [1, H, n, d].

    In float64 once they are multiplied, so that long sums lose nothing.
    """
    group = read(start, start + 1).shape[2]
    step = max(1, LOGIT_BYTES // (8 * group * keys[..., 0].numel()))
    for first in range(start, stop, step):
        rows = slice(first, min(first + step, stop))
        q = read(rows.start, rows.stop)
        z = formula.capped((q.flatten(2, 3) @ keys.mT).double().mul_(formula.scale))
        yield rows, z.unflatten(2, q.shape[2:4])


def unrotated(source: TraceSource) -> Read:
    """The source's queries before RoPE."""

    def read(start: int, stop: int) -> Tensor:
        at = source.positions[start:stop]
        return source.rope.unrotate(source.queries(start, stop), at)

    return read


def normal_gap(variance: Floats, samples: int) -> Floats:
    """The gap of the quantiles of a normal distribution at (i - 1/2) / samples; like variance.

    What so many samples that are as normal as can be fall short by, 0 or less.
    """
    quantiles = torch.special.ndtri((torch.arange(samples, dtype=torch.float64) + 0.5) / samples)
    sizes = torch.linspace(0, float(variance.max()) ** 0.5, _DEVIATIONS, dtype=torch.float64)
    top = (sizes.unsqueeze(-1) * quantiles).logsumexp(-1) - math.log(samples)
    found = np.interp(np.sqrt(variance), sizes.numpy(), (top - sizes**2 / 2).numpy())
    return np.asarray(found, np.float64)


def check_rows(trace: Trace, skip: int, stop: int, least: int) -> None:
    """Raise PolicyError where rows skip..stop-1 are not at least `least` rows of the trace."""
    if not 0 <= skip <= stop - least or stop > trace.n_pos:
        raise PolicyError(
            f"{trace.name}: rows {skip} to {stop - 1} of {trace.n_pos} were to be samples; "
            f"expected at least {least} rows of the trace"
        )


def projection_table(found: Sequence[Projections]) -> pl.DataFrame:
    """Return a row per trace, layer, query head and key; `PROJECTION_COLUMNS`."""
    parts = (vars(x) | places(x.gap.shape, x.group, "pos", x.skip) for x in found)
    return wide(parts, PROJECTION_COLUMNS)
