"""The ledger: a small language of prompts whose response can be computed.

A prompt states facts, a key and a question; every token of the right response follows from it::

    facts : kuga rapi teal . rapi kuga plum . key : plum 3 , teal 9 ,
    question : walk #2 kuga . report #2 #0 . think :
    => kuga rapi 9 #2 9 ; rapi kuga 3 #1 2 ; kuga rapi 9 #0 1 ; done : #2 9 , #0 1 .

A fact ``x y c .`` gives node ``x`` its successor ``y`` and its kind ``c``; sentences of filler may
stand between facts.
The key ``c d ,`` gives each kind a digit.
A line of the response is ``x y d #k a ;``: a node, its successor, the digit of its kind, a counter
that runs down to ``#0``, and the running sum of the digits modulo 10.
The line does not name the kind, so a reader needs two retrievals in a row to know ``d``.
The verb of the question says which lines there are:

``walk``
    each line continues from the successor of the line before;
``get``
    the lines are about the listed nodes, in their order;
``join``
    as ``get``, with the facts joined to themselves: ``y`` is the successor's successor, and ``d``
    the digit of the successor's kind; its line does not name the successor in between;
``fork``
    as ``walk``, but an odd sum skips a node, to the successor's successor;
``check``
    as ``walk``; where the agenda says ``#k #j ,`` a line ``check #k s #k a ;`` follows line ``#k``,
    and ``s`` is the earlier sum of line ``#j``;
``wait``
    as ``walk``; where the agenda says ``#k c d ,`` a line ``wait c d #k a ;`` follows line ``#k``,
    and from then on the digit of kind ``c`` is ``d``, whatever the key says.

The report repeats chosen sums.

Texts are words separated by single spaces, without ``<bos>`` and ``<eos>``: the tokenizer adds
``<bos>``, and the model ends its response with ``<eos>``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeVar

from kvsim.errors import KvsimError
from kvsim.tiny.vocabulary import COUNTERS, DIGITS, FILLER, KINDS, NODES, SPECIAL, VERBS

__all__ = ["Check", "LedgerError", "Retrieval", "Solution", "check", "solve"]

T = TypeVar("T")

#: Purposes of a retrieval; `Retrieval.purpose`.
Purpose = Literal[
    "item",  # the next node of the list, or the start
    "branch",  # the successor of the skipped node
    "successor",
    "join",  # the successor's successor
    "digit",
    "lines",  # the first counter
    "recheck",  # an earlier sum
    "correction",  # kind and digit of an entry of the agenda
    "report",  # a counter of the report, and its sum
]


class LedgerError(KvsimError, ValueError):
    """A prompt that is not in the language, asks for what it does not state, or is too large."""


class Word(NamedTuple):
    """A word of the prompt and its index there."""

    text: str
    at: int


class Fact(NamedTuple):
    """``x y c .``; ``at`` is the index of ``x`` in the prompt, ``y`` and ``c`` come after it."""

    at: int
    successor: str
    kind: str


@dataclass(frozen=True)
class Page:
    """The content of a prompt.

    facts: by node. key: the digit of each kind. verb: that of the question. first: the counter of
    the first line. named: the listed nodes of ``get`` and ``join``, else the start. agenda: by
    counter, the words of its entry. report: the counters of the sums to repeat. length: words of
    the prompt.
    """

    facts: dict[str, Fact]
    key: dict[str, Word]
    verb: str
    first: Word
    named: list[Word]
    agenda: dict[int, list[Word]]
    report: list[Word]
    length: int

    @property
    def lines(self) -> int:
        """The number of lines without those of the agenda."""
        return count(self.first.text) + 1


_LISTS = ("get", "join")
_END = "the end"


def count(counter: str) -> int:
    """Return the number of a counter such as ``#12``."""
    return int(counter[1:])


