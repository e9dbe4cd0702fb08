"""`kvsim report`: one page that needs nothing else and escapes whatever a run holds."""

import html
import re

import polars as pl
import pytest

import kvsim
from kvsim.analysis.folder import bind, read_run
from kvsim.analysis.registry import METRICS
from kvsim.analysis.table import COLUMNS
from kvsim.cli import _status
from kvsim.core.policy import Policy
from kvsim.errors import OutputError, PolicyError
from kvsim.report import write_report
from kvsim.sweeps.driver import replay_all
from tests.facts import facts
from web import Reader

pytestmark = pytest.mark.usefixtures("no_layout")

HOSTILE = "<script>alert('x')</script>&\"' {body} [link](javascript:x)"


def read(path):
    """A page, parsed."""
    return Reader(path.read_text("utf-8"))


def saved(folder, values, **more):
    """A run folder with made-up values by policy, one per prompt."""
    folder.mkdir()
    rows = []
    for policy, numbers in values.items():
        for trace, value in enumerate(numbers):
            for name in ("output_error", "wipeout"):
                row = dict.fromkeys(COLUMNS)
                row |= {"trace": f"t{trace}", "policy": policy, "metric": name, "value": value}
                row |= {"variant": METRICS[name].main, "budget": 64, "layer": 0, "params": "{}"}
                row |= {"unit": METRICS[name].unit, "fidelity": "open"}
                rows.append(row | facts(policy) | more)
    pl.DataFrame(rows, schema=COLUMNS).write_parquet(folder / "results.parquet")
    bind(folder, {"budgets": ["64"], "remarks": [HOSTILE]})
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A real run of the sample."""
    trace = kvsim.open_trace(kvsim.sample_trace())
    policies: list[Policy] = [kvsim.policy("tova"), kvsim.policy("ams", window=16)]
    found = replay_all([trace], policies, ["25%", 64], interval=64, prefill=False)
    return found.save(tmp_path_factory.mktemp("runs") / "real")


def test_a_page_has_results_figures_claims_and_provenance(run, tmp_path, capsys):
    """From one command, with the numbers of the Table."""
    out = tmp_path / "pages" / "r.html"
    status = _status(["report", str(run), "--out", str(out)])
    page = read(out)
    table = read_run(run).table
    error = table.filter(policy="tova", share="25%", metric="output_error")["value"].mean()

    assert (status, capsys.readouterr().out) == (0, f"Written to {out}.\n")
    assert f"{error:.3f}" in page.text
    for part in ("Verdict", "Results", "every metric", "What the papers say"):
        assert part in page.text
    assert "AMS wipes out fewer regions" in page.text
    assert "not decided" in page.text
    assert '"budgets"' in page.text
    assert "sha256:" in page.text
    assert len([1 for tag, _ in page.tags if tag == "img"]) == 3


def test_a_page_needs_nothing_else(run, tmp_path):
    """No scripts, no links, no address but those of the images that it holds."""
    page = read(write_report([run], tmp_path / "r.html"))
    places = [a[name] for _, a in page.tags for name in ("src", "href") if name in a]

    assert all(place.startswith("data:image/svg+xml;base64,") for place in places)
    assert {"script", "link", "iframe", "object"}.isdisjoint(tag for tag, _ in page.tags)
    assert any("default-src 'none'" in str(a.get("content")) for _, a in page.tags)


def test_texts_of_a_run_are_escaped(tmp_path):
    """Names of policies and domains, remarks and folders may hold anything."""
    folder = saved(tmp_path / "<b>run", {HOSTILE: [0.1, 0.2], "tova": [0.3, 0.5]}, domain=HOSTILE)
    second = saved(tmp_path / "other", {HOSTILE: [0.1], "tova": [0.3]}, domain="ore", budget=32)
    page = write_report([folder, second], tmp_path / "r.html").read_text("utf-8")
    found = read(tmp_path / "r.html")

    assert {"script", "b>run"}.isdisjoint(tag for tag, _ in found.tags)
    assert "<script" not in page
    assert found.text.count("alert('x')") >= 4
    assert HOSTILE in html.unescape(page)


def test_a_page_opens_with_the_verdict_as_a_table(tmp_path):
    """Its sentences, then a row for each policy, with metrics of the reader's choice."""
    values = {"tova": [0.30, 0.50], HOSTILE: [0.10, 0.20], "h2o": [0.10, 0.20]}
    run = saved(tmp_path / "r", values)
    text = write_report([run], tmp_path / "r.html", metrics=["wipeout"]).read_text("utf-8")
    part = text[text.index("<h2>Verdict") : text.index("<h2>Results")]
    rows = [re.findall(r"<t[dh][^>]*>(.*?)</t", row) for row in re.findall(r"<tr>.*?</tr>", part)]

    assert "share the lowest mean output_error, 0.15, and no policy is better on 2 of 2" in part
    assert "Fewer than 6 prompts say nothing about other prompts" in part
    assert "Figures" not in text
    assert "would likely show" not in text
    assert [html.unescape(row[1]) for row in rows[1:]] == [HOSTILE, "h2o", "tova"]
    assert [row[2] for row in rows[1:]] == ["0.15", "0.15", "0.4"]
    assert [row[3] for row in rows[1:]] == ["", "", ""]
    assert len(rows[0]) == 6
    assert "wipeout" in rows[0][5]
    with pytest.raises(PolicyError, match="'wiped'"):
        write_report([run], tmp_path / "x.html", metrics=["wiped"])
    alone = saved(tmp_path / "alone", {"tova": [0.3, 0.5]})
    with pytest.raises(PolicyError, match="'wiped'"):  # also where there is no verdict
        write_report([alone], tmp_path / "x.html", metrics=["wiped"])


def test_what_is_no_run_is_refused(tmp_path, run, capsys):
    """With what was expected; nothing is written."""
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(OutputError, match=r"no run folder: .*run\.json is missing"):
        read_run(empty)
    (tmp_path / "there.html").write_text("mine")
    assert _status(["report", str(run), "--out", str(tmp_path / "there.html")]) == 2
    assert "exists; give another --out" in capsys.readouterr().err
    assert (tmp_path / "there.html").read_text() == "mine"
    assert _status(["report", str(run), "--out", str(tmp_path / "there.html"), "--overwrite"]) == 0
    assert _status(["report", str(tmp_path / "there.html"), "--out", str(tmp_path / "x.html")]) == 2
    assert "there.html is not a kvsim trace" in capsys.readouterr().err
