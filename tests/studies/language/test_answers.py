"""The check of a response of the shipped models."""

from kvsim.studies.language import tasks
from kvsim.studies.language.answers import answer_check


def test_a_check_says_what_a_trace_stores():
    """Right and wrong responses, and prompts outside the language, which have no right one."""
    sample = tasks.prompts(1, task="walk", level=1)[0]
    right = answer_check(sample.prompt, sample.response)
    wrong = answer_check(sample.prompt, "done : #0 1 .")

    assert (right["kind"], right["right"], wrong["right"]) == ("ledger", True, False)
    assert right["expected"] == wrong["expected"] == sample.response
    assert answer_check("once upon a time", "done").keys() == {"kind", "right", "reason"}
