"""Captures of many prompts: which are kept, which are recorded, and what is in the way."""

import errno
import json
import os
import shutil

import pytest
import torch
from recorder_models import build, four_layers

from damage import edit_header, reseal
from families import ids
from kvsim.errors import CaptureError, TraceError, TraceExistsError
from kvsim.recorder import Prompt, capture, capture_many
from kvsim.store import TraceWriter, open_trace
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
    "attention": "window:3",
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
    # two more, of two tokens, show the shapes for the plan and whether there are gates
    assert len(runs) == traces[1].n_pos - traces[1].prompt_len + 3
    runs.clear()
    capture_many(four_layers(), words_tokenizer(), MANY, folder, resume=True, **SAME)
    assert runs == []


@pytest.mark.parametrize(
    ("prompts", "changed", "message"),
    [
        ({"a": Prompt("a", "w1 w3")}, {}, "its prompt of 2 tokens differs from token 1 on"),
        ({}, {"chat": True}, r"token 0 on.*; chat \(--chat, --system\): \[\], expected \['user'\]"),
        ({}, {"system": "w4"}, r"expected \[\"system 'w4'\", 'user'\]"),
        ({}, {"temperature": 1.0, "top_k": 1}, "its temperature is 0.0.*; its top_k is None"),
        ({"a": Prompt("a", "w1 w2 w3")}, {}, "from token 2 on, expected 3 tokens"),
        ({"a": Prompt("a", "w3")}, {"seed": 1}, "differs from token 0 on.*; its seed is 0"),
        ({"a": Prompt("a", "w1 w2")}, {}, r"its labels are {'level': 1}, expected {}"),
        ({"c": Prompt("c", "w5 w6", "w1")}, {}, "its response was compared with another answer"),
        ({}, {"max_new_tokens": 7}, "its max_new_tokens is 6, expected 7"),
        ({}, {"temperature": 0.5}, r"its temperature is 0\.0, expected 0\.5"),
        ({}, {"seed": 1}, "its seed is 0, expected 1"),
        ({}, {"stop": ()}, r"its stop is \['w1 w1 w1'\], expected \[\]"),
        ({}, {"layers": None}, r"its layers are \[0, 2\], expected \[0, 1, 2, 3\]"),
        ({}, {"residual": False}, "it has residual"),
        ({}, {"o_proj": False}, "it has o_proj"),
        ({}, {"attention": False}, "its rows of dense attention are 3, expected 0"),
        ({}, {"store_dtype": "float16"}, "it is stored in float32, expected float16"),
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
        (brain, "its model's dtype is float32, expected bfloat16"),
        (eager, "its attention kernel is sdpa, expected eager"),
    ):
        with pytest.raises(CaptureError, match=message):
            capture_many(model, words_tokenizer(), MANY, folder, **SAME, resume=True)


def test_a_damaged_trace_is_not_kept(folder, runs):
    """A trace that cannot be opened is refused before anything runs."""
    (folder / "c.zarr" / "k" / "c" / "0" / "0" / "0" / "0").unlink()
    shutil.rmtree(folder / "a.zarr")

    with pytest.raises(TraceError, match=r"c\.zarr: 'k/c/0/0/0/0' is missing"):
        capture_many(four_layers(), words_tokenizer(), MANY, folder, **SAME, resume=True)

    assert runs == []


def test_resume_of_one_trace(tmp_path, runs):
    """`capture` keeps or records its only trace in the same way."""
    options = {"max_new_tokens": 2, "resume": True, "out": tmp_path / "a.zarr"}

    first = capture(four_layers(), None, [1, 2], **options)
    ran = len(runs)
    second = capture(four_layers(), None, [1, 2], **options)

    assert (second.digest, len(runs)) == (first.digest, ran)
    with pytest.raises(CaptureError, match="differs from token 1 on"):
        capture(four_layers(), None, [1, 3], **options)


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
        (1, r"^prompt 'a' \(1 of 3, none is complete\): .*cannot be written .* output path$"),
        (
            2,
            r"^prompt 'b' \(2 of 3, the prompts before it are complete and stay\): .*b\.zarr",
        ),
        (
            5,
            r"^prompt 'c' \(3 of 3, .*; in the same place resume=True \(--resume\) records the oth",
        ),
    ],
)
def test_a_full_disk_among_many_prompts(chunks, expected, tmp_path, full):
    """The error says where it happened, what is complete, and how to go on; which works."""
    full[0] = chunks  # a trace has one for each of two layers

    with pytest.raises(TraceError, match=expected) as caught:
        capture_many(four_layers(), words_tokenizer(), MANY, tmp_path, **SAME)
    one_line(caught)
    left = sorted(path.name for path in tmp_path.glob("*.zarr"))
    full[0] = 10**6
    traces = capture_many(four_layers(), words_tokenizer(), MANY, tmp_path, resume=True, **SAME)

    assert left == ["a.zarr", "b.zarr", "c.zarr"][: chunks // 2]
    assert ("--resume" in str(caught.value)) == bool(left)
    assert [trace.path.name for trace in traces] == ["a.zarr", "b.zarr", "c.zarr"]


def test_a_model_that_is_refused_among_many_prompts(tmp_path):
    """What is wrong with the model in a later prompt is told in the same way, as what it is."""
    model = build("qwen2", num_hidden_layers=4)
    seen = []

    def off(_, args):
        seen.append(1)
        # after the first prompt, and the runs of two tokens that show whether there are gates
        return (args[0] * 1.1,) if len(seen) > 12 else None

    model.model.layers[1].self_attn.o_proj.register_forward_pre_hook(off)
    with pytest.raises(CaptureError, match=r"^prompt 'b' \(2 of 3, .*o_proj of layer 1 differs"):
        capture_many(model, words_tokenizer(), MANY, tmp_path, max_new_tokens=6, o_proj=True)


def test_a_trace_that_is_in_the_way_of_many(folder, runs):
    """The refusal names `resume`, unless all are to be replaced or there is one trace alone."""
    message = r"a\.zarr exists, expected .*, or resume=True \(--resume\), which keeps traces"
    with pytest.raises(TraceExistsError, match=message) as caught:
        capture_many(four_layers(), words_tokenizer(), MANY, folder, **SAME)
    one_line(caught)
    with pytest.raises(TraceExistsError, match=r"\(--overwrite\)$"):
        capture(four_layers(), words_tokenizer(), "w1 w2", out=folder / "a.zarr")
    (folder / "b.zarr" / "zarr.json").unlink()
    with pytest.raises(TraceExistsError, match=r"b\.zarr exists and is not .* what is there$"):
        capture_many(four_layers(), words_tokenizer(), MANY, folder, **SAME, overwrite=True)

    assert runs == []


def test_a_resumed_command_says_what_it_kept(run, saved, tmp_path):
    """Kept traces are marked in the text and in JSON; without the option they are in the way."""
    rows = [{"id": "a", "prompt": "w1", "system": "w2"}, {"id": "b", "tokens": [3]}]
    file = tmp_path / "p.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    arguments = ["capture", "--model", saved, "--prompts", file, "--out", tmp_path / "out"]
    arguments += ["--max-new-tokens", 3, "--layers", "0,-1", "--chat", "--attention", "window:2"]

    first = run(*arguments, "--limit", 1)
    status, text, err = run(*arguments, "--resume")
    _, document, _ = run(*arguments, "--resume", "--json")
    again = run(*arguments)

    lines = text.splitlines()
    assert (first[0], first[2], status, err) == (0, "", 0, "")
    assert first[1].startswith(f"{tmp_path / 'out' / 'a.zarr'}: 8 tokens (prompt 5, response 3")
    assert "2 of 4 layers (0,3)" in lines[0]
    assert [line.endswith(", kept") for line in lines[:2]] == [True, False]
    assert lines[2] == "1 of 2 traces existed already and are kept."
    assert [one["kept"] for one in json.loads(document)["traces"]] == [True, True]
    assert again[0] == 2
    assert "a.zarr exists" in again[2]
    assert "or resume=True (--resume), which keeps" in again[2]
    assert "2 of 4 layers (0,3)" in run("info", tmp_path / "out" / "a.zarr")[1]


@pytest.mark.parametrize(
    ("ended", "said"),
    [
        ("eos", ", ended by the model)"),
        ("stop", ", ended by a stop string)"),
        ("length", ", cut by --max-new-tokens)"),
        ("context", ", cut by the context)"),
    ],
)
def test_info_says_what_ended_the_response(ended, said, run, folder):
    """Each end has its words, beside the number of tokens."""
    change = {"stopped": ended}
    edit_header(folder / "b.zarr", lambda found: found["meta"]["generation"].update(change))
    reseal(folder / "b.zarr")

    _, text, _ = run("info", folder / "b.zarr")

    assert f"8 tokens (prompt 2, response 6{said}" in text


def test_saving_a_model_makes_it_no_other_one(tmp_path):
    """transformers notes the class in the configuration when it saves; nothing computes with it."""
    model = build("qwen2", num_hidden_layers=4)
    first = capture(model, None, ids(9), max_new_tokens=2, out=tmp_path / "a.zarr")

    model.save_pretrained(tmp_path / "model")
    again = capture(model, None, ids(9), max_new_tokens=2, out=tmp_path / "a.zarr", resume=True)

    assert again.digest == first.digest
