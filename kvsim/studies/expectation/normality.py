"""Are queries normal? How each dimension of each head is distributed over the tokens.

Devoto, Jeblick and Jegou, arXiv 2510.00636, Fig. 1 and 7 to 9: Expected Attention takes queries
before RoPE to be normal, as linear images of hidden states that are. Effect sizes (`fit`) of every
dimension, over the rows behind the sinks (skip=4) or all of them (skip=0): the first tokens are
outliers in most models. Every number is `exact`.

States of the residual stream are the inputs of each decoder layer, before the norm in front of
the attention, if the trace was recorded with `--residual`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from kvsim.analysis.arrays import Floats
from kvsim.analysis.axes import trace_layer
from kvsim.core.lazy import Tensor, torch
from kvsim.core.trace import Trace
from kvsim.core.view import LOGIT_BYTES
from kvsim.studies.expectation.expectation import check_rows
from kvsim.studies.expectation.fit import EFFECTS, LEAST_SAMPLES, fit_normal, normal_medians

#: Sampled states: queries before or after RoPE, or the input of each layer.
States = Literal["query", "rotated_query", "residual"]


@dataclass(frozen=True)
class Normality:
    """Effect sizes of every dimension over `samples` rows from `skip` on.

    effects: by name, as in `fit.EFFECTS`; [layer, qhead, dim], and [layer, 1, hidden] of the
    residual stream.
    """

    trace: str
    of: States
    skip: int
    samples: int
    effects: dict[str, Floats] = field(repr=False)


def states(
    trace: Trace, layer: int, of: States = "query", *, skip: int = 4, stop: int | None = None
) -> Tensor:
    """Samples of one layer, rows skip..stop-1, all by default; float64 [qhead, dim, row].

    [1, hidden, row] of the residual stream, NeedsError where it is not recorded. PolicyError for a
    layer that the trace does not have.
    """
    layer = trace_layer(trace, layer)
    rows, of_layer = slice(skip, trace.n_pos if stop is None else stop), slice(layer, layer + 1)
    samples = trace.read("residual" if of == "residual" else "q", of_layer, rows)
    if of == "query":
        samples = trace.ropes[layer].unrotate(samples, trace.positions[rows])
    by_head: Tensor = samples if of == "residual" else samples[0]
    return by_head.mT.double()


def state_normality(
    trace: Trace, of: States = "query", *, skip: int = 4, stop: int | None = None
) -> Normality:
    """Effect sizes of every dimension, one layer in memory at a time.

    Raises PolicyError for fewer than 4 rows, and NeedsError for a residual stream that is not
    recorded.
    """
    stop = trace.n_pos if stop is None else stop
    check_rows(trace, skip, stop, LEAST_SAMPLES)
    samples = stop - skip
    step = max(1, LOGIT_BYTES // (8 * samples))
    effects: dict[str, list[Floats]] = {name: [] for name in EFFECTS}
    for layer in range(trace.n_layers):
        drawn = states(trace, layer, of, skip=skip, stop=stop)
        fits = [fit_normal(part) for part in drawn.flatten(0, 1).split(step)]
        for name in EFFECTS:
            whole = torch.cat([getattr(fit, name) for fit in fits])
            effects[name].append(whole.view(drawn.shape[:2]).numpy())
    stacked = {name: np.stack(layers) for name, layers in effects.items()}
    return Normality(trace.name, of, skip, samples, stacked)


@dataclass(frozen=True)
class Histogram:
    """Densities [..., bins] between edges [..., bins + 1], of samples [..., n].

    Of samples between two percentiles; a density is a share of all samples per unit.
    """

    edges: Floats
    density: Floats


def histogram(
    samples: Tensor, *, bins: int = 50, between: tuple[float, float] = (0.1, 99.9)
) -> Histogram:
    """A histogram of each of samples [..., n], as the paper's figures draw them.

    Samples that do not vary are all in the first bin, of which the width is 0 and the density NaN.
    """
    flat = samples.flatten(0, -2).numpy()
    low, high = np.percentile(flat, between, axis=-1)
    edges = np.linspace(low, high, bins + 1, axis=-1)
    # the last bin includes its upper edge
    inside = (flat >= low[:, None]) & (flat <= high[:, None])
    width = np.diff(edges)
    with np.errstate(invalid="ignore"):
        place = (flat - low[:, None]) / (high - low)[:, None] * bins
    column = np.clip(np.nan_to_num(place), 0, bins - 1).astype(np.int64)
    counts = np.zeros((len(flat), bins))
    np.add.at(counts, (np.arange(len(flat))[:, None], column), inside)
    density = np.full(counts.shape, np.nan)
    np.divide(counts, flat.shape[-1] * width, out=density, where=width > 0)
    shape = samples.shape[:-1]
    return Histogram(edges.reshape(*shape, -1), density.reshape(*shape, -1))


def quantiles(samples: Tensor, points: int = 200) -> tuple[Floats, Floats]:
    """A Q-Q plot: normal quantiles [p], and standardised samples of the same rank [..., p].

    At most `points`, both ends included, evenly spaced in rank.
    """
    n = samples.shape[-1]
    places = torch.linspace(0, n - 1, min(points, n), dtype=torch.float64).round().long()
    ascending = samples.double().sort(dim=-1).values
    deviation = ascending.std(-1, correction=0, keepdim=True)
    ordered = ((ascending - ascending.mean(-1, keepdim=True)) / deviation)[..., places]
    return normal_medians(n)[places].numpy(), ordered.numpy()
