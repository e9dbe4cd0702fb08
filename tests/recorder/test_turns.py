"""Several turns in one trace: question, answer, question, answer, by text, chat and token ids."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from itertools import pairwise

import numpy as np
import pytest

import kvsim
from kvsim.errors import CaptureError, TextError
from kvsim.recorder import Prompt, Turn, read_prompts
from small_model import small, words_tokenizer

#: A chat whose answers end with w9, as the tokenizer's own end of an answer.
CHAT = (
    "{% for m in messages %}{{ 'w7 ' if m['role'] == 'user' else 'w8 ' }}"
    "{{ m['content'] }} w9 {% endfor %}{% if add_generation_prompt %}w8 {% endif %}"
)
CONTEXT = " ".join(f"w{(7 * i) % 50 + 10}" for i in range(30))
TURNS = [Turn("w4 w5", answer="w1"), Turn("w6 w2 w1", labels={"depth": 0.5})]


def capture(turns=TURNS, **options):
    """A trace of a context, its question, and later ones."""
    given = {"context": f"{CONTEXT} ", "answer": "w5", "max_new_tokens": 8} | options
    of = {
        name: given.pop(name)
        for name in {x.name for x in fields(Prompt)} & {*given}
        if name != "max_new_tokens"
    }
    prompt = Prompt("", of.pop("content", "w1 w2 w3"), turns=turns, **of)
    return kvsim.capture(small(), words_tokenizer(), prompt, **given)


def test_segments_are_contiguous_and_hold_the_questions():
    """Context, then question and answer of each turn, over the whole trace."""
    trace = capture()

    kinds, starts, stops = zip(*trace.segments, strict=True)
    assert kinds == ("context", *["question", "answer"] * 3)
    assert starts == (0, *stops[:-1])
    assert stops[-1] == trace.n_pos
    assert (trace.header.context_len, trace.prompt_len) == (30, 33)
    words = [trace.tokens[a:b].tolist() for kind, a, b in trace.segments if kind == "question"]
    assert words == [[1, 2, 3], [4, 5], [6, 2, 1]]
    assert [stop - start for kind, start, stop in trace.segments if kind == "answer"] == [8] * 3


def test_every_answer_is_what_the_model_writes_after_all_before_it():
    """Each is that of a prompt with all earlier turns in it, and q, k, v are those of one pass."""
    trace = capture()

    for question, answer in pairwise(trace.segments[1:]):
        if question[0] == "question":
            ids = trace.tokens[: question[2]].tolist()
            alone = kvsim.capture(small(), None, ids, max_new_tokens=8)
            expected = trace.tokens[slice(*answer[1:])]
            assert alone.tokens[len(ids) :].tolist() == expected.tolist()
    given = kvsim.capture(
        small(), None, trace.tokens[:33].tolist(), response=trace.tokens[33:].tolist()
    )
    np.testing.assert_allclose(trace.read("k"), given.read("k"), atol=2e-5)


def test_one_turn_is_the_same_trace():
    """Without later turns the digest and the metadata are those of a prompt without any."""
    alone, none = capture(turns=[]), capture(turns=())

    assert alone.digest == none.digest
    assert "turns" not in alone.meta
    assert alone.header.questions == ()
    assert [kind for kind, _, _ in alone.segments] == ["context", "question", "answer"]


def test_given_answers_make_the_same_trace():
    """Answers that are given are recorded in one pass, with the log-likelihood of every token."""
    trace = capture()
    texts = [trace.header.turn(number)["response"] for number in (1, 2, 3)]
    turns = [Turn(x.question, response=text) for x, text in zip(TURNS, texts[1:], strict=True)]

    given = capture(turns=turns, response=texts[0], max_new_tokens=None)

    assert given.segments == trace.segments
    assert given.tokens.tolist() == trace.tokens.tolist()
    assert len(given.header.response_logprobs) == trace.n_pos - trace.prompt_len
    assert "agreement" not in given.meta


def test_turns_of_a_chat_are_rendered_by_the_template():
    """What the template puts between the answers is part of the question after them."""
    tokenizer = words_tokenizer(CHAT)
    turns = [Turn("w20 w21"), Turn("w22")]

    prompt = Prompt("", "w3", turns=turns)
    trace = kvsim.capture(small(), tokenizer, prompt, chat=True, max_new_tokens=3)

    words = [trace.tokens[a:b].tolist() for kind, a, b in trace.segments if kind == "question"]
    assert words == [[7, 3, 9, 8], [9, 7, 20, 21, 9, 8], [9, 7, 22, 9, 8]]


def test_a_prompt_of_one_token_may_have_later_turns():
    """There are no earlier rows from which its forward could continue."""
    trace = kvsim.capture(small(), None, Prompt("x", [1], turns=[Turn([7, 8])]), max_new_tokens=2)
    assert trace.prompt_len == 1
    assert len(trace.header.questions) == 1


def test_an_answer_that_ends_itself_is_not_ended_twice():
    """The token that ends an answer is the one that the template would put there."""
    free = kvsim.capture(small(), words_tokenizer(CHAT), "w3", chat=True, max_new_tokens=3)
    end = int(free.tokens[-2])
    chat = CHAT.replace("w9", f"w{end}")
    model = small(eos_token_id=end)

    turns = [Turn("w20")]
    trace = kvsim.capture(
        model, words_tokenizer(chat), Prompt("", "w3", turns=turns), chat=True, max_new_tokens=40
    )

    for (_, _, stop), turn in zip(trace.segments[1::2], trace.meta["turns"], strict=True):
        if turn["stopped"] == "eos":
            assert trace.tokens[stop - 1] == end
            assert stop == trace.n_pos or trace.tokens[stop] != end
    assert "eos" in [turn["stopped"] for turn in trace.meta["turns"]]
    answers = [trace.tokens[a:b].tolist() for kind, a, b in trace.segments if kind == "answer"]
    again = Prompt("", "w3", response=answers[0], turns=[Turn("w20", response=answers[1])])
    given = kvsim.capture(model, words_tokenizer(chat), again, chat=True)
    assert given.tokens.tolist() == trace.tokens.tolist()


def test_right_answers_and_labels_belong_to_their_turn():
    """Each turn has its own check, and a Table has the values of each with its own labels."""
    trace = capture(labels={"task": "get"}, o_proj=True)

    rights = [
        turn["answer_check"] and turn["answer_check"]["right"] for turn in trace.meta["turns"]
    ]
    assert rights == [False, rights[1], None]
    assert trace.meta["answer_check"] is None
    table = kvsim.measure(
        trace,
        [kvsim.replay(trace, "knorm", 20)],
        ["output_error", "layer_error", "retained_iou"],
    )
    for metric in ("output_error", "layer_error"):
        rows = table.filter(metric=metric)
        assert rows["turn"].unique().sort().to_list() == [1, 2, 3]
        assert rows.filter(turn=3)["depth"].unique().to_list() == [0.5]
        assert rows.filter(turn=2)["depth"].is_null().all()
        assert set(rows["task"]) == {"get"}
    assert table.filter(metric="retained_iou")["turn"].is_null().all()


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ([], "its prompt is"),
        ([Turn([11, 12])], "its prompt is"),
        ([Turn([11], max_new_tokens=4)], "its turns is"),
    ],
)
def test_a_trace_of_other_turns_is_not_kept(turns, message, tmp_path):
    """Fewer turns, and another length of an answer, are another capture."""
    whole = Prompt("a", [5, 6, 7], max_new_tokens=3)
    out = tmp_path / "a.zarr"
    kvsim.capture("tiny", None, replace(whole, turns=[Turn([11])]), out=out)
    with pytest.raises(CaptureError, match=message):
        kvsim.capture("tiny", None, replace(whole, turns=turns), out=out, resume=True)


def test_a_file_of_turns_is_recorded_and_split_by_turn(run, tmp_path):
    """Two commands make a table by turn, and the trace is the same after resuming."""
    source, traces, out = tmp_path / "p.jsonl", tmp_path / "traces", tmp_path / "run"
    turns = [
        {"question": "question : get kuga", "answer": "red"},
        {"question": " question : get rapi", "answers": ["red"], "depth": 0.5},
    ]
    row = {"id": "a", "context": "facts : kuga red rapi ; ", "turns": turns, "task": "get"}
    source.write_text(json.dumps(row))
    recording = ("capture", "--model", "tiny", "--prompts", source, "--out", traces)

    recorded, said, err = run(*recording, "--max-new-tokens", "6")
    again, kept, err_again = run(*recording, "--max-new-tokens", "6", "--resume")
    command = ("replay", traces / "a.zarr", "--policy", "knorm", "--budget", "8", "--out", out)
    replayed, _, err_replay = run(*command, "--compress", "questions", "--interval", "3")
    code, shown, err_table = run("compare", out, "--by", "turn", "--metric", "output_error")
    _, info, _ = run("info", traces / "a.zarr")

    assert (recorded, again, replayed, code) == (0, 0, 0, 0), (
        err + err_again + err_replay + err_table
    )
    assert "of 2 answers right" in said
    assert "kept" in kept
    rows = [line.split() for line in shown.splitlines()]
    assert [row[:2] for row in rows if row[1:2] == ["knorm"]] == [["1", "knorm"], ["2", "knorm"]]
    assert "turns " in info
    turns[1]["question"] = " question : get kuga"
    source.write_text(json.dumps(row))
    code, _, err = run(*recording, "--max-new-tokens", "6", "--resume")
    assert code == 2
    assert "its prompt is" in err


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ({"turns": []}, "turns is"),
        ({"turns": ["q"]}, "turn 1: 'q'"),
        ({"turns": [{"question": "q"}, {"answer": "a"}]}, "turn 2: .*'question'"),
        ({"turns": [{"question": "q"}], "answer": "a"}, "turns is .*answer into them"),
        ({"turns": [{"question": "q"}], "prompt": "p"}, "turns is .*prompt into them"),
        ({"turns": [{"question": "q", "anwser": "a"}]}, "turn 1: 'anwser'.*'answer'"),
        ({"turns": [{"question": "q", "scorer": "gym:x"}]}, "turn 1: scorer is"),
        ({"turns": [{"question": "q", "depth": 3}]}, "turn 1: depth is 3"),
        ({"turns": [{"question": "q", "max_new_tokens": 0}]}, "turn 1: .*max_new_tokens is 0"),
    ],
)
def test_bad_turns_are_one_line(row, name, tmp_path):
    """With the place in the file."""
    source = tmp_path / "p.jsonl"
    source.write_text(json.dumps({"context": "c", **row}))

    with pytest.raises(CaptureError, match=f"line 1: {name}") as caught:
        read_prompts(source)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("turns", "options", "message"),
    [
        ([Turn("")], {}, "turn 2: the question is ''"),
        ([Turn([1, 2])], {}, r"turn 2: the question is \[1, 2\]"),
        ([Turn("w1", response="w2")], {}, "responses to all of them"),
        ([Turn("w1")], {"max_new_tokens": 0}, "turn 2: its answer has 0 tokens"),
        ([Turn("w1")], {"max_new_tokens": 600}, "take up to 1201 tokens .* room for 867"),
        ([Turn("never")], {}, "does not know 'never'"),
        ([{"question": "w1"}], {}, "turns are .*, expected a list of kvsim.recorder.Turn"),
    ],
)
def test_turns_that_cannot_be_recorded_are_refused(turns, options, message):
    """Before the model runs, in one line."""
    with pytest.raises((CaptureError, TextError), match=message) as caught:
        capture(turns=turns, **options)
    assert "\n" not in str(caught.value)


def test_a_template_of_unequal_shape_is_refused():
    """One that renders the last turn otherwise than earlier ones."""
    unequal = CHAT.replace(
        "{{ m['content'] }}", "{{ '' if loop.last else 'w1 ' }}{{ m['content'] }}"
    )
    prompt = Prompt("", "w3", turns=[Turn("w4")])

    with pytest.raises(CaptureError, match="renders a turn otherwise where another turn follows"):
        kvsim.capture(small(), words_tokenizer(unequal), prompt, chat=True)
