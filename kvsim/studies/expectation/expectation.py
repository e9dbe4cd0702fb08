"""Expected against observed attention, and four steps between (docs/notebooks/expectation.ipynb).

Devoto, Jeblick and Jegou, arXiv 2510.00636, Fig. 10 and eq. 7. A cut divides rows into past and
future. Observed is the mean attention of the future's rows on each key of the past after the sinks;
expected is Expected Attention's softmax over these keys, per query head, before the policy averages
over the group, without the norm of the value and epsilon. The first step is the mean of the
observed rows, weighted by each row's sum of exponentials.

The gap of a key over queries is log mean exp(x) - (mean + variance / 2) in nats, x = s q.k: 0 for
normal x, positive for a heavier upper tail. A mean over n samples falls short for normal x too,
beyond a variance of about 2 log n: by `normal_gap`. Every number is `exact`.

Normality of queries before RoPE (Fig. 1 and 7 to 9) is measured by the Kolmogorov-Smirnov distance,
an effect size: a test rejects any model at thousands of samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from kvsim.analysis.arrays import Floats
from kvsim.analysis.attention.agreement import pearson, spearman
from kvsim.analysis.kept.retention import SINK
from kvsim.analysis.subject import Analysis
from kvsim.core.attention import Formula
from kvsim.core.lazy import Tensor, torch
from kvsim.core.moments import moments
from kvsim.core.trace import Trace
from kvsim.core.view import LOGIT_BYTES
from kvsim.engine.source import TraceSource
from kvsim.errors import PolicyError
from kvsim.policies.calibration import row_blocks
from kvsim.policies.expected_attention import expected_logits

#: Reads queries of rows start..stop-1; [1, H, G, w, d].
Read = Callable[[int, int], Tensor]

#: Fewest samples that are compared with a normal distribution.
LEAST_SAMPLES = 4

# Columns of normal samples for the value by chance.
_BY_CHANCE = 64

# Deviations at which the gap of normal samples is computed; between them it is interpolated.
_DEVIATIONS = 256


def key_gaps(trace: Trace, *, skip: int = 4, n_future: int = 512, device: str = "cpu") -> Floats:
    """The gap of every key from position `skip` on, less `normal_gap`; [layer, qhead, key] in nats.

    Over the queries of the same rows before RoPE, those before a key too: they are samples of
    queries to come. Keys are rotated back by the mean rotation of the positions after the rows, as
    the policy does.
    """
    stop, layers = trace.n_pos, []
    with torch.inference_mode():
        for layer in range(trace.n_layers):
            source = TraceSource(trace, [layer], torch.device(device))
            read = unrotated(source)
            keys = source.keys[:, :, skip:stop]
            keys = source.rope.rotate_mean(keys, 1 - stop - n_future, n_future)
            _, mu, sigma = moments(row_blocks(read, skip, stop))
            scale = source.formula.scale
            middle = expected_logits(keys, mu, None, scale).double()
            half = expected_logits(keys, torch.zeros_like(mu), sigma, scale).double()
            exact = torch.tensor(-torch.inf, dtype=torch.float64, device=keys.device)
            for _, z in logit_blocks(read, skip, stop, keys, source.formula):
                exact = torch.logaddexp(exact, z.logsumexp(3))
            exact = exact - math.log(stop - skip)  # the mean over queries of exp(scale q.k)
            parts = 2 * half, exact - middle - half
            layers.append([part[0].flatten(0, 1).cpu().numpy() for part in parts])
    variance, gap = (np.stack(part) for part in zip(*layers, strict=True))
    return np.asarray(gap - normal_gap(variance, stop - skip))


def logit_blocks(
    read: Read, start: int, stop: int, keys: Tensor, formula: Formula
) -> Iterator[tuple[slice, Tensor]]:
    """(rows, float64 logits [1, H, G, w, n]) of rows start..stop-1 over all keys [1, H, n, d]."""
    group = read(start, start + 1).shape[2]
    step = max(1, LOGIT_BYTES // (8 * group * keys[..., 0].numel()))
    for begin in range(start, stop, step):
        rows = slice(begin, min(begin + step, stop))
        q = read(rows.start, rows.stop)
        z = formula.capped((q.flatten(2, 3) @ keys.mT).double().mul_(formula.scale))
        yield rows, z.unflatten(2, q.shape[2:4])


def unrotated(source: TraceSource) -> Read:
    """The source's queries before RoPE."""

    def read(start: int, stop: int) -> Tensor:
        positions = source.positions[start:stop]
        return source.rope.unrotate(source.queries(start, stop), positions)

    return read


