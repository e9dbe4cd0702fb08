"""Tasks to the definitions of RULER (Hsieh et al. 2024, arXiv 2404.06654), on shipped text.

* niah_*: facts "One of the special magic numbers for KEY is: VALUE." in a haystack. Of
  niah_single_1 that is one repeated line, of niah_multikey_2 and _3 other such facts, else prose;
  VALUE is a number of seven digits or a UUID. multikey: three more facts; multivalue: four values
  of one key; multiquery: four keys, all asked for.
* vt: a chain "VAR A = 12345", "VAR B = VAR A" of four hops in repeated lines, after an example.
* cwe: a numbered list in which ten words stand more often than the others (30 times against 3, and
  below 4,096 tokens 6 times against once), after an example.
* fwe: coded words by a zeta distribution, whose second to fourth are asked for; the first is "...".

Numbers, templates and the tokens of a response are those of github.com/NVIDIA/RULER
(scripts/synthetic.yaml, scripts/data/synthetic). Prompt and response together have at most the
requested length. Deviations: haystack and words are of Python's documentation, not of essays and
word lists; keys are a colour and such a word; the beginning of the answer stands on a line of its
own, as in kvpress's data sets; the example of vt has ten lines of noise. The tasks qa_* are left
out, because their documents do not ship.
"""

from __future__ import annotations

import random
import re
import string
import uuid
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from math import pi

from kvsim.errors import TextError
from kvsim.text.haystack import draw, prose
from kvsim.text.tasks import CountTokens, Sample, fitted

__all__ = ["RULER", "ruler_sample"]

#: Of each task of needles: haystack, kind of keys and of values, and how many keys, values of a
#: key, and keys that are asked for.
_NEEDLES: dict[str, tuple[str, str, str, int, int, int]] = {
    "niah_single_1": ("repeat", "words", "numbers", 1, 1, 1),
    "niah_single_2": ("prose", "words", "numbers", 1, 1, 1),
    "niah_single_3": ("prose", "words", "uuids", 1, 1, 1),
    "niah_multikey_1": ("prose", "words", "numbers", 4, 1, 1),
    "niah_multikey_2": ("needles", "words", "numbers", 1, 1, 1),
    "niah_multikey_3": ("needles", "uuids", "uuids", 1, 1, 1),
    "niah_multivalue": ("prose", "words", "numbers", 1, 4, 1),
    "niah_multiquery": ("prose", "words", "numbers", 4, 1, 4),
}

#: The tasks.
RULER = (*_NEEDLES, "vt", "cwe", "fwe")

_NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_COLOURS = ("red", "blue", "green", "black", "white", "silver", "brown", "grey")
_DEPTHS = 40  # places of needles in prose, from its beginning to its end


def ruler_sample(
    seed: int, index: int, count_tokens: CountTokens, *, task: str, length: int
) -> Sample:
    """Draw a prompt.

    Args:
        seed: source of all randomness, with `index`.
        index: number of the prompt among those of its task and length.
        count_tokens: returns the tokens of a plain prompt.
        task: one of `RULER`.
        length: tokens of prompt and response, at most.

    Raises:
        TextError: no such task, or a length that the task or the documentation cannot have.
    """
    if task not in RULER:
        raise TextError(f"task is {task!r}, expected one of {', '.join(RULER)}")
    rng = random.Random(f"{seed} ruler {task} {length} {index}")
    maker, new_tokens = _MAKERS[task.partition("_")[0]]
    least, most, parts = maker(rng, length, *_NEEDLES.get(task, ()))

    def build(units: int) -> Sample:
        context, question, prefix, answers = parts(units)
        more = (), None, prefix, new_tokens
        return Sample(task, length, 0, None, context, question, answers, *more)

    return fitted((least, most, build), length, count_tokens)


@cache
def _words() -> tuple[str, ...]:
    """Words of the documentation, of four to ten small letters."""
    text = " ".join(sentence for paragraph in prose() for sentence in paragraph)
    return tuple(sorted(set(re.findall(r"\b[a-z]{4,10}\b", text))))


def _drawn(rng: random.Random, kind: str) -> str:
    if kind == "numbers":
        return str(rng.randrange(10**6, 10**7))
    if kind == "uuids":
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))
    return f"{rng.choice(_COLOURS)}-{rng.choice(_words())}"


def _inserted(rng: random.Random, lines: list[str], new: Sequence[str]) -> list[str]:
    """Return lines with new ones in their order at random places."""
    places = sorted(rng.sample(range(len(lines) + len(new)), len(new)))
    rest, added = iter(lines), iter(new)
    chosen = {*places}
    return [next(added if i in chosen else rest) for i in range(len(lines) + len(new))]


#: Context, question, beginning of the answer, and answers.
_Parts = tuple[str, str, str, tuple[str, ...]]

#: The fewest and the most lines or words of filler, and what builds the prompt with so many.
_Made = tuple[int, int, Callable[[int], _Parts]]


