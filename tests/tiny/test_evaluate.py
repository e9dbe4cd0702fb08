"""The measurements behind the model card."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvsim.tiny import PATH
from kvsim.tiny.curriculum import collate
from kvsim.tiny.evaluate import (
    Cell,
    ablation,
    fill,
    structure,
    targets,
    wilson,
    without_attention,
)
from kvsim.tiny.ledger import prompts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CARD = Path(__file__).parents[2] / "docs" / "tiny-model-card.md"


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """The shipped model."""
    return AutoModelForCausalLM.from_pretrained(str(PATH)).eval()


@pytest.mark.parametrize(
    ("hits", "n", "low", "high"),
    [(48, 48, 0.9259, 1.0), (0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634)],
)
def test_wilson_gives_published_intervals(hits: int, n: int, low: float, high: float) -> None:
    """The 95 % interval of a proportion agrees with tables."""
    assert wilson(hits, n) == pytest.approx((low, high), abs=1e-4)


def test_targets_name_the_words_of_each_retrieval() -> None:
    """Positions of a line's retrievals hold the words of the fact and of the key."""
    for sample in prompts(2, seed=6):
        words = ["<bos>", *sample.prompt.split(), *sample.response.split()]
        at = targets(sample)
        for line, lookup in enumerate(sample.lookups):
            node, successor, digit = sample.response.split()[6 * line : 6 * line + 3]

            assert words[at.node[line]] == node == words[at.successor[line] - 1]
            assert words[at.successor[line]] == words[at.named[line]] == successor
            assert words[at.colour[line]] == lookup.colour == words[at.digit[line] - 1]
            assert words[at.digit[line]] == digit
            assert at.successor[line] < 1 + len(sample.prompt.split()) < at.named[line]


def test_removed_attention_comes_back(model: PreTrainedModel) -> None:
    """A layer's attention is missing inside the with statement and nowhere else."""
    tokens = collate(prompts(1, seed=1, facts=4, lines=4)).tokens
    with torch.no_grad():
        before = model(input_ids=tokens).logits
        with without_attention(model, 1):
            removed = model(input_ids=tokens).logits
        after = model(input_ids=tokens).logits

    assert torch.equal(before, after)
    assert not torch.equal(before, removed)


def test_every_layer_is_needed(model: PreTrainedModel) -> None:
    """The whole model is right, and without any one layer's attention no chain is."""
    (row,) = ablation(model, [Cell("walk", 12, 24)], n=2).splitlines()[2:]
    whole, *without = [cell.strip() for cell in row.split("|")[2:-1]]

    assert whole.startswith("2/2")
    assert all(cell.startswith("0/2") for cell in without)


def test_structure_has_one_row_for_each_head(model: PreTrainedModel) -> None:
    """The table of heads covers all layers, and its masses are shares."""
    rows = structure(model, [Cell("get", 12, 12)], n=1).splitlines()[2:]
    masses = [float(row.split("|")[column]) for row in rows for column in (3, 4, 6, 7, 8)]

    assert len(rows) == 24
    assert all(0 <= mass <= 1 for mass in masses)


def test_fill_replaces_what_is_between_markers() -> None:
    """A section of the card is replaced, and filling twice changes nothing."""
    card = "a <!-- begin x -->old<!-- end x --> b"
    filled = fill(card, {"x": "new"})

    assert filled == "a <!-- begin x -->\nnew\n<!-- end x --> b"
    assert fill(filled, {"x": "new"}) == filled


def test_fill_refuses_a_card_without_markers() -> None:
    """A card that lost its markers is an error that names them."""
    with pytest.raises(ValueError, match="begin x"):
        fill("no markers", {"x": "new"})


def test_the_card_holds_every_measured_table() -> None:
    """The card has a filled section for each measurement."""
    card = CARD.read_text()

    for name in ("accuracy", "ablation", "attention"):
        table = card.partition(f"<!-- begin {name} -->")[2].partition(f"<!-- end {name} -->")[0]
        assert table.count("\n|") >= 4
