"""Tasks on real text: prompts of a given length in tokens, with answers that can be checked.

* needle: one fact in the text, and a question about it (Kamradt 2023,
  github.com/gkamradt/LLMTest_NeedleInAHaystack).
* needles: two such facts of different things, and a question about one of them (as RULER's
  multi-key needles, arXiv 2404.06654).
* quote: two sentences in the text; the prompt ends with the first, and the answer is the second.
* fewshot: words and their groups throughout the context, and a new word.
* chat: turns of a conversation, one of which has the fact.
* text: only text, and the response that continues it.

All randomness comes from the seed. The same seed gives the same prompts only under the same
version of Python, whose documentation is the text.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvsim.errors import TextError
from kvsim.text.haystack import draw

__all__ = ["DEPTHLESS", "TASKS", "Sample", "sample"]

TASKS = ("needle", "needles", "quote", "fewshot", "chat", "text")
#: Tasks whose prompts have no needle at a depth.
DEPTHLESS = ("fewshot", "text")

#: Tokens of the whole encoded prompt: plain text, or the messages of a chat.
CountTokens = Callable[["str | list[dict[str, str]]"], int]

_COLOURS = ("red", "blue", "green", "black", "white", "silver", "brown", "grey")
_PLACES = ("door", "gate", "box", "tower", "locker", "cabinet", "vault", "drawer")
_THINGS = (
    *("anchor", "basket", "bicycle", "blanket", "camera", "candle", "carpet", "falcon", "garden"),
    *("guitar", "hammer", "island", "jacket", "kettle", "ladder", "lantern", "magnet", "mirror"),
    *("parrot", "pencil", "pillow", "ribbon", "saddle", "trumpet", "violin"),
)
_GROUPS = (
    "dog cat horse cow sheep lion tiger wolf bear fox rabbit mouse goat pig duck monkey camel",
    "hammer saw drill wrench knife shovel rake axe pliers chisel ladder brush file screw nail",
    "apple pear peach plum cherry grape lemon orange banana mango melon kiwi fig lime apricot",
)
_ACKNOWLEDGED = "Thank you, I have read it."
_USERS = 3  # turns of the user before the question

_SHORTEST = 128  # tokens; a question and its facts have up to about 100


@dataclass(frozen=True)
class Sample:
    """A prompt, with its answer.

    Attributes:
        task: one of `TASKS`.
        length: the requested length in tokens.
        tokens: the length of the encoded prompt, at most `length`.
        depth: the share of the context's words before the needle, as requested; None without one.
        context: the text before the question; of a chat the messages before it.
        question: the rest of the prompt; of a chat the last message.
        answer: the right answer, or None.
        needles: the texts that the answer depends on.
        response: text that continues the prompt, or None.
    """

    task: str
    length: int
    tokens: int
    depth: float | None
    context: str | list[dict[str, str]]
    question: str
    answer: str | None
    needles: tuple[str, ...] = ()
    response: str | None = None

    @property
    def prompt(self) -> str | list[dict[str, str]]:
        """The whole prompt: text, or the messages of a chat."""
        if isinstance(self.context, str):
            return self.context + self.question
        return [*self.context, {"role": "user", "content": self.question}]

    def row(self, name: str, *, split: bool = False) -> dict[str, Any]:
        """Return the sample as a line of a prompt file (`kvsim capture --prompts`).

        split: say where the context ends, so that `--compress context` is possible.
        """
        if split and not self.question:
            raise TextError(f"{self.task} has no question; leave --context out")
        row: dict[str, Any] = {"id": name}
        if isinstance(self.context, list):
            row["messages"] = self.prompt
            row |= {"context": len(self.context)} if split else {}
        elif split:
            row |= {"context": self.context, "prompt": self.question}
        else:
            row["prompt"] = self.prompt
        row["needle"] = list(self.needles) or None
        names = ("answer", "response", "depth", "task", "length", "tokens")
        row |= {key: getattr(self, key) for key in names}
        return {key: value for key, value in row.items() if value is not None}


#: The most words or lines of filler, and what builds the sample with so many, without its tokens.
Draft = tuple[int, Callable[[int], Sample]]


def sample(
    seed: int,
    index: int,
    count_tokens: CountTokens,
    *,
    task: str,
    length: int,
    depth: float | None = None,
) -> Sample:
    """Draw a prompt.

    Args:
        seed: source of all randomness, with `index`.
        index: number of the prompt among those of its task, length and depth.
        count_tokens: returns the tokens of an encoded prompt: plain text, or messages of a chat.
        task: one of `TASKS`.
        length: tokens of the encoded prompt, at most; it is a few tokens shorter.
        depth: the share of the context's words before the needle, 0 to 1; 0.5 by default.

    Raises:
        TextError: no such task, a depth outside 0 to 1 or of a task without a needle, or a length
            that the question or the documentation cannot have.
    """
    problems = {
        f"task is {task!r}, expected one of {', '.join(TASKS)}": task not in TASKS,
        f"depth is {depth}, but {task} has no needle; leave the depth out": (
            task in DEPTHLESS and depth is not None
        ),
        f"depth is {depth}, expected a number from 0 to 1": not 0 <= (depth or 0) <= 1,
        f"length is {length}, expected at least {_SHORTEST} tokens": length < _SHORTEST,
    }
    for problem, applies in problems.items():
        if applies:
            raise TextError(problem)
    at = None if task in DEPTHLESS else 0.5 if depth is None else depth
    rng = random.Random(f"{seed} {task} {length} {at} {index}")
    most, build = _MAKERS[task](rng, length, at)

    def fits(dropped: int) -> bool:
        return count_tokens(build(most - dropped).prompt) <= length

    dropped = bisect_left(range(most), x=True, key=fits)
    drawn = build(most - dropped)
    tokens = count_tokens(drawn.prompt)
    if tokens > length or not dropped:
        limit = "least" if tokens > length else "most"
        raise TextError(
            f"length is {length}, expected at {limit} {tokens}, with {most - dropped} words of "
            "Python's documentation"
        )
    return replace(drawn, tokens=tokens)


def _code(rng: random.Random) -> str:
    return str(rng.randrange(10_000, 100_000))


def _question(thing: str) -> str:
    # a model that was trained to complete text continues the last line
    fact = f"The secret code of the {thing} is"
    return f"\n\nQuestion: What is the secret code of the {thing}?\nAnswer: {fact}"


def _thing(rng: random.Random) -> str:
    return f"{rng.choice(_COLOURS)} {rng.choice(_PLACES)}"


def _fact(thing: str, code: object) -> str:
    return f"The secret code of the {thing} is {code}."


def _hidden(rng: random.Random, needles: Sequence[tuple[float, str]], drawn: Sample) -> Draft:
    filler = draw(rng, drawn.length)  # more than enough: a word has at least one token
    return filler.words, lambda n: replace(drawn, context=filler.last_words(n).text(needles))


def _needle(rng: random.Random, length: int, depth: float) -> Draft:
    thing, code = _thing(rng), _code(rng)
    fact = _fact(thing, code)
    drawn = Sample("needle", length, 0, depth, "", _question(thing), code, (fact,))
    return _hidden(rng, [(depth, fact)], drawn)


def _needles(rng: random.Random, length: int, depth: float) -> Draft:
    thing, other = rng.sample(_THINGS, 2)
    code, decoy = rng.sample(range(10_000, 100_000), 2)
    fact = _fact(thing, code)
    drawn = Sample("needles", length, 0, depth, "", _question(thing), str(code), (fact,))
    return _hidden(rng, [(depth, fact), ((depth + 0.5) % 1, _fact(other, decoy))], drawn)


def _quote(rng: random.Random, length: int, depth: float) -> Draft:
    a, b, c, d = rng.sample(_THINGS, 4)
    first, second = f"The {a} stands beside the {b}.", f"Then the {c} falls on the {d}."
    drawn = Sample("quote", length, 0, depth, "", f"\n\n{first}", second, (second,))
    return _hidden(rng, [(depth, f"{first} {second}")], drawn)


def _fewshot(rng: random.Random, length: int, _depth: None) -> Draft:
    groups = rng.sample(("red", "blue", "green", "white", "black"), len(_GROUPS))
    examples, held_out = [], []
    for words, group in zip(_GROUPS, groups, strict=True):
        first, *rest = rng.sample(words.split(), len(words.split()))
        held_out.append((first, group))
        examples += [f"{word} -> {group}" for word in rest]
    word, group = rng.choice(held_out)
    lines: list[str] = []
    while len(lines) < length:
        lines += rng.sample(examples, len(examples))
    drawn = Sample("fewshot", length, 0, None, "", f"\n{word} ->", group)
    return len(lines), lambda n: replace(drawn, context="\n".join(lines[len(lines) - n :]))


def _chat(rng: random.Random, length: int, depth: float) -> Draft:
    thing, code = _thing(rng), _code(rng)
    fact = _fact(thing, code)
    filler = draw(rng, length)

    def build(n: int) -> Sample:
        paragraphs = filler.last_words(n).text([(depth, fact)]).split("\n\n")
        ends = [round(len(paragraphs) * turn / _USERS) for turn in range(_USERS + 1)]
        messages = []
        for turn in range(_USERS):
            content = "\n\n".join(paragraphs[ends[turn] : ends[turn + 1]])
            messages.append({"role": "user", "content": content})
            messages.append({"role": "assistant", "content": _ACKNOWLEDGED})
        question = f"What is the secret code of the {thing}?"
        return Sample("chat", length, 0, depth, messages, question, code, (fact,))

    return filler.words, build


def _text(rng: random.Random, length: int, _depth: None) -> Draft:
    words = draw(rng, length + length // 4).text().split(" ")

    def build(n: int) -> Sample:
        response = " " + " ".join(words[n : n + length // 4])
        return Sample("text", length, 0, None, " ".join(words[:n]), "", None, response=response)

    return len(words) - length // 4, build


_MAKERS: dict[str, Callable[[random.Random, int, Any], Draft]] = {
    "needle": _needle,
    "needles": _needles,
    "quote": _quote,
    "fewshot": _fewshot,
    "chat": _chat,
    "text": _text,
}
