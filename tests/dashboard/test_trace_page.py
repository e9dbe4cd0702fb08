"""The frame of the dashboard and its page of a trace, without a browser."""

import pytest


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
    app = opened(folder, "retention", trace="more/plain.zarr", layer="0", head="1")
    assert app.selectbox(key="trace").value == "more/plain.zarr"
    assert (app.selectbox(key="layer").value, app.selectbox(key="head").value) == (0, 1)

    app = opened(folder, "retention", trace="../../etc/passwd", layer="77", head="x")
    assert not app.exception
    assert app.selectbox(key="trace").value == "broken.zarr"


@pytest.mark.parametrize(
    ("name", "says"), [("broken.zarr", "zarr.json"), ("more/unfinished.zarr", "its seal")]
)
@pytest.mark.parametrize("page", ["retention", "segments"])
def test_a_broken_or_unfinished_trace_is_a_message(opened, folder, page, name, says):
    """What is wrong and what to do, and no traceback."""
    app = opened(folder, page, trace=name)

    assert not app.exception
    assert app.error[0].value == "This trace cannot be read."
    assert says in app.text[0].value
