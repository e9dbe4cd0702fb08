"""The ledger: a small language of prompts whose whole answer can be computed.

A prompt states facts, a key and a question; every token of the right response follows from it::

    facts : kuga rapi teal . rapi kuga plum . key : plum 3 , teal 9 ,
    question : walk #2 kuga . report #2 #0 . think :
    => kuga rapi 9 #2 9 ; rapi kuga 3 #1 2 ; kuga rapi 9 #0 1 ; done : #2 9 , #0 1 .

A fact ``x y c .`` gives node ``x`` its successor ``y`` and its colour ``c``; sentences of filler
may stand between facts.
The key ``c d ,`` gives each colour its digit.
A line of the response is ``x y d #k a ;``: node, successor, digit of the colour of ``x``, a counter
that runs down to ``#0``, and the running sum of the digits modulo 10.
The colour itself is never written, so a reader needs two retrievals in a row to know ``d``.
``walk`` follows successors from a start; ``get`` takes a list of nodes in the order given.
The report repeats chosen running sums.

Texts are words separated by single spaces, without ``<bos>`` and ``<eos>``: the tokenizer puts
``<bos>`` in front, and the model ends its response with ``<eos>``.

    python -m kvsim.tiny.ledger --task walk --facts 32 --lines 64 --n 3 --seed 0
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from kvsim.errors import KvsimError
from kvsim.tiny.vocabulary import (
    COLOURS,
    COUNTERS,
    DIGITS,
    FILLER,
    ID,
    NODES,
    SPECIAL,
    VOCAB,
    unknown_words,
)

__all__ = [
    "COLOURS",
    "ID",
    "VOCAB",
    "Check",
    "LedgerError",
    "Lookup",
    "Sample",
    "Task",
    "check",
    "make",
    "prompts",
    "solve",
    "unknown_words",
]

Task = Literal["walk", "get"]
TASKS: tuple[Task, ...] = get_args(Task)

MAX_FACTS = len(NODES)
MAX_LINES = len(COUNTERS)


class LedgerError(KvsimError, ValueError):
    """A prompt that is not in the language, asks for what it does not state, or is too large."""


# --- samples ---


class Lookup(NamedTuple):
    """The two retrievals behind one line: where they are needed and what they find.

    ``response_index`` is the word of the response (the line's ``y``) after which the digit is
    due, ``colour`` the value in the middle, ``prompt_index`` the word of the prompt that holds
    the digit. Both indices count words from 0, special tokens not included.
    """

    response_index: int
    colour: str
    prompt_index: int


@dataclass(frozen=True)
class Sample:
    """One prompt with its only right response; ``lookups`` has one entry for each line."""

    task: Task
    prompt: str
    response: str
    facts: int
    lines: int
    lookups: tuple[Lookup, ...]

    @property
    def answer(self) -> str:
        """The last running sum: the digit that the chain ends on."""
        return self.response.split()[6 * self.lines - 2]

    @property
    def tokens(self) -> int:
        """Length of the sequence in tokens, ``<bos>`` and ``<eos>`` included."""
        return len(self.prompt.split()) + len(self.response.split()) + 2


# A filler word is followed by one of four words, so that filler is cheap to predict and a model
# of this size need not spend capacity on it.
_filler_rng = random.Random(11)
_FILLER_NEXT = {word: _filler_rng.sample(FILLER, 4) for word in FILLER}


def _filler_sentence(rng: random.Random) -> list[str]:
    words = [rng.choice(FILLER)]
    for _ in range(rng.randint(2, 7)):
        words.append(_FILLER_NEXT[words[-1]][min(int(rng.expovariate(1.2)), 3)])
    return [*words, "."]


def _successors(nodes: Sequence[str], cycle: int, rng: random.Random) -> dict[str, str]:
    """A permutation of ``nodes``: the first ``cycle`` of them form one cycle, the rest others."""
    successor: dict[str, str] = {}
    start, size = 0, cycle
    while start < len(nodes):
        group = nodes[start : start + size]
        successor.update(zip(group, [*group[1:], group[0]], strict=True))
        start, size = start + len(group), rng.randint(3, 16)
    return successor


def _within(name: str, value: int, low: int, high: int) -> int:
    if not low <= value <= high:
        raise LedgerError(f"{name} is {value}, expected {low} to {high}")
    return value


def make(
    rng: random.Random,
    *,
    facts: int,
    lines: int,
    task: Task | None = None,
    filler: float = 0.0,
    colours: int = 8,
    report: int | None = None,
    cycle: int | None = None,
) -> Sample:
    """Draw one sample.

    Args:
        rng: source of all randomness.
        facts: number of facts, 2 to 160.
        lines: number of lines in the response, 1 to 128; ``get`` names each node at most once,
            so there it is capped at ``facts``.
        task: ``walk`` or ``get``; without it, ``get`` with probability 2/3.
        filler: probability of a filler sentence before a fact.
        colours: number of colours in the key, 1 to 24.
        report: number of running sums in the report; without it, 1 to 4.
        cycle: length in nodes of the cycle that ``walk`` runs on, so a fact recurs every
            ``cycle`` lines; without it, 4 to 16.

    Raises:
        LedgerError: a size is outside its range.
    """
    _within("facts", facts, 2, MAX_FACTS)
    _within("lines", lines, 1, MAX_LINES)
    _within("colours", colours, 1, len(COLOURS))
    _within("report", 1 if report is None else report, 1, MAX_LINES)
    _within("cycle", 1 if cycle is None else cycle, 1, MAX_FACTS)
    if task is None:
        task = TASKS[rng.choice((0, 1, 1))]
    lines = min(lines, facts) if task == "get" else lines
    nodes = rng.sample(NODES, facts)
    cycle = min(facts, cycle or rng.randint(min(4, facts), min(16, facts)))
    successor = _successors(nodes, cycle, rng)
    used = rng.sample(COLOURS, colours)
    key = {colour: rng.choice(DIGITS) for colour in used}
    colour_of = {node: rng.choice(used) for node in nodes}

    prompt = ["facts", ":"]
    for node in rng.sample(nodes, facts):
        if rng.random() < filler:
            prompt += _filler_sentence(rng)
        prompt += [node, successor[node], colour_of[node], "."]
    prompt += ["key", ":"]
    digit_index: dict[str, int] = {}
    for colour, digit in key.items():
        digit_index[colour] = len(prompt) + 1
        prompt += [colour, digit, ","]

    count = min(rng.randint(1, 4) if report is None else report, lines)
    reported = [*rng.sample(range(1, lines), count - 1), 0]
    prompt += ["question", ":", task, COUNTERS[lines - 1]]
    if task == "walk":
        visited = [rng.choice(nodes[:cycle])]
        while len(visited) < lines:
            visited.append(successor[visited[-1]])
        prompt.append(visited[0])
    else:
        visited = rng.sample(nodes, lines)
        # Every item ends in a comma, the last one too: heads that find the next item through
        # the comma after it then need no exception for the last.
        for node in visited:
            prompt += [node, ","]
    prompt += [".", "report", *(COUNTERS[k] for k in reported), ".", "think", ":"]

    digits = [key[colour_of[node]] for node in visited]
    response = _response(visited, [successor[node] for node in visited], digits, reported)
    lookups = tuple(
        Lookup(6 * line + 1, colour_of[node], digit_index[colour_of[node]])
        for line, node in enumerate(visited)
    )
    return Sample(task, " ".join(prompt), " ".join(response), facts, lines, lookups)


def prompts(
    n: int,
    seed: int = 0,
    *,
    task: Task | None = None,
    facts: int = 32,
    lines: int = 48,
    filler: float = 0.1,
    colours: int = 12,
    report: int | None = 3,
    cycle: int | None = None,
) -> list[Sample]:
    """``n`` samples of one size, the same for the same arguments; without a task, alternating.

    The defaults make sequences of about 500 tokens that the shipped model answers.
    """
    rng = random.Random(f"ledger {seed}")
    return [
        make(
            rng,
            facts=facts,
            lines=lines,
            task=task or TASKS[index % 2],
            filler=filler,
            colours=colours,
            report=report,
            cycle=cycle,
        )
        for index in range(n)
    ]


# --- the exact response ---


def _response(
    nodes: Sequence[str], successors: Sequence[str], digits: Sequence[str], reported: Sequence[int]
) -> list[str]:
    words: list[str] = []
    sums: dict[int, int] = {}
    total = 0
    for line, (node, successor, digit) in enumerate(zip(nodes, successors, digits, strict=True)):
        counter = len(nodes) - 1 - line
        total = sums[counter] = (total + int(digit)) % 10
        words += [node, successor, digit, f"#{counter}", str(total), ";"]
    words += ["done", ":"]
    for counter in reported:
        words += [f"#{counter}", str(sums[counter]), ","]
    words[-1] = "."
    return words


_NODE_SET, _COLOUR_SET, _FILLER_SET = frozenset(NODES), frozenset(COLOURS), frozenset(FILLER)
_DIGIT_SET, _COUNTER_SET = frozenset(DIGITS), frozenset(COUNTERS)


class _Reader:
    """Walks through the words of a prompt and says what was expected where it fails."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = words
        self.at = 0

    def peek(self) -> str:
        return self.words[self.at] if self.at < len(self.words) else "the end"

    def take(self, allowed: frozenset[str], expected: str) -> str:
        word = self.peek()
        if word not in allowed:
            raise LedgerError(f"word {self.at + 1} of the prompt is {word!r}, expected {expected}")
        self.at += 1
        return word

    def skip(self, *words: str) -> None:
        for word in words:
            self.take(frozenset({word}), repr(word))

    def node(self) -> str:
        return self.take(_NODE_SET, "a node name")

    def counter(self) -> int:
        return int(self.take(_COUNTER_SET, "a counter #0 to #127")[1:])


def _read_facts(reader: _Reader) -> tuple[dict[str, str], dict[str, str]]:
    """Successor and colour of each node that has a fact."""
    successor: dict[str, str] = {}
    colour_of: dict[str, str] = {}
    reader.skip("facts", ":")
    while reader.peek() != "key":
        if reader.peek() in _FILLER_SET:
            while reader.peek() in _FILLER_SET:
                reader.at += 1
            reader.skip(".")
            continue
        node = reader.node()
        if node in successor:
            raise LedgerError(f"two facts about {node!r}, expected one")
        successor[node] = reader.node()
        colour_of[node] = reader.take(_COLOUR_SET, "a colour")
        reader.skip(".")
    return successor, colour_of


def _read_key(reader: _Reader) -> dict[str, str]:
    """Digit of each colour."""
    key: dict[str, str] = {}
    reader.skip("key", ":")
    while reader.peek() != "question":
        colour = reader.take(_COLOUR_SET, "a colour")
        if colour in key:
            raise LedgerError(f"two digits for {colour!r} in the key, expected one")
        key[colour] = reader.take(_DIGIT_SET, "a digit")
        reader.skip(",")
    return key


def _read_question(reader: _Reader) -> tuple[str, int, list[str]]:
    """Task, number of lines, and the nodes named: the start of a walk or the list of a get."""
    reader.skip("question", ":")
    task = reader.take(frozenset(TASKS), "'walk' or 'get'")
    lines = reader.counter() + 1
    named = []
    while reader.peek() != ".":
        named.append(reader.node())
        if task == "walk":
            break
        reader.skip(",")
    reader.skip(".")
    if task == "get" and len(named) != lines:
        raise LedgerError(f"get #{lines - 1} lists {len(named)} nodes, expected {lines}")
    if not named:
        raise LedgerError("walk names no start, expected one node")
    return task, lines, named


def _read_report(reader: _Reader, lines: int) -> list[int]:
    reader.skip("report")
    reported = [reader.counter()]
    while reader.peek() != ".":
        reported.append(reader.counter())
    if max(reported) >= lines:
        raise LedgerError(
            f"the report asks for #{max(reported)}, expected at most #{lines - 1}, the first line"
        )
    return reported


def solve(prompt: str) -> str:
    """The right response to ``prompt``, computed from its text alone.

    Raises:
        LedgerError: the prompt is not in the language, or names a node without a fact or a
            colour without a digit.
    """
    reader = _Reader(prompt.split())
    successor, colour_of = _read_facts(reader)
    key = _read_key(reader)
    task, lines, named = _read_question(reader)
    reported = _read_report(reader, lines)
    reader.skip(".", "think", ":")
    if reader.at < len(reader.words):
        raise LedgerError(f"the prompt goes on with {reader.peek()!r} after 'think :'")

    visited: list[str] = []
    digits: list[str] = []
    for line in range(lines):
        node = named[line] if task == "get" or line == 0 else successor[visited[-1]]
        if node not in successor:
            raise LedgerError(f"no fact about {node!r}, which line {line + 1} needs")
        if colour_of[node] not in key:
            raise LedgerError(f"no digit for {colour_of[node]!r}, which line {line + 1} needs")
        visited.append(node)
        digits.append(key[colour_of[node]])
    return " ".join(_response(visited, [successor[node] for node in visited], digits, reported))


# --- judging a response ---


@dataclass(frozen=True)
class Check:
    """How a response compares with the right one.

    Attributes:
        chain_exact: every word of every line is right.
        report_exact: everything from ``done`` to the end is right, and nothing follows.
        answer: the last running sum (the word after the first ``#0``), None if there is none.
        answer_exact: ``answer`` is the right digit.
        share: share of the expected words found at their position, 0 to 1.
        expected: the right response.
    """

    chain_exact: bool
    report_exact: bool
    answer: str | None
    answer_exact: bool
    share: float
    expected: str

    @property
    def exact(self) -> bool:
        """The whole response is right."""
        return self.chain_exact and self.report_exact


def _last_sum(words: Sequence[str]) -> str | None:
    following = words[words.index("#0") + 1 :] if "#0" in words else []
    return following[0] if following else None


def check(prompt: str, response: str) -> Check:
    """Compare ``response`` with the right response to ``prompt``; special tokens are ignored."""
    expected = solve(prompt).split()
    words = [word for word in response.split() if word not in SPECIAL[:3]]
    done = expected.index("done")
    right = sum(word == other for word, other in zip(words, expected, strict=False))
    report = words[words.index("done") :] if "done" in words else []
    answer = _last_sum(words)
    return Check(
        chain_exact=words[:done] == expected[:done],
        report_exact=report == expected[done:],
        answer=answer,
        answer_exact=answer == _last_sum(expected),
        share=right / len(expected),
        expected=" ".join(expected),
    )


# --- command line ---


def main(argv: Sequence[str] | None = None) -> None:
    """Print samples as JSON lines, in the form that ``kvsim capture --prompts`` reads."""
    parser = argparse.ArgumentParser(prog="python -m kvsim.tiny.ledger", description=main.__doc__)
    parser.add_argument("--task", choices=TASKS, help="default: both, alternating")
    parser.add_argument("--facts", type=int, default=32)
    parser.add_argument("--lines", type=int, default=48)
    parser.add_argument("--filler", type=float, default=0.1, help="filler probability per fact")
    parser.add_argument("--colours", type=int, default=12)
    parser.add_argument("--report", type=int, default=3, help="running sums in the report")
    parser.add_argument("--cycle", type=int, help="nodes in the cycle of a walk; default 4 to 16")
    parser.add_argument("--n", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = vars(parser.parse_args(argv))
    n, seed = options.pop("n"), options.pop("seed")
    try:
        samples = prompts(n, seed, **options)
    except LedgerError as error:
        parser.error(str(error))
    for index, sample in enumerate(samples):
        row = {
            "id": f"{sample.task}-f{sample.facts}-l{sample.lines}-s{seed}-{index}",
            "prompt": sample.prompt,
            "answer": sample.answer,
            "task": sample.task,
            "facts": sample.facts,
            "lines": sample.lines,
            "tokens": sample.tokens,
            "response": sample.response,
        }
        print(json.dumps(row))


if __name__ == "__main__":
    main()
