"""The frame of the dashboard and its page of a trace, without a browser."""

import base64
import json
import shutil

import numpy as np
import pytest

import kvsim
from kvsim.samples import sample_trace
from kvsim.store.index import find_runs, find_traces


def test_runs_are_found_and_not_looked_into(tmp_path):
    """What a run holds is no trace, and links lead nowhere."""
    (tmp_path / "runs" / "a" / "records.zarr").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "run.json").write_text("{}")
    (tmp_path / "link.zarr").symlink_to(tmp_path / "runs")

    assert list(find_runs(tmp_path)) == ["runs/a"]
    assert find_traces(tmp_path) == {}


def test_an_empty_folder_shows_the_sample_and_says_how_to_record(opened, tmp_path, monkeypatch):
    """The first sight is a page with something on it; the folder is named from home on."""
    folder = tmp_path / "results"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    app = opened(folder)

    assert not app.exception
    assert app.selectbox(key="trace").options == ["sample-smollm2", "sample"]
    assert any("kvsim capture --model tiny" in one.value for one in app.sidebar.caption)
    assert app.header[0].value == "Answer"
    assert [one.value for one in app.sidebar.code] == ["~/results"]


def test_a_link_restores_the_page_and_ignores_nonsense(opened, folder):
    """Every value is one of the options, whatever the link says."""
    app = opened(folder, "trace", trace="more/plain.zarr", layer="0", head="1", qhead="3")
    assert app.selectbox(key="trace").value == "more/plain.zarr"
    assert (app.selectbox(key="layer").value, app.selectbox(key="qhead").value) == (0, 3)

    app = opened(folder, "trace", trace="../../etc/passwd", layer="77", qhead="x")
    assert not app.exception
    assert app.selectbox(key="trace").value == "broken.zarr"


@pytest.mark.parametrize(
    ("name", "says"), [("broken.zarr", "zarr.json"), ("more/unfinished.zarr", "complete")]
)
@pytest.mark.parametrize("page", ["trace", "retention", "segments", "layers"])
def test_a_broken_or_unfinished_trace_is_a_message(opened, folder, page, name, says):
    """What is wrong and what to do, and no traceback."""
    app = opened(folder, page, trace=name)

    assert not app.exception
    assert app.error[0].value == "This trace cannot be read."
    assert says in app.text[0].value


def test_what_was_computed_is_not_computed_again(opened, folder, monkeypatch):
    """A second look at a head asks kvsim for nothing."""
    from apps.dashboard import cache

    asked = []
    for name in ("attention_tile", "head_table"):
        known = getattr(cache, name)
        counted = lambda *a, known=known, name=name: (asked.append(name), known(*a))[1]  # noqa: E731
        monkeypatch.setattr(cache, name, counted)
    cache.attention.clear()
    cache.heads.clear()
    app = opened(folder, "trace", trace="more/plain.zarr", layer="1")
    assert sorted(asked) == ["attention_tile", "head_table"]

    app.selectbox(key="head").set_value(1)
    app.run()
    assert asked[2:] == ["attention_tile"]
    app.selectbox(key="head").set_value(0)
    app.run()
    assert len(asked) == 3


def test_weights_under_the_pointer_are_those_of_the_trace(opened, folder):
    """In float32 where the picture is small, else in ten-thousandths."""
    trace = kvsim.open_trace(sample_trace())
    weights = trace.attention(1, slice(0, trace.n_pos))[4].numpy()
    link = {"trace": "sample.zarr", "layer": "1", "head": "2", "qhead": "4"}
    whole = opened(folder, "trace", **link)
    part = opened(folder, "trace", **link, rows=["300", "340"])

    np.testing.assert_allclose(_sent(whole, "u2", weights.shape) / 10_000, weights, atol=5.1e-5)
    np.testing.assert_allclose(_sent(part, "f4", (40, trace.n_pos)), weights[300:340], atol=1e-6)


def _sent(app, kind, shape):
    """The numbers that a picture was sent with."""
    (chart,) = app.get("plotly_chart")
    sent = json.loads(chart.proto.spec)["data"][0]["z"]
    assert sent["dtype"] == kind
    return np.frombuffer(base64.b64decode(sent["bdata"]), kind).reshape(shape)


def test_what_is_recorded_anew_is_read_anew(opened, tmp_path, folder):
    """A trace that was replaced does not come out of the cache."""
    path = tmp_path / "t.zarr"
    shutil.copytree(folder / "more" / "plain.zarr", path)
    before = opened(tmp_path, "trace", trace="t.zarr").caption
    shutil.rmtree(path)
    shutil.copytree(folder / "sample.zarr", path)

    after = opened(tmp_path, "trace", trace="t.zarr").caption

    assert any(one.value.startswith("120 tokens") for one in before)
    assert any(one.value.startswith("472 tokens") for one in after)
