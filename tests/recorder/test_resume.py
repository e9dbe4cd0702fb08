"""Captures of many prompts: which are kept, which are recorded, and what is in the way."""

import errno
import json
import os
import shutil

import pytest
import torch
from recorder_models import build, four_layers

from kvsim.errors import CaptureError, OutputError
from kvsim.recorder import Prompt, capture_many
from kvsim.store.reader import open_trace
from kvsim.store.writer import TraceWriter
from small_model import TEMPLATE, words_tokenizer


def one_line(caught):
    """The message of an error, which is one line."""
    text = str(caught.value)
    assert "\n" not in text
    return text


MANY = [Prompt("a", "w1 w2", labels={"level": 1}), Prompt("b", "w3 w4"), Prompt("c", "w5 w6", "w0")]


SAME = {
    "max_new_tokens": 6,
    "residual": True,
    "layers": [0, 2],
    "stop": ["w1 w1 w1"],
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Traces of `MANY`, not to be changed."""
    folder = tmp_path_factory.mktemp("recorded")
    capture_many(four_layers(), words_tokenizer(), MANY, folder, **SAME)
    return folder


@pytest.fixture
def folder(recorded, tmp_path):
    """A copy of them."""
    return shutil.copytree(recorded, tmp_path / "out")


def state(folder):
    """Which folders lie there."""
    return {path.name: path.stat().st_ino for path in folder.iterdir()}


def test_resume_records_what_is_missing(folder, recorded, runs):
    """Traces that are there stay untouched, the others are recorded, and all come in order."""
    shutil.rmtree(folder / "b.zarr")
    (folder / ".b.zarr.tmp-1-abcd").mkdir()  # what a killed capture leaves
    before = state(folder)

    traces = capture_many(four_layers(), words_tokenizer(), MANY, folder, resume=True, **SAME)

    assert [trace.path.name for trace in traces] == ["a.zarr", "b.zarr", "c.zarr"]
    assert [trace.digest for trace in traces] == [
        open_trace(recorded / trace.path.name).digest for trace in traces
    ]
    assert {**state(folder), "b.zarr": 0} == {**before, "b.zarr": 0}
    # one more, of two tokens, shows whether there are gates
    assert len(runs) == traces[1].n_pos - traces[1].prompt_len + 2
    runs.clear()
    capture_many(four_layers(), words_tokenizer(), MANY, folder, resume=True, **SAME)
    assert runs == []


@pytest.mark.parametrize(
    ("prompts", "changed", "message"),
    [
        ({"a": Prompt("a", "w1 w3")}, {}, "its prompt is"),
        ({}, {"chat": True}, "its chat is False, expected True; its prompt is"),
        ({"a": Prompt("a", "w1 w2")}, {}, r"its labels is {'level': 1}, expected {}"),
        ({"c": Prompt("c", "w5 w6", "w1")}, {}, "its answer is 'w0', expected 'w1'"),
        ({}, {"stop": ()}, r"its stop is \['w1 w1 w1'\], expected \[\]"),
        ({}, {"layers": None}, r"its layers is \[0, 2\], expected \[0, 1, 2, 3\]"),
        ({}, {"store_dtype": "float16"}, "its store_dtype is None, expected 'float16'"),
    ],
)
def test_a_trace_of_another_capture_is_refused(prompts, changed, message, folder, runs):
    """A trace that differs is named with what differs, before anything runs, and stays."""
    shutil.rmtree(folder / "b.zarr")
    before = state(folder)
    wanted = [prompts.get(one.id, one) for one in MANY]

    with pytest.raises(CaptureError, match=message) as caught:
        capture_many(
            four_layers(),
            words_tokenizer(TEMPLATE),
            wanted,
            folder,
            **{**SAME, **changed},
            resume=True,
        )

    assert "is of another capture" in one_line(caught)
    assert (runs, state(folder)) == ([], before)


def test_a_trace_of_another_model_is_refused(folder):
    """Another configuration, precision, kernel or name is another capture."""
    deeper, brain = (
        build("qwen2", num_hidden_layers=5),
        build("qwen2", num_hidden_layers=4).to(torch.bfloat16),
    )
    eager = build("qwen2", num_hidden_layers=4)
    eager.config._attn_implementation = "eager"

    for model, message in (
        (deeper, "its model has another configuration"),
        (brain, "its model dtype is 'float32', expected 'bfloat16'"),
        (eager, "its model attention is 'sdpa', expected 'eager'"),
    ):
        with pytest.raises(CaptureError, match=message):
            capture_many(model, words_tokenizer(), MANY, folder, **SAME, resume=True)


@pytest.fixture
def full(monkeypatch):
    """A disk that takes so many chunks of keys before it is full."""
    room = [0]
    append = TraceWriter.append

    def refuse(writer, name, layer, block):
        room[0] -= name == "k"
        if room[0] < 0:
            with writer._writing():
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append(writer, name, layer, block)

    monkeypatch.setattr(TraceWriter, "append", refuse)
    return room


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        (1, r"^prompt 'a' \(1 of 3\): .*cannot be written .* path$"),
        (
            2,
            r"^prompt 'b' \(2 of 3\): .*b\.zarr",
        ),
        (
            5,
            r"^prompt 'c' \(3 of 3\): .*; resume=True \(--resume\) keeps those before it",
        ),
    ],
)
def test_a_full_disk_among_many_prompts(chunks, expected, tmp_path, full):
    """The error says where it happened, what is complete, and how to go on; which works."""
    full[0] = chunks  # a trace has one for each of two layers

    with pytest.raises(OutputError, match=expected) as caught:
        capture_many(four_layers(), words_tokenizer(), MANY, tmp_path, **SAME)
    one_line(caught)
    left = sorted(path.name for path in tmp_path.glob("*.zarr"))
    full[0] = 10**6
    traces = capture_many(four_layers(), words_tokenizer(), MANY, tmp_path, resume=True, **SAME)

    assert left == ["a.zarr", "b.zarr", "c.zarr"][: chunks // 2]
    assert ("--resume" in str(caught.value)) == bool(left)
    assert [trace.path.name for trace in traces] == ["a.zarr", "b.zarr", "c.zarr"]


def test_a_resumed_command_says_what_it_kept(run, saved, tmp_path):
    """Kept traces are marked in the text and in JSON; without the option they are in the way."""
    rows = [{"id": "a", "prompt": "w1", "system": "w2"}, {"id": "b", "tokens": [3]}]
    file = tmp_path / "p.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    arguments = ["capture", "--model", saved, "--prompts", file, "--out", tmp_path / "out"]
    arguments += ["--max-new-tokens", 3, "--layers", "0,-1", "--chat"]

    first = run(*arguments, "--limit", 1)
    status, text, err = run(*arguments, "--resume")
    _, document, _ = run(*arguments, "--resume", "--json")
    again = run(*arguments)

    lines = text.splitlines()
    assert (first[0], first[2], status, err) == (0, "", 0, "")
    assert first[1].startswith(f"{tmp_path / 'out' / 'a.zarr'}: 8 tokens (prompt 5, response 3")
    assert "2 of 4 layers (0,3)" in lines[0]
    assert [line.endswith(", kept") for line in lines[:2]] == [True, False]
    assert sum(line.endswith(", kept") for line in lines) == 1
    assert [one["kept"] for one in json.loads(document)["traces"]] == [True, True]
    assert again[0] == 2
    assert "a.zarr exists" in again[2]
    assert "2 of 4 layers (0,3)" in run("info", tmp_path / "out" / "a.zarr")[1]
