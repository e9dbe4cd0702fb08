"""Prompts of the ledger language: tasks, domains, levels."""

import hashlib
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.studies.language.ledger import LedgerError, read
from kvsim.studies.language.tasks import MAX_KINDS, PERIOD, TASKS, TOKENS, make, prompts
from kvsim.tiny.vocabulary import DOMAINS, VOCAB


def seeded(seed: int) -> random.Random:
    """A source of samples."""
    return random.Random(seed)  # noqa: S311 - samples of an exercise are no secrets


def counters(words: list[str]) -> list[int]:
    """The numbers of the counters among words."""
    return [int(word[1:]) for word in words if word.startswith("#")]


@given(
    st.integers(0, 2**32),
    st.sampled_from(TASKS),
    st.sampled_from(list(DOMAINS)),
    st.integers(2, 160),
    st.integers(1, 128),
    st.integers(1, MAX_KINDS),
)
def test_a_page_has_the_sizes_that_were_asked_for(
    seed: int, task: str, domain: str, facts: int, lines: int, kinds: int
) -> None:
    """Facts, lines and kinds are counted on the page; what a task must change is within a line."""
    sample = make(
        seeded(seed), task=task, domain=domain, facts=facts, lines=lines, kinds=kinds, report=3
    )
    page, text = read(sample.prompt), f"{sample.prompt} {sample.response}"
    chain = sample.response.split()[: sample.chain_words]

    assert len(page.facts) == sample.facts == facts
    assert page.lines == sample.lines
    assert chain.count(";") == sample.lines + len(page.agenda)
    assert len(page.report) == min(3, len(set(counters(chain)) - set(page.agenda)))
    if task in ("get", "join", "needle"):
        assert sample.lines == min(lines, facts)
        assert len({word.text for word in page.named}) == sample.lines
    else:
        assert abs(sample.lines - lines) <= (task == "check")
    needed = (lines - 1) // PERIOD["wait"] if task == "wait" else 0
    assert len(page.key) == max(kinds, needed)
    assert sample.tokens == len(text.split()) + 2
    assert set(text.split()) <= {*VOCAB}
    assert " ".join(text.split()) == text


def test_a_row_says_all_that_a_prompt_file_needs() -> None:
    """The row of a sample has its text, its answer, and what tables are grouped by."""
    (sample,) = prompts(1, task="wait", level=2, domain="ore")
    row = sample.row("x")

    assert row == {
        "id": "x",
        "prompt": sample.prompt,
        "answer": sample.response.split()[-2],
        "task": "wait",
        "domain": "ore",
        "level": 2,
        "facts": 28,
        "lines": 36,
        "tokens": sample.tokens,
        "reach": round(sample.reach, 1),
        "reference": sample.response,
    }


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("level", range(1, 6))
def test_tokens_of_a_level_are_in_its_range(task: str, level: int) -> None:
    """Whatever the task, the domain and the seed, a level has its range of lengths."""
    low, high = TOKENS[level - 1]

    for sample in prompts(24, seed=level, task=task, level=level):
        assert low <= sample.tokens <= high
        assert sample.level == level


def test_prompts_never_change() -> None:
    """Published numbers name levels and seeds; these are the prompts that they are about."""
    texts = [sample.prompt for level in range(1, 6) for sample in prompts(28, level=level)]
    digest = hashlib.sha256("\n".join(texts).encode()).hexdigest()

    assert digest[:16] == "78822771047edddf"


@pytest.mark.parametrize(
    "wrong",
    [
        {"facts": 161},
        {"facts": 1},
        {"lines": 129},
        {"kinds": 21},
        {"filler": 65.0},
        {"filler": float("nan")},
        {"report": 0},
        {"cycle": 0},
        {"task": "run"},
        {"domain": "sea"},
        {"level": 6},
        {"level": 2, "facts": 28},
        {"level": 2, "lines": 9, "report": 3},
    ],
)
def test_what_cannot_be_made_is_refused(wrong: dict[str, Any]) -> None:
    """A size without words in the vocabulary, an unknown name, a level with sizes of its own."""
    named = wrong[[*wrong][-1]] if wrong.keys() & {"task", "domain"} else [*wrong][-1]

    with pytest.raises(LedgerError, match=str(named)):
        prompts(1, **wrong)
    if "level" not in wrong:
        with pytest.raises(LedgerError, match=str(named)):
            make(seeded(0), **{"task": "walk", "facts": 8, "lines": 8, **wrong})