def normal_gap(variance: Floats, samples: int) -> Floats:
    """The gap of the quantiles of a normal distribution at (i - 1/2) / samples; like variance.

    The shortfall of so many ideally normal samples, 0 or less.
    """
    quantiles = torch.special.ndtri((torch.arange(samples, dtype=torch.float64) + 0.5) / samples)
    sizes = torch.linspace(0, float(variance.max()) ** 0.5, _DEVIATIONS, dtype=torch.float64)
    top = (sizes.unsqueeze(-1) * quantiles).logsumexp(-1) - math.log(samples)
    gap = np.interp(np.sqrt(variance), sizes.numpy(), (top - sizes**2 / 2).numpy())
    return np.asarray(gap, np.float64)


#: From observed to expected attention; the last is Expected Attention.
STEPS = ("ratio_of_means", "normal", "mean_rotation", "past")

# The paper takes the moments of the first 1,000 of 5,000 tokens.
_PAST = 5


@dataclass(frozen=True)
class Expectation:
    """Attention on the keys of positions sink..cut-1, in logarithms.

    observed [layer, qhead, key]: mean over the rows from `cut` on. expected [step, layer, qhead,
    key]: sums to 1 over the keys.
    """

    cut: int
    sink: int
    observed: Floats = field(repr=False)
    expected: Floats = field(repr=False)

    @cached_property
    def spearman(self) -> Floats:
        """Rank correlation of each step with observed attention; [step, layer, qhead]."""
        return spearman(self.expected, np.broadcast_to(self.observed, self.expected.shape))

    @cached_property
    def log_pearson(self) -> Floats:
        """Correlation of the logarithms; [step, layer, qhead]."""
        return pearson(self.expected, self.observed)


def expected_and_observed(
    trace: Trace, cut: int | None = None, *, sink: int = SINK, device: str = "cpu"
) -> Expectation:
    """Expected and observed attention of every query head, one layer in memory at a time.

    cut: rows of the past, a fifth of the trace by default, as in the paper. Raises PolicyError with
    fewer than two samples after the sinks, or no row after the cut.
    """
    cut = trace.n_pos // _PAST if cut is None else cut
    if not sink + 2 <= cut < trace.n_pos or trace.windowed:
        raise PolicyError(
            f"{trace.name}: attention after row {cut} of {trace.n_pos} cannot be compared; "
            f"expected {sink + 2} rows before it, rows after it, and no sliding windows"
        )
    layers = []
    with torch.inference_mode():
        for layer in range(trace.n_layers):
            source = TraceSource(trace, [layer], torch.device(device))
            layers.append([x.cpu().numpy() for x in _of_layer(source, cut, sink)])
    arrays = (np.stack(x, -3) for x in zip(*layers, strict=True))
    return Expectation(cut, sink, *arrays)


def _of_layer(source: TraceSource, cut: int, sink: int) -> tuple[Tensor, Tensor]:
    """Observed [qhead, key] and expected [step, qhead, key] of one layer."""
    end, before, scale = source.n_rows, unrotated(source), source.formula.scale
    keys = source.keys[:, :, sink:cut]
    # the transpose of the mean rotation over the future, cut..end-1
    back = source.rope.rotate_mean(keys, 1 - end, end - cut)
    observed, means = _recorded(source, keys, cut)
    logits = [means]
    for at, rows in (
        (keys, row_blocks(source.queries, cut, end)),
        (back, row_blocks(before, cut, end)),
        (back, row_blocks(before, sink, cut)),
    ):
        _, mu, sigma = moments(rows)
        logits.append(expected_logits(at, mu, sigma, scale).double())
    expected = torch.stack(logits)[:, 0].log_softmax(-1)
    return observed[0].flatten(0, 1), expected.flatten(1, 2)


def _recorded(source: TraceSource, keys: Tensor, cut: int) -> tuple[Tensor, Tensor]:
    """Logs of mean attention and of the mean exponential, rows from `cut` on; [1, H, G, n]."""
    attention, exponential = (
        torch.tensor(-torch.inf, dtype=torch.float64, device=keys.device) for _ in range(2)
    )
    for rows, z in logit_blocks(source.queries, cut, source.n_rows, keys, source.formula):
        exponential = torch.logaddexp(exponential, z.logsumexp(3))
        _, lse = source.full(rows.start, rows.stop)
        attention = torch.logaddexp(attention, z.sub_(lse.unsqueeze(-1)).logsumexp(3))
    count = math.log(source.n_rows - cut)
    return attention - count, exponential - count


def state_normality(trace: Trace, *, skip: int = 4) -> Floats:
    """Distance from normal of queries before RoPE, rows from `skip` on; [layer, qhead, dim].

    NaN where all are equal.
    """
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


def prompt_expectation(analysis: Analysis) -> Expectation | None:
    """Return expected and observed attention on the keys of the prompt of an analysed trace.

    None without enough rows (`expected_and_observed`).
    """
    trace = analysis.trace
    with suppress(PolicyError):
        return expected_and_observed(trace, trace.prompt_len, device=analysis.device)
    return None
