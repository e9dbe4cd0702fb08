"""The dumps of docs/dumps: each known defect is recognised by its name, by the command."""

import json
from pathlib import Path

import pytest
from conformance.dumps import DUMPS, FOLDER

PAGE = (Path(__file__).parents[3] / "docs" / "conform.md").read_text("utf-8")


@pytest.mark.parametrize("name", DUMPS)
def test_a_shipped_dump_is_recognised(run, name):
    """The command says which deviations explain it, and exits by whether sets differ."""
    policy, parameters, expected = DUMPS[name]
    settings = [part for pair in parameters.items() for part in ("--set", "{}={}".format(*pair))]
    command = ["conform", FOLDER / f"{name}.npz", "--policy", policy, *settings]
    status, out, _ = run(*command, "--json")
    report = json.loads(out)
    assert [each["name"] for each in report["deviations"]] == expected
    assert status == int(bool(expected))
    assert report["equal"] is not bool(expected)


def test_the_page_has_each_dump():
    """A row of the page names the file, the definition and what `conform` says."""
    assert sorted(path.stem for path in FOLDER.glob("*")) == sorted(DUMPS)
    for name, (policy, parameters, expected) in DUMPS.items():
        settings = "".join(f" --set {key}={value}" for key, value in parameters.items())
        verdict = f"`{expected[0]}`" if expected else "`equal`"
        row = f"| [{name}](dumps/{name}.npz) | `--policy {policy}{settings}` | {verdict} |"
        assert row in PAGE
