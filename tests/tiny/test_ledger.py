"""The ledger language: what is generated, solved, and judged."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.errors import KvsimError
from kvsim.tiny import ledger
from kvsim.tiny.ledger import LedgerError, Sample, check, make, prompts, solve, unknown_words

# Worked out by hand: kuga is teal (9), rapi is plum (3).
PROMPT = (
    "facts : kuga rapi teal . rapi kuga plum . key : plum 3 , teal 9 , "
    "question : walk #2 kuga . report #2 #0 . think :"
)
RESPONSE = "kuga rapi 9 #2 9 ; rapi kuga 3 #1 2 ; kuga rapi 9 #0 1 ; done : #2 9 , #0 1 ."


def seeded(seed: int) -> random.Random:
    """A source of samples."""
    return random.Random(seed)  # noqa: S311 - samples of an exercise are no secrets


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    """Any sample that the generator can make."""
    return make(
        seeded(draw(st.integers(0, 2**32))),
        facts=draw(st.integers(2, 160)),
        lines=draw(st.integers(1, 128)),
        task=draw(st.sampled_from(["walk", "get", None])),
        filler=draw(st.sampled_from([0.0, 0.3, 1.0])),
        colours=draw(st.integers(1, 24)),
        report=draw(st.none() | st.integers(1, 6)),
        cycle=draw(st.none() | st.integers(1, 160)),
    )


def test_solve_answers_an_example_worked_out_by_hand() -> None:
    """The response to a prompt of two facts is the one found with pencil and paper."""
    assert solve(PROMPT) == RESPONSE


def test_solve_takes_the_list_of_get_in_order() -> None:
    """Get visits the nodes in the order of its list, and its digits sum modulo 10."""
    prompt = PROMPT.replace("walk #2 kuga .", "get #1 rapi , kuga , .").replace("#2 #0", "#0")

    assert solve(prompt) == "rapi kuga 3 #1 3 ; kuga rapi 9 #0 2 ; done : #0 2 ."


@given(samples())
def test_solve_agrees_with_the_generator(sample: Sample) -> None:
    """The response computed from the text alone is the one that the generator wrote."""
    assert solve(sample.prompt) == sample.response


@given(samples())
def test_every_word_is_in_the_vocabulary(sample: Sample) -> None:
    """Prompts and responses hold known words only, separated by single spaces."""
    text = f"{sample.prompt} {sample.response}"

    assert unknown_words(text) == []
    assert " ".join(text.split()) == text


@given(samples())
def test_lookups_name_the_two_retrievals_of_each_line(sample: Sample) -> None:
    """The word before a lookup's digit in the key is its colour, and the digit is the line's."""
    prompt, response = sample.prompt.split(), sample.response.split()

    assert len(sample.lookups) == sample.lines
    for lookup in sample.lookups:
        assert prompt[lookup.prompt_index - 1] == lookup.colour
        assert prompt[lookup.prompt_index] == response[lookup.response_index + 1]


@given(samples())
def test_the_answer_is_the_last_running_sum(sample: Sample) -> None:
    """The answer is what stands after the counter #0, and the report ends on it too."""
    words = sample.response.split()

    assert sample.answer == words[words.index("#0") + 1] == words[-2]


@given(samples())
def test_check_accepts_the_right_response(sample: Sample) -> None:
    """The right response is exact in every part, with or without special tokens."""
    found = check(sample.prompt, f"{sample.response} <eos> <pad> <pad>")

    assert found.exact
    assert found.answer_exact
    assert found.answer == sample.answer
    assert found.share == 1.0


@given(samples(), st.data())
def test_check_catches_one_wrong_word(sample: Sample, data: st.DataObject) -> None:
    """One changed word, a digit among them, spoils the chain or the report it stands in."""
    words = sample.response.split()
    at = data.draw(st.integers(0, len(words) - 1))
    wrong = data.draw(st.sampled_from(["0", "1", "kuga", "#127"]).filter(lambda w: w != words[at]))
    chain = at < 6 * sample.lines
    words[at] = wrong

    found = check(sample.prompt, " ".join(words))

    assert not found.exact
    assert not (found.chain_exact if chain else found.report_exact)
    assert found.share == 1 - 1 / len(words)


def test_check_catches_a_wrong_last_sum() -> None:
    """A wrong digit after #0 is a wrong answer, and a right one elsewhere does not help."""
    found = check(PROMPT, RESPONSE.replace("#0 1 ;", "#0 2 ;"))

    assert (found.answer, found.answer_exact) == ("2", False)
    assert found.report_exact
    assert not found.chain_exact


@pytest.mark.parametrize("response", ["", "kuga rapi 9 #2 9 ;", "#0", "done"])
def test_check_accepts_any_text_as_a_response(response: str) -> None:
    """A response that stops early or makes no sense is wrong, not an error."""
    found = check(PROMPT, response)

    assert not found.exact
    assert found.answer is None
    assert found.expected == RESPONSE


