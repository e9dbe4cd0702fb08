"""Inputs of a capture: options, layers, windows of attention, prompts, stop strings, resume."""

from __future__ import annotations

import errno
import functools
import inspect
import json
import os
import shutil
import typing
from dataclasses import fields, replace

import accelerate
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import kvsim
from damage import edit_header
from families import FAMILIES, ids
from kvsim.cli import recording
from kvsim.cli.shared import OptionError, parse_layers
from kvsim.core.options import declared
from kvsim.errors import CaptureError, PolicyError, TraceError, TraceExistsError
from kvsim.recorder import Options, Prompt, capture, capture_many, load_model, read_prompts
from kvsim.recorder import models as loading
from kvsim.recorder.generation import StopStrings
from kvsim.recorder.modules import attention_modules
from kvsim.recorder.options import select_layers
from kvsim.store import TraceWriter, describe, open_trace, verify
from kvsim.studies.layers.ranking import ranking
from mutations import reseal_folder
from small_model import TEMPLATE, words_tokenizer

ARRAYS = ("q", "k", "v", "attn_out", "lse", "o_proj", "residual")


def build(layers=4):
    """A random qwen2 model of a few layers."""
    return replace(FAMILIES["qwen2"], changes={"num_hidden_layers": layers}).build("sdpa")


@functools.cache
def small():
    """The model, made once."""
    return build()


@pytest.fixture
def runs(monkeypatch):
    """Counts the forwards of the model, after the one that finds its attention."""
    calls = []
    attention_modules(small())
    handle = small().register_forward_pre_hook(lambda *_: calls.append(1))
    yield calls
    handle.remove()


def one_line(caught):
    """The message of an error, which is one line."""
    text = str(caught.value)
    assert "\n" not in text
    return text


# ------------------------------------------------------------------------------------- options


@pytest.mark.parametrize("function", [capture, capture_many])
def test_keywords_are_the_fields_of_the_options(function):
    """The signature has each field of `Options` with type and default; the docstring its help."""
    parameters = inspect.signature(function).parameters
    kinds = typing.get_type_hints(Options)
    text = " ".join(inspect.getdoc(function).split())

    assert list(parameters)[-len(kinds) :] == [field.name for field in fields(Options)]
    for option in declared(Options):
        parameter = parameters[option.name]
        assert (parameter.kind, parameter.default) == (parameter.KEYWORD_ONLY, option.default)
        assert parameter.annotation == kinds[option.name]
        assert f"{option.name}: {option.help.text}" in text
    assert "**options" not in text


def test_the_command_line_has_the_same_options():
    """`kvsim capture` offers each field of `Options` that is data, with the same help and bound."""
    offered = inspect.signature(recording.capture).parameters

    for option in declared(Options):
        if option.name in ("planned", "progress"):
            assert option.name not in offered
            continue
        kind, info = typing.get_args(offered[option.name].annotation)
        name = option.name.replace("_", "-")
        both = name in ("o-proj", "sensitivity")
        assert info.default == (f"--{name}/--no-{name}" if both else f"--{name}")
        assert (info.help, info.min) == (option.help.text, option.least)
        if kind == option.kind:
            assert offered[option.name].default == option.default
        else:  # text, or a list of texts, that is converted
            assert offered[option.name].default is None
            assert option.name in ("stop", "layers", "attention", "store_dtype", "memory")


