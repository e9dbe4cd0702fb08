"""Prompts in the ledger language: tasks, domains, levels of difficulty.

A task is a verb of the language with the sizes that suit it, and `needle`, which is a `get` of two
nodes in a page that is nearly all filler.
A level from 1 to 5 sets the sizes: longer pages, longer responses, and facts that recur later.
A domain sets the words (see `vocabulary.DOMAINS`).

All randomness comes from the caller's ``random.Random``, or from a seed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Annotated, Any

from kvsim.core.parameters import Between, check_fields
from kvsim.studies.language.ledger import LedgerError, Retrieval, last_sum, solve
from kvsim.tiny.vocabulary import COMMON, COUNTERS, DIGITS, DOMAINS, NODES

__all__ = ["LEVELS", "TASKS", "TOKENS", "Sample", "Size", "make", "prompts"]

TASKS = ("walk", "get", "join", "check", "wait", "fork", "needle")
#: Lines from one entry of the agenda to the next.
PERIOD = {"check": 4, "wait": 8}

MAX_KINDS = min(len(domain.kinds) for domain in DOMAINS.values())


@dataclass(frozen=True)
class Size:
    """The sizes of a sample.

    Attributes:
        facts: number of facts.
        lines: number of lines in the response, those of the agenda not counted. `get`, `join` and
            `needle` name each node at most once, so there it is capped at ``facts``; `check` takes
            one line more where the agenda would begin with the first line.
        kinds: number of kinds in the key; `wait` needs one for each entry of its agenda and takes
            that many where there are fewer.
        filler: filler sentences before a fact, on average.
        cycle: length in nodes of the cycle that a walk runs on, so a fact recurs every ``cycle``
            lines; without it, 4 to 16.
        report: number of sums in the report; without it, 1 to 4.

    Raises:
        LedgerError: a size outside its range.
    """

    facts: Annotated[int, Between(2, len(NODES))]
    lines: Annotated[int, Between(1, len(COUNTERS))]
    kinds: Annotated[int, Between(1, MAX_KINDS)] = 8
    filler: Annotated[float, Between(0, 64)] = 0.0
    cycle: Annotated[int | None, Between(1, len(NODES))] = None
    report: Annotated[int | None, Between(1, len(COUNTERS))] = None

    def __post_init__(self) -> None:
        check_fields(self, "a prompt", LedgerError)


@dataclass(frozen=True)
class Sample:
    """One prompt with its only right response.

    Attributes:
        task: one of `TASKS`.
        domain: one of `DOMAINS`.
        level: 1 to 5, or None for sizes of no level.
        prompt: the input of the model.
        response: the right response.
        retrievals: the retrievals of its words.
        facts: facts on the page.
        lines: lines of the response, those of the agenda not counted.
    """

    task: str
    domain: str
    level: int | None
    prompt: str
    response: str
    retrievals: tuple[Retrieval, ...]
    facts: int
    lines: int

    @property
    def answer(self) -> str:
        """The last sum: the digit that the chain ends on."""
        return str(last_sum(self.response.split()))

    @cached_property
    def prompt_words(self) -> int:
        """Words of the prompt."""
        return len(self.prompt.split())

    @cached_property
    def chain_words(self) -> int:
        """Words of the response before its report."""
        return self.response.split().index("done")

    @property
    def tokens(self) -> int:
        """Length of the sequence in tokens, ``<bos>`` and ``<eos>`` included."""
        return self.prompt_words + len(self.response.split()) + 2

    @property
    def reach(self) -> float:
        """Mean distance in tokens from a word back to the first word of its retrieval."""
        back = [retrieval.at - min(retrieval.path) for retrieval in self.retrievals]
        return sum(back) / len(back)

    def row(self, name: str) -> dict[str, object]:
        """Return a line of a prompt file; the right response is its `reference`, not recorded."""
        names = ("prompt", "answer", "task", "domain", "level", "facts", "lines", "tokens")
        row = {"id": name, **{key: getattr(self, key) for key in names}}
        return {**row, "reach": round(self.reach, 1), "reference": self.response}


# Each filler word has four possible successors, so that filler is easy to predict and takes little
# of the model's capacity.
_filler_rng = random.Random(11)
_FILLER_WORDS = {name: (*COMMON, *domain.nouns) for name, domain in DOMAINS.items()}
_FILLER_NEXT = {
    name: {word: _filler_rng.sample(words, 4) for word in words}
    for name, words in _FILLER_WORDS.items()
}


def _sentence(rng: random.Random, domain: str) -> list[str]:
    words = [rng.choice(_FILLER_WORDS[domain])]
    for _ in range(rng.randint(2, 7)):
        words.append(_FILLER_NEXT[domain][words[-1]][min(int(rng.expovariate(1.2)), 3)])
    return [*words, "."]


def _successors(nodes: Sequence[str], cycle: int, rng: random.Random) -> dict[str, str]:
    """Return a permutation of ``nodes``: one cycle of the first ``cycle`` nodes, then others."""
    successor: dict[str, str] = {}
    start, size = 0, cycle
    while start < len(nodes):
        group = nodes[start : start + size]
        successor.update(zip(group, [*group[1:], group[0]], strict=True))
        start, size = start + len(group), rng.randint(3, 16)
    return successor


def _agenda(rng: random.Random, verb: str, lines: int, key: dict[str, str]) -> list[str]:
    """Draw the words of the agenda: an entry every `PERIOD` lines but the last.

    A sum to check is of a line without an entry: there no other digit follows the counter.
    """
    period = PERIOD[verb]
    due = range((lines - 1) // period * period, 0, -period)
    words = ["agenda"]
    kinds = rng.sample(sorted(key), len(due)) if verb == "wait" else []
    for index, counter in enumerate(due):
        words.append(COUNTERS[counter])
        if verb == "check":
            earlier = [k for k in range(counter + 1, lines) if k % period]
            words.append(COUNTERS[rng.choice(earlier)])
        else:
            digits = [digit for digit in DIGITS if digit != key[kinds[index]]]
            words += [kinds[index], rng.choice(digits)]
        words.append(",")
    return [*words, "."]


def make(
    rng: random.Random,
    *,
    task: str,
    domain: str | None = None,
    level: int | None = None,
    **sizes: Any,
) -> Sample:
    """Draw one sample.

    Args:
        rng: source of all randomness.
        task: one of `TASKS`.
        domain: one of `DOMAINS`; without it, any.
        level: the level of the sample; it does not change sizes.
        sizes: those of `Size`.

    Raises:
        LedgerError: no such task or domain, or a size outside its range.
    """
    domain, size = domain or rng.choice(list(DOMAINS)), Size(**sizes)
    for value, known in ((task, TASKS), (domain, DOMAINS)):
        if value not in known:
            raise LedgerError(f"there is no {value!r}, expected one of {', '.join(known)}")
    facts, lines, kinds = size.facts, size.lines, size.kinds
    verb = "get" if task == "needle" else task
    listed = verb in ("get", "join")
    if listed:
        lines = min(lines, facts)
    if verb == "check" and (lines - 1) % PERIOD["check"] == 0 and lines > 1:
        lines += 1 if lines < len(COUNTERS) else -1
    if verb == "wait":
        kinds = max(kinds, (lines - 1) // PERIOD["wait"])
    nodes = rng.sample(NODES, facts)
    cycle = min(facts, size.cycle or rng.randint(min(4, facts), min(16, facts)))
    successor = _successors(nodes, cycle, rng)
    used = rng.sample(DOMAINS[domain].kinds, kinds)
    key = {kind: rng.choice(DIGITS) for kind in used}

    words = ["facts", ":"]
    for node in rng.sample(nodes, facts):
        for _ in range(int(size.filler + rng.random())):
            words += _sentence(rng, domain)
        words += [node, successor[node], rng.choice(used), "."]
    words += ["key", ":"]
    for kind, digit in key.items():
        words += [kind, digit, ","]
    words += ["question", ":", verb, COUNTERS[lines - 1]]
    if listed:
        # Every item ends in a comma, also the last: heads that find the next item through the comma
        # then need no exception for the last item.
        for node in rng.sample(nodes, lines):
            words += [node, ","]
    else:
        words.append(rng.choice(nodes[:cycle]))
    words.append(".")
    if verb in PERIOD:
        words += _agenda(rng, verb, lines, key)
    # A line with a check has two digits that follow its counter; the report leaves it out.
    free = [k for k in range(1, lines) if verb != "check" or k % PERIOD["check"]]
    reports = min(size.report or rng.randint(1, 4), len(free) + 1)
    reported = [*rng.sample(free, reports - 1), 0]
    words += ["report", *(COUNTERS[k] for k in reported), ".", "think", ":"]
    prompt = " ".join(words)
    return Sample(task, domain, level, prompt, *solve(prompt), facts, lines)


_FACTS = (16, 28, 44, 64, 96)
_KINDS = (8, 10, 12, 14, 16)
_FILLER = (0.1, 0.15, 0.2, 0.3, 0.3)
_CYCLES = (5, 9, 16, 32, 64)


def _sizes(lines: Sequence[int]) -> tuple[Size, ...]:
    return tuple(map(Size, _FACTS, lines, _KINDS, _FILLER, _CYCLES, [3] * 5))


#: Sizes of levels 1 to 5 for each task.
LEVELS: dict[str, tuple[Size, ...]] = {
    "walk": _sizes((24, 40, 60, 84, 108)),
    "get": _sizes((12, 22, 36, 52, 72)),
    "join": _sizes((12, 22, 36, 52, 72)),
    "check": _sizes((19, 32, 48, 68, 88)),
    "wait": _sizes((21, 36, 54, 75, 96)),
    "fork": _sizes((24, 40, 60, 84, 108)),
    "needle": tuple(Size(8, 2, 6, filler, report=3) for filler in (4, 7, 11, 16, 22)),
}
#: Tokens of a sequence, response included, at levels 1 to 5 of any task: from, to.
TOKENS = ((200, 330), (330, 510), (520, 760), (780, 1110), (1120, 1470))
#: Sizes without a level: sequences of about 500 tokens. A needle has the sizes of its level 3.
DEFAULT = Size(facts=32, lines=48, kinds=12, filler=0.1, report=3)


def prompts(
    n: int,
    seed: int = 0,
    *,
    task: str | None = None,
    level: int | None = None,
    domain: str | None = None,
    **sizes: Any,
) -> list[Sample]:
    """Draw ``n`` samples, equal for equal arguments.

    Without a task they alternate among all tasks, without a domain among all domains. Without a
    level, ``sizes`` (facts, lines, filler, kinds, report, cycle: see `make`) default to `DEFAULT`.

    Raises:
        LedgerError: no such task, domain or level, a size outside its range, or a size together
            with a level.
    """
    given = {name: size for name, size in sizes.items() if size is not None}
    if level is not None and (given or level not in range(1, 1 + len(TOKENS))):
        raise LedgerError(
            f"level is {level}, and of sizes {', '.join(given) or 'none'} are given; expected 1 to "
            f"{len(TOKENS)}, which sets all sizes, or sizes"
        )
    rng = random.Random(f"ledger {seed}")
    samples = []
    for index in range(n):
        name = task or TASKS[index % len(TASKS)]
        levels = LEVELS.get(name, LEVELS["walk"])
        size = levels[(level or 3) - 1]
        if level is None:
            size = replace(size if name == "needle" else DEFAULT, **given)
        subject = domain or list(DOMAINS)[index % len(DOMAINS)]
        samples.append(make(rng, task=name, domain=subject, level=level, **asdict(size)))
    return samples
