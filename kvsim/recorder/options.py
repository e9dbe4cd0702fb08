"""What a capture can be asked for: the keywords that `capture` and `capture_many` share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self, TypedDict

from kvsim.errors import CaptureError, suggest

Progress = Callable[[int, int], None]


class Keywords(TypedDict, total=False):
    """The fields of `Options` as keywords, for type checkers; all of them have defaults."""

    max_new_tokens: int
    temperature: float
    seed: int
    stop: str | Sequence[str]
    system: str | None
    chat: bool
    layers: Sequence[int] | None
    attention: bool | str
    o_proj: bool
    residual: bool
    store_dtype: str | None
    overwrite: bool
    resume: bool
    progress: Progress | bool | None


@dataclass(frozen=True)
class Options:
    """Everything that `capture` and `capture_many` take by keyword, checked.

    Attributes:
        max_new_tokens: the response is at most so long; cut at the model's context, with a note.
            0 records the prefill alone.
        temperature: 0 takes the most likely token, else tokens are drawn with `seed`.
        seed: of the draws.
        stop: text, or several, that ends the response: it ends after the token that completes one
            of them in the decoded response, special tokens included.
        system: a system message before the prompt, which is then a chat.
        chat: text is the message of a user and goes through the tokenizer's chat template.
        layers: the model's numbers of the layers to record, -1 for the last; None records all.
        attention: store dense attention too: True or ``full``, or ``window:N`` for the last N rows.
            It follows from q, k and lse at any time, so this is for short sequences and other
            programs.
        o_proj: store the output projection of each layer too, which some policies read. It is as
            large as these weights of the model, whatever the length of the sequence.
        residual: store the residual stream too, the input of each decoder layer, from which deeper
            layers can be computed again. For each token it takes as much as `hidden` numbers of
            each layer.
        store_dtype: None stores exactly, ``float16`` stores q, k, v, attn_out, o_proj and
            residual in half the space.
        overwrite: replace a trace that is there.
        resume: keep a trace that is there and is of the same prompt, model and options.
        progress: called with (tokens done, most tokens there can be); True shows a bar on a
            terminal.

    Raises:
        CaptureError: a value that is out of range, or two that exclude each other.
    """

    max_new_tokens: int = 512
    temperature: float = 0.0
    seed: int = 0
    stop: str | Sequence[str] = ()
    system: str | None = None
    chat: bool = False
    layers: Sequence[int] | None = None
    attention: bool | str = False
    o_proj: bool = False
    residual: bool = False
    store_dtype: str | None = None
    overwrite: bool = False
    resume: bool = False
    progress: Progress | bool | None = None

    @classmethod
    def of(cls, keywords: Mapping[str, Any]) -> Self:
        """The options of a call; raises TypeError for a keyword that is none."""
        known = [field.name for field in fields(cls)]
        for name in keywords:
            if name not in known:
                raise TypeError(
                    f"capture has no option {name!r}{suggest(name, known)}; "
                    f"options: {', '.join(known)}"
                )
        return cls(**keywords)

    def __post_init__(self) -> None:
        if self.max_new_tokens < 0:
            raise CaptureError(f"max_new_tokens is {self.max_new_tokens}, expected 0 or more")
        if not self.temperature >= 0:
            raise CaptureError(f"temperature is {self.temperature}, expected 0 or more")
        if self.store_dtype not in (None, "float16"):
            raise CaptureError(
                f"store_dtype is {self.store_dtype!r}, expected None (exact) or 'float16'"
            )
        if self.overwrite and self.resume:
            raise CaptureError(
                "overwrite and resume are both given; expected one of them: a trace that is there "
                "is replaced, or kept"
            )
        if not all(self.stops):
            raise CaptureError(f"stop is {self.stop!r}, expected text that is not empty")
        if self.system is not None and not self.system.strip():
            raise CaptureError("system is empty, expected the text of a system message")
        self.dense_rows(1)

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings; one alone may be given as text."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def dense_rows(self, n_pos: int) -> int:
        """How many of the last rows of a sequence have dense attention."""
        if self.attention is False:
            return 0
        found = re.fullmatch(r"window:(\d+)", str(self.attention))
        if self.attention in (True, "full"):
            return n_pos
        if found is None or int(found[1]) == 0:
            raise CaptureError(
                f"attention is {self.attention!r}, expected 'full', or 'window:N' for the last N "
                "rows, such as 'window:64'"
            )
        return min(int(found[1]), n_pos)


def check_output(options: Options, *, stored: bool) -> None:
    """Raise CaptureError where an option is about what is written, and nothing is."""
    asked = {
        "attention": options.attention is not False,
        "store_dtype": options.store_dtype is not None,
        "resume": options.resume,
    }
    found = [name for name, given in asked.items() if given]
    if found and not stored:
        raise CaptureError(
            f"{' and '.join(found)} {'is' if len(found) == 1 else 'are'} about what is written, "
            "but out is None; give out=..., or use trace.attention(layer, rows)"
        )


def chosen_layers(wanted: Sequence[int] | None, numbers: Iterable[int]) -> tuple[int, ...]:
    """The layers to record among the model's `numbers`, in order; negative ones count from the end.

    Raises:
        CaptureError: none, one twice, or one that the model does not have.
    """
    known = sorted(numbers)
    if wanted is None:
        return tuple(known)
    found: set[int] = set()
    for one in wanted:
        number = known[one] if one in range(-len(known), 0) else one
        if number not in known:
            raise CaptureError(
                f"the model has no layer {one!r}, expected numbers from {known[0]} to {known[-1]}, "
                "or -1 for the last"
            )
        if number in found:
            raise CaptureError(f"layers has layer {number} twice, expected each once")
        found.add(int(number))
    if not found:
        raise CaptureError("layers is empty, expected at least one; leave it out for all")
    return tuple(sorted(found))