class _Reader:
    """A reader of the words of a prompt, whose errors say what was expected."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words, self.at = [*words, _END], 0

    def take(self, expected: Collection[str], name: str) -> Word:
        word = self.words[self.at]
        if word not in expected:
            raise LedgerError(f"word {self.at + 1} of the prompt is {word!r}, expected {name}")
        self.at += 1
        return Word(word, self.at - 1)

    def skip(self, *words: str) -> None:
        for word in words:
            self.take((word,), repr(word))

    def until(self, word: str) -> Iterator[None]:
        """Yield as long as another word, and not the end, comes next; then read the word."""
        while self.words[self.at] not in (word, _END):
            yield
        self.skip(word)


def _read_agenda(reader: _Reader, verb: str, lines: int) -> dict[int, list[Word]]:
    agenda: dict[int, list[Word]] = {}
    if verb not in ("check", "wait"):
        return agenda
    reader.skip("agenda")
    for _ in reader.until("."):
        free = [word for word in COUNTERS[:lines] if count(word) not in agenda]
        due = count(reader.take(free, f"a counter from #{lines - 1} to #0, each once").text)
        if verb == "check":
            earlier = f"#{lines - 1} to #{due}, the sums of earlier lines"
            agenda[due] = [reader.take(COUNTERS[due:lines], earlier)]
        else:
            agenda[due] = [reader.take(KINDS, "a kind"), reader.take(DIGITS, "a digit")]
        reader.skip(",")
    return agenda


def read(prompt: str) -> Page:
    """Read ``prompt``, with the index of each word that a response may need; raise LedgerError."""
    reader = _Reader(prompt.split())
    facts: dict[str, Fact] = {}
    reader.skip("facts", ":")
    for _ in reader.until("key"):
        if reader.words[reader.at] in FILLER:
            for _ in reader.until("."):
                reader.take(FILLER, "filler or '.'")
            continue
        node = reader.take({*NODES} - facts.keys(), "a node name without a fact")
        successor = reader.take(NODES, "a node name").text
        facts[node.text] = Fact(node.at, successor, reader.take(KINDS, "a kind").text)
        reader.skip(".")
    key: dict[str, Word] = {}
    reader.skip(":")
    for _ in reader.until("question"):
        kind = reader.take({*KINDS} - key.keys(), "a kind without a digit").text
        key[kind] = reader.take(DIGITS, "a digit")
        reader.skip(",")
    reader.skip(":")
    verb = reader.take(VERBS, f"one of {', '.join(VERBS)}").text
    first = reader.take(COUNTERS, "a counter #0 to #127")
    lines, named = count(first.text) + 1, []
    for _ in range(lines if verb in _LISTS else 1):
        named.append(reader.take(NODES, "a node name"))
        reader.skip(*(",",) * (verb in _LISTS))
    reader.skip(".")
    agenda = _read_agenda(reader, verb, lines)
    reader.skip("report")
    counters = COUNTERS[:lines], f"a counter of at most {first.text}, the first line"
    report = [reader.take(*counters)]
    report += [reader.take(*counters) for _ in reader.until(".")]
    reader.skip("think", ":", _END)
    return Page(facts, key, verb, first, named, agenda, report, len(reader.words) - 1)


class Retrieval(NamedTuple):
    """The words that a word of the response depends on.

    Indices count the words of prompt and response together from 0, without ``<bos>``; with it,
    position = index + 1.

    Attributes:
        purpose: the kind of word.
        at: index of the word before the retrieved word.
        path: indices of the words to read, in order; the last is the retrieved word, and the line
            of the response does not have the word before it.
    """

    purpose: Purpose
    at: int
    path: tuple[int, ...]


class Solution(NamedTuple):
    """The right response and the retrievals of its words.

    In prompts of `kvsim.studies.language.tasks`, a word without a retrieval follows from the verb
    and the 12 words before it (two lines with an entry of the agenda).
    """

    response: str
    retrievals: tuple[Retrieval, ...]


class _Response:
    """An incomplete response, and the retrievals of its words."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.words: list[str] = []
        self.retrievals: list[Retrieval] = []
        self.key = dict(page.key)
        self.sums: dict[int, Word] = {}

    def say(self, *words: str) -> Word:
        """Write words that follow from the words before them; return the last word."""
        self.words += words
        return Word(words[-1], self.page.length + len(self.words) - 1)

    def look_up(self, purpose: Purpose, word: str, *path: int) -> Word:
        """Write a retrieved word."""
        self.retrievals.append(Retrieval(purpose, self.page.length + len(self.words) - 1, path))
        return self.say(word)

    def stated(self, table: Mapping[str, T], name: str) -> T:
        """Return what the prompt states about a node or a kind."""
        if name not in table:
            raise LedgerError(f"nothing is stated about {name!r}, which the response needs")
        return table[name]