def test_an_unknown_keyword_is_named():
    """A keyword that is none is an error that names the closest one."""
    with pytest.raises(TypeError, match=r"'max_tokens'; did you mean 'max_new_tokens'\?"):
        capture(small(), None, [1], max_tokens=3)
    with pytest.raises(TypeError, match="capture has no option 'colour'; options: max_new_tokens"):
        capture_many(small(), None, [Prompt("a", [1])], "out", colour="red")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 10**6}, r"and the model has \d+ positions for prompt and response"),
        ({"attention": "windo"}, "attention is 'windo', expected 'full', or 'window:N'"),
        ({"attention": "window:0"}, "attention is 'window:0'"),
        ({"attention": None}, "attention is None"),
        ({"stop": ("a", "")}, "expected text that is not empty"),
        ({"stop": ""}, "expected text that is not empty"),
        ({"stop": 5}, "stop is 5, expected text that is not empty"),
        ({"stop": None}, "stop is None, expected text that is not empty"),
        ({"labels": ["a"]}, "labels are ..a.., expected names with values"),
        ({"stop": "w1"}, "stop is text, and there is no tokenizer"),
        ({"system": " "}, "system is empty"),
        ({"system": "w1"}, "token ids, expected text or messages; leave the system message out"),
        ({"overwrite": True, "resume": True}, "overwrite and resume are both given"),
        ({"layers": []}, "layers is empty"),
        ({"layers": [0, 4]}, "the model has no layer 4, expected numbers from 0 to 3"),
        ({"layers": [-5]}, "the model has no layer -5"),
        ({"layers": "01"}, "the model has no layer '0'"),
        ({"layers": [0.5]}, "the model has no layer 0.5"),
        ({"layers": [3, 1, -1]}, "layers has layer 3 twice"),
    ],
)
def test_bad_options_are_refused_before_the_model_runs(options, message, runs, tmp_path):
    """An option out of range is one line, and nothing has run or been written."""
    with pytest.raises(CaptureError, match=message) as caught:
        capture(small(), None, [1], out=tmp_path / "a.zarr", **options)

    one_line(caught)
    assert (runs, list(tmp_path.iterdir())) == ([], [])


def test_resume_needs_a_place():
    """To keep a trace there must be one."""
    with pytest.raises(CaptureError, match="resume is about what is written, but out is None"):
        capture(small(), None, [1], resume=True)


# -------------------------------------------------------------------------------------- layers


@pytest.mark.parametrize(
    ("asked", "found"), [([2, 0], (0, 2)), ([-1], (3,)), (range(1, 3), (1, 2))]
)
def test_selected_layers_are_those_of_a_whole_capture(asked, found, tmp_path):
    """Every array of the selected layers equals that of a capture of all layers."""
    more = {"max_new_tokens": 20, "o_proj": True, "residual": True}
    whole = capture(small(), None, ids(270), **more)
    memory = capture(small(), None, ids(270), layers=asked, **more)
    stored = capture(small(), None, ids(270), layers=asked, out=tmp_path / "a.zarr", **more)

    for trace in (memory, stored):
        assert trace.layer_ids == found
        assert not trace.whole
        for name in ARRAYS:
            assert torch.equal(trace.read(name), whole.read(name)[list(found)]), name
        assert len(trace.meta["capture_check"]["max_relative_error"]) == len(found)
    assert whole.whole
    assert stored.digest == memory.digest
    assert verify(stored.path).ok
    assert verify(stored.path).layers == found
    assert describe(stored.path)["layer_ids"] == list(found)


def test_selected_layers_replay_as_in_the_whole():
    """A policy that treats layers alike evicts the same from a layer with and without others."""
    whole = capture(small(), None, ids(90), max_new_tokens=20)
    some = capture(small(), None, ids(90), max_new_tokens=20, layers=[1, 3])
    policy = kvsim.policy("tova")

    expected = kvsim.replay(whole, policy, 40).evicted_at[[1, 3]]

    assert (kvsim.replay(some, policy, 40).evicted_at == expected).all()


def test_other_layers_may_compute_anything():
    """A layer that is not recorded is not checked; the same layer is refused where it is."""
    library = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def off(module, *args, **kwargs):
        out, weights = library(module, *args, **kwargs)
        return out * (1.1 if module.layer_idx == 2 else 1), weights

    ALL_ATTENTION_FUNCTIONS["sdpa"] = off
    try:
        trace = capture(small(), None, ids(20), max_new_tokens=1, layers=[0, 3])
        with pytest.raises(CaptureError, match="attention of layer 2, recomputed"):
            capture(small(), None, ids(20), max_new_tokens=1, layers=[2])
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]
    assert trace.layer_ids == (0, 3)


def test_the_stream_is_followed_through_all_layers():
    """A change between layers that are not recorded is found too."""
    model = build()
    model.model.layers[2].register_forward_pre_hook(lambda _, args: (args[0] + 1, *args[1:]))

    with pytest.raises(
        CaptureError, match="the input of decoder layer 2 is not the output of layer 1"
    ):
        capture(model, None, ids(20), max_new_tokens=0, layers=[0], residual=True)


