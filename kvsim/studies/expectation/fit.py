"""Distance of samples from the normal distribution that fits them: effect sizes, no p-values.

A test rejects any model at thousands of samples, and neighbouring tokens are not independent; what
matters is how large a difference is. Samples are [..., n], float64; moments divide by n.

    skew, kurtosis  third and fourth standardised moments, the fourth minus 3; 0 for normal samples
    ks              Kolmogorov-Smirnov distance: largest difference of the distribution functions
    qq              correlation of the ordered samples with the normal medians of their ranks
                    (Filliben 1975, doi 10.1080/00401706.1975.10489279); 1 for normal samples
    wasserstein     area between the distribution functions, in standard deviations
    bimodality      (skew^2 + 1) / (kurtosis + 3 (n-1)^2 / ((n-2)(n-3))), both corrected for bias
                    (Pfister et al. 2013, doi 10.3389/fpsyg.2013.00700); above 5/9, that of a
                    uniform distribution, is taken for more than one mode
    modes           maxima of the kernel density at Silverman's bandwidth, 0.9 min(deviation,
                    interquartile range / 1.34) n^(-1/5) (Silverman 1986, eq. 3.31), at least 5 % as
                    high as the highest: single outliers are no modes. Of 5,000 normal samples one
                    in eight has a second one by chance
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import scipy

from kvsim.core.lazy import Tensor, torch

#: Samples that the bias corrections need.
LEAST_SAMPLES = 4

# Columns of normal samples that stand for chance.
_BY_CHANCE = 64
# A maximum of the density counts if it is at least so high, as a share of the highest.
_LEAST_MODE = 0.05
# Points at which the density is computed, from the least to the largest sample and 3 bandwidths on.
_POINTS = 4096


@dataclass(frozen=True)
class NormalFit:
    """Mean, standard deviation and effect sizes of samples [..., n]; [...] each.

    NaN where the samples do not vary, but for mean and deviation.
    """

    mean: Tensor
    deviation: Tensor
    skew: Tensor
    kurtosis: Tensor
    ks: Tensor
    qq: Tensor
    wasserstein: Tensor
    bimodality: Tensor
    modes: Tensor


#: Numbers of a fit, in order.
EFFECTS = tuple(effect.name for effect in fields(NormalFit))


def fit_normal(samples: Tensor) -> NormalFit:
    """The normal distribution of the samples' mean and deviation, and how far they are from it."""
    ascending = samples.double().sort(dim=-1).values
    mean = ascending.mean(-1)
    # of equal samples the mean may differ by rounding, and so the deviation from 0
    varied = ascending[..., 0] < ascending[..., -1]
    deviation = ascending.std(-1, correction=0).where(varied, 0.0)
    z = (ascending - mean.unsqueeze(-1)) / deviation.where(varied, torch.nan).unsqueeze(-1)
    n = z.shape[-1]
    third = _moment(scipy.stats.skew, z, bias=False)
    fourth = _moment(scipy.stats.kurtosis, z, bias=False)
    return NormalFit(
        mean=mean,
        deviation=deviation,
        skew=_moment(scipy.stats.skew, z),
        kurtosis=_moment(scipy.stats.kurtosis, z),
        ks=_ks(z),
        qq=_qq(z),
        wasserstein=_wasserstein(z),
        bimodality=(third**2 + 1) / (fourth + 3 * (n - 1) ** 2 / ((n - 2) * (n - 3))),
        modes=_modes(z),
    )


def normal_medians(n: int) -> Tensor:
    """Medians of the ordered values of n standard normal samples, after Filliben; [n]."""
    probability = (torch.arange(1, n + 1, dtype=torch.float64) - 0.3175) / (n + 0.365)
    probability[-1] = 0.5 ** (1 / n)
    probability[0] = 1 - probability[-1]
    medians: Tensor = torch.special.ndtri(probability)
    return medians


def normal_ks(n: int) -> float:
    """Mean `ks` of n independent normal samples, and so of queries that are normal."""
    source = torch.Generator().manual_seed(0)
    drawn = torch.randn(_BY_CHANCE, n, generator=source, dtype=torch.float64)
    return float(fit_normal(drawn).ks.mean())


