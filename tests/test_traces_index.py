"""`kvsim traces`: what lies in a folder, found without opening an array."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
import torch

from kvsim.attention import Rope
from kvsim.schema import FORMAT_VERSION
from kvsim.store import describe
from kvsim.store.index import index
from kvsim.trace import Trace


def make(path, n=20, layers=2, **meta):
    """A stored trace of random numbers."""
    q = torch.randn(layers, 2, n, 8, generator=torch.Generator().manual_seed(0))
    trace = Trace.from_arrays(q, q, q, prompt_len=5, rope=Rope.default(8), meta=meta)
    path.parent.mkdir(exist_ok=True)
    return trace.save(path)


def edit(trace, change):
    """Change the metadata of a trace in place."""
    path = trace / "zarr.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


CHECKS = {
    "right": {"right": True, "answer": "x"},
    "wrong": {"right": False, "answer": "y"},
    "none": {"right": False, "answer": None},
    None: {"right": None, "reason": "unknown"},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with everything that can lie in one, not to be changed."""
    folder = tmp_path_factory.mktemp("traces")
    said = {"model": {"name": "m", "layers": 4}, "versions": {"kvsim": "0.1"}}
    labels = {"task": "walk", "level": 2, "length": 9}
    make(folder / "b" / "whole.zarr", labels=labels, answer_check=CHECKS["right"], **said)
    make(folder / "a.zarr", n=300, layers=4, answer_check=CHECKS["wrong"], **said)
    make(folder / "bare.zarr")
    for name, change in DAMAGE.items():
        change(make(folder / "bad" / f"{name}.zarr"))
    draft = make(folder / "b" / "x.zarr")
    edit(draft, lambda d: d.update(attributes={"kvsim_format": 1, "committed_tokens": 256}))
    draft.rename(folder / "b" / ".x.zarr.tmp-12-000000ab")
    (folder / ".y.zarr.tmp-13-000000cd").mkdir()
    (folder / "run").mkdir()
    (folder / "run" / "run.json").write_text("{}")
    make(folder / "run" / "records.zarr")
    (folder / "notes.txt").write_text("no trace")
    return folder


def attributes(**changed):
    """A damage: attributes of the group replaced, or removed where they are None."""

    def change(trace):
        def put(document):
            found = document["attributes"]
            found.update(changed)
            for key in [key for key, value in changed.items() if value is None]:
                del found[key]

        edit(trace, put)

    return change


DAMAGE = {
    "cut": lambda trace: (trace / "zarr.json").write_text('{"attr'),
    "early": attributes(complete=False, committed_tokens=7),
    "empty": lambda trace: (trace / "zarr.json").unlink(),
    "foreign": attributes(kvsim_format=None),
    "headless": attributes(prompt_len=None),
    "later": attributes(kvsim_format=FORMAT_VERSION + 1),
    "list": lambda trace: (trace / "zarr.json").write_text("[1]"),
}
REASONS = {
    "cut": "zarr.json is damaged",
    "early": "incomplete, 7 tokens were written",
    "empty": "no zarr.json",
    "foreign": "no kvsim trace",
    "headless": "no prompt_len",
    "later": f"format {FORMAT_VERSION + 1}, this kvsim knows up to {FORMAT_VERSION}",
    "list": "zarr.json is damaged",
}


def test_whole_traces_are_as_they_describe_themselves(made):
    """Sizes, lengths, layers and labels are those that opening the trace gives."""
    whole = [one for one in index(made) if one.state == "whole"]

    assert [one.path for one in whole] == ["a.zarr", "b/whole.zarr", "bare.zarr"]
    for one in whole:
        full = describe(made / one.path)
        for name in ("tokens", "prompt_len", "layers", "bytes", "labels", "versions"):
            assert getattr(one, name) == full[name], name
        assert one.model == full["model"].get("name")
        assert one.model_layers == full["model"].get("layers")
    assert [one.answer for one in whole] == ["wrong", "right", None]


def test_the_others_say_what_is_wrong(made):
    """What cannot be opened has its reason, what is unfinished its tokens, and runs are none."""
    found = index(made)

    broken = {one.path: one.reason for one in found if one.state == "broken"}
    drafts = {one.path: one.tokens for one in found if one.state == "unfinished"}

    assert broken == {f"bad/{name}.zarr": reason for name, reason in REASONS.items()}
    assert drafts == {"b/.x.zarr.tmp-12-000000ab": 256, ".y.zarr.tmp-13-000000cd": 0}
    assert [one.path for one in found] == sorted(one.path for one in found)


def test_answers(tmp_path):
    """Right, wrong, none in the response, or not checked."""
    for name, check in CHECKS.items():
        make(tmp_path / f"{name}.zarr", answer_check=check)

    found = {one.path: one.answer for one in index(tmp_path)}

    assert found == {f"{name}.zarr": name for name in CHECKS}


_opened = None


def _watch(event, arguments):
    if event == "open" and _opened is not None:
        _opened.append(str(arguments[0]))


sys.addaudithook(_watch)


DRAFTS = ("b/.x.zarr.tmp-12-000000ab", ".y.zarr.tmp-13-000000cd")


