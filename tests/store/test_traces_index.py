"""`kvsim traces`: what lies in a folder, found without reading queries, keys or values."""

import json
import shutil
import sys
import zipfile
from dataclasses import asdict

import pytest
import torch

from damage import edit
from kvsim.core.attention import Rope
from kvsim.core.trace import Trace
from kvsim.schema import NEWEST_VERSION
from kvsim.store import describe
from kvsim.store.index import index
from kvsim.store.packing import pack
from mutations import reseal_folder


def make(path, n=20, layers=2, **meta):
    """A stored trace of random numbers."""
    q = torch.randn(layers, 2, n, 8, generator=torch.Generator().manual_seed(0))
    trace = Trace.from_arrays(q, q, q, prompt_len=5, rope=Rope.default(8), meta=meta)
    path.parent.mkdir(exist_ok=True)
    return trace.save(path)


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
    labels = {"task": "walk", "level": 2, "colour": 9}
    make(folder / "b" / "whole.zarr", labels=labels, answer_check=CHECKS["right"], **said)
    make(folder / "a.zarr", n=300, layers=4, answer_check=CHECKS["wrong"], **said)
    make(folder / "bare.zarr")
    pack(folder / "b" / "whole.zarr", folder / "b" / "packed.zarr.zip")
    make(folder / "plain")
    pack(folder / "plain")
    (folder / "bad").mkdir()
    (folder / "bad" / "cut.zarr.zip").write_bytes(b"PK\x03\x04")
    with zipfile.ZipFile(folder / "other.zip", "w") as archive:
        archive.writestr("zarr.json", '{"attributes": {}}')
    (folder / "store").mkdir()
    (folder / "store" / "zarr.json").write_text('{"attributes": {}}')
    for name, change in DAMAGE.items():
        change(make(folder / "bad" / f"{name}.zarr"))
    make(folder / "b" / "x.zarr").rename(folder / "b" / ".x.zarr.tmp-12-000000ab")
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

        edit(trace / "zarr.json", put)

    return change


DAMAGE = {
    "chunkless": lambda trace: (trace / "v" / "c" / "1" / "0" / "0" / "0").unlink(),
    "cut": lambda trace: (trace / "zarr.json").write_text('{"attr'),
    "early": attributes(complete=False, committed_tokens=7),
    "empty": lambda trace: (trace / "zarr.json").unlink(),
    "foreign": attributes(kvsim_format=None),
    "headless": attributes(prompt_len=None),
    "later": attributes(kvsim_format=NEWEST_VERSION + 1),
    "list": lambda trace: (trace / "zarr.json").write_text("[1]"),
}
REASONS = {
    "chunkless.zarr": ": v has 1 of 2 chunks, the first missing is c/1/0/0/0, expected all; ",
    "cut.zarr": ": zarr.json is not readable (",
    "cut.zarr.zip": " is not a usable packed trace (",
    "early.zarr": " is incomplete, expected a complete trace; ",
    "empty.zarr": " is not a kvsim trace: zarr.json is missing, expected ",
    "foreign.zarr": " is not a kvsim trace: its zarr.json has no kvsim_format, expected ",
    "headless.zarr": ": attribute prompt_len is None, which ",
    "later.zarr": " was recorded by another version of kvsim (trace format ",
    "list.zarr": ": zarr.json is not a JSON object; ",
}
#: Whole ones, in order.
WHOLE = ["a.zarr", "b/packed.zarr.zip", "b/whole.zarr", "bare.zarr", "plain", "plain.zip"]


def test_whole_traces_are_as_they_describe_themselves(made):
    """Sizes, lengths, layers and labels are those that opening the trace gives."""
    whole = [one for one in index(made) if one.state == "whole"]

    assert [one.path for one in whole] == WHOLE
    for one in whole:
        full = describe(made / one.path)
        if one.path.endswith(".zip"):
            full["bytes"] = (made / one.path).stat().st_size
        for name in ("tokens", "prompt_len", "layers", "bytes", "labels", "versions"):
            assert getattr(one, name) == full[name], name
        assert one.model == full["model"].get("name")
        assert one.model_layers == full["model"].get("layers")
    assert [one.answer for one in whole] == ["wrong", "right", "right", None, None, None]


def test_the_others_say_what_is_wrong(made):
    """What cannot be opened has its reason, and runs and hidden folders are left out."""
    found = index(made)

    broken = {one.path: one.reason for one in found if one.state == "broken"}

    assert broken.keys() == {f"bad/{name}" for name in REASONS}
    for name, reason in REASONS.items():
        assert broken[f"bad/{name}"].startswith(f"bad/{name}{reason}")
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


def test_no_queries_keys_or_values_are_read(made):
    """Of a trace its metadata is opened, and of the arrays the numbers of layers alone."""
    global _opened  # noqa: PLW0603  an audit hook cannot be taken away
    _opened = []
    try:
        index(made)
        below = [path for path in _opened if path.startswith(str(made))]
    finally:
        _opened = None

    files = [path.removeprefix(str(made)) for path in below]
    chunks = {path.partition(".zarr/")[2] or path for path in files if "/c/" in path}
    assert chunks == {"layer/c/0", "/plain/layer/c/0"}
    rest = {path.split("/")[-1] for path in files if "/c/" not in path}
    packed = {"packed.zarr.zip", "plain.zip", "cut.zarr.zip", "other.zip"}
    assert rest == {"zarr.json", *packed}
    assert not [path for path in files if "/run/" in path]


