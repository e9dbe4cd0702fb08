"""`kvsim prompts` on real text: rows, their lengths in tokens, and options that are refused."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvsim.recorder.models import load_tokenizer
from kvsim.recorder.prompts import token_count
from kvsim.text.tasks import DEPTHLESS, TASKS
from kvsim.tiny import PATH

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a tokenizer of bytes and a chat template, and no model."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    path = tmp_path_factory.mktemp("bytes")
    PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=TEMPLATE).save_pretrained(path)
    return path


def test_rows_of_all_tasks(run, folder):
    """Tasks, lengths and depths take turns; the tokens are those that `capture` would encode."""
    command = ["prompts", "--model", folder, "--n", "24"]
    options = ["--length", "900,1200", "--depth", "0.1,0.9"]

    status, out, err = run(*command, *options)

    rows = [json.loads(line) for line in out.splitlines()]
    tokenizer = load_tokenizer(folder)
    assert (status, err) == (0, "")
    assert run(*command, *options)[1] == out
    assert [row["task"] for row in rows[:6]] == list(TASKS)
    assert len({row["id"] for row in rows}) == 24
    with_depth = {(r["task"], r["length"], r["depth"]) for r in rows if "depth" in r}
    assert len(with_depth) == 4 * 2 * 2
    for row in rows:
        prompt = row.get("prompt") or row["messages"]
        assert row["tokens"] == token_count(prompt, tokenizer)
        assert row["length"] - 30 <= row["tokens"] <= row["length"]
        assert ("answer" in row) == (row["task"] != "text")
        assert ("depth" in row) == (row["task"] not in DEPTHLESS)


def test_context_and_question(run, folder, tmp_path):
    """With --context a row says where the question begins; --out says how long prompts are."""
    out = tmp_path / "p.jsonl"
    command = ["prompts", "--model", folder, "--task", "needle,chat", "--length", "900"]
    _, plain, _ = run(*command, "--n", "2")

    status, text, err = run(*command, "--n", "2", "--context", "--out", out)

    needle, chat = map(json.loads, out.read_text().splitlines())
    whole, _ = map(json.loads, plain.splitlines())
    assert (status, err) == (0, "")
    assert needle["context"] + needle["prompt"] == whole["prompt"]
    assert chat["context"] == len(chat["messages"]) - 1
    low, high = sorted([needle["tokens"], chat["tokens"]])
    assert text.endswith(f"p.jsonl: 2 prompts, {low} to {high} tokens\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--length", "512"], "--length is an option of models for real text, as smollm2, but"),
        (["--context"], "--context is an option of models for real text"),
        (["--model", "{}", "--level", "1"], "--level is an option of tiny and tiny-deep, but"),
        (["--model", "{}", "--facts", "2"], "--facts is an option of tiny and tiny-deep"),
        (["--model", "{}", "--task", "walk"], "--task is 'walk'; expected needle, needles"),
        (["--model", "{}", "--length", "x"], "--length is 'x'; expected whole numbers of tokens"),
        (["--model", "{}", "--depth", "x"], "--depth is 'x'; expected numbers from 0 to 1"),
        (["--model", "{}", "--depth", "2", "--length", "900"], "depth is 2.0, expected a number"),
        (["--model", "{}", "--task", "text", "--depth", "0"], "--depth: text has no needle"),
        (
            ["--model", "{}", "--task", "text", "--context", "--length", "900"],
            "--context: text has no question",
        ),
        (["--model", str(PATH), "--task", "needle"], "the tokenizer does not know"),
        (["--model", "./nowhere"], "no model folder at './nowhere'"),
    ],
)
def test_bad_options(run, folder, tmp_path, arguments, message):
    """One line each, and nothing is written."""
    out = tmp_path / "p.jsonl"

    given = [str(folder) if each == "{}" else each for each in arguments]
    status, _, err = run("prompts", "--out", out, *given)

    assert status == 2
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1
    assert not out.exists()


def test_a_folder_without_a_tokenizer(run, tmp_path):
    """Prompts on real text need a tokenizer, to count tokens."""
    status, _, err = run("prompts", "--model", tmp_path, "--task", "needle")

    assert status == 2
    assert f"model {str(tmp_path)!r} has no tokenizer, expected one in its folder" in err
