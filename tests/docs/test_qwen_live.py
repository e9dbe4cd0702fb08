"""docs/qwen_live.py: answers in batches, what they go on from, and the table of them."""

import json
import sys

import pytest

import qwen_live
import smollm2_card


@pytest.fixture
def prompts(tmp_path):
    """Three prompts of tiny's words."""
    rows = [
        {"task": "walk", "index": at, "prompt": "the box is in the room " * (at + 2), "answer": "x"}
        for at in range(3)
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(monkeypatch, *args):
    """The script with these arguments."""
    monkeypatch.setattr(sys, "argv", ["qwen_live.py", *map(str, args)])
    qwen_live.main()


def test_answers_are_written_once_and_go_on(prompts, tmp_path, monkeypatch, capsys):
    """After a stop the rest follows; batches of another size have the same answers."""
    out, other = tmp_path / "out.jsonl", tmp_path / "other.jsonl"
    options = ["--dtype", "float32", "--new-tokens", 12, "--all", "--budget", 16, 24]
    options += ["--policy", "snapkv", "h2o"]

    run(monkeypatch, "run", "tiny", prompts, out, "--seconds", 0, *options)
    assert smollm2_card.read(out) == []
    run(monkeypatch, "run", "tiny", prompts, out, "--batch", 5, *options)
    run(monkeypatch, "run", "tiny", prompts, out, "--batch", 5, *options)
    run(monkeypatch, "run", "tiny", prompts, other, "--batch", 1, *options)

    rows = smollm2_card.read(out)
    assert len(rows) == len({qwen_live.key(row) for row in rows}) == 3 + 3 * 4
    alone = {qwen_live.key(row): row["response"] for row in smollm2_card.read(other)}
    assert {qwen_live.key(row): row["response"] for row in rows} == alone
    assert "the full cache answers 3 of 3 prompts" in capsys.readouterr().out


def test_the_table_is_of_prompts_that_the_full_cache_answers():
    """Right answers by policy and budget; a prompt that the full cache gets wrong is left out."""

    def row(policy, budget, index, *, right):
        named = {"model": "m", "task": "t", "policy": policy, "budget": budget}
        return {**named, "index": index, "right": right, "tokens": 10, "seconds": 2}

    rows = [row("full", 1 << 20, at, right=at < 2) for at in range(3)]
    rows += [row("h2o", 64, at, right=at != 1) for at in range(3)]

    lines = qwen_live.table(rows)

    assert lines[-1] == "| `h2o` | 50% (9% to 91%; 2) | 10 | 5.0 |"
