"""The ledger language: what is solved, looked up, and judged."""

import hashlib
import random
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.errors import KvsimError
from kvsim.studies.language.ledger import LedgerError, answer_check, check, solve
from kvsim.studies.language.tasks import MAX_KINDS, TASKS, Sample, make
from kvsim.tiny.vocabulary import DOMAINS, ID, NODES, VOCAB

FACTS = "facts : kuga rapi teal . wind sings . rapi dodi plum . dodi kuga rust . "
KEY = "key : plum 3 , teal 9 , rust 5 , "
# Worked out by hand: kuga is teal (9), rapi is plum (3), dodi is rust (5).
EXAMPLES = {
    "walk #3 kuga . report #2 #0 .": (
        "kuga rapi 9 #3 9 ; rapi dodi 3 #2 2 ; dodi kuga 5 #1 7 ; kuga rapi 9 #0 6 ; "
        "done : #2 2 , #0 6 ."
    ),
    "get #1 dodi , kuga , . report #0 .": "dodi kuga 5 #1 5 ; kuga rapi 9 #0 4 ; done : #0 4 .",
    "join #1 dodi , kuga , . report #0 #1 .": (
        "dodi rapi 9 #1 9 ; kuga dodi 3 #0 2 ; done : #0 2 , #1 9 ."
    ),
    # 9 is odd: rapi is passed over; 4 is even: on to kuga; 3 is odd again
    "fork #3 kuga . report #0 .": (
        "kuga rapi 9 #3 9 ; dodi kuga 5 #2 4 ; kuga rapi 9 #1 3 ; dodi kuga 5 #0 8 ; done : #0 8 ."
    ),
    "check #2 kuga . agenda #1 #2 , . report #0 .": (
        "kuga rapi 9 #2 9 ; rapi dodi 3 #1 2 ; check #1 9 #1 2 ; dodi kuga 5 #0 7 ; done : #0 7 ."
    ),
    # from the second line on teal is 4
    "wait #3 kuga . agenda #2 teal 4 , . report #0 .": (
        "kuga rapi 9 #3 9 ; rapi dodi 3 #2 2 ; wait teal 4 #2 2 ; dodi kuga 5 #1 7 ; "
        "kuga rapi 4 #0 1 ; done : #0 1 ."
    ),
}
PROMPT = f"{FACTS}{KEY}question : walk #3 kuga . report #2 #0 . think :"
RESPONSE = EXAMPLES["walk #3 kuga . report #2 #0 ."]


def seeded(seed: int) -> random.Random:
    """A source of samples."""
    return random.Random(seed)  # noqa: S311 - samples of an exercise are no secrets


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    """Any sample that can be made."""
    return make(
        seeded(draw(st.integers(0, 2**32))),
        task=draw(st.sampled_from(TASKS)),
        facts=draw(st.integers(2, 160)),
        lines=draw(st.integers(1, 128)),
        domain=draw(st.sampled_from(list(DOMAINS))),
        filler=draw(st.sampled_from([0.0, 0.3, 1.0])),
        kinds=draw(st.integers(1, MAX_KINDS)),
        report=draw(st.none() | st.integers(1, 6)),
        cycle=draw(st.none() | st.integers(1, 160)),
    )


def expected(prompt: str) -> str:
    """The right response of a prompt of the language, from the definitions, line by line."""
    page, _, rest = prompt.partition(" key :")
    key_text, _, question = rest.partition("question :")
    statements = [sentence.split() for sentence in f"{page} ".split(":", 1)[1].split(" . ")]
    facts = {words[0]: words[1:] for words in statements if words and words[0] in NODES}
    key = dict(entry.split() for entry in key_text.split(",") if entry.strip())
    verb, first, *asked = question.split(" report ")[0].replace(" agenda ", " ").split()
    agenda_text = question.partition(" agenda ")[2].partition(" .")[0]
    agenda = {words[0]: words[1:] for words in map(str.split, agenda_text.split(" ,")) if words}
    last = int(first[1:])
    named = [word for word in asked if word in NODES]

    def counter(line: int) -> str:
        return f"#{last - line}"

    @cache
    def node(line: int) -> str:
        if line == 0 or verb in ("get", "join"):
            return named[line]
        odd = verb == "fork" and total(line - 1) in (1, 3, 5, 7, 9)
        return facts[after(line - 1)][0] if odd else after(line - 1)

    @cache
    def after(line: int) -> str:
        once = facts[node(line)][0]
        return facts[once][0] if verb == "join" else once

    @cache
    def digit(line: int) -> int:
        kind = facts[facts[node(line)][0] if verb == "join" else node(line)][1]
        news = [agenda.get(counter(earlier)) for earlier in range(line)] if verb == "wait" else []
        heard = [entry[1] for entry in news if entry and entry[0] == kind]
        return int(heard[-1] if heard else key[kind])

    @cache
    def total(line: int) -> int:
        return (digit(line) + (total(line - 1) if line else 0)) % 10

    def extra(line: int) -> str:
        if counter(line) not in agenda:
            return ""
        said = agenda[counter(line)]
        if verb == "check":
            what = f"{counter(line)} {total(last - int(said[0][1:]))}"
        else:
            what = " ".join(said)
        return f"{verb} {what} {counter(line)} {total(line)} ; "

    for line in range(last + 1):  # the shallow ones first, so that none recurses far
        total(line)
    chain = "".join(
        f"{node(i)} {after(i)} {digit(i)} {counter(i)} {total(i)} ; {extra(i)}"
        for i in range(last + 1)
    )
    wanted = question.split(" report ")[1].split(" .")[0].split()
    report = " , ".join(f"{word} {total(last - int(word[1:]))}" for word in wanted)
    return f"{chain}done : {report} ."


