"""Page *Layers* without a browser: its numbers are those of `kvsim.analysis`."""

import json

import numpy as np
import polars as pl
import pytest

import kvsim
from kvsim.analysis.attention.sparsity import sparsity_table
from kvsim.analysis.attention.windows import overlap_table
from kvsim.policies.asl import ASL
from kvsim.studies.layers.ranking import ranking
from kvsim.studies.layers.tables import diagnose, layer_table
from traces import settling_trace

TEXTS = ["a", "b\n", " c"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Traces of nine layers, of three, of one, and some too short for one thing or another."""
    root, given = tmp_path_factory.mktemp("layers"), {"prompt_len": 100, "speed": 1.0}
    settling_trace(9, 130, **given).save(root / "deep.zarr")
    texts = [TEXTS[i % 3] for i in range(130)]
    settling_trace(3, 130, **given, token_text=texts).save(root / "flat.zarr")
    settling_trace(1, 130, **given).save(root / "one.zarr")
    settling_trace(3, 3, prompt_len=2).save(root / "tiny.zarr")
    settling_trace(3, 8, prompt_len=1).save(root / "unasked.zarr")
    return root


def drawn(app, place):
    """The lines of a picture by name."""
    spec = json.loads(app.get("plotly_chart")[place].proto.spec)
    return {one.get("name"): one for one in spec["data"]}


def floats(values):
    """Numbers of a line or a column, NaN for none."""
    return [np.nan if one is None else one for one in values]


def test_the_table_is_that_of_the_diagnosis(opened, folder):
    """At the knobs of the link: the page's table and lines, and its verdict."""
    knobs = {"tau": "0.6", "k": "20", "first_layer": "2", "look_back": "3", "window": "16"}
    app = opened(folder, "layers", trace="deep.zarr", **knobs)
    trace = kvsim.open_trace(folder / "deep.zarr")
    rule = ASL(window=16, tau=0.6, first_layer=2, look_back=3)
    one = diagnose(trace, ranking(trace, ASL(window=16)), 36, rule=rule)
    table = layer_table([one])

    assert not app.exception
    shown = app.dataframe[0].value
    for name in ("variance", "relative_variance", "entropy", "jaccard", "union"):
        known = table[name].cast(pl.Float64).to_list()
        np.testing.assert_allclose(shown[name].to_numpy(dtype=float), floats(known))
    assert one.curve.verdict() in app.info[0].value
    line = drawn(app, 0)["relative variance"]["y"]
    np.testing.assert_allclose(floats(line), one.curve.relative)
    np.testing.assert_allclose(floats(drawn(app, 1)["chance"]["y"])[1:], one.jaccard_chance)


def test_overlap_and_sparsity_are_those_of_kvsim(opened, folder):
    """Of the layer that is chosen and the window of the link."""
    app = opened(folder, "layers", trace="deep.zarr", rows_of_window="12")
    app.selectbox(key="layer").select(4).run()
    trace = kvsim.open_trace(folder / "deep.zarr")
    sparsity, overlap = app.dataframe[1].value, app.dataframe[2].value

    for name in ("sequence", "behind_sink"):
        np.testing.assert_allclose(sparsity[name], sparsity_table(trace)[name])
    expected = overlap_table(trace, 4, window=12)
    for name in expected.columns:
        np.testing.assert_allclose(overlap[name], expected[name])
    assert set(overlap["layer"]) == {4}


@pytest.mark.parametrize("order", ["rank", "position"])
def test_the_pattern_holds_the_ranks_of_each_layer(opened, folder, order):
    """A column is a token, and says which; escaped."""
    app = opened(folder, "layers", trace="flat.zarr", k="10", order=order)
    (picture,) = drawn(app, 4).values()
    known = ranking(kvsim.open_trace(folder / "flat.zarr"))
    positions = [int(name.split()[1]) for name in picture["x"]]

    best = known.ranks[-1].argsort()[:10].tolist()
    assert set(best) <= set(positions)
    in_order = positions if order == "position" else known.ranks[-1, positions].tolist()
    assert in_order == sorted(in_order)
    assert picture["x"][0].startswith(f"position {positions[0]} ")
