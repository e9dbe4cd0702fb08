"""The grid of needles: what each cell shows, which are empty, and what a table must have."""

import numpy as np
import polars as pl

from kvsim import plots
from kvsim.analysis.table import TYPES

LENGTHS, DEPTHS = (512, 1024, 2048), (0.1, 0.5, 0.9)


def recall(policy, budget, length, depth):
    """A different number for each cell."""
    return round((DEPTHS.index(depth) + 3 * LENGTHS.index(length)) / 10 + budget / 10_000, 4)


def made(policies=("snapkv", "tova"), budgets=(128, 256), drop=()):
    """A Table of two prompts a cell, whose mean over two heads is `recall`."""
    rows = [
        {
            "trace": f"{length}-{depth}-{i}",
            "length": length,
            "depth": depth,
            "policy": policy,
            "params": "{}",
            "budget": budget,
            "metric": "needle_recall",
            "variant": "",
            "layer": 0,
            "head": head,
            "unit": "share",
            "fidelity": "open",
            "value": recall(policy, budget, length, depth) + (i - 0.5) / 50 + (head - 0.5) / 50,
        }
        for policy in policies
        for budget in budgets
        for length in LENGTHS
        for depth in DEPTHS
        if (length, depth) not in drop
        for i in range(2)
        for head in range(2)
    ]
    return pl.DataFrame(rows, schema_overrides=TYPES).select(
        pl.lit(None, kind).alias(name) if name not in rows[0] else pl.col(name)
        for name, kind in TYPES.items()
    )


def test_each_cell_is_the_mean_of_its_prompts():
    """A panel per policy and budget; depths downwards, lengths to the right, percent in cells."""
    figure = plots.needle(made())
    figure.draw_without_rendering()

    panels = [axis for axis in figure.axes if axis.get_title()]
    assert [axis.get_title() for axis in panels] == [
        f"{policy}\nbudget {budget}" for policy in ("snapkv", "tova") for budget in (128, 256)
    ]
    for axis, budget in zip(panels, (128, 256) * 2, strict=True):
        expected = [[recall("", budget, length, depth) for length in LENGTHS] for depth in DEPTHS]
        (image,) = axis.images
        np.testing.assert_allclose(image.get_array(), expected)
        shown = [text.get_text() for text in axis.texts]
        assert shown == [f"{100 * value:.0f}" for row in expected for value in row]
        assert image.get_clim() == (0, 1)
    ticks = panels[-1].get_xticklabels(), panels[0].get_yticklabels()
    across, down = ([label.get_text() for label in labels] for labels in ticks)
    assert across == ["512", "1024", "2048"]
    assert down == ["10%", "50%", "90%"]
    assert panels[0].yaxis_inverted()
    assert figure.get_supxlabel() == "length of the prompt (tokens)"
    assert figure.get_supylabel() == "depth of the needle"
    assert "2 prompts" in figure.get_suptitle()
    assert "open)" in figure.get_suptitle()
