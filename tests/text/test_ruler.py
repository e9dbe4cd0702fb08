"""Tasks to the definitions of RULER: their answers follow from their texts, and lengths are met."""

import re
from collections import Counter
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.errors import TextError
from kvsim.text.answers import score
from kvsim.text.ruler import RULER, ruler_sample
from kvsim.text.tasks import TASKS


def words(prompt):
    """A token is a word or a run of other characters."""
    return len(re.findall(r"\w+|[^\w\s]+", prompt))


@cache
def drawn(task, length=1200, index=0, seed=0):
    """A prompt, by a tokenizer of words."""
    return ruler_sample(seed, index, words, task=task, length=length)


def solved(sample):
    """The answers, from the text alone."""
    text = sample.context.rsplit("\n\n", 1)[-1] if sample.task in ("vt", "cwe") else sample.context
    if sample.task.startswith("niah"):
        facts = re.findall(r"One of the special magic \w+ for ([\w-]+) is: ([\w-]+)\.", text)
        asked = re.search(r" for (.*) mentioned", sample.question)[1].replace(", and ", ", ")
        return [value for key in asked.split(", ") for name, value in facts if name == key]
    if sample.task == "vt":
        value = re.search(r"the value (\d+)", sample.question)[1]
        known = {value}
        for name, source in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", text):
            known |= {name} if source in known else set()
        return sorted(known - {value})
    counted = re.findall(r"(?<=\. )[a-z]+(?= |\n)", text.partition("often.\n")[2])
    if sample.task == "fwe":
        counted = [word for word in text.partition("coded words. ")[2].split() if word != "..."]
    return [word for word, _ in Counter(counted).most_common(len(sample.answer))]


@settings(max_examples=40)
@given(st.sampled_from(RULER), st.integers(900, 3000), st.integers(0, 99))
def test_answers_follow_from_the_text(task, length, seed):
    """They are what a reader of the text finds, each once, and all of them score 1."""
    sample = drawn(task, length, seed=seed)

    assert sorted(solved(sample)) == sorted(sample.answer)
    assert len(sample.answer) == {"vt": 5, "cwe": 10, "fwe": 3}.get(task, len(sample.answer))
    assert score(" ".join(sample.answer).upper(), sample.answer, "string_match_all") == 1


@pytest.mark.parametrize("task", RULER)
def test_a_length_is_met(task):
    """Prompt and response have at most so many tokens, and a line or a word more does not fit."""
    for length in (1000, 2500):
        sample = drawn(task, length)
        total = sample.tokens + sample.max_new_tokens
        assert sample.tokens == words(sample.prompt)
        assert length - 160 < total <= length


def test_numbers_of_facts_are_those_of_the_tasks():
    """Four keys, four values or four questions; and only facts where the haystack is of facts."""
    facts = {task: drawn(task).context.count("One of the special magic") for task in RULER}

    assert [facts[f"niah_single_{i}"] for i in (1, 2, 3)] == [1, 1, 1]
    assert facts["niah_multikey_1"] == facts["niah_multivalue"] == facts["niah_multiquery"] == 4
    assert facts["niah_multikey_2"] > 20
    assert [len(drawn(f"niah_{task}").answer) for task in ("multivalue", "multiquery")] == [4, 4]
    assert len(drawn("niah_single_3").answer[0]) == 36
    assert Counter(drawn("cwe", 8000).context.split())[drawn("cwe", 8000).answer[0]] == 30


def test_bad_tasks_and_lengths_are_one_line():
    """A length that the example alone exceeds, one that the documentation has not, and a name."""
    with pytest.raises(TextError, match=r"length is 100, expected at least \d+ for vt"):
        drawn("vt", 100)
    with pytest.raises(TextError, match="Python's documentation has no more"):
        drawn("niah_single_2", 10**6)
    with pytest.raises(TextError, match="task is 'qa_1', expected one of niah_single_1"):
        drawn("qa_1")
    assert not {*RULER} & {*TASKS}