def test_metadata_that_is_not_consolidated(tmp_path):
    """Nothing is missing from a trace then, unless an array is."""
    trace = make(tmp_path / "a.zarr", layers=3)
    edit(trace / "zarr.json", lambda document: document.pop("consolidated_metadata"))
    other = shutil.copytree(trace, tmp_path / "b.zarr")
    shutil.rmtree(other / "q")

    first, second = index(tmp_path)

    assert (first.state, first.layers) == ("whole", 3)
    assert second.reason.startswith("b.zarr: no array q, expected ")


@pytest.mark.parametrize("value", [None, 3, "x", [1], {"q": 3}, {"q": {"shape": "x"}}])
def test_foreign_metadata_is_harmless(value, tmp_path):
    """Whatever a foreign writer put in, the trace is listed."""
    trace = make(tmp_path / "a.zarr")
    edit(
        trace / "zarr.json",
        lambda document: document.update(consolidated_metadata={"metadata": value}),
    )
    edit(trace / "zarr.json", lambda document: document["attributes"].update(meta={"model": value}))
    reseal_folder(trace)
    other = make(tmp_path / "b.zarr")
    edit(other / "zarr.json", lambda document: document.update(attributes=value))

    first, second = index(tmp_path)

    assert (first.state, first.model) == ("whole", None)
    assert second.reason.startswith("b.zarr is not a kvsim trace")


def test_the_table(run, made):
    """A line for each trace, then what cannot be used with what to do, then the totals."""
    status, text, err = run("traces", made)

    lines = [line.split() for line in text.splitlines()]
    assert (status, err) == (0, "")
    assert lines[0] == (
        ["trace", "model", "task", "level", "answer", "kvsim", "tokens", "prompt", "layers", "MB"]
    )
    assert lines[1][:-1] == ["a.zarr", "m", "-", "-", "wrong", "0.1", "300", "5", "4"]
    assert [line[0] for line in lines[1:7]] == WHOLE
    assert lines[3][:-1] == (
        ["b/whole.zarr", "m", "walk", "2", "right", "0.1", "20", "5", "2", "of", "4"]
    )
    assert lines[4][:-1] == ["bare.zarr", "-", "-", "-", "-", "-", "20", "5", "2"]
    for name, reason in REASONS.items():
        assert f"\ncannot be opened: bad/{name}{reason}" in text
    size = sum(one.bytes for one in index(made) if one.state == "whole") / 1e6
    assert text.splitlines()[-1] == (
        f"6 traces in {made}, 400 tokens, {size:.1f} MB, 2 of 3 answers right, 9 cannot be opened"
    )


def test_json(run, made):
    """One document with every entry."""
    status, document, err = run("traces", made, "--json")

    assert (status, err) == (0, "")
    assert json.loads(document) == {
        "folder": str(made),
        "traces": [asdict(one) for one in index(made)],
        "projections": [],
    }


def test_a_folder_without_traces(run, tmp_path):
    """Nothing found is said, and no error."""
    assert run("traces", tmp_path) == (0, f"no trace in {tmp_path}\n", "")


def test_what_is_no_folder_of_traces(run, made):
    """A trace, a file and nothing are refused in one line."""
    for name, message in (
        ("plain.zip", "is a file; expected a folder of traces"),
        ("a.zarr", "is a trace; use `kvsim info`"),
        ("notes.txt", "is a file; expected a folder of traces"),
        ("none", "does not exist; expected a folder of traces"),
    ):
        status, out, err = run("traces", made / name)
        assert (status, out, len(err.splitlines())) == (2, "", 1)
        assert message in err


LOCAL = [
    ("traces", "URL"),
    ("dashboard", "URL"),
    ("trace", "pack", "URL"),
    ("trace", "pack", "sample", "--out", "URL"),
    ("trace", "unpack", "URL"),
    ("trace", "unpack", "a.zarr.zip", "--out", "URL"),
    ("replay", "sample", "--policy", "tova", "--budget", "32", "--out", "URL"),
    ("report", "sample", "--out", "URL"),
    ("plot", "mass_curve", "sample", "--out", "URL"),
    ("layers", "sample", "--figures", "URL"),
    ("cost", "--policy", "tova", "--budget", "32", "--model-config", "URL"),
    ("prompts", "--out", "URL"),
    ("demo", "--out", "URL"),
    ("capture", "--model", "tiny", "--out", "a.zarr", "--prompts", "URL"),
]


@pytest.mark.parametrize("words", LOCAL, ids=" ".join)
def test_a_url_is_no_path(words, run, tmp_path, monkeypatch):
    """Where a path of this machine is expected a URL is named as it was given, in one line."""
    monkeypatch.chdir(tmp_path)
    url = "http://127.0.0.1:1/a.zarr"

    status, out, error = run(*[url if word == "URL" else word for word in words])

    assert (status, out, error.count("\n")) == (2, "", 1)
    assert f"{url} is a URL, expected" in error.replace(";", ",")
    assert not list(tmp_path.iterdir())


def test_names_and_labels_are_text(run, tmp_path):
    """What a terminal would act upon is escaped, and makes no line of its own."""
    evil = "x\x1b[31m\nerror: y"
    make(tmp_path / "a\x1b\n.zarr", labels={"task": evil}, model={"name": evil})
    (tmp_path / "b\x1b\n.zarr").mkdir()

    _, text, _ = run("traces", tmp_path)

    assert "\x1b" not in text
    assert not [line for line in text.splitlines() if line.startswith(("error", ".zarr"))]