@pytest.mark.parametrize("asked", EXAMPLES)
def test_examples_worked_out_by_hand(asked: str) -> None:
    """The responses of all verbs are those found with pencil and paper."""
    prompt = f"{FACTS}{KEY}question : {asked} think :"

    assert solve(prompt).response == EXAMPLES[asked]
    assert expected(prompt) == EXAMPLES[asked]


@given(samples())
def test_solve_agrees_with_the_definitions(sample: Sample) -> None:
    """The response to any page that can be made is the one that the definitions give."""
    assert sample.response == solve(sample.prompt).response == expected(sample.prompt)


@given(samples())
def test_retrievals_lead_to_the_due_word(sample: Sample) -> None:
    """In the order of the response, each at most once per word, from what was read by then."""
    words = f"{sample.prompt} {sample.response}".split()
    due = [found.at + 1 for found in sample.retrievals]

    assert due == sorted(set(due))
    assert due[0] == sample.prompt_words
    for found in sample.retrievals:
        assert words[found.path[-1]] == words[found.at + 1]
        assert all(0 <= at <= found.at for at in found.path)
        assert len(found.path) in (1, 2)


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
    chain = at < sample.chain_words
    words[at] = wrong

    found = check(sample.prompt, " ".join(words))

    assert not found.exact
    assert not (found.chain_exact if chain else found.report_exact)
    assert found.share == 1 - 1 / len(words)


@pytest.mark.parametrize("response", ["", "kuga rapi 9 #2 9 ;", "#0", "done"])
def test_check_accepts_any_text_as_a_response(response: str) -> None:
    """A response that stops early or makes no sense is wrong, not an error."""
    found = check(PROMPT, response)

    assert not found.exact
    assert found.answer is None
    assert found.expected == RESPONSE


WALK = "walk #3 kuga ."


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("facts :", "<bos> facts :", "word 1 of the prompt begins '<bos> facts :"),
        ("wind sings .", "Paris sings .", "word 7 of the prompt begins 'Paris sings"),
        ("rapi dodi plum .", "", "nothing is stated about 'rapi'"),
        ("plum 3 ,", "", "nothing is stated about 'plum'"),
        (WALK, "run #3 kuga .", "expected one of walk, get, join, check, wait, fork"),
        (WALK, "get #2 kuga , rapi , .", "get #2 has 2 nodes"),
        (WALK, "check #3 kuga .", "begins 'check #3 kuga .'"),
        (WALK, "check #3 kuga . agenda #1 #0 , .", "nothing is stated about '#0'"),
        (WALK, "wait #3 kuga . agenda #1 #2 , .", "begins 'wait #3 kuga .'"),
        ("report #2 #0", "report #4 #0", "nothing is stated about '#4'"),
        ("think :", "think : #0", "begins 'think : #0'"),
        (PROMPT, "", "begins the end, expected 'facts"),
    ],
)
def test_solve_says_what_is_wrong_with_a_prompt(old: str, new: str, message: str) -> None:
    """A prompt outside the language is refused with what was found and what was expected."""
    assert old in PROMPT

    with pytest.raises(LedgerError, match=message) as caught:
        solve(PROMPT.replace(old, new))

    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, KvsimError)
    assert "\n" not in str(caught.value)


def test_a_check_says_what_a_trace_stores() -> None:
    """Right and wrong responses, and prompts outside the language, which have no right one."""
    right, wrong = (answer_check(PROMPT, response) for response in (RESPONSE, "done : #0 1 ."))

    assert (right["kind"], right["right"], wrong["right"]) == ("ledger", True, False)
    assert right["expected"] == wrong["expected"] == RESPONSE
    assert answer_check("once upon a time", "done").keys() == {"kind", "right", "reason"}


def test_token_ids_never_change() -> None:
    """The order of the vocabulary is what the shipped weights were trained with."""
    digest = hashlib.sha256(" ".join(VOCAB).encode()).hexdigest()

    assert digest[:16] == "4a531ba5fda6b7cd"
    assert ID["<unk>"] == 3