def test_one_file_of_each_trace_is_read(made):
    """Of a trace its zarr.json is opened, and no array; of q where nothing is consolidated."""
    global _opened  # noqa: PLW0603  an audit hook cannot be taken away
    _opened = []
    try:
        index(made)
        files = [path for path in _opened if path.startswith(str(made))]
    finally:
        _opened = None

    there = [path for path in made.rglob("zarr.json") if path.parent.suffix != ""]
    expected = {str(path) for path in there if "run" not in path.relative_to(made).parts}
    missing = {str(made / "bad" / "empty.zarr"), str(made / ".y.zarr.tmp-13-000000cd")}
    expected |= {f"{path}/zarr.json" for path in missing}
    # the file that a writer holds locked
    expected |= {f"{made}/{name}/draft.jsonl" for name in DRAFTS}
    assert sorted(files) == sorted(expected)


def test_metadata_that_is_not_consolidated(tmp_path):
    """The number of layers then comes from the metadata of q, or is not known."""
    trace = make(tmp_path / "a.zarr", layers=3)
    edit(trace, lambda document: document.pop("consolidated_metadata"))
    other = shutil.copytree(trace, tmp_path / "b.zarr")
    shutil.rmtree(other / "q")

    assert [one.layers for one in index(tmp_path)] == [3, None]


@pytest.mark.parametrize("value", [None, 3, "x", [1], {"q": 3}, {"q": {"shape": "x"}}])
def test_foreign_metadata_is_harmless(value, tmp_path):
    """Whatever a foreign writer put in, the trace is listed."""
    trace = make(tmp_path / "a.zarr")
    edit(trace, lambda document: document.update(consolidated_metadata={"metadata": value}))
    edit(trace, lambda document: document["attributes"].update(meta={"model": value}))
    other = make(tmp_path / "b.zarr")
    edit(other, lambda document: document.update(attributes=value))

    first, second = index(tmp_path)

    assert (first.state, first.model, second.reason) == ("whole", None, "no kvsim trace")


# ------------------------------------------------------------------------------- the command


def test_the_table(run, made):
    """A line for each trace, then what cannot be used with what to do, then the totals."""
    status, text, err = run("traces", made)

    lines = [line.split() for line in text.splitlines()]
    assert (status, err) == (0, "")
    assert lines[0] == (
        ["trace", "model", "task", "level", "answer", "kvsim", "tokens", "prompt", "layers", "MB"]
    )
    assert lines[1][:-1] == ["a.zarr", "m", "-", "-", "wrong", "0.1", "300", "5", "4"]
    assert lines[2][:-1] == (
        ["b/whole.zarr", "m", "walk", "2", "right", "0.1", "20", "5", "2", "of", "4"]
    )
    assert lines[3][:-1] == ["bare.zarr", "-", "-", "-", "-", "-", "20", "5", "2"]
    for name, reason in REASONS.items():
        assert f"\nbad/{name}.zarr: cannot be opened, {reason}\n" in text
    draft = made / "b" / ".x.zarr.tmp-12-000000ab"
    said = f"unfinished, 256 tokens are on disk; kvsim trace recover {draft}\n"
    assert f"b/.x.zarr.tmp-12-000000ab: {said}" in text
    assert ".y.zarr.tmp-13-000000cd: unfinished, without a token; nothing is lost" in text
    size = sum(one.bytes for one in index(made) if one.state == "whole") / 1e6
    assert text.splitlines()[-1] == (
        f"3 traces in {made}, 340 tokens, {size:.1f} MB, 1 of 2 answers right, "
        "7 cannot be opened, 2 unfinished"
    )


def test_json(run, made):
    """One document with every entry."""
    status, document, err = run("traces", made, "--json")

    assert (status, err) == (0, "")
    assert json.loads(document) == {
        "folder": str(made),
        "traces": [one.to_dict() for one in index(made)],
    }


def test_a_folder_without_traces(run, tmp_path):
    """Nothing found is said, and no error."""
    assert run("traces", tmp_path) == (0, f"no trace in {tmp_path}\n", "")


def test_what_is_no_folder_of_traces(run, made):
    """A trace, a file and nothing are refused in one line."""
    for name, message in (
        ("a.zarr", "is a trace itself; see `kvsim info`"),
        ("notes.txt", "is a file; expected a folder of traces"),
        ("none", "does not exist; expected a folder of traces"),
    ):
        status, out, err = run("traces", made / name)
        assert (status, out, len(err.splitlines())) == (2, "", 1)
        assert message in err


def test_names_and_labels_are_text(run, tmp_path):
    """What a terminal would act upon is escaped, and makes no line of its own."""
    evil = "x\x1b[31m\nerror: y"
    make(tmp_path / "a\x1b\n.zarr", labels={"task": evil}, model={"name": evil})
    (tmp_path / "b\x1b\n.zarr").mkdir()
    (tmp_path / ".c\x1b\n.zarr.tmp-1-0000000a").mkdir()

    _, text, _ = run("traces", tmp_path)

    assert "\x1b" not in text
    assert not [line for line in text.splitlines() if line.startswith(("error", ".zarr"))]
