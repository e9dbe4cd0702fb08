"""Spans: which tokens of an encoded prompt are a text in it."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any

from kvsim.errors import CaptureError

#: First token, and the one behind the last.
Span = tuple[int, int]

#: One text or several, or token spans.
Needle = str | Sequence[str] | Sequence[Sequence[int]]


def needle_parts(needle: Any) -> tuple[str, ...] | tuple[Span, ...]:
    """Return a needle as several; raise CaptureError for anything else than texts or spans."""
    parts = [needle] if isinstance(needle, str) else needle
    if isinstance(parts, list | tuple):
        if all(isinstance(part, str) and part.strip() for part in parts):
            return tuple(parts)
        if all(
            isinstance(part, list | tuple) and len(part) == 2 and {*map(type, part)} == {int}
            for part in parts
        ):
            return tuple((start, end) for start, end in parts)
    raise CaptureError(
        f"needle is {reprlib.repr(needle)}, expected a text that is in the prompt, a list of such "
        "texts, or for token ids a list of [start, end]"
    )


def located(
    parts: Any, text: str | None, n_tokens: int, tokenizer: Any, *, special: bool
) -> list[Span]:
    """Return the token spans of a needle (`needle_parts`) in a prompt.

    text: what the prompt was encoded from, None for token ids. special: whether the tokenizer added
    special tokens. Raises CaptureError for a text that the prompt has not once, a span outside it,
    one kind of needle in the other kind of prompt, or a tokenizer without offsets.
    """
    texts = [part for part in parts if isinstance(part, str)]
    spans = [part for part in parts if not isinstance(part, str)]
    outside = any(not 0 <= start < end <= n_tokens for start, end in spans)
    if (texts if text is None else spans) or outside:
        raise CaptureError(
            f"needle is {reprlib.repr(parts)}, expected texts in a prompt of text, or of token "
            f"ids spans [start, end] within the {n_tokens} tokens of the prompt"
        )
    if text is None or not texts:
        return spans
    places = offsets(text, tokenizer, special=special)
    return [_tokens_of(each, text, places) for each in texts]


def offsets(text: str, tokenizer: Any, *, special: bool) -> list[Span]:
    """Return where each token is in the text, in characters; special tokens are nowhere, (0, 0).

    Raises CaptureError for a tokenizer that does not say so.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise CaptureError(
            f"the tokenizer ({type(tokenizer).__name__}) does not say where its tokens are in the "
            "text, expected a fast one (tokenizer.json); give token ids and spans"
        )
    encoded = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
    return [(int(start), int(end)) for start, end in encoded["offset_mapping"]]


def counted_context(count: Any, n: int, what: str) -> int:
    """Return the first `count` of n messages or tokens; CaptureError unless it is 1 to n."""
    number = count + n * (count < 0) if type(count) is int else 0
    if not 1 <= number <= n:
        raise CaptureError(
            f"context is {count!r} and the prompt has {n} {what}, expected a context that ends in "
            f"it: 1 to {n}, or -1 for all but the last"
        )
    return number


def tokens_before(end: int, text: str, tokenizer: Any, *, special: bool) -> int:
    """Return how many of the first tokens end in the first `end` characters of a text.

    A token with characters on both sides belongs to what follows. Raises CaptureError for none.
    """
    places = offsets(text, tokenizer, special=special)
    count = next((i for i, (_, stop) in enumerate(places) if stop > end), len(places))
    if not any(stop for _, stop in places[:count]):
        raise CaptureError(
            f"no token of the prompt ends in its context of {end} characters, expected at least "
            "one; give a longer context"
        )
    return count


def _tokens_of(needle: str, text: str, places: Sequence[Span]) -> Span:
    """Return the tokens that have a character of a text that is in another one once."""
    first, again = text.find(needle), text.find(needle, text.find(needle) + 1)
    stop = first + len(needle)
    at = [i for i, (start, end) in enumerate(places) if start < min(end, stop) and end > first]
    if first < 0 or again >= 0 or not at:
        raise CaptureError(
            f"needle {reprlib.repr(needle)} is {'more than once' if again >= 0 else 'not'} in the "
            "prompt, expected once; give a text that is there once, as the chat template renders it"
        )
    return at[0], at[-1] + 1
