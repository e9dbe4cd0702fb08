"""Figures of how queries are distributed: their data beside plain loops, their labels and units."""

import itertools
import math
import statistics

import numpy as np
import pytest
import torch

import kvsim
from kvsim.plots import normal_distance, projection_gap
from kvsim.studies.expectation.expectation import key_projections
from kvsim.studies.expectation.normality import state_normality

NORMAL = statistics.NormalDist()


def made(size=1.0):
    """A random trace of two layers, one KV head of three query heads; head 1, dim 2 is constant."""
    torch.manual_seed(0)
    q = torch.randn(2, 3, 80, 4) * size
    q[..., 0] = q[..., 0].exp()
    q[:, 1, :, 2] = 1.5
    return kvsim.Trace.from_arrays(
        q,
        torch.randn(2, 1, 80, 4),
        torch.randn(2, 1, 80, 4),
        prompt_len=20,
        rope=kvsim.Rope((0.0, 0.0)),
        name="made",
    )


@pytest.fixture(scope="module")
def trace():
    """Without rotation, so that queries are the same before and after."""
    return made()


def samples(trace, layer, name):
    """Samples of "head.dimension" behind the sinks, as standard deviations from the mean."""
    head, dim = map(int, name.split("."))
    found = trace.q[layer, head, 4:, dim].double().tolist()
    mean, deviation = statistics.fmean(found), statistics.pstdev(found)
    return [(one - mean) / deviation for one in found]


def distance(z):
    """Kolmogorov-Smirnov distance from the standard normal, sample by sample."""
    n = len(z)
    steps = [(i, NORMAL.cdf(one)) for i, one in enumerate(sorted(z))]
    return max(max((i + 1) / n - below, below - i / n) for i, below in steps)


def test_the_map_is_the_mean_distance(trace):
    """Layers down, heads across, the number in each cell; constant dimensions do not count."""
    figure = normal_distance(state_normality(trace))
    axis, bar = figure.axes
    values = axis.images[0].get_array().data
    for layer in range(2):
        for head in range(3):
            dims = [dim for dim in range(4) if (head, dim) != (1, 2)]
            known = [distance(samples(trace, layer, f"{head}.{dim}")) for dim in dims]
            assert values[layer, head] == pytest.approx(statistics.fmean(known))
    written = [text.get_text() for text in axis.texts]
    assert written == [f"{value:.3f}".removeprefix("0") for value in values.ravel()]
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("query head", "layer")
    assert figure.get_suptitle() == (
        "made: queries before RoPE, distance from normal over 76 rows\n"
        "mean over 4 dimensions (fidelity: exact)"
    )
    rng = np.random.default_rng(1)
    drawn = []
    for _ in range(300):
        z = rng.standard_normal(76)
        drawn.append(distance(list((z - z.mean()) / z.std())))
    (line,) = [one for one in bar.lines if one.get_color() == "white"]
    chance = line.get_ydata()[0]
    assert chance == pytest.approx(statistics.fmean(drawn), rel=0.1)
    assert bar.get_ylabel() == f"KS distance\n(normal samples: {chance:.3f})"


def test_gaps_are_counted_by_layer():
    """Shares of heads and keys in each bin, the last ones with all beyond, by variance."""
    trace = made(size=3.0)
    found = key_projections(trace)
    figure = projection_gap(found)
    limit = 2 * math.log(76)
    for layer, axis in enumerate(figure.axes):
        small, large = axis.containers
        gaps, wide = [], []
        for head in range(3):
            for key in range(76):
                # without rotation the projections are those of the recorded vectors
                q, k = trace.q[layer, head, 4:].double(), trace.k[layer, 0, 4 + key].double()
                x = (q @ k * trace.scale).numpy()
                top = x.max()
                gap = top + math.log(np.exp(x - top).mean()) - x.mean() - x.var() / 2
                gaps.append(gap - found.normal_gap[layer, head, key])
                wide.append(x.var() > limit)
        gaps, wide = np.array(gaps), np.array(wide)
        edges = [bar.get_x() for bar in small] + [small[-1].get_x() + small[-1].get_width()]
        for part, group in ((small, ~wide), (large, wide)):
            for place, bar in enumerate(part):
                low = -np.inf if place == 0 else edges[place]
                high = np.inf if place == len(part) - 1 else edges[place + 1]
                share = 100 * ((gaps >= low) & (gaps < high) & group).mean()
                assert bar.get_height() == pytest.approx(share, abs=1e-9)
        assert wide.any()
        assert any(a + b == pytest.approx(0) for a, b in itertools.pairwise(edges))
        (said,) = axis.texts
        near = (np.abs(gaps) <= 1).mean()
        assert said.get_text() == f"median {np.median(gaps):.2f} nats\nwithin 1 nat: {near:.0%}"
        assert axis.get_title() == f"layer {layer}"
    assert figure.axes[0].get_xlabel() == "gap above that of normal (nats)"
    assert figure.axes[0].get_ylabel() == "share of heads and keys (%)"
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == [f"variance up to {limit:.1f}", f"variance above {limit:.1f} (2 log n)"]
    assert "before RoPE" in figure.get_suptitle()
    assert figure.get_suptitle().endswith(
        "3 query heads, 76 keys; ends: all beyond (fidelity: exact)"
    )
