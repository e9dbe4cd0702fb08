"""Distance of samples from the normal distribution that fits them: effect sizes, no p-values.

A test rejects any model at thousands of samples, and neighbouring tokens are not independent; what
matters is how large a difference is. Samples are [..., n], float64; the deviation divides by n.

    ks  Kolmogorov-Smirnov distance: largest difference of the distribution functions
    qq  correlation of the ordered samples with the normal medians of their ranks
        (Filliben 1975, doi 10.1080/00401706.1975.10489279); 1 for normal samples
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from kvsim.core.lazy import Tensor, torch

#: Fewest samples that are compared with a normal distribution.
LEAST_SAMPLES = 4

# Columns of normal samples that stand for chance.
_BY_CHANCE = 64


@dataclass(frozen=True)
class NormalFit:
    """Mean, standard deviation and effect sizes of samples [..., n]; [...] each.

    NaN where the samples do not vary, but for mean and deviation.
    """

    mean: Tensor
    deviation: Tensor
    ks: Tensor
    qq: Tensor


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
    return NormalFit(mean, deviation, ks=_ks(z), qq=_qq(z))


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
