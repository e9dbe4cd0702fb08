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


def test_live_answers_are_compared_on_the_same_prompts():
    """A prompt that the full cache misses, or some policy lacks, counts for none; best first."""
    row = {"model": "m", "task": "t", "tokens": 10, "budget": 8}
    full = [row | {"policy": "full", "index": i, "right": i != 1} for i in range(4)]
    first = [row | {"policy": "a", "index": i, "right": i < 2} for i in range(4)]
    second = [row | {"policy": "b", "index": i, "right": True, "tokens": 20} for i in range(3)]

    head, _, *lines = qwen_live.table([*full, *first, *second]).splitlines()

    assert head == "| policy | right at 8 | tokens at 8 |"
    assert lines == [
        "| `b` | **100% (34% to 100%; 2)** | 20 |",
        "| `a` | 50% (9% to 91%; 2) | 10 |",
    ]


def test_the_page_is_of_its_results():
    """docs/qwen.md has what `python docs/qwen_live.py write` writes; each answer is there once."""
    text, rows = qwen_live.PAGE.read_text("utf-8"), smollm2_card.read(qwen_live.RESULTS)

    assert qwen_live.page(text) == text
    assert len({qwen_live.key(row) for row in rows}) == len(rows)