def test_what_needs_all_layers_refuses_some():
    """Propagation, recomputing and ranks refuse the first layers alone; shared budgets say so."""
    trace = capture(small(), None, ids(90), max_new_tokens=4, layers=[0, 1, 2], residual=True)
    asl = kvsim.policy("asl", window=8)

    message = r"the trace has layers \[0, 1, 2\]; expected 0, 1, 2, ... to the model's last"
    with pytest.raises(PolicyError, match=message):
        kvsim.replay(trace, asl, 40)
    with pytest.raises(PolicyError, match=message):
        kvsim.recompute(trace, asl, 40, small())
    with pytest.raises(PolicyError, match=message):
        ranking(trace)
    shared = kvsim.replay(trace, kvsim.policy("pyramidkv", window=8), 40).remark
    even = kvsim.replay(trace, kvsim.policy("snapkv", window=8), 40).remark
    assert "the budget is shared over the 3 layers of the trace, which are not all" in shared
    assert even == ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0", [0]), ("0,4-7,-1", [0, 4, 5, 6, 7, -1]), (" 2 , 3-3", [2, 3]), ("-2", [-2])],
)
def test_layers_on_the_command_line(text, expected):
    """Numbers, ranges, and negative ones from the end."""
    assert parse_layers(text) == expected


@pytest.mark.parametrize("text", ["", "a", "3-1", "1,,2", "-3-1", "1-", "0-99999999999"])
def test_layers_that_are_none(text):
    """What is no list of layers is one line."""
    with pytest.raises(OptionError, match="expected numbers and ranges between commas"):
        parse_layers(text)


@given(st.sets(st.integers(-6, 5), min_size=1))
def test_layers_count_from_either_end(asked):
    """Negative numbers count as those of Python's lists do, and no layer comes twice."""
    meant = [range(6)[one] for one in asked]

    if len(set(meant)) < len(meant):
        with pytest.raises(CaptureError, match="twice"):
            select_layers(list(asked), range(6))
    else:
        assert select_layers(list(asked), range(6)) == tuple(sorted(meant))


# ----------------------------------------------------------------------------- dense attention


@pytest.mark.parametrize(("rows", "n"), [(1, 20), (40, 300), (280, 300), (300, 300), (900, 300)])
def test_a_window_of_attention_is_its_last_rows(rows, n, tmp_path):
    """`attention_window` holds the last rows of what `attention` would."""
    asked = {"full": "full", "window": f"window:{rows}"}
    traces = {
        name: capture(
            small(), None, ids(n - 10), max_new_tokens=10, attention=kind, out=tmp_path / name
        )
        for name, kind in asked.items()
    }

    whole, part = (traces["full"].read("attention"), traces["window"].read("attention_window"))

    assert part.shape == (4, 6, min(rows, n), n)
    assert torch.allclose(part, whole[:, :, -rows:], atol=1e-6)  # fewer rows round otherwise
    assert not traces["window"].has("attention")
    report = verify(traces["window"].path)
    assert report.ok
    assert len(report.attention_error) == 4
    assert traces["window"].digest == traces["full"].digest
    with pytest.raises(kvsim.KvsimError, match=r"no array 'attention', it has .*_window"):
        traces["window"].read("attention")


def test_a_window_of_a_response_that_ends_early(tmp_path):
    """The last rows are those of the tokens that came, not of those that there could have been."""
    free = capture(small(), words_tokenizer(), ids(30), max_new_tokens=9).token_text[30:]

    options = {"stop": free[4], "attention": "window:12", "out": tmp_path / "a.zarr"}
    trace = capture(small(), words_tokenizer(), ids(30), max_new_tokens=600, **options)

    assert trace.n_pos <= 35
    expected = trace.attention(2, range(trace.n_pos - 12, trace.n_pos))
    assert torch.allclose(trace.read("attention_window")[2], expected, atol=1e-6)
    assert verify(trace.path, deep=True).ok