def test_check_counts_what_follows_the_report_as_wrong() -> None:
    """A model that does not stop has no exact report."""
    assert not check(PROMPT, f"{RESPONSE} kuga").report_exact


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("facts :", "<bos> facts :", "word 1 of the prompt is '<bos>', expected 'facts'"),
        ("kuga rapi teal .", "kuga rapi .", "word 5 .* is '.', expected a colour"),
        ("kuga rapi teal .", "kuga rapi green .", "is 'green', expected a colour"),
        ("rapi kuga plum .", "kuga rapi plum .", "two facts about 'kuga'"),
        ("rapi kuga plum .", "", "no fact about 'rapi', which line 2 needs"),
        ("plum 3 ,", "", "no digit for 'plum', which line 2 needs"),
        ("plum 3 ,", "teal 3 ,", "two digits for 'teal'"),
        ("plum 3 ,", "plum 10 ,", "is '10', expected a digit"),
        ("walk #2 kuga .", "walk #128 kuga .", "is '#128', expected a counter"),
        ("walk #2 kuga .", "walk #2 .", "walk names no start"),
        ("walk #2 kuga .", "run #2 kuga .", "expected 'walk' or 'get'"),
        ("walk #2 kuga .", "get #2 kuga , rapi , .", "lists 2 nodes, expected 3"),
        ("walk #2 kuga .", "get #0 kuga .", "expected ','"),
        ("report #2 #0", "report #3 #0", "asks for #3, expected at most #2"),
        ("report #2 #0", "report", "expected a counter"),
        ("think :", "", "is 'the end', expected 'think'"),
        ("think :", "think : kuga", "goes on with 'kuga'"),
        (PROMPT, "", "is 'the end', expected 'facts'"),
    ],
)
def test_solve_says_what_is_wrong_with_a_prompt(old: str, new: str, message: str) -> None:
    """A prompt outside the language is refused with what was found and what was expected."""
    assert old in PROMPT

    with pytest.raises(LedgerError, match=message) as caught:
        solve(PROMPT.replace(old, new))

    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, KvsimError)


def test_unknown_words_are_listed_once_in_order() -> None:
    """Words that the tokenizer would lose are named."""
    assert unknown_words("facts : Paris kuga #200 Paris 12 .") == ["Paris", "#200", "12"]


@pytest.mark.parametrize(
    "sizes",
    [
        {"facts": 161, "lines": 8},
        {"facts": 1, "lines": 8},
        {"facts": 8, "lines": 129},
        {"facts": 8, "lines": 0},
        {"facts": 8, "lines": 8, "colours": 25},
        {"facts": 8, "lines": 8, "report": 0},
        {"facts": 8, "lines": 8, "cycle": 0},
    ],
)
def test_make_refuses_sizes_outside_the_language(sizes: dict[str, int]) -> None:
    """A size that the vocabulary has no words for is an error that gives the range."""
    with pytest.raises(LedgerError, match=r"is \d+, expected \d+ to \d+"):
        make(seeded(0), **sizes)


def test_get_is_capped_at_the_number_of_facts() -> None:
    """Get names each node at most once."""
    assert make(seeded(0), task="get", facts=5, lines=9).lines == 5


def test_prompts_are_the_same_for_the_same_seed() -> None:
    """A seed and a size stand for one list of samples, and another seed for another."""
    assert prompts(3, seed=1) == prompts(3, seed=1)
    assert prompts(3, seed=1) != prompts(3, seed=2)
    assert [sample.task for sample in prompts(3)] == ["walk", "get", "walk"]


def test_token_ids_never_change() -> None:
    """The order of the vocabulary is what the shipped weights were trained with."""
    digest = hashlib.sha256(" ".join(ledger.VOCAB).encode()).hexdigest()

    assert digest[:16] == "410077cad9e9a049"
    assert ledger.ID["<unk>"] == 3


def test_the_command_prints_rows_for_capture() -> None:
    """The generator as a program prints JSON lines whose answers follow from their prompts."""
    command = [sys.executable, "-m", "kvsim.tiny.ledger", "--task", "get", "--n", "2"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = [json.loads(line) for line in printed.splitlines()]

    assert len({row["id"] for row in rows}) == 2
    for row in rows:
        assert row["task"] == "get"
        assert row["response"] == solve(row["prompt"])
        assert check(row["prompt"], row["response"]).answer == row["answer"]


def test_the_command_refuses_a_size_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """A size outside the language is bad usage, not a traceback."""
    with pytest.raises(SystemExit, match="2"):
        ledger.main(["--facts", "500"])

    assert "facts is 500, expected 2 to 160" in capsys.readouterr().err


def test_importing_the_language_loads_nothing_heavy() -> None:
    """Writing prompts and judging responses needs neither torch nor transformers."""
    code = (
        "import sys, kvsim.tiny, kvsim.tiny.ledger; "
        "print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", code]

    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "set()\n"
