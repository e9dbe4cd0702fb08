"""Options of `capture` and `capture_many`, each declared once.

`Options` has a field for each (`kvsim.core.options`). Importing this module loads none of the large
libraries.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from kvsim.core.options import Help, given_options
from kvsim.core.parameters import AtLeast, Between, Finite, check_fields
from kvsim.errors import CaptureError

Progress = Callable[[int, int], None]

#: Tokens of a chunk of a probe by default, as in KVzip's paper.
PROBE_CHUNK = 2048

#: Rows before the response that are stored with it by default.
ROWS = 512

_ROWS = r"response(?:\+(\d{1,9}))?"

_PROBE = r"repeat(?::0*([1-9]\d{0,8}))?"


@dataclass(frozen=True)
class Options:
    """The keywords that `capture` and `capture_many` share.

    Raises:
        CaptureError: a value out of range, or two options that exclude each other.
    """

    max_new_tokens: Annotated[
        int | None,
        AtLeast(0),
        Help(
            "The longest response, in tokens, 512 by default; 0 records only the prompt. A "
            "response is cut at the model's context, with a note. Not for a given response."
        ),
    ] = None
    temperature: Annotated[
        float,
        Finite(),
        AtLeast(0),
        Help("0 takes the most likely token; above 0, tokens are drawn."),
    ] = 0.0
    seed: Annotated[int, Between(-(2**63), 2**63 - 1), Help("The seed of the draws.")] = 0
    top_k: Annotated[
        int | None,
        AtLeast(1),
        Help("Draw among so many most likely tokens, by default as the model's settings say."),
    ] = None
    top_p: Annotated[
        float | None,
        Between(0, 1),
        Help("Draw among the most likely tokens with this probability together, likewise."),
    ] = None
    stop: Annotated[
        str | Sequence[str],
        Help(
            "End the response after the token that completes this text; may be several. Special "
            "tokens count as text.",
            "TEXT",
        ),
    ] = ()
    system: Annotated[
        str | None,
        Help("A system message before each prompt, which makes the prompt a chat.", "TEXT"),
    ] = None
    chat: Annotated[
        bool, Help("Send text as a user's message, through the tokenizer's chat template.")
    ] = False
    chat_template_kwargs: Annotated[
        Mapping[str, Any] | None,
        Help(
            "Variables of the chat template, as JSON, such as '{\"enable_thinking\": false}'.",
            "JSON",
        ),
    ] = None
    layers: Annotated[
        Sequence[int] | None,
        Help("Record only these layers, by number; -1 is the last.", "N,A-B,..."),
    ] = None
    o_proj: Annotated[
        bool | None,
        Help(
            "Store the output projection of each layer, which some policies and `layer_error` "
            "read: once per model, next to its traces, if the model's can be checked. True makes "
            "it an error if they cannot; a trace in memory has them only with True."
        ),
    ] = None
    sensitivity: Annotated[
        bool,
        Help(
            "Measure how much the response changes with an error of each layer, one number for a "
            "layer, by which `weighted_error` weights them; needs output projections. It takes as "
            "long as 16 more rows for each layer: 13 to 60 % of a capture of SmolLM2."
        ),
    ] = True
    residual: Annotated[
        bool,
        Help(
            "Store the residual stream too, the input of each decoder layer, from which layers can "
            "be recomputed. It takes as many numbers per token and layer as the hidden size."
        ),
    ] = False
    rows: Annotated[
        str | None,
        Help(
            "'response' stores queries and outputs of the response, of the 512 rows before it "
            "('response+N': of N rows) and of the first 256, and sums over the others, which most "
            "policies and metrics read instead (docs/record.md). With a context, rows count "
            "from its end. All rows by default.",
            "response[+N]",
        ),
    ] = None
    probe: Annotated[
        str | None,
        Help(
            "Record rows that repeat the context too, which `kvzip` and `kvcompose` score by: "
            "'repeat', or 'repeat:N' for chunks of N tokens, 2048 by default. The model reads the "
            "context a second time for them.",
            "repeat[:N]",
        ),
    ] = None
    chunk: Annotated[
        int | None,
        AtLeast(1),
        Help(
            "Run at most so many tokens of the prompt through the model at once. By default a "
            "prompt of up to 2,896 tokens runs in one piece, and a longer one in chunks of at "
            "least 256, over the model's own cache."
        ),
    ] = None
    store_dtype: Annotated[
        Literal["float16"] | None,
        Help("'float16' stores q, k, v and outputs in half the space; the default is exact."),
    ] = None
    overwrite: Annotated[bool, Help("Replace a trace that exists.")] = False
    resume: Annotated[
        bool,
        Help(
            "Keep traces that exist and are of the same prompt, model and options, and record the "
            "others."
        ),
    ] = False
    batch: Annotated[
        int,
        AtLeast(1),
        Help(
            "Write the responses of so many prompts at once, then record each by itself; sequences "
            "that cannot be batched are written one by one, with a note.",
            flag="--batch-size",
        ),
    ] = 1
    force: Annotated[bool, Help("Record even if the plan says that the disk is too small.")] = False
    progress: Annotated[
        Progress | bool | None,
        Help("A function of (tokens done, most tokens possible); True shows a bar on a terminal."),
    ] = None

    @classmethod
    def of(cls, keywords: Mapping[str, Any]) -> Self:
        """Return the options of a call; raise TypeError for an unknown keyword."""
        return cls(**given_options(cls, keywords, "capture", CaptureError))

    def __post_init__(self) -> None:
        check_fields(self, "capture", CaptureError)
        stops: Any = (self.stop,) if isinstance(self.stop, str) else self.stop
        text = isinstance(stops, Sequence) and all(isinstance(x, str) and x for x in stops)
        problems = {
            "overwrite and resume are both given, expected one of them; overwrite replaces a trace "
            "that exists, resume keeps it": self.overwrite and self.resume,
            f"stop is {self.stop!r}, expected text that is not empty": not text,
            f"rows is {self.rows!r}, expected 'response', or 'response+N' for N rows before the "
            "response too": not re.fullmatch(_ROWS, "response" if self.rows is None else self.rows),
            f"probe is {self.probe!r}, expected 'repeat', or 'repeat:N' for chunks of N tokens": (
                not re.fullmatch(_PROBE, "repeat" if self.probe is None else self.probe)
            ),
            "rows and residual are both given, expected one of them": (
                self.rows is not None and self.residual
            ),
        }
        for problem, applies in problems.items():
            if applies:
                raise CaptureError(problem)

    @property
    def rows_before(self) -> int | None:
        """Rows before the response that are stored; None for all."""
        match = re.fullmatch(_ROWS, self.rows or "")
        return match and int(match[1] or ROWS)

    @property
    def probe_chunk(self) -> int:
        """Tokens of a chunk of a probe."""
        match = re.fullmatch(_PROBE, self.probe or "")
        return int(match[1]) if match and match[1] else PROBE_CHUNK

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings; a single one may be given as text."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def longest(self) -> int:
        """Tokens of the longest response that is generated."""
        return 512 if self.max_new_tokens is None else self.max_new_tokens


def select_layers(requested: Sequence[int] | None, numbers: Iterable[int]) -> tuple[int, ...]:
    """Return the layers to record among the model's `numbers`, in order.

    Negative numbers count from the end; None selects all. Raises CaptureError for no layer, or one
    that the model does not have.
    """
    available = sorted(numbers)
    listed = available if requested is None else requested
    selected = {available[x] if x in range(-len(available), 0) else x for x in listed}
    unknown = [layer for layer in selected if layer not in available]
    if unknown or not selected:
        what = f"the model has no layer {unknown[0]!r}" if unknown else "layers is empty"
        raise CaptureError(
            f"{what}, expected numbers from {available[0]} to {available[-1]}, or -1 for the last; "
            "leave it out for all"
        )
    return tuple(sorted(map(int, selected)))
