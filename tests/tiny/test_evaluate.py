"""The measurements behind the model card, and the card itself."""

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from apps.tiny import card, evaluate
from apps.tiny.model import build
from apps.tiny.probes import (
    NEEDS,
    attention_maps,
    needs,
    replaced,
    score,
    structure,
)
from apps.tiny.results import Results, best, digest, heads
from kvsim.recorder.loading import load_tokenizer
from kvsim.studies.language.ledger import check
from kvsim.studies.language.tasks import TASKS, prompts
from kvsim.tiny import PATH

DOCS = Path(__file__).parents[2] / "docs"
CARD = DOCS / "tiny.md"
MEASURED = Results(DOCS / "tiny-results.jsonl", digest(PATH))


@pytest.fixture(scope="module")
def model():
    """The shipped model."""
    return AutoModelForCausalLM.from_pretrained(str(PATH), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def start():
    """A model at the start of its training: its heads are known, and it answers nothing."""
    return build(0).eval()


def test_the_first_error_is_named_by_what_was_to_be_looked_up():
    """A right response has none; a wrong digit is one of `digit`, a wrong counter of `other`."""
    (sample,) = prompts(1, seed=3, task="walk", facts=4, lines=4)
    words = sample.response.split()

    def wrong(at: int) -> str:
        return " ".join([*words[:at], "red", *words[at + 1 :]])

    assert evaluate.first_error(sample, sample.response) is None
    assert evaluate.first_error(sample, sample.response + " <eos>") is None
    assert evaluate.first_error(sample, wrong(2)) == "digit"
    assert evaluate.first_error(sample, wrong(7)) == "successor"
    assert evaluate.first_error(sample, wrong(9)) == "other"
    assert evaluate.first_error(sample, " ".join(words[:7])) == "successor"
    assert evaluate.first_error(sample, sample.response + " .") == "other"


def test_accuracy_counts_what_is_exact(monkeypatch):
    """Of a right response, one with a wrong report and one with a wrong digit each part is told."""
    samples = prompts(3, seed=4, task="walk", facts=4, lines=4, report=1)
    texts = [sample.response for sample in samples]
    texts[1] += " ."
    words = texts[2].split()
    texts[2] = " ".join([*words[:2], str((int(words[2]) + 1) % 10), *words[3:]])
    monkeypatch.setattr(evaluate, "respond", lambda *_: texts)
    found = evaluate.accuracy(None, None, samples)

    assert (found["chain"], found["report"], found["answer"]) == (2, 2, 3)
    assert found["errors"] == {"other": 1, "digit": 1}
    assert found["right"] == pytest.approx(1 - 1 / (3 * len(words)), abs=1e-4)
    assert found["tokens"] == [min(s.tokens for s in samples), max(s.tokens for s in samples)]


def test_needs_name_the_words_of_each_retrieval():
    """What is read last is the word that is due next, and its place says whether it is chain."""
    seen = set()
    for sample in prompts(14, seed=6, facts=20, lines=26):
        words = ["<bos>", *sample.prompt.split(), *sample.response.split()]
        for need in needs(sample):
            seen.add(need.name)
            assert need.pos <= need.row
            assert need.name.endswith("chain") == (need.pos > sample.prompt_words)
            if "1" not in need.name:
                assert words[need.pos] == words[need.row + 1]

    assert seen == set(NEEDS)


def test_teacher_forced_chains_are_those_of_greedy_generation(model):
    """With and without a KV head, both ways of counting exact chains give the same number."""
    tokenizer = load_tokenizer(PATH)
    samples = prompts(3, seed=12, task="fork", level=1)
    for columns in (slice(0, 0), slice(192, 256)):
        with replaced(model, 1, columns, 0.0):
            responses = evaluate.respond(model, tokenizer, samples)
            forced = score(model, samples)
        pairs = zip(samples, responses, strict=True)

        assert forced.exact == sum(check(s.prompt, text).chain_exact for s, text in pairs)


def test_masses_are_read_off_the_attention(start):
    """The numbers of a head agree with loops over rows and positions of its attention."""
    (sample,) = prompts(1, seed=15, task="check", facts=6, lines=12)
    found = structure(start, [sample])
    maps = attention_maps(start, sample)
    one, head = maps[2, 3], found["heads"][19]
    rows = range(sample.prompt_words, sample.tokens - 1)
    recent = [sum(one[r, p] for p in range(max(0, r - 31), r + 1)) for r in rows]
    chain = [sum(one[r, p] for p in range(1 + sample.prompt_words, r - 31)) for r in rows]
    words = ["<bos>", *sample.prompt.split()]
    stops = [p for p, word in enumerate(words) if word in (".", ",", ":", ";") and p >= 4]
    marks = [sum(one[r, p] for p in stops if p < r - 31) for r in rows]
    sums = [need for need in needs(sample) if need.name == "recheck 2, chain"]

    assert (head["layer"], head["head"]) == (2, 3)
    assert head["first"] == pytest.approx(float(one[rows, :4].sum(-1).mean()), abs=1e-3)
    assert head["marks"] == pytest.approx(float(sum(marks)) / len(rows), abs=1e-3)
    assert head["last"] == pytest.approx(float(sum(recent)) / len(rows), abs=1e-3)
    assert head["chain"] == pytest.approx(float(sum(chain)) / len(rows), abs=1e-3)
    assert 1 <= head["effective"] <= sample.tokens
    assert found["met"]["recheck 2, chain"] == len(sums) == 2
    mass = sum(float(one[need.row, need.pos]) for need in sums) / 2
    assert head["mass"]["recheck 2, chain"] == pytest.approx(mass, abs=1e-3)


def test_the_card_shows_a_right_example():
    """The response in the card is the right one to its prompt."""
    (found,) = re.findall(r"```text\n(.*?)\n```", CARD.read_text("utf-8"), re.DOTALL)
    prompt, response = (" ".join(text.split()) for text in found.split("\n\n"))

    assert check(prompt, response).exact


def test_the_card_is_what_was_measured():
    """Every generated section of the card follows from the results, the code and the weights."""
    text = CARD.read_text("utf-8")

    assert card.fill(text, card.sections(DOCS)) == text


def test_the_card_meets_its_demands():
    """Chains are exact often enough, each layer is needed, heads retrieve, rest or are local."""
    rows = MEASURED.rows()
    cells = best(rows, "accuracy")
    assert set(cells) == {(task, level) for task in TASKS for level in range(1, 6)}
    assert all(row["n"] >= 100 for row in cells.values())
    low = {
        (task, level): row["chain"] / row["n"]
        for (task, level), row in cells.items()
        if row["chain"] / row["n"] < (0.95 if level <= 3 else 0.8)
    }
    drops = [
        row["removed"]["nothing"]["exact"] - without["exact"]
        for row in best(rows, "ablation").values()
        for name, without in row["removed"].items()
        if name in ("layer 0", "layer 1", "layer 2")
    ]
    sizes = [row["n"] for row in best(rows, "ablation").values()]
    roles: dict[int, set[str]] = {}
    for head in heads(rows):
        roles.setdefault(head["layer"], set()).update(card.roles(head))

    assert low == {}
    assert len(drops) == 3 * len(TASKS)
    assert min(drops) >= 0.1 * max(sizes)
    assert all({"sink", "retrieval"} <= roles[layer] for layer in (1, 2))
    assert "local" in roles[1] | roles[2]