def test_verify_finds_a_wrong_row_of_the_window(tmp_path):
    """A number of the window that does not follow from q, k, v is a problem of its layer."""
    import zarr

    trace = capture(
        small(), None, ids(60), max_new_tokens=0, attention="window:8", out=tmp_path / "a.zarr"
    )
    array = zarr.open_group(trace.path, mode="r+")["attention_window"]
    array[1, 2, 7, 5] = array[1, 2, 7, 5] + 0.01
    reseal_folder(trace.path)

    report = verify(trace.path, deep=True)

    assert [problem.split(": ")[1][:30] for problem in report.problems] == [
        "attention_window of layer 1 di"
    ]


@pytest.mark.parametrize(("name", "shape"), [("attention", 8), ("attention_window", 61)])
def test_rows_that_do_not_fit_are_refused(name, shape, tmp_path):
    """Dense attention of another size than its trace is refused when it is opened."""
    import zarr

    kind = {"attention": "full", "attention_window": "window:8"}[name]
    trace = capture(
        small(), None, ids(60), max_new_tokens=0, attention=kind, out=tmp_path / "a.zarr"
    )
    array = zarr.open_group(trace.path, mode="r+")[name]
    array.resize((4, 6, shape, 60))
    array[:] = 0

    with pytest.raises(TraceError, match=f"{name} has shape .*expected"):
        open_trace(trace.path)


# ------------------------------------------------------------------------------------- prompts


def write(path, *rows, start=b"", end=b"\n"):
    """A file with a JSON object per line."""
    path.write_bytes(start + end.join(json.dumps(row).encode() for row in rows) + end)
    return path


def test_what_a_line_may_hold(tmp_path):
    """Text, chats and token ids, with names, answers, labels and a system message."""
    chat = [{"role": "user", "content": "w1"}]
    source = write(
        tmp_path / "p.jsonl",
        {"id": 7, "prompt": "w1", "answer": 42, "difficulty": "hard", "tokens": 100},
        {"messages": chat, "system": "w2", "level": 3, "difficulty": 3},
        {"tokens": [1, 2], "system": ""},
        {"prompt": chat},
        {"prompt": [5, 6], "other": None},
    )

    found = read_prompts(source)

    assert found == [
        Prompt("7", "w1", "42", {"level": "hard"}),
        Prompt("prompt-0001", chat, None, {"level": 3}, "w2"),
        Prompt("prompt-0002", [1, 2]),
        Prompt("prompt-0003", chat),
        Prompt("prompt-0004", [5, 6]),
    ]


def test_files_from_elsewhere(tmp_path):
    """A byte order mark, Windows line ends, empty lines and a separator inside a text are fine."""
    rows = [{"prompt": "w1 \u2028 w2"}, {"prompt": "w3"}]
    plain = write(tmp_path / "a.jsonl", *rows)
    odd = write(tmp_path / "b.jsonl", *rows, start=b"\xef\xbb\xbf\r\n", end=b"\r\n  \r\n")

    assert read_prompts(odd) == read_prompts(plain)


def test_a_file_is_read_no_further_than_asked(tmp_path):
    """With a limit, what follows is not looked at."""
    source = tmp_path / "p.jsonl"
    source.write_text('{"prompt": "a"}\n{"prompt": "b"}\nnonsense\n')

    assert [one.content for one in read_prompts(source, limit=2)] == ["a", "b"]
    with pytest.raises(CaptureError, match="limit is -1, expected at least 1 prompt"):
        read_prompts(source, limit=-1)
    with pytest.raises(CaptureError, match="line 3"):
        read_prompts(source)


def test_misspelled_keys_are_told_once(tmp_path):
    """A key that looks like one that is read is named; others are silently ignored."""
    row = {"prompt": "w1", "anwser": "w2", "reach": 3}
    source = write(tmp_path / "p.jsonl", row, {**row, "id": "b", "dificulty": 1})
    notes = []

    read_prompts(source, note=notes.append)

    assert [note.removeprefix(str(source)) for note in notes] == [
        ", line 1: 'anwser' is not read; did you mean 'answer'?",
        ", line 2: 'dificulty' is not read; did you mean 'difficulty'?",
    ]


