"""A network fitted to pairs: the entry to keep should score above the other.

The loss of a pair is gain * log(1 + exp(other - keep)), a smooth bound of the attention that the
wrong choice between the two gives up. Equal pairs and seeds give equal networks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from kvsim.core.threads import threads_for
from kvsim.studies.learning.lessons import Pairs

#: Pairs of a step of the optimiser, at most.
BATCH = 4096

# Of Adam, falling to 0 along a cosine.
_RATE = 1e-2

# Features that vary less are not scaled up.
_LEAST_SPREAD = 1e-3

# Of the mean square of a dimension, against directions of which pairs say little.
_RIDGE = 0.1

#: Weight and bias of each layer.
Layers = tuple[tuple[Tensor, Tensor], ...]


def fit(
    pairs: Pairs,
    hidden: Sequence[int] = (32,),
    *,
    steps: int = 1500,
    seed: int = 0,
    fixed: bool = False,
) -> tuple[Tensor, Tensor, Layers]:
    """Return mean and spread of the features [F], and the layers.

    hidden: widths of hidden layers, none for a linear score. fixed: hidden layers stay as they
    were drawn (random features; Rahimi and Recht 2007), and the last one alone is fitted.
    """
    every = torch.cat([pairs.keep, pairs.drop])
    mean, spread = every.mean(0), every.std(0).clamp(min=_LEAST_SPREAD)
    keep, drop = ((x - mean) / spread for x in (pairs.keep, pairs.drop))
    gain = pairs.gain / pairs.gain.mean()
    random, size = torch.Generator().manual_seed(seed), min(BATCH, len(gain))
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(seed)
        sizes = [keep.shape[1], *hidden, 1]
        linear = [nn.Linear(before, after) for before, after in pairwise(sizes)]
        for layer in linear[: -1 if fixed else 0]:
            layer.requires_grad_(requires_grad=False)
        network = nn.Sequential(*(part for layer in linear for part in (layer, nn.ReLU())))[:-1]
        trained = [x for x in network.parameters() if x.requires_grad]
        optimiser = torch.optim.Adam(trained, lr=_RATE)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
        with threads_for(network):
            for _ in range(steps):
                batch = torch.randint(len(keep), (size,), generator=random)
                better, worse = network(torch.cat([keep[batch], drop[batch]])).view(2, size)
                loss = (gain[batch] * nn.functional.softplus(worse - better)).mean()
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                schedule.step()
    layers = tuple((layer.weight.detach(), layer.bias.detach()) for layer in linear)
    return mean, spread, layers


class Projecting:
    """Vectors of heads for keys and values, such that products with them tell pairs apart.

    The vector u of a head minimises the mean over its pairs of gain * (1 - u . (keep - drop))^2
    with a ridge penalty: least squares, so that sums over the pairs are all that it needs.
    """

    def __init__(self, heads: int, dim: int) -> None:
        self._squares = torch.zeros(heads, 2, dim, dim, dtype=torch.float64)
        self._sums = torch.zeros(heads, 2, dim, dtype=torch.float64)

    def add(self, pairs: Pairs) -> None:
        """Count pairs whose features are the key and the value."""
        apart = (pairs.keep - pairs.drop).double().unflatten(-1, (2, -1))  # [N, 2, d]
        weighted = apart * pairs.gain.double()[:, None, None]
        for head in pairs.head.unique().tolist():
            chosen = pairs.head == head
            self._squares[head] += torch.einsum("nki,nkj->kij", weighted[chosen], apart[chosen])
            self._sums[head] += weighted[chosen].sum(0)

    def vectors(self) -> Tensor:
        """The vectors [head, 2, d]; 0 for a head without pairs."""
        mean = self._squares.diagonal(dim1=-2, dim2=-1).mean(-1).clamp(min=1e-12)
        ridge = torch.eye(self._sums.shape[-1]).to(mean) * (_RIDGE * mean)[..., None, None]
        vectors: Tensor = torch.linalg.solve(self._squares + ridge, self._sums)
        return vectors.float()
