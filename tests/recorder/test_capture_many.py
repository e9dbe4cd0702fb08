"""Prompts of the shipped model, files of many prompts, and what is refused."""

import json

import pytest
from recorder_models import exact_attention, small

import kvsim.tiny
from kvsim.errors import CaptureError
from kvsim.recorder import Prompt, capture, capture_many, read_prompts
from kvsim.store.verification import describe, verify
from kvsim.studies.language import tasks
from small_model import words_tokenizer


def test_tiny_is_recorded_exactly_and_answers(tmp_path):
    """A capture of tiny is exact to 1e-5, and its answer is checked against the right one."""
    sample = tasks.prompts(1, 3, task="walk", facts=12, lines=10, kinds=6)[0]

    trace = capture("tiny", None, sample.prompt, out=tmp_path / "walk.zarr")

    for layer in range(trace.n_layers):
        expected = exact_attention(trace, layer)
        found = trace.read("attn_out", slice(layer, layer + 1))[0]
        assert float((found - expected).abs().max() / expected.abs().max()) < 1e-5
    report = verify(trace.path, deep=True)
    assert report.ok
    assert max(report.output_error) < 1e-5
    assert trace.meta["answer_check"]["right"] is True
    assert trace.meta["answer_check"]["expected"] == sample.response
    assert trace.meta["text"] == {
        "prompt": sample.prompt,
        "messages": None,
        "response": sample.response,
    }
    assert trace.meta["model"]["name"] == "tiny"
    assert trace.token_text[0] == "<bos>"
    assert trace.token_text[1 : trace.prompt_len] == sample.prompt.split()
    assert str(kvsim.tiny.PATH) not in json.dumps(dict(trace.meta))


def test_capture_many(tmp_path):
    """Each prompt gets a trace of its own, named by its id, with its answer checked."""
    rows = [
        {"id": "a/1", "prompt": "w1 w2 w3", "answer": "nothing of the sort"},
        {"prompt": "w4 w5"},
        {"id": "chat", "messages": [{"role": "user", "content": "w6"}]},
    ]
    source = tmp_path / "prompts.jsonl"
    source.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    template = "{% for m in messages %}{{ m['role'] }} w0 {{ m['content'] }}{% endfor %} w9"
    tokenizer = words_tokenizer(template.replace("{{ m['role'] }}", "w7"))

    traces = capture_many(
        small("llama"), tokenizer, read_prompts(source), tmp_path / "out", max_new_tokens=3
    )

    assert [trace.path.name for trace in traces] == ["a-1.zarr", "prompt-0001.zarr", "chat.zarr"]
    assert [trace.prompt_len for trace in traces] == [3, 2, 4]
    assert [trace.name for trace in traces] == ["a/1", "prompt-0001", "chat"]
    assert traces[0].meta["answer_check"]["right"] is False
    assert traces[1].meta["answer_check"] is None
    assert traces[2].meta["text"]["prompt"] == "w7 w0 w6 w9"
    assert traces[2].meta["text"]["messages"] == [{"role": "user", "content": "w6"}]


def test_labels_of_a_prompt_go_into_its_trace(tmp_path):
    """Task, domain and level, as far as a line has them; other fields of the line do not."""
    rows = [
        {"prompt": "w1", "task": "walk", "domain": "ore", "level": 2, "tokens": 9},
        {"prompt": "w2", "level": "hard", "task": None},
        {"prompt": "w3"},
    ]
    source = tmp_path / "prompts.jsonl"
    source.write_text("\n".join(json.dumps(row) for row in rows))
    model = small("llama")

    many = capture_many(
        model, words_tokenizer(), read_prompts(source), tmp_path / "out", max_new_tokens=0
    )
    one = capture(model, None, [1, 2], max_new_tokens=0, labels={"domain": "fruit"})

    expected = [{"task": "walk", "domain": "ore", "level": 2}, {"level": "hard"}, {}]
    assert [trace.meta["labels"] for trace in many] == expected
    assert [trace.header.labels for trace in many] == expected
    assert [describe(trace.path)["labels"] for trace in many] == expected
    assert one.header.labels == {"domain": "fruit"}


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ({"colour": "red"}, "label 'colour', expected one of task, domain, level, length"),
        ({"level": 0.5}, "level is 0.5, expected text or a whole number"),
        ({"level": True}, "level is True, expected text or a whole number"),
        ({"level": 2**63}, "level is 9223372036854775808, expected text or a whole number of 64"),
        ({"length": "512"}, "length is '512', expected a whole number"),
        ({"length": -(2**63)}, "length is -9223372036854775808, expected a whole number"),
        ({"depth": 1.5}, "depth is 1.5, expected a number from 0 to 1"),
        ({"depth": float("nan")}, "depth is nan, expected a number from 0 to 1"),
        ({"depth": 10**400}, "depth is 1000.*, expected a number from 0 to 1"),
    ],
)
def test_bad_labels(labels, message):
    """A label that no table has a place for is refused before the model runs."""
    with pytest.raises(CaptureError, match=f"^{message}"):
        capture(small("llama"), None, [1, 2], labels=labels)


def test_an_expected_answer_is_found(tmp_path):
    """An expected answer is right where it stands as whole words after the reasoning."""
    model, tokenizer = small("llama"), words_tokenizer()
    response = capture(model, tokenizer, "w1 w2", max_new_tokens=6).meta["text"]["response"]
    last = response.split()[-1]

    right, wrong = capture_many(
        model,
        tokenizer,
        [Prompt("right", "w1 w2", last), Prompt("wrong", "w1 w2", last + "0")],
        tmp_path,
        max_new_tokens=6,
    )

    assert right.meta["answer_check"]["right"] is True
    assert wrong.meta["answer_check"]["right"] is False


def test_files_without_prompts_of_their_own_names(tmp_path):
    """A file that is not there, one without prompts, and two ids of one trace are one line each."""
    source = tmp_path / "prompts.jsonl"
    with pytest.raises(CaptureError, match="cannot be read"):
        read_prompts(source)
    for text, message in (
        ("", "has no prompts"),
        ('{"id": "a b", "prompt": "x"}\n{"id": "a-b", "prompt": "x"}', "expected ids that differ"),
    ):
        source.write_text(text)
        with pytest.raises(CaptureError, match=message):
            read_prompts(source)