def test_system_messages(tmp_path):
    """A system message comes first, a line's own before the common one, and text becomes a chat."""
    prompts = [
        Prompt("text", "w1"),
        Prompt("own", "w2", system="w4"),
        Prompt("chat", [{"role": "user", "content": "w3"}]),
    ]

    traces = capture_many(
        small(), words_tokenizer(TEMPLATE), prompts, tmp_path, system="w5", max_new_tokens=0
    )

    texts = [trace.meta["text"] for trace in traces]
    assert [text["prompt"] for text in texts] == [
        "w8 w5 w7 w1 w9",
        "w8 w4 w7 w2 w9",
        "w8 w5 w7 w3 w9",
    ]
    assert texts[0]["messages"] == [
        {"role": "system", "content": "w5"},
        {"role": "user", "content": "w1"},
    ]


def test_text_as_a_chat():
    """With `chat`, text is a user's message; token ids are taken as they are."""
    options = {"max_new_tokens": 0, "chat": True}

    text = capture(small(), words_tokenizer(TEMPLATE), "w1 w2", **options)
    tokens = capture(small(), words_tokenizer(TEMPLATE), [1, 2], **options)

    assert text.meta["text"]["prompt"] == "w7 w1 w2 w9"
    assert text.meta["text"]["messages"] == [{"role": "user", "content": "w1 w2"}]
    assert tokens.tokens.tolist() == [1, 2]


def parts(*given):
    """A chat of one message in parts; words are parts of text."""
    content = [{"type": "text", "text": one} if isinstance(one, str) else one for one in given]
    return [{"role": "user", "content": content}]


def test_text_parts_are_one_text(tmp_path):
    """A content in parts is what it is in one piece, in a file and in a call."""
    chat = [*parts("w1 ", "w2"), {"role": "user", "content": "w3"}]
    (line,) = read_prompts(write(tmp_path / "p.jsonl", {"messages": chat}))

    trace = capture(small(), words_tokenizer(TEMPLATE), chat, max_new_tokens=0)

    plain = [{"role": "user", "content": "w1 w2"}, *chat[1:]]
    assert line.content == plain
    assert trace.meta["text"]["messages"] == plain
    assert trace.meta["text"]["prompt"] == "w7 w1 w2 w7 w3 w9"
    assert chat[0]["content"][0]["text"] == "w1 "  # nothing of the caller's is changed


# -------------------------------------------------------------------------------- stop strings


def test_the_response_ends_with_the_token_that_completes_a_string():
    """It is the shortest response that holds one of the strings, which may span tokens."""
    free = capture(small(), words_tokenizer(), ids(20), max_new_tokens=30)
    after = free.token_text[20:]
    pair = f"{after[7]} {after[8]}"
    texts = [" ".join(after[:n]) for n in range(1, 31)]
    length = next(n for n, text in enumerate(texts, start=1) if pair in text)

    stopped = capture(small(), words_tokenizer(), ids(20), max_new_tokens=30, stop=("never", pair))
    alone = capture(small(), words_tokenizer(), ids(20), max_new_tokens=30, stop=pair)

    assert stopped.tokens.tolist() == free.tokens.tolist()[: 20 + length]
    assert stopped.meta["generation"]["stopped"] == "stop"
    assert stopped.meta["generation"]["stop"] == ["never", pair]
    assert stopped.meta["text"]["response"].endswith(pair)
    assert alone.digest == stopped.digest
    assert free.meta["generation"]["stopped"] == "length"
    assert free.meta["generation"]["stop"] == []


def test_the_prompt_does_not_stop_the_response():
    """A stop string in the prompt is none in the response."""
    prompt = [60, 61, *ids(10)]
    free = capture(small(), words_tokenizer(), prompt, max_new_tokens=5)
    assert "w60 w61" not in free.meta["text"]["response"]

    trace = capture(small(), words_tokenizer(), prompt, max_new_tokens=5, stop="w60 w61")

    assert trace.n_pos == free.n_pos