def _niah(
    rng: random.Random,
    length: int,
    haystack: str,
    key_kind: str,
    value_kind: str,
    n_keys: int,
    n_values: int,
    n_asked: int,
) -> _Made:
    keys: dict[str, list[str]] = {}
    while len(keys) < n_keys:
        keys[_drawn(rng, key_kind)] = [_drawn(rng, value_kind) for _ in range(n_values)]

    def fact(key: str, value: str) -> str:
        return f"One of the special magic {value_kind} for {key} is: {value}."

    facts = [fact(key, value) for key, values in keys.items() for value in values]
    rng.shuffle(facts)
    asked = rng.sample(list(keys), n_asked)
    names = asked[0] if n_asked == 1 else f"{', '.join(asked[:-1])}, and {asked[-1]}"
    one = n_asked * n_values == 1
    kind, be = (value_kind[:-1], "is") if one else (value_kind, "are")
    hidden = f"A special magic {kind} is" if one else f"Some special magic {kind} are"
    depths = sorted(rng.sample(range(_DEPTHS), len(facts)))
    most = length if haystack == "prose" else length // 8
    filler, decoys = None, list[str]()
    if haystack == "prose":
        filler = draw(rng, length)
        most = filler.words
    elif haystack == "needles":
        while len(decoys) < most:
            key = _drawn(rng, key_kind)
            decoys += [] if key in keys else [fact(key, _drawn(rng, value_kind))]
    place = rng.random()

    def build(n: int) -> _Parts:
        if filler is not None:
            pairs = [(d / (_DEPTHS - 1), each) for d, each in zip(depths, facts, strict=True)]
            text = filler.last_words(n).text(pairs)
        else:
            lines = decoys[:n] or [_NOISE] * n
            text = "\n".join([*lines[: int(place * n)], *facts, *lines[int(place * n) :]])
        context = (
            f"{hidden} hidden within the following text. Make sure to memorize it. I will quiz you "
            f"about the {kind} afterwards.\n{text}\n"
        )
        all_of = "" if one else "all "
        mentioned = f"the special magic {kind} for {names} mentioned in the provided text"
        question = f"What {be} {all_of}{mentioned}?"
        answers = tuple(value for key in asked for value in keys[key])
        prefix = f"{mentioned[0].upper()}{mentioned[1:]} {be}"
        return context, question, prefix, answers

    return 1, most, build


def _vt(rng: random.Random, length: int) -> _Made:
    def chain(letters: int) -> tuple[list[str], list[str], str]:
        names = dict[str, None]()
        while len(names) < 5:
            names["".join(rng.choices(string.ascii_uppercase, k=letters))] = None
        value, variables = str(rng.randrange(10_000, 100_000)), list(names)
        hops = [f"VAR {b} = VAR {a}" for a, b in pairwise(variables)]
        return variables, [f"VAR {variables[0]} = {value}", *hops], value

    def asked(lines: list[str], value: str) -> tuple[str, str, str]:
        text = "\n".join(lines)
        context = (
            "Memorize and track the chain(s) of variable assignment hidden in the following text."
            f"\n\n{text}\n"
        )
        question = f"Find all variables that are assigned the value {value} in the text above."
        prefix = (
            "Answer: According to the chain(s) of variable assignment in the text above, 5 "
            f"variables are assigned the value {value}, they are: "
        )
        return context, f"Question: {question}", prefix

    shown, shown_chain, shown_value = chain(3)
    example = asked(_inserted(rng, [_NOISE] * 10, shown_chain), shown_value)
    before = f"{example[0]}{example[1]}\n{example[2]}{' '.join(shown)}\n\n"
    variables, assignments, value = chain(5)
    seed = rng.random()

    def build(n: int) -> _Parts:
        lines = _inserted(random.Random(seed), [_NOISE] * n, assignments)
        context, question, prefix = asked(lines, value)
        return before + context, question, prefix, tuple(variables)

    return 1, length // 8, build


def _cwe(rng: random.Random, length: int) -> _Made:
    words = rng.sample(_words(), len(_words()))
    short = length < 4096

    def listed(common: list[str], others: list[str], often: int, seldom: int) -> tuple[str, str]:
        entries = common * often + others * seldom
        random.Random(seed).shuffle(entries)
        numbered = " ".join(f"{i}. {word}" for i, word in enumerate(entries, 1))
        context = (
            "Below is a numbered list of words. In these words, some appear more often than "
            f"others. Memorize the ones that appear most often.\n{numbered}\n"
        )
        return context, "Question: What are the 10 most common words in the above list?"

    seed, prefix = rng.random(), "Answer: The top 10 words that appear most often in the list are:"
    size, *times = (20, 3, 1) if short else (40, 10, 3)
    shown = " ".join(f"{i}. {word}" for i, word in enumerate(words[:10], 1))
    before, question = listed(words[:10], words[10:size], *times)
    before = f"{before}{question}\n{prefix} {shown}\n\n"
    common, others = words[size : size + 10], words[size + 10 :]

    def build(n: int) -> _Parts:
        context, question = listed(common, others[:n], *((6, 1) if short else (30, 3)))
        return before + context, question, prefix, tuple(common)

    return 1, len(others), build


def _fwe(rng: random.Random, length: int) -> _Made:
    vocabulary = dict.fromkeys(["..."])
    while len(vocabulary) < max(5, length // 50):
        vocabulary["".join(rng.choices(string.ascii_lowercase, k=6))] = None
    coded, seed = list(vocabulary), rng.random()
    prefix = (
        "Answer: According to the coded text above, the three most frequently appeared words are:"
    )

    def build(n: int) -> _Parts:
        share = n * 6 / pi**2  # over zeta(2)
        words = [word for k, word in enumerate(coded, 1) for _ in range(int(share / k**2))]
        random.Random(seed).shuffle(words)
        context = (
            "Read the following coded text and track the frequency of each coded word. Find the "
            f"three most frequently appeared coded words. {' '.join(words)}\n"
        )
        question = (
            "Question: Do not provide any explanation. Please ignore the dots '....'. What are the "
            "three most frequently appeared words in the above coded text?"
        )
        return context, question, prefix, tuple(coded[1:4])

    return 60, 60 + length, build  # from 60 on, no two of the asked words are as frequent


# What draws a task, and the tokens of its response.
_MAKERS: dict[str, tuple[Callable[..., _Made], int]] = {
    "niah": (_niah, 128),
    "vt": (_vt, 30),
    "cwe": (_cwe, 120),
    "fwe": (_fwe, 50),
}