def _ks(z: Tensor) -> Tensor:
    """Largest difference of the distribution functions, on both sides of each step."""
    n = z.shape[-1]
    rank = torch.arange(n, dtype=z.dtype, device=z.device)
    below = torch.special.ndtr(z)
    return torch.maximum((rank + 1) / n - below, below - rank / n).amax(-1)


def _qq(z: Tensor) -> Tensor:
    medians = normal_medians(z.shape[-1]).to(z.device)
    medians = medians - medians.mean()
    size = torch.linalg.vector_norm(z, dim=-1) * torch.linalg.vector_norm(medians)
    correlation: Tensor = (z @ medians) / size
    return correlation


def _wasserstein(z: Tensor) -> Tensor:
    """Sum over samples of the integral of |z_i - x| p(x) between the quantiles (i-1)/n and i/n.

    With c the place of z_i between the quantiles a and b, P the distribution and p the density:
    z (2 P(c) - P(a) - P(b)) + 2 p(c) - p(a) - p(b).
    """
    n = z.shape[-1]
    share = torch.arange(n + 1, dtype=z.dtype, device=z.device) / n
    quantile = torch.special.ndtri(share)
    density = (-(quantile**2) / 2).exp()
    a, b = quantile[:-1], quantile[1:]
    c = z.clamp(a, b)
    cumulative = torch.special.ndtr(c)
    middle = z * (2 * cumulative - share[:-1] - share[1:])
    ends = 2 * (-(c**2) / 2).exp() - density[:-1] - density[1:]
    area: Tensor = (middle + ends / (2 * torch.pi) ** 0.5).sum(-1)
    return area


def _moment(statistic: Callable[..., Any], z: Tensor, *, bias: bool = True) -> Tensor:
    """A standardised moment of scipy's, `bias=False` for the corrected one; [...]."""
    return torch.from_numpy(np.asarray(statistic(z.cpu().numpy(), axis=-1, bias=bias))).to(z.device)


def _modes(z: Tensor) -> Tensor:
    """Maxima of the kernel density of ordered samples of deviation 1; [...]."""
    density = kernel_density(z)
    rises = density[..., 1:-1] > density[..., :-2]
    falls = density[..., 1:-1] >= density[..., 2:]
    high = density[..., 1:-1] >= _LEAST_MODE * density.amax(-1, keepdim=True)
    count = (rises & falls & high).sum(-1).to(z.dtype)
    return count.where(z[..., 0].isfinite(), torch.nan)


def kernel_density(z: Tensor) -> Tensor:
    """Density of ordered samples [..., n] of deviation 1, on equally spaced points; [..., points].

    Each sample is shared between the two points beside it, and the points are smoothed by a product
    of Fourier transforms (Silverman 1982, AS 176). Up to a factor.
    """
    n = z.shape[-1]
    quarters = (_quantile(z, 0.75) - _quantile(z, 0.25)) / 1.34
    size = 0.9 * quarters.where(quarters > 0, 1.0).clamp(max=1.0) * n**-0.2  # [...]
    low, high = z[..., 0] - 3 * size, z[..., -1] + 3 * size
    step = ((high - low) / (_POINTS - 1)).unsqueeze(-1)
    place = ((z - low.unsqueeze(-1)) / step).nan_to_num(0.0).clamp(0, _POINTS - 1.001)
    lower = place.floor()
    part, lower = place - lower, lower.long()
    bins = z.new_zeros(*z.shape[:-1], _POINTS).scatter_add_(-1, lower, 1 - part)
    bins.scatter_add_(-1, lower + 1, part)
    # no narrower than the points, between which a narrower one would ring
    width = torch.maximum(size.unsqueeze(-1) / step, torch.ones_like(step))
    turn = 2 * torch.pi * torch.fft.rfftfreq(_POINTS, dtype=z.dtype, device=z.device)
    smooth = torch.fft.rfft(bins) * (-((width * turn) ** 2) / 2).exp()
    density: Tensor = torch.fft.irfft(smooth, n=_POINTS)
    return density


def _quantile(ascending: Tensor, share: float) -> Tensor:
    """Interpolate between the two ascending samples around a quantile."""
    place = share * (ascending.shape[-1] - 1)
    low = int(place)
    return ascending[..., low].lerp(ascending[..., low + 1], place - low)
