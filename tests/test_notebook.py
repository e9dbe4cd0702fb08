"""What notebooks show of objects: short, escaped, with a picture that tells the truth."""

import re
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from xml.etree import ElementTree as ET

import numpy as np
import polars as pl
import pytest

import kvsim
from kvsim.progress import progress_bar
from kvsim.sweeps import replay_all
from traces import random_trace

EVIL = "<script>alert('x')</script>&amp;"


def make_trace(name="small", n=24, meta=None):
    """A random trace of 2 layers and 2 KV heads."""
    return random_trace(n=n, seed=len(name), prompt_len=12, name=name, meta=meta)


@pytest.fixture(scope="module")
def swept():
    """A run of two policies at two budgets over two traces, the first with a hostile name."""
    return replay_all(
        [make_trace(EVIL), make_trace()], ["tova", "snapkv"], [8, "50%"], fit=True, metrics=METRICS
    )


METRICS = ["entries_seen", "output_error"]
TAGS = {"div", "b", "p", "span", "table", "tr", "td", "svg", "path", "rect", "circle", "text"}


def texts(shown):
    """The texts of what a notebook shows; it is well-formed, small and has only plain elements."""
    page = shown._repr_html_()
    root = ET.fromstring(page)  # noqa: S314  our own page
    tags = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert tags <= TAGS
    assert not [name for element in root.iter() for name in element.attrib if name.startswith("on")]
    assert len(page) < 20_000
    return " ".join(root.itertext())


def test_objects_are_shown_with_shape_and_provenance(swept, tmp_path):
    """Trace, Record, Policy, run, saved run and comparison, each with its facts and a picture."""
    trace = make_trace()
    stored = kvsim.open_trace(trace.save(tmp_path / "small.zarr"))
    record = kvsim.replay(stored, "h2o", "50%", interval=4)
    saved = kvsim.read_run(swept.save(tmp_path / "run"))
    expected = [
        (
            stored,
            "2 layers",
            "prompt 12, response 12",
            f".../{tmp_path.name}/small.zarr",
            stored.digest[:19],
        ),
        (record, "h2o on small", "12 (50%) entries", "the prompt, every 4 rows", "24 positions"),
        (kvsim.policy("streaming_llm"), "StreamingLLM(sink=4)", "chosen of a budget of 128"),
        (kvsim.compare(swept), "Budget 8: ", "worse_by"),
    ]

    for shown, *parts in expected:
        text = texts(shown)
        assert [part for part in parts if part not in text] == []
        assert "<svg" in shown._repr_html_()
    seen = swept.table.filter(metric="entries_seen", budget=8)["value"].mean()
    for run in (swept, saved):
        assert "Budget 8: " in texts(run)
        assert f" {seen:.3g} " in texts(run)


def test_texts_of_traces_and_runs_are_escaped(swept):
    """Names, labels and spans of a trace, and names in a run, are text and no elements."""
    meta = {"model": {"name": EVIL}, "labels": {"task": EVIL}, "spans": {EVIL: [[2, 9]]}}
    trace = make_trace(EVIL, meta=meta)
    record = replace(kvsim.replay(trace, "tova", 8), policy=EVIL, remark=EVIL)
    named = replace(kvsim.policy("tova"), name=EVIL)
    table = swept.table.with_columns(
        policy=pl.when(policy="tova").then(pl.lit(EVIL)).otherwise("policy")
    )

    for shown in (trace, record, named, replace(swept, table=table), kvsim.compare(table)):
        assert EVIL[:8] in texts(shown)
        assert "<script" not in shown._repr_html_()


def test_the_picture_of_a_record_is_what_it_retains():
    """Each cell is as dark as the share of heads and layers whose row still sees the position."""
    record = kvsim.replay(make_trace(), "tova", 6, interval=2)
    drawn = np.zeros((24, 24))
    root = ET.fromstring(record._repr_html_())  # noqa: S314  our own page
    for path in root.iter("{http://www.w3.org/2000/svg}path"):
        for x, y, width, height in re.findall(r"M(\d+) (\d+)h(\d+)v(\d+)h-\d+z", path.get("d")):
            assert height == "6"
            columns = slice(int(x) // 20, (int(x) + int(width)) // 20)
            drawn[int(y) // 6, columns] += float(path.get("opacity"))

    seen = np.zeros((24, 24))
    for row in range(24):
        for pos in range(row + 1):
            seen[row, pos] = (record.evicted_at[:, :, pos] >= row).mean()
    np.testing.assert_allclose(drawn, np.ceil(seen * 5) / 5, atol=0.005)


def test_texts_are_one_short_line(swept):
    """What a console shows of an object has no arrays."""
    trace = make_trace()
    record = kvsim.replay(trace, "ams", 20)

    assert repr(record) == (
        "Record('ams', trace='small', budget=20, after 'every 512 rows', layers=2, heads=2, "
        "pos=24, events=0)"
    )
    assert repr(kvsim.policy("knorm")) == "Policy('knorm', after 'the prompt')"
    assert repr(kvsim.policy("ams")).endswith("more, after 'every 512 rows')")
    assert "policy=['tova', 'snapkv@scaled'], budget=['8', '50%']" in repr(swept)
    assert "prompts=2" in repr(kvsim.compare(swept))


def test_a_bar_in_a_notebook(monkeypatch):
    """`progress=True` shows how much is done, where the output of a cell is, and removes it."""
    shown = []

    def display(first, *, raw, display_id):
        assert raw
        assert display_id
        shown.append(first)
        return SimpleNamespace(update=lambda each, *, raw: shown.append(each) if raw else None)

    shell = SimpleNamespace(kernel=object())
    modules = {"IPython": ModuleType("IPython"), "IPython.display": ModuleType("IPython.display")}
    modules["IPython"].get_ipython = lambda: shell
    modules["IPython.display"].display = display
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)

    kvsim.sweep(
        traces=make_trace("<b>"), policies="tova", budgets=8, metrics="output_error", progress=True
    )

    plain = [each["text/plain"] for each in shown]
    assert (plain[0], plain[1], plain[-1]) == ("", "0 of 1 cells", "")
    assert "1 of 1 cells: <b>" in plain
    assert shown[-2]["text/html"] == (
        '<progress value="1.000"></progress> <small>1 of 1 cells: &lt;b&gt;</small>'
    )


def test_no_bar_outside_of_notebooks_and_terminals(capsys):
    """In a pipe short work prints nothing."""
    with progress_bar("cells") as show:
        show(1, 2, "half")

    assert capsys.readouterr() == ("", "")


def test_a_budget_of_rows_binds():
    """A policy whose budget chooses rows and leaves whole caches has one that binds."""
    chosen, whole = kvsim.policy("fastkv", kv_before="full"), kvsim.policy("full")

    assert "does not bind" in whole._repr_html_()
    assert "does not bind" not in chosen._repr_html_()
    assert chosen.bounds == {"held"}
    assert not chosen.bounded
