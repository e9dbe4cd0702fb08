"""Answers under judged evictions."""

from __future__ import annotations

import math
from dataclasses import replace

from kvsim import Trace
from kvsim.core.outcome import Generated, Outcome
from kvsim.text.answers import is_right

#: The metric of the answers.
ANSWER = "answer_kept"


def answered(trace: Trace, outcome: Outcome) -> Outcome:
    """The outcome with what the model would write, if it answers right with the full cache.

    Where the only event is after the prompt, the judged rows are those of greedy decoding up to the
    first token that differs; the answer is kept if there is none before it is complete.
    """
    check, texts = trace.meta.get("answer_check") or {}, trace.token_text
    if not check.get("right") or "expected" not in check or not texts or outcome.forced is None:
        return outcome
    response = texts[trace.prompt_len :]
    whole = (
        n for n in range(1, len(response) + 1) if is_right("".join(response[:n]), check["expected"])
    )
    until = next(whole, len(response))
    kept = bool(outcome.forced.agreement[:until].all())
    return replace(outcome, generated=Generated((), kept, None, full_right=True, seconds=math.nan))
