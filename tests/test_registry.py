"""Policies, metrics, figures and commands of packages, and what happens when these are broken."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvsim
from kvsim import registry
from kvsim.analysis.definition import Metric
from kvsim.analysis.registry import METRICS
from kvsim.plots.registry import FIGURES, Figure
from kvsim.registry import Registry

ROOT = Path(__file__).parent.parent
OUTSIDE = ROOT / "tests" / "outside"
# every command line of standard input in one process, as `kvsim` would run it
RUN = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from kvsim.cli import main
done = []
for line in json.load(sys.stdin):
    texts = io.StringIO(), io.StringIO()
    try:
        with redirect_stdout(texts[0]), redirect_stderr(texts[1]):
            main(line)
    except SystemExit as end:
        done.append([end.code, *(text.getvalue() for text in texts)])
print(json.dumps(done))
"""


def run(folder, *lines, cwd="."):
    """Run command lines of a kvsim that finds the packages in a folder: status, output, errors."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        input=json.dumps([line.split() for line in lines]),
        env=environment,
        cwd=cwd,
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(done.stdout)


def declare(folder, group, name, value, package="rival"):
    """Put the metadata of an installed package into a folder: one entry point."""
    info = folder / f"{package}-2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 2.0\n")
    (info / "entry_points.txt").write_text(f"[kvsim.{group}]\n{name} = {value}\n")


@pytest.fixture
def declared(tmp_path, monkeypatch):
    """Return a function that declares an entry point of an installed package."""
    assert METRICS["wipeout"]  # scanned before, as all tests need it
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_installed", registry.entry_points)
    yield lambda *point, **package: declare(tmp_path, *point, **package)
    sys.modules.pop("rival", None)  # of this test's folder


def metrics(**own):
    """Return a registry of metrics of its own."""
    return Registry("metric", "kvsim.metrics", (Metric,), own)


def test_an_installed_package_is_listed_replayed_measured_plotted_and_run(tmp_path):
    """What a package declares is there after pip has installed it, as if it were kvsim's own."""
    options = "--no-deps --no-build-isolation --no-index --disable-pip-version-check --quiet"
    pip = [sys.executable, "-m", "pip", "install", *options.split(), "--target"]
    subprocess.run([*pip, tmp_path, OUTSIDE], check=True)

    done = run(
        tmp_path,
        "policies alternate",
        "metrics --json",
        "replay sample --policy alternate,ams+alternate --set step=3 --budget 64 "
        "--metric odd_share --json --out run",
        "plot odd_bars run --out bars.svg",
        "odd 7",
        "--help",
        cwd=tmp_path,
    )

    assert [status for status, *_ in done] == [0] * 6
    outputs = [out for _, out, _ in done]
    assert "an integer of at least 1" in outputs[0]
    names = [each["name"] for each in json.loads(outputs[1])]
    assert names[:2] == ["wipeout", "odd_share"]
    assert {*names} - {"odd_share"} == {*METRICS}
    cells = json.loads(outputs[2])["cells"]
    assert [cell["policy"] for cell in cells] == ["alternate", "ams+alternate"]
    table = kvsim.read_run(tmp_path / "run").table
    # multiples of 3 that are still there after an eviction are odd and even in turn
    share = table.filter(policy="alternate", metric="odd_share")["value"]
    assert 0.4 < share.min() <= share.max() < 0.6
    assert "<svg" in (tmp_path / "bars.svg").read_text("utf-8")
    assert outputs[4] == "3 of 7\n"
    assert "  odd  " in outputs[5]


def test_a_broken_package_is_named_where_it_is_used(tmp_path):
    """An import error names package, object and cure; other commands work, and help lists all."""
    declare(tmp_path, "commands", "rival", "rival:command")
    (tmp_path / "rival.py").write_text("import nothing_of_this_name\n")

    alone, listed, other = run(tmp_path, "rival", "--help", "metrics wipeout")

    expected = (
        "the command 'rival' of rival 2.0 cannot be loaded from 'rival:command': "
        "ModuleNotFoundError: No module named 'nothing_of_this_name'; mend the package, or "
        "uninstall rival"
    )
    assert alone == [2, "", f"error: {expected}\n"]
    assert listed[0] == other[0] == 0
    assert expected in " ".join(listed[1].split())


def test_a_taken_name_is_refused(tmp_path):
    """A package cannot replace a policy or quantizer of kvsim; others go on working."""
    declare(tmp_path, "policies", "tova", "rival:tova")
    declare(tmp_path, "policies", "int8", "rival:int8", package="third")

    lines = [f"policies {name}" for name in ("tova", "int8", "snapkv")]
    tova, quantizer, other = run(tmp_path, *lines)

    assert tova[2] == (
        "error: the policy 'tova' is declared by kvsim and by rival 2.0; a name is declared once: "
        "rename it in the package's pyproject.toml, or uninstall rival\n"
    )
    assert [tova[0], quantizer[0], other[0]] == [2, 2, 0]
    assert "'int8' is declared by kvsim and by third 2.0" in quantizer[2]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("def bars(table): pass", "no function bars is under kvsim.plots.registry.figure"),
        ("import nothing_here\n@figure(metrics=NAMES)\ndef bars(table): pass", "ValueError"),
        ("def bars(:", "SyntaxError"),
    ],
)
def test_a_function_that_declares_no_figure_is_refused(declared, tmp_path, text, reason):
    """The error names it and its package; the file is read and not run."""
    declared("figures", "bars", "rival:bars")
    (tmp_path / "rival.py").write_text(text)

    with pytest.raises(kvsim.KvsimError, match=f"figure 'bars' of rival .*{reason}"):
        _ = type(FIGURES)("figure", "kvsim.figures", (Figure,), {})["bars"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "gain = 5",
            "it is of type int; expected kvsim.analysis.definition.Metric; mend the package",
        ),
        ("", "AttributeError: module 'rival' has no attribute 'gain'"),
        ("raise SystemExit(0)", "SystemExit: 0; mend the package"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
def test_an_object_that_is_no_metric_is_refused(declared, tmp_path, text, message):
    """Anything that a package's module may do or hold ends in one line."""
    declared("metrics", "gain", "rival:gain")
    (tmp_path / "rival.py").write_text(text)

    with pytest.raises(kvsim.KvsimError) as error:
        _ = metrics()["gain"]

    assert message in str(error.value)
    assert "\n" not in str(error.value)
