"""Prompts in tables with the columns of kvpress's benchmarks, their answers and their scores."""

import json
import re
import sys
import types
from dataclasses import replace

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvsim
from kvsim.analysis.folder import read_run
from kvsim.errors import CaptureError, ExtraError, TextError, TraceError
from kvsim.recorder import Options, Prompt, capture, capture_many, read_prompts
from kvsim.recorder.encoding import encode
from kvsim.studies.language.tasks import prompts as pages
from kvsim.text.answers import SCORERS, is_right, score, text_check
from small_model import TEMPLATE, bytes_tokenizer, small, words_tokenizer

ROWS = [
    {
        "context": "w1 w2 w3 ",
        "question": "w4 w5",
        "answer_prefix": "w6",
        "answer": ["w9", "w11"],
        "task": "niah_multivalue",
        "max_new_tokens": 5,
    },
    {
        "context": "w2 w2 ",
        "question": "w3",
        "answer_prefix": "",
        "answer": ["w7"],
        "task": "qa_1",
        "max_new_tokens": 3,
    },
]


@pytest.fixture
def table(tmp_path):
    """The rows as polars writes a table."""
    pl.DataFrame(ROWS).write_ndjson(tmp_path / "p.jsonl")
    return tmp_path / "p.jsonl"


def hub(monkeypatch, load):
    """Replace the package that loads data sets of a hub."""
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load))


def test_a_table_is_read_as_lines_are(table, monkeypatch):
    """The same rows in JSONL and on a hub are the same prompts."""
    asked = []
    hub(monkeypatch, lambda *name, split: asked.append((*name, split)) or ROWS)

    found = read_prompts(table)

    assert found == read_prompts("hub:a/b")
    assert found[0] == Prompt(
        *("prompt-0000", "w4 w5", ["w9", "w11"], {"task": "niah_multivalue"}),
        context="w1 w2 w3 ",
        answer_prefix="w6",
        scorer="string_match_all",
        max_new_tokens=5,
    )
    assert found[1].scorer == "string_match_part"
    assert len(read_prompts(table, limit=1)) == 1
    for name in ("hub:a/b:4096", "hub:a/b:4096:validation", "hub:a/b::train"):
        read_prompts(name)
    configs = [(None, "test"), ("4096", "test"), ("4096", "validation"), (None, "train")]
    assert asked == [("a/b", *each) for each in configs]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"answers": ["a", "b"], "task": "hotpotqa"}, (["a", "b"], None)),
        ({"answer": "a", "task": "vt"}, ("a", None)),
        ({"answer": ["a"], "scorer": "string_match_part"}, (["a"], "string_match_part")),
    ],
)
def test_a_scorer_is_that_of_the_row_or_of_its_task(row, expected, tmp_path):
    """Several answers of other benchmarks are alternatives, and one answer is compared as ever."""
    source = tmp_path / "p.jsonl"
    source.write_text(json.dumps({"context": "", "question": "q", **row}))

    (prompt,) = read_prompts(source)

    assert (prompt.answer, prompt.scorer) == expected
    assert prompt.context is None


@given(st.text("aA1 \n"), st.lists(st.text("aA1", min_size=1, max_size=3), min_size=1, max_size=4))
def test_scores_are_those_of_the_definitions(response, answers):
    """RULER's: the share of the answers that occur, or whether any does; else any whole words."""
    found = [1.0 if r.lower() in response.lower() else 0.0 for r in answers]

    assert score(response, answers, "string_match_all") == sum(found) / len(answers)
    assert score(response, answers, "string_match_part") == max(found)
    assert score(response, answers) == max(is_right(response, answer) for answer in answers)
    assert all(0 <= score(response, answers, each) <= 1 for each in SCORERS)


def test_the_prompt_ends_with_the_beginning_of_the_answer():
    """Of plain text on a new line, of a chat after the template; the context is before both."""
    prompt = Prompt("a", "w4 w5", context="w1 w2 w3 ", answer_prefix=" w6")

    plain = encode(prompt, small(300), bytes_tokenizer(), Options())
    chat = encode(prompt, small(), words_tokenizer(TEMPLATE), Options(chat=True))

    assert plain.text == "w1 w2 w3 w4 w5\n w6"
    assert plain.context_len == len("w1 w2 w3 ")
    assert chat.ids == [7, 1, 2, 3, 4, 5, 9, 6]
    assert chat.context_len == 4


