"""Figures of how queries are distributed: their data, their labels and units."""

import itertools
import math

import numpy as np
import pytest
import torch

import kvsim
from kvsim.plots import normal_distance, projection_gap
from kvsim.studies.expectation.expectation import key_projections
from kvsim.studies.expectation.normality import normal_ks, state_normality


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


def test_the_map_is_the_mean_distance(trace):
    """Layers down, heads across, the number in each cell; constant dimensions do not count."""
    found = state_normality(trace)
    figure = normal_distance(found)
    axis, bar = figure.axes
    values = axis.images[0].get_array().data
    assert np.isnan(found.distance[:, 1, 2]).all()
    assert values == pytest.approx(np.nanmean(found.distance, -1))
    written = [text.get_text() for text in axis.texts]
    assert written == [f"{value:.3f}".removeprefix("0") for value in values.ravel()]
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("query head", "layer")
    assert figure.get_suptitle() == (
        "made: queries before RoPE, distance from normal over 76 rows\n"
        "mean over 4 dimensions (fidelity: exact)"
    )
    drawn = normal_ks(torch.from_numpy(np.random.default_rng(1).standard_normal((300, 76))))
    (line,) = [one for one in bar.lines if one.get_color() == "white"]
    chance = line.get_ydata()[0]
    assert chance == pytest.approx(float(drawn.mean()), rel=0.1)
    assert bar.get_ylabel() == f"KS distance\n(normal samples: {chance:.3f})"


def test_gaps_are_counted_by_layer():
    """Shares of heads and keys in each bin, the last ones with all beyond, by variance."""
    found = key_projections(made(size=3.0))
    figure = projection_gap(found)
    limit = 2 * math.log(76)
    for layer, axis in enumerate(figure.axes):
        small, large = axis.containers
        gaps = (found.gap - found.normal_gap)[layer].ravel()
        wide = found.variance[layer].ravel() > limit
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
