"""docs/qwen_card.py: answers in responses, and the page in the repository is of its results."""

import pytest

import qwen_card as card
import smollm2_card
from kvsim.recorder import load_model


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (r"so it is \(\boxed{68}\).", "68"),
        (r"\boxed{7}, no: $\boxed{8,\!000}$", "8,000"),
        (r"\boxed{\text{pear, fig}}", "pear, fig"),
        (r"\boxed{x = -3}", "-3"),
        ("68", ""),
    ],
)
def test_the_answer_is_in_the_last_box(response, expected):
    """Marks of LaTeX around it are no part of it; without a box there is no answer."""
    assert card.final(response) == expected


def test_a_batch_writes_what_each_prompt_alone_does():
    """Padding on the left changes no greedy response; nothing follows its end."""
    model, _ = load_model("tiny")
    prompts = [[5, 9, 7, 30], [11], [8, 6, 40, 12, 9, 10]]

    together = card.responses(model, prompts, 12)

    assert together == [card.responses(model, [prompt], 12)[0] for prompt in prompts]
    end = model.generation_config.eos_token_id
    assert all(end not in response[:-1] for response in together)


def test_the_page_is_of_its_results():
    """docs/qwen.md has what `python docs/qwen_card.py write` writes; each prompt is there once."""
    text, rows = card.PAGE.read_text("utf-8"), smollm2_card.read(card.RESULTS)
    keys = [(row["model"], row["task"], row.get("length"), row["index"]) for row in rows]

    assert card.page(text, rows) == text
    assert len(set(keys)) == len(keys)
