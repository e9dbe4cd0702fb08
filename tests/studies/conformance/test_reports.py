"""The dumps of docs/conformance: every report is reached again, and deviations are seen."""

import json
from dataclasses import replace

import conformance_page
import numpy as np
import pytest
from conformance.cases import FOLDER, RESULTS, case_of, ruled

RELEASES = json.loads(RESULTS.read_text("utf-8"))
CASES = {each["dump"]: each for facts in RELEASES.values() for each in facts["cases"]}
#: A dump of each release that is equal, and one that differs.
FIRST = {
    next((each["dump"] for each in facts["cases"] if bool(each["apart"]) == differs), "")
    for facts in RELEASES.values()
    for differs in (False, True)
}


def others_deep(names, quick):
    """Parameters of a test, of which those that are not quick run with `-m deep`."""
    return [x if x in quick else pytest.param(x, marks=pytest.mark.deep) for x in names]


@pytest.mark.parametrize("name", others_deep(CASES, FIRST))
def test_a_ruling_is_reached_again(name):
    """`kvsim conform` says of a dump what the page says: sets, first difference, explanation."""
    assert ruled(case_of(CASES[name])) == CASES[name]


@pytest.mark.parametrize("name", others_deep(["snapkv-64", "h2o-32", "gkv", "ams"], ["gkv"]))
def test_one_exchanged_entry_is_seen(name):
    """A dump in which one head keeps another entry differs there, and no deviation explains it."""
    case = case_of(CASES[name])
    *earlier, row = sorted(case.dump.kept)
    sets = case.dump.kept[row].copy()
    held = np.ones(row + 1, bool)
    if earlier:
        held[: earlier[-1] + 1] = case.dump.kept[earlier[-1]][1, 2]
    leaves, stays = np.flatnonzero(held & ~sets[1, 2])[0], np.flatnonzero(sets[1, 2])[-20]
    sets[1, 2, [stays, leaves]] = False, True
    result = ruled(replace(case, dump=replace(case.dump, kept={**case.dump.kept, row: sets})))
    first = result["first"]
    assert (result["apart"], first["row"], first["layer"], first["head"]) == (1, row, 1, 2)
    assert result["explained"] == []


def test_every_dump_has_its_row():
    """Of cases.json, and of the table that `python docs/conformance_page.py` writes."""
    assert sorted(path.stem for path in FOLDER.glob("*.npz")) == sorted(CASES)
    assert (FOLDER / "cases.csv").read_text("utf-8") == conformance_page.rows()
