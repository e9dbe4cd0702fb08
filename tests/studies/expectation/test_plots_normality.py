"""Figures of how queries are distributed: their data beside plain loops, their labels and units."""

from __future__ import annotations

import itertools
import math
import statistics

import numpy as np
import pytest
import torch

import kvsim
from kvsim.errors import NeedsError, PolicyError
from kvsim.plots import normal_distance, projection_gap, state_quantiles, state_ridges
from kvsim.studies.expectation.expectation import key_projections
from kvsim.studies.expectation.normality import state_normality

NORMAL = statistics.NormalDist()
STILL = kvsim.Rope((0.0, 0.0))


def made(*, rope=STILL, size=1.0, residual=False):
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
        rope=rope,
        name="made",
        residual=torch.randn(2, 80, 6) if residual else None,
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


# -------------------------------------------------------------------------------------- dimensions


def test_ridges_are_histograms_beside_the_normal(trace):
    """All dimensions in two columns: densities from counts, one curve each, and the KS distance."""
    figure = state_ridges(trace, 1, dimensions=99)
    named = {}
    for axis in figure.axes:
        words = [text.get_text() for text in axis.texts if text.get_text() != "KS"]
        named |= dict(zip(words[1::2], words[::2], strict=True))
        shapes = iter([patch for patch in axis.patches if not patch.get_fill()])
        for name, ks, curve in zip(words[1::2], words[::2], axis.lines[::2], strict=True):
            x, bell = curve.get_data()
            base = bell[0] - 0.9 * math.exp(-8)
            peak = NORMAL.pdf(0)
            assert bell == pytest.approx([base + 0.9 * NORMAL.pdf(one) / peak for one in x])
            if name == "1.2":
                assert ks == "constant"
                continue
            z = samples(trace, 1, name)
            heights, edges, bottom = next(shapes).get_data()
            assert bottom == pytest.approx(base)
            assert edges[[0, -1]] == pytest.approx(np.percentile(z, [0.1, 99.9]))
            inside = [sum(a <= one < b for one in z) for a, b in itertools.pairwise(edges)]
            density = np.array(inside) / (76 * np.diff(edges))
            # samples on an edge may be counted on either side
            assert (heights - base) * peak / 0.9 == pytest.approx(density, abs=1e-6)
            assert ks == f"{distance(z):.3f}"
    assert list(named) == [f"{head}.{dim}" for head in range(3) for dim in range(4)]
    assert figure.axes[0].get_xlabel() == "standard deviations from the mean"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "fitted normal",
        "samples",
    ]
    assert figure.get_suptitle() == (
        "made, layer 1: queries before RoPE, 76 rows\n"
        "12 random dimensions (query head.dimension) (fidelity: exact)"
    )


def test_quantiles_are_ordered_samples(trace):
    """A panel per dimension, the line where both are equal, and the correlation."""
    figure = state_quantiles(trace, 0, dimensions=99)
    panels = figure.axes
    for place, panel in enumerate(panels):
        name, qq = (text.get_text() for text in panel.texts)
        assert name == f"{place // 4}.{place % 4}"
        if name == "1.2":
            assert qq == "constant"
            continue
        z = sorted(samples(trace, 0, name))
        ranks = [(i - 0.3175) / (76 + 0.365) for i in range(1, 77)]
        ranks[0], ranks[-1] = 1 - 0.5 ** (1 / 76), 0.5 ** (1 / 76)
        medians = [NORMAL.inv_cdf(rank) for rank in ranks]
        line, points = panel.lines
        assert points.get_xdata() == pytest.approx(medians)
        assert points.get_ydata() == pytest.approx(z)
        assert line.get_xdata() == pytest.approx(line.get_ydata())
        assert qq == f"{np.corrcoef(z, medians)[0, 1]:.3f}"
    assert figure.get_supxlabel() == "normal quantile"
    assert figure.get_supylabel() == "sample, standard deviations from the mean"


def test_what_is_sampled(trace):
    """Queries after RoPE, and the residual stream by dimension alone; else an error."""
    recorded = made(residual=True, rope=kvsim.Rope.default(4))
    figure = state_quantiles(recorded, 1, "residual", skip=0)
    turned = state_quantiles(recorded, 1, "rotated_query", skip=0, dimensions=99).axes[1]
    found = recorded.read("residual", slice(1, 2), slice(0, 80)).numpy().reshape(80, 6)
    z = (found - found.mean(0)) / found.std(0)

    assert [panel.texts[0].get_text() for panel in figure.axes] == list("012345")
    for panel, column in zip(figure.axes, z.T, strict=True):
        assert panel.lines[1].get_ydata() == pytest.approx(np.sort(column), abs=1e-6)
    query = recorded.q[1, 0, :, 1].numpy()
    standard = np.sort((query - query.mean()) / query.std())
    assert turned.lines[1].get_ydata() == pytest.approx(standard, abs=1e-5)
    assert "input of the layer, 80 rows" in figure.get_suptitle()
    with pytest.raises(NeedsError):
        state_ridges(trace, 0, "residual")
    with pytest.raises(PolicyError, match="layer is 2; made has layers 0 to 1"):
        state_ridges(trace, 2)
    with pytest.raises(PolicyError, match="expected at least 4 rows"):
        state_quantiles(trace, 0, skip=77)


# ------------------------------------------------------------------------------------------ heads


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


# ------------------------------------------------------------------------------------ projections


@pytest.mark.parametrize("rotated", [False, True])
def test_gaps_are_counted_by_layer(rotated):
    """Shares of heads and keys in each bin, the last ones with all beyond, by variance."""
    trace = made(size=3.0)
    found = key_projections(trace, rotated=rotated)
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
    assert ("after RoPE" if rotated else "before RoPE") in figure.get_suptitle()
    assert figure.get_suptitle().endswith(
        "3 query heads, 76 keys; ends: all beyond (fidelity: exact)"
    )