class Pieces:
    """A tokenizer of bytes, some tokens of which are several, decoded as byte-level ones are."""

    TABLE = (*(bytes([b]) for b in "aé€<".encode()), b"ab", b"<a", b"\xc3", b"a<ab")

    def __init__(self):
        self.most = 0

    def decode(self, tokens, *, skip_special_tokens):
        """Bytes that make no character become the replacement character."""
        assert not skip_special_tokens
        self.most = max(self.most, len(tokens))
        return b"".join(self.TABLE[token] for token in tokens).decode(errors="replace")


@given(
    tokens=st.lists(st.integers(0, len(Pieces.TABLE) - 1), max_size=60),
    strings=st.lists(st.text(alphabet="abé€<", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_the_end_is_where_the_whole_text_says(tokens, strings):
    """Looking at the last tokens alone finds the end that decoding all of them does."""
    tokenizer, whole = Pieces(), Pieces()
    stop = StopStrings(strings, tokenizer)

    found = next((n for n in range(1, len(tokens) + 1) if stop.completed(tokens[:n], 0)), None)

    texts = (whole.decode(tokens[:n], skip_special_tokens=False) for n in range(1, len(tokens) + 1))
    expected = (n for n, text in enumerate(texts, start=1) if any(one in text for one in strings))
    assert found == next(expected, None)
    assert tokenizer.most <= 8 + max(len(one.encode()) for one in strings)


# -------------------------------------------------------------------------------------- resume

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
    capture_many(small(), words_tokenizer(), MANY, folder, **SAME)
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

    traces = capture_many(small(), words_tokenizer(), MANY, folder, resume=True, **SAME)

    assert [trace.path.name for trace in traces] == ["a.zarr", "b.zarr", "c.zarr"]
    assert [trace.digest for trace in traces] == [
        open_trace(recorded / trace.path.name).digest for trace in traces
    ]
    assert {**state(folder), "b.zarr": 0} == {**before, "b.zarr": 0}
    # two more, of two tokens, show the shapes for the plan and whether there are gates
    assert len(runs) == traces[1].n_pos - traces[1].prompt_len + 3
    runs.clear()
    capture_many(small(), words_tokenizer(), MANY, folder, resume=True, **SAME)
    assert runs == []


@pytest.mark.parametrize(
    ("prompts", "changed", "message"),
    [
        ({"a": Prompt("a", "w1 w3")}, {}, "its prompt of 2 tokens differs from token 1 on"),
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
        capture_many(small(), words_tokenizer(), wanted, folder, **{**SAME, **changed}, resume=True)

    assert "is of another capture" in one_line(caught)
    assert (runs, state(folder)) == ([], before)


def test_a_trace_of_another_model_is_refused(folder):
    """Another configuration, precision, kernel or name is another capture."""
    deeper, brain = build(5), build().to(torch.bfloat16)
    eager = build()
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

    with pytest.raises(TraceError, match=r"c\.zarr: k has 1 of 2 chunks"):
        capture_many(small(), words_tokenizer(), MANY, folder, **SAME, resume=True)

    assert runs == []


def test_resume_of_one_trace(tmp_path, runs):
    """`capture` keeps or records its only trace in the same way."""
    options = {"max_new_tokens": 2, "resume": True, "out": tmp_path / "a.zarr"}

    first = capture(small(), None, [1, 2], **options)
    ran = len(runs)
    second = capture(small(), None, [1, 2], **options)

    assert (second.digest, len(runs)) == (first.digest, ran)
    with pytest.raises(CaptureError, match="differs from token 1 on"):
        capture(small(), None, [1, 3], **options)


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
        capture_many(small(), words_tokenizer(), MANY, tmp_path, **SAME)
    one_line(caught)
    left = sorted(path.name for path in tmp_path.glob("*.zarr"))
    full[0] = 10**6
    traces = capture_many(small(), words_tokenizer(), MANY, tmp_path, resume=True, **SAME)

    assert left == ["a.zarr", "b.zarr", "c.zarr"][: chunks // 2]
    assert ("--resume" in str(caught.value)) == bool(left)
    assert [trace.path.name for trace in traces] == ["a.zarr", "b.zarr", "c.zarr"]


def test_a_model_that_is_refused_among_many_prompts(tmp_path):
    """What is wrong with the model in a later prompt is told in the same way, as what it is."""
    model = build()
    seen = []

    def off(_, args):
        seen.append(1)
        # after the first prompt, and a run of two tokens that shows whether there are gates
        return (args[0] * 1.1,) if len(seen) > 11 else None

    model.model.layers[1].self_attn.o_proj.register_forward_pre_hook(off)
    with pytest.raises(CaptureError, match=r"^prompt 'b' \(2 of 3, .*o_proj of layer 1 differs"):
        capture_many(model, words_tokenizer(), MANY, tmp_path, max_new_tokens=6, o_proj=True)


def test_a_trace_that_is_in_the_way_of_many(folder, runs):
    """The refusal names `resume`, unless all are to be replaced or there is one trace alone."""
    message = r"a\.zarr exists, expected .*, or resume=True \(--resume\), which keeps traces"
    with pytest.raises(TraceExistsError, match=message) as caught:
        capture_many(small(), words_tokenizer(), MANY, folder, **SAME)
    one_line(caught)
    with pytest.raises(TraceExistsError, match=r"\(--overwrite\)$"):
        capture(small(), words_tokenizer(), "w1 w2", out=folder / "a.zarr")
    (folder / "b.zarr" / "zarr.json").unlink()
    with pytest.raises(TraceExistsError, match=r"b\.zarr exists and is not .* what is there$"):
        capture_many(small(), words_tokenizer(), MANY, folder, **SAME, overwrite=True)

    assert runs == []


# ------------------------------------------------------------------------- on the command line


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with the small model and its tokenizer."""
    path = tmp_path_factory.mktemp("model") / "small"
    small().save_pretrained(path)
    words_tokenizer(TEMPLATE).save_pretrained(path)
    return path


def test_a_resumed_command_says_what_it_kept(run, saved, tmp_path):
    """Kept traces are marked in the text and in JSON; without the option they are in the way."""
    rows = [{"id": "a", "prompt": "w1", "system": "w2"}, {"id": "b", "tokens": [3]}]
    file = write(tmp_path / "p.jsonl", *rows)
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
        ("interrupted", ", interrupted)"),
    ],
)
def test_info_says_what_ended_the_response(ended, said, run, folder):
    """Each end has its words, beside the number of tokens."""
    change = {"stopped": ended}
    edit_header(folder / "b.zarr", lambda found: found["meta"]["generation"].update(change))
    reseal_folder(folder / "b.zarr")

    _, text, _ = run("info", folder / "b.zarr")

    assert f"8 tokens (prompt 2, response 6{said}" in text


def test_a_misspelled_key_is_told(run, saved, tmp_path):
    """What a file may have meant stands on standard error, and the capture goes on."""
    file = write(tmp_path / "p.jsonl", {"prompt": "w1", "anwser": "w2"})

    command = ["capture", "--model", saved, "--prompts", file, "--out", tmp_path / "o"]

    status, _, err = run(*command, "--max-new-tokens", "1", "--stop", "w0")

    assert (status, err) == (0, f"{file}, line 1: 'anwser' is not read; did you mean 'answer'?\n")


# ------------------------------------------------------------------------------------- devices


@pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}])
def test_a_device_map_is_passed_on(device_map, saved):
    """On a machine with one device, a model that is spread over all is recorded as any other."""
    model, tokenizer = load_model(saved, device_map=device_map, dtype="float32")

    trace = capture(model, tokenizer, ids(40), max_new_tokens=3, residual=True, o_proj=True)

    expected = capture(
        small(), words_tokenizer(), ids(40), max_new_tokens=3, residual=True, o_proj=True
    )
    for name in ARRAYS:  # weights lie at other addresses
        assert torch.allclose(trace.read(name), expected.read(name), atol=1e-4)


@pytest.mark.filterwarnings("ignore:Some parameters are on the meta device")
def test_layers_whose_weights_come_and_go(saved, tmp_path):
    """Layers that accelerate moves about are recorded; their projections, which leave, are not."""
    model, _ = load_model(saved)
    places = {name: "cpu" for name, _ in model.model.named_children() if name != "layers"}
    places = {f"model.{name}": place for name, place in places.items()} | {"lm_head": "cpu"}
    places |= {f"model.layers.{i}": "disk" if i % 2 else "cpu" for i in range(4)}
    moved = accelerate.dispatch_model(
        model, places, main_device="cpu", offload_dir=tmp_path / "off", force_hooks=True
    )
    assert moved.model.layers[1].self_attn.q_proj.weight.is_meta

    trace = capture(moved, None, ids(40), max_new_tokens=3, residual=True)

    expected = capture(small(), None, ids(40), max_new_tokens=3, residual=True)
    assert trace.tokens.tolist() == expected.tokens.tolist()
    for name in ("q", "k", "v", "attn_out", "residual"):
        assert torch.allclose(trace.read(name), expected.read(name), atol=1e-4)
    with pytest.raises(CaptureError, match="o_proj of layer 1 is offloaded"):
        capture(moved, None, ids(4), max_new_tokens=0, o_proj=True)


@pytest.mark.parametrize("model", [None, 5, b"tiny", torch.nn.Sequential(torch.nn.Linear(2, 2))])
def test_what_is_no_model_is_refused(model, tmp_path):
    """Neither a model of transformers nor a name: one line, also for many prompts."""
    for call in (
        lambda: capture(model, None, [1, 2]),
        lambda: capture_many(model, None, [], tmp_path / "many"),
    ):
        with pytest.raises(CaptureError, match=r"model is of type \w+; expected a mod") as caught:
            call()
        assert "\n" not in str(caught.value)
    with pytest.raises(CaptureError, match="tokenizer is of type int; expected a tokenizer of"):
        capture(small(), 5, "w1 w2")


def test_the_precision_of_a_spread_model(saved, monkeypatch):
    """Without a dtype, the CPU gets float32 and a map the checkpoint's own."""
    asked = []

    def load(place, **options):
        asked.append((options["dtype"], options.get("device_map")))
        return small(), {"missing_keys": set(), "mismatched_keys": set()}

    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", load)
    monkeypatch.setattr(loading, "find_spec", lambda _: True)

    for options in ({}, {"device_map": "cpu"}, {"device_map": "auto"}, {"device_map": {"": "cpu"}}):
        load_model(saved, **options)

    kinds = [torch.float32, torch.float32, "auto", "auto"]
    assert asked == list(zip(kinds, [None, "cpu", "auto", {"": "cpu"}], strict=True))


@pytest.mark.parametrize(
    ("options", "installed", "message"),
    [
        ({"device_map": "auto"}, None, "needs accelerate, which is not installed; `pip install"),
        ({"device_map": "auto", "device": "cpu"}, True, "device is 'cpu' and device_map 'auto'"),
        ({"device_map": "nowhere"}, True, "device_map names 'nowhere', expected auto, balanced"),
        ({"device_map": {"": "cuda:99"}}, True, "device_map names 'cuda:99'"),
    ],
)
def test_device_maps_that_are_refused(options, installed, message, saved, monkeypatch):
    """One line that says what is missing or excludes what."""
    monkeypatch.setattr(loading, "find_spec", lambda _: installed)

    with pytest.raises(CaptureError, match=message) as caught:
        load_model(saved, **options)

    one_line(caught)


def test_a_recovered_trace_is_no_whole_one(folder, runs):
    """What was recovered of a killed capture does not pass for the capture that was asked for."""
    change = {"stopped": "interrupted"}
    edit_header(folder / "b.zarr", lambda found: found["meta"]["generation"].update(change))
    reseal_folder(folder / "b.zarr")

    with pytest.raises(CaptureError, match=r"b.zarr .*recovered from an interrupted capture"):
        capture_many(small(), words_tokenizer(), MANY, folder, resume=True, **SAME)
    assert runs == []


def test_saving_a_model_makes_it_no_other_one(tmp_path):
    """transformers notes the class in the configuration when it saves; nothing computes with it."""
    model = build()
    first = capture(model, None, ids(9), max_new_tokens=2, out=tmp_path / "a.zarr")

    model.save_pretrained(tmp_path / "model")
    again = capture(model, None, ids(9), max_new_tokens=2, out=tmp_path / "a.zarr", resume=True)

    assert again.digest == first.digest