def test_recorded_and_live_responses_are_scored(table, tmp_path):
    """By the scorer and the length of each prompt; the full cache has the score of the trace."""
    model, tokenizer = small(), words_tokenizer()
    first, second = read_prompts(table)
    (drawn,) = capture_many(model, tokenizer, [first], tmp_path / "drawn", max_new_tokens=5)
    words = drawn.meta["text"]["response"].split()
    first = Prompt(**{**vars(first), "answer": [words[0], "nothing", words[1], words[4]]})

    traces = capture_many(model, tokenizer, [first, second], tmp_path / "traces")
    run = kvsim.live(
        *(model, traces, ["full", "streaming_llm"], 4),
        tokenizer=tokenizer,
        compress="context",
        max_new_tokens=64,
        metrics=["answer_score", "answer_right", "response_tokens"],
    )

    assert [trace.n_pos - trace.prompt_len for trace in traces] == [5, 3]
    check = traces[0].meta["answer_check"]
    assert (check["score"], check["right"], check["scorer"]) == (0.75, False, first.scorer)
    results = run.table.filter(policy="full")
    assert results.filter(metric="answer_score")["value"].to_list() == [0.75, 0.0]
    assert results.filter(metric="answer_right")["value"].to_list() == [0.0, 0.0]
    assert results.filter(metric="response_tokens")["value"].to_list() == [5, 3]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_new_tokens": "5"}, "max_new_tokens of its answer_check is '5', expected a number"),
        ({"max_new_tokens": 0}, "max_new_tokens of its answer_check is 0, expected a number"),
        ({"expected": None}, "the answer is None, expected text or a list of texts"),
        ({"expected": []}, r"the answer is \[\], expected text or a list of texts"),
        ({"expected": [{}]}, r"the answer is \{\}, expected text or a list of texts"),
        ({"expected": [True]}, "the answer is True, expected text or a list of texts"),
        ({"scorer": ["f1"]}, r"scorer is \['f1'\], expected one of contained"),
        ({"kind": ["text"], "expected": [7]}, ""),
        ({"kind": "ledger"}, ""),
    ],
)
def test_a_check_of_another_writer_is_one_line_or_no_score(changes, message):
    """Whatever its values are, they are untrusted input."""
    answered = {"max_new_tokens": 2, "answer": "w3", "scorer": "string_match_all"}
    trace = capture(small(), words_tokenizer(), "w1 w2", **answered)
    check = {**trace.meta["answer_check"], **changes}
    meta = {**trace.meta, "answer_check": check, "text": None}
    other = kvsim.Trace(trace.source, replace(trace.header, meta=meta))
    options = {"tokenizer": words_tokenizer(), "max_new_tokens": 2, "metrics": ["answer_score"]}

    try:
        errors = [x.error for x in kvsim.live(small(), [other], "full", 2, **options).failures]
    except TraceError as error:
        errors = [str(error)]

    assert len(errors) == bool(message)
    assert all(re.search(message, error) for error in errors)


def test_an_answer_that_cannot_be_found_is_refused_before_anything_runs():
    """No answers at all, or a number that is none; others are compared as text."""
    model, tokenizer = small(), words_tokenizer()
    for scorer in (None, *SCORERS):
        with pytest.raises(TextError, match=r"the answer is \[\], expected text"):
            capture(model, tokenizer, "w1", answer=[], scorer=scorer)
        trace = capture(model, tokenizer, "w1", answer=[1], scorer=scorer, max_new_tokens=1)
        assert trace.meta["answer_check"]["expected"] == [1]
    for answer in (float("nan"), [float("inf")], True):
        with pytest.raises(TextError, match=r"the answer is .*, expected text or"):
            text_check("", answer, None)
    assert text_check("It is 7, or 1.50.", 7.0, None)["right"]


def test_a_table_of_results_takes_two_commands(tmp_path, run):
    """From a file of 4 rows, with the columns of kvpress's benchmarks."""
    rows = []
    for page in pages(4, 3, facts=3, lines=1):
        context, question, rest = page.prompt.partition("question :")
        named = {"context": context, "question": question + rest}
        rows.append({**named, "answer": ["1"], "task": "get", "max_new_tokens": 2})
    pl.DataFrame(rows).write_ndjson(tmp_path / "rows.jsonl")
    out, traces = tmp_path / "run", tmp_path / "traces"

    recorded, _, err = run(
        *("capture", "--model", "tiny", "--prompts", tmp_path / "rows.jsonl", "--out", traces)
    )
    replayed, _, _ = run(
        *("replay", *sorted(traces.glob("*.zarr")), "--policy", "streaming_llm", "--budget", "8"),
        *("--compress", "context", "--metric", "output_error", "--out", out),
    )

    assert (recorded, replayed) == (0, 0), err
    table = read_run(out).table.drop_nulls("task")
    assert table["trace"].n_unique() == 4
    assert set(table["task"]) == {"get"}


def test_sources_that_cannot_be_read_are_one_line(tmp_path, monkeypatch):
    """A malformed name, no package, and no network or data set."""

    def refused(*_names, **_options):
        raise OSError("no network")

    monkeypatch.setitem(sys.modules, "datasets", None)
    for name, message in (
        (tmp_path / "none.parquet", "cannot be read .*, expected a JSONL file"),
        ("hub:a", "expected hub:OWNER/NAME"),
        ("hub:a/b:c:d:e", "expected hub:OWNER/NAME"),
        ("hub:a/b", r"datasets is not installed; this needs kvsim\[hub\]"),
    ):
        with pytest.raises((CaptureError, ExtraError), match=message) as caught:
            read_prompts(name)
        assert "\n" not in str(caught.value)
    hub(monkeypatch, refused)
    with pytest.raises(CaptureError, match=r"hub:a/b cannot be loaded \(no network\)"):
        read_prompts("hub:a/b")
