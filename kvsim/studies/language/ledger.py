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

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeVar

from kvsim.errors import KvsimError
from kvsim.tiny.vocabulary import COUNTERS, DIGITS, FILLER, KINDS, MARKS, NODES, SPECIAL, VERBS

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
    """A prompt outside the language, with a question on unstated facts, or too large."""


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


def count(counter: str) -> int:
    """Return the number of a counter such as ``#12``."""
    return int(counter[1:])


#: A letter for each word: a prompt is a string in which the place of a letter is the index of its
#: word. Verbs are `v`, those with lists `l`, with an agenda of sums `s` or of corrections `t`.
_LETTERS = {mark: mark[0].upper() for mark in MARKS}
_LETTERS |= dict(zip(VERBS, "vllstv", strict=True))
_LETTERS |= {
    word: letter
    for words, letter in ((NODES, "n"), (KINDS, "k"), (DIGITS, "d"), (COUNTERS, "c"), (FILLER, "f"))
    for word in words
}

#: The parts of a prompt in order, and the expected part in errors.
_PARTS = {
    r"F:": "'facts :'",
    r"(?:nnk\.|f+\.)*": "",
    r"K:": "a fact, filler or 'key :'",
    r"(?:kd,)*": "",
    r"Q:": "a kind with its digit, or 'question :'",
    r"vcn\.|lc(?:n,)+\.|scn\.A(?:cc,)*\.|tcn\.A(?:ckd,)*\.": f"one of {', '.join(VERBS)}, with all "
    "that it asks for",
    r"Rc+\.": "'report' with counters",
    r"T:\Z": "'think :' at the end",
}


def read(prompt: str) -> Page:
    """Read ``prompt``, with the index of each word that a response may need; raise LedgerError."""
    words, end, spans = prompt.split(), 0, []
    letters = "".join(_LETTERS.get(word, "?") for word in words)
    for form, expected in _PARTS.items():
        found = re.compile(form).match(letters, end)
        if found is None:
            wrong = repr(" ".join(words[end : end + 4])) if words[end:] else "the end"
            raise LedgerError(f"word {end + 1} of the prompt begins {wrong}, expected {expected}")
        end = found.end()
        spans.append(found.span())
    _, facts_at, _, key_at, _, asked_at, report_at, _ = spans

    def all_of(form: str, span: tuple[int, int]) -> Iterator[list[Word]]:
        for found in re.compile(form).finditer(letters, *span):
            yield [Word(words[at], at) for at in range(*found.span())]

    verb, first = words[asked_at[0]], Word(words[asked_at[0] + 1], asked_at[0] + 1)
    named = [node for (node,) in all_of("n", asked_at)]
    if verb in _LISTS and len(named) != count(first.text) + 1:
        raise LedgerError(f"{verb} {first.text} has {len(named)} nodes, expected one for each line")
    return Page(
        {x.text: Fact(x.at, y.text, c.text) for x, y, c in all_of("nnk", facts_at)},
        {kind.text: digit for kind, digit in all_of("kd", key_at)},
        verb,
        first,
        named,
        {count(due.text): entry for due, *entry in all_of("cc|ckd", asked_at)},
        [counter for (counter,) in all_of("c", report_at)],
        len(words),
    )


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
        self.sums: dict[str, Word] = {}

    def say(self, *words: str) -> Word:
        """Write words that follow from the words before them; return the last word."""
        self.words += words
        return Word(words[-1], self.page.length + len(self.words) - 1)

    def look_up(self, purpose: Purpose, word: str, *path: int) -> Word:
        self.retrievals.append(Retrieval(purpose, self.page.length + len(self.words) - 1, path))
        return self.say(word)

    def stated(self, table: Mapping[str, T], name: str) -> T:
        """Look up a stated fact about a node, a kind or a sum."""
        if name not in table:
            raise LedgerError(f"nothing is stated about {name!r}, which the response needs")
        return table[name]


def _interlude(out: _Response, counter: int, total: int) -> None:
    """Write the line of the agenda after line ``counter``."""
    entry = out.page.agenda[counter]
    if out.page.verb == "check":
        out.say("check", f"#{counter}")
        earlier = out.stated(out.sums, entry[0].text)
        out.look_up("recheck", earlier.text, entry[0].at, earlier.at)
    else:
        kind, digit = entry
        out.say("wait")
        out.look_up("correction", kind.text, kind.at)
        out.key[kind.text] = out.look_up("correction", digit.text, digit.at)
    out.say(f"#{counter}", str(total), ";")


@lru_cache(maxsize=64)
def solve(prompt: str) -> Solution:
    """Compute the right response to ``prompt`` from only its text.

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
        out.sums[f"#{counter}"] = out.say(str(total))
        out.say(";")
        if counter in page.agenda:
            _interlude(out, counter, total)
    out.say("done", ":")
    for index, item in enumerate(page.report):
        out.look_up("report", *item)
        earlier = out.stated(out.sums, item.text)
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
