"""Prompts on real text, answered by SmolLM2: lengths, needles and answers in the trace."""

import pytest

import kvsim
from kvsim.recorder.encoding import token_count
from kvsim.text.tasks import sample

pytestmark = pytest.mark.real


@pytest.mark.parametrize("task", ["needle", "chat"])
def test_a_captured_prompt_is_as_its_row_says(smollm2, task):
    """So many tokens, the needle's tokens are its text, and the answer is right and is the code."""
    model, tokenizer = smollm2
    drawn = sample(
        1, 0, lambda prompt: token_count(prompt, tokenizer), task=task, length=128, depth=0.5
    )
    row = drawn.row("a")

    trace = kvsim.capture(
        model,
        tokenizer,
        row.get("prompt") or row["messages"],
        needle=row["needle"],
        answer=row["answer"],
        max_new_tokens=16,
        stop=["\n"],
    )

    ((start, end),) = trace.header.spans["needle"]
    assert trace.prompt_len == row["tokens"]
    assert 122 <= row["tokens"] <= 128
    assert tokenizer.decode(trace.tokens[start:end]).strip() == row["needle"][0]
    assert trace.meta["answer_check"]["right"]
    record = kvsim.replay(trace, kvsim.policy("streaming_llm"), budget=32)
    table = kvsim.measure(trace, record, ["needle_recall", "needle_wipeout"])
    assert table.filter(metric="needle_recall")["value"].to_list() == [0.0] * 90
    assert table.filter(metric="needle_wipeout")["value"].to_list() == [1.0] * 90
