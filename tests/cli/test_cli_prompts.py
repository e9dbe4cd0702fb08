"""`kvsim prompts` on real text: rows, their lengths in tokens, and options that are refused."""

import json

from kvsim.recorder.encoding import token_count
from kvsim.recorder.loading import load_tokenizer
from kvsim.text.tasks import DEPTHLESS, TASKS


def test_rows_of_all_tasks(run, printed, bytes_tokenizer):
    """Tasks, lengths and depths take turns; the tokens are those that `capture` would encode."""
    command = ["prompts", "--model", bytes_tokenizer, "--n", "24"]
    options = ["--length", "900,1200", "--depth", "0.1,0.9"]

    out = printed(*command, *options)

    rows = [json.loads(line) for line in out.splitlines()]
    tokenizer = load_tokenizer(bytes_tokenizer)
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


def test_context_and_question(run, printed, bytes_tokenizer, tmp_path):
    """With --context a row says where the question begins; --out says how long prompts are."""
    out = tmp_path / "p.jsonl"
    command = ["prompts", "--model", bytes_tokenizer, "--task", "needle,chat", "--length", "900"]
    _, plain, _ = run(*command, "--n", "2")

    text = printed(*command, "--n", "2", "--context", "--out", out)

    needle, chat = map(json.loads, out.read_text().splitlines())
    whole, _ = map(json.loads, plain.splitlines())
    assert needle["context"] + needle["prompt"] == whole["prompt"]
    assert chat["context"] == len(chat["messages"]) - 1
    low, high = sorted([needle["tokens"], chat["tokens"]])
    assert text.endswith(f"p.jsonl: 2 prompts, {low} to {high} tokens\n")
