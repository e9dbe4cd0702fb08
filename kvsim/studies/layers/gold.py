"""Gold tokens: the positions of a prompt that its answer needs."""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np

from kvsim.analysis.arrays import Ints
from kvsim.core.trace import Trace
from kvsim.errors import GoldError, TraceError


def check_positions(trace: Trace, positions: Iterable[int]) -> Ints:
    """The positions, ascending and each once; GoldError for one that is not in the prompt."""
    ascending = np.unique(np.fromiter(positions, np.int64))
    if len(ascending) and not 0 <= ascending[0] <= ascending[-1] < trace.prompt_len:
        wrong = ascending[0] if ascending[0] < 0 else ascending[-1]
        raise GoldError(
            f"{trace.name}: gold position {wrong} is not in the prompt; expected 0 to "
            f"{trace.prompt_len - 1}"
        )
    return ascending


def find_text(trace: Trace, text: str) -> Ints:
    """Positions of all tokens of all occurrences of a text in the prompt.

    An occurrence neither starts nor ends within a word. Tokens that carry no blanks are taken as
    words: there it starts and ends with a token, and blanks do not matter.

    Raises GoldError where the text does not occur, TraceError where the trace has no token texts.
    """
    if trace.token_text is None:
        raise TraceError(
            f"{trace.name}: the trace has no token texts to find {text!r} in; give positions"
        )
    pieces = trace.token_text[: trace.prompt_len]
    ends = np.cumsum([len(piece) for piece in pieces])
    starts = ends - [len(piece) for piece in pieces]
    blanks = any(character.isspace() for piece in pieces for character in piece)
    wanted = text.strip() if blanks else "".join(text.split())
    ahead = r"(?<![A-Za-z0-9])" if blanks and wanted[:1].isalnum() else ""
    behind = r"(?![A-Za-z0-9])" if blanks and wanted[-1:].isalnum() else ""
    matches = re.finditer(f"(?={ahead}({re.escape(wanted)}){behind})", "".join(pieces))
    spans = [match.span(1) for match in matches]
    if not blanks:
        spans = [(start, end) for start, end in spans if start in starts and end in ends]
    if not wanted or not spans:
        raise GoldError(
            f"{trace.name}: {text!r} does not occur in the prompt; expected words of it, as "
            "`kvsim info` shows them"
        )
    inside = np.zeros(len(pieces), dtype=bool)
    for start, end in spans:
        inside |= (starts < end) & (ends > start)
    return np.flatnonzero(inside)
