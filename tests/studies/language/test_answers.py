"""The words that an answer of the shipped models rests on, and the check of a response."""

import pytest

from kvsim.errors import GoldError
from kvsim.studies.language import ledger, tasks
from kvsim.studies.language.answers import answer_check, answer_facts


@pytest.mark.parametrize("task", tasks.TASKS)
@pytest.mark.parametrize("seed", range(5))
def test_answer_facts_are_enough_and_all_needed(task, seed):
    """A prompt of them alone has the same answer, and without any one of them it has none."""
    sample = tasks.prompts(1, seed, task=task, facts=20, lines=12, filler=0.4)[0]
    words = ["<bos>", *sample.prompt.split(), *sample.response.split()]
    prompt_len = 1 + len(sample.prompt.split())
    gold = answer_facts(words[:prompt_len], "text")
    key, question = words.index("key"), words.index("question")
    stated = [words[at : at + 3] for at in gold if at < key and at - 1 not in gold]
    given = [words[at : at + 2] for at in gold if key < at < question and words[at].isalpha()]
    asked = words[question:prompt_len]
    needed = sum(at > question for at in gold)
    assert sorted(gold) == gold
    assert len(gold) == 3 * len(stated) + 2 * len(given) + needed
    # all of the question but its marks and its verb
    marks = {"question", ":", ",", ".", "agenda", "report", "think"}
    assert needed == len([word for word in asked if word not in marks]) - 1

    def prompt(facts, entries):
        page = [word for fact in facts for word in (*fact, ".")]
        digits = [word for entry in entries for word in (*entry, ",")]
        return " ".join(["facts", ":", *page, "key", ":", *digits, *asked])

    assert ledger.solve(prompt(stated, given)).response == sample.response
    for parts in (stated, given):
        for part in list(parts):
            parts.remove(part)
            with pytest.raises(ledger.LedgerError, match="which line"):
                ledger.solve(prompt(stated, given))
            parts.append(part)


def test_answer_facts_of_another_prompt():
    """Only prompts of the shipped model's tasks have them."""
    for words in ([], ["once", "upon", "a", "time"]):
        with pytest.raises(GoldError, match=r"^text: the prompt is no task of the shipped"):
            answer_facts(words, "text")


def test_a_check_says_what_a_trace_stores():
    """Right and wrong responses, and prompts outside the language, which have no right one."""
    sample = tasks.prompts(1, task="walk", level=1)[0]
    right = answer_check(sample.prompt, sample.response)
    wrong = answer_check(sample.prompt, "done : #0 1 .")

    assert (right["kind"], right["right"], wrong["right"]) == ("ledger", True, False)
    assert right["expected"] == wrong["expected"] == sample.response
    assert answer_check("once upon a time", "done").keys() == {"kind", "right", "reason"}