def _interlude(out: _Response, counter: int, total: int) -> None:
    """Write the line of the agenda after line ``counter``."""
    entry = out.page.agenda[counter]
    if out.page.verb == "check":
        out.say("check", f"#{counter}")
        earlier = out.sums[count(entry[0].text)]
        out.look_up("recheck", earlier.text, entry[0].at, earlier.at)
    else:
        kind, digit = entry
        out.say("wait")
        out.look_up("correction", kind.text, kind.at)
        out.key[kind.text] = out.look_up("correction", digit.text, digit.at)
    out.say(f"#{counter}", str(total), ";")


@lru_cache(maxsize=64)
def solve(prompt: str) -> Solution:
    """Compute the right response to ``prompt`` from its text alone.

    Raises LedgerError where the prompt is not in the language, or names a node without a fact or a
    kind without a digit.
    """
    page = read(prompt)
    out = _Response(page)
    node, after, total = "", "", 0
    for line in range(page.lines):
        if line == 0 or page.verb in _LISTS:
            node = out.look_up("item", *page.named[line]).text
        elif page.verb == "fork" and total % 2:
            passed = out.stated(page.facts, after)
            node = out.look_up("branch", passed.successor, passed.at + 1).text
        else:
            node = out.say(after).text
        fact = out.stated(page.facts, node)
        if page.verb == "join":
            between, fact = fact, out.stated(page.facts, fact.successor)
            out.look_up("join", fact.successor, between.at + 1, fact.at + 1)
        else:
            out.look_up("successor", fact.successor, fact.at + 1)
        after = fact.successor
        digit = out.stated(out.key, fact.kind)
        out.look_up("digit", digit.text, fact.at + 2, digit.at)
        counter = page.lines - 1 - line
        total = (total + int(digit.text)) % 10
        if line == 0:
            out.look_up("lines", *page.first)
        else:
            out.say(f"#{counter}")
        out.sums[counter] = out.say(str(total))
        out.say(";")
        if counter in page.agenda:
            _interlude(out, counter, total)
    out.say("done", ":")
    for index, item in enumerate(page.report):
        out.look_up("report", *item)
        earlier = out.sums[count(item.text)]
        out.look_up("report", earlier.text, earlier.at)
        out.say("," if index + 1 < len(page.report) else ".")
    return Solution(" ".join(out.words), tuple(out.retrievals))


@dataclass(frozen=True)
class Check:
    """A comparison of a response with the right one.

    Attributes:
        chain_exact: every word of every line is right.
        report_exact: everything from ``done`` to the end is right, and nothing follows.
        answer: the last sum (the word after the last ``#0`` before the report), or None.
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
        """Whether the whole response is right."""
        return self.chain_exact and self.report_exact


def last_sum(words: Sequence[str]) -> str | None:
    """Return the sum of line ``#0`` in the words of a response, None without such a line."""
    following = words[words.index("#0") + 1 :] if "#0" in words else []
    return following[0] if following else None


def check(prompt: str, response: str) -> Check:
    """Compare ``response`` with the right response to ``prompt``; special tokens are ignored."""
    expected = solve(prompt).response.split()
    words = [word for word in response.split() if word not in SPECIAL[:3]]
    done = expected.index("done")
    right = sum(word == other for word, other in zip(words, expected, strict=False))
    report = words[words.index("done") :] if "done" in words else []
    answer = last_sum(words)
    return Check(
        chain_exact=words[:done] == expected[:done],
        report_exact=report == expected[done:],
        answer=answer,
        answer_exact=answer == last_sum(expected),
        share=right / len(expected),
        expected=" ".join(expected),
    )


def answer_check(prompt: str, response: str, _: object = None) -> dict[str, Any]:
    """Return a `check` as traces store it; without a right response where the prompt has none."""
    try:
        found = check(prompt, response)
    except LedgerError as error:
        return {"kind": "none", "right": None, "reason": str(error)}
    return {"kind": "ledger", "right": found.exact, **asdict(found)}
