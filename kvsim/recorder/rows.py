"""The rows of a capture: its tokens, as far as they are known, and how they run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from kvsim.core.left_out import left_out_before
from kvsim.errors import CaptureError
from kvsim.recorder.answers import answer_check, reasoning_notes
from kvsim.recorder.batching import Written
from kvsim.recorder.choice import Choice, stop_tokens
from kvsim.recorder.encoding import encode
from kvsim.recorder.forward import WHOLE, chunk_rows, continues
from kvsim.recorder.generation import stop_search
from kvsim.recorder.models import is_tiny
from kvsim.recorder.options import Options
from kvsim.recorder.positions import fitting_tokens, indexer_notes
from kvsim.recorder.prompts import Prompt

#: What ended a response that was given (`generation.stopped`).
GIVEN = "given"


class Rows:
    """The prompt of a capture as tokens, its response if that is given, and its limits.

    Raises CaptureError for a prompt or an option that the model or its tokenizer has nothing for.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any, prompt: Prompt, options: Options
    ) -> None:
        self.encoded = encoded = encode(prompt, model, tokenizer, options)
        self.longest = options.max_new_tokens
        self.own_length = prompt.max_new_tokens if self.longest is None else None
        if self.own_length is not None:
            options = replace(options, max_new_tokens=self.own_length)
        self.model, self.tokenizer, self.prompt, self.options = model, tokenizer, prompt, options
        self.choice = Choice(model, stop_tokens(model, tokenizer), **options.draws)
        self.completed = stop_search(options.stops, tokenizer)
        self.turns, self.response = encoded.turns, encoded.given
        self.questions = [*encoded.questions]
        asks = bool(self.turns) and not next(model.parameters()).is_meta
        self.step = 1 if asks and not continues(model, encoded.ids) else WHOLE  # rows of a question
        #: a response that is known before it is recorded: given, or written in a batch
        self.written = Written(self.response, GIVEN, 0.0) if self.response else None
        self.new_tokens, cut = self._fitting()
        self.context = encoded.ids[: encoded.context_len]
        n = len(encoded.ids) + len(self.response)
        stay, end = options.rows_before, encoded.context_len or len(encoded.ids)
        self.left_out = None if stay is None else left_out_before(end, stay)
        self.chunk, whole = chunk_rows(model, [*encoded.ids, *self.response], options.chunk)
        self.limit = n + self.new_tokens
        drawn = self.choice.notes if self.new_tokens else ()
        indexed = indexer_notes(model, self.limit)
        self.notes = [*encoded.notes, *cut, *whole, *drawn, *indexed]

    def _fitting(self) -> tuple[int, list[str]]:
        """Return how many new tokens fit, as `fitting_tokens`; CaptureError unless all turns do."""
        start, most = len(self.encoded.ids), 0
        if not self.response:
            later = sum(len(turn.ids) + turn.longest for turn in self.turns)
            most = self.options.longest + later
        count, notes = fitting_tokens(self.model, start, most)
        if self.turns and count < most:
            raise CaptureError(
                f"questions and answers of all turns take up to {most} tokens after a prompt of "
                f"{start}, and the model has room for {count}; expected turns that fit; give a "
                "smaller --max-new-tokens, or fewer turns"
            )
        return count, notes

    def answer_check(self, response: str | None) -> dict[str, Any] | None:
        """Compare a response whose writer is known with the right one, ready for JSON."""
        if response is None or (self.response and self.prompt.writer is None):
            return None
        opened, text, tiny = (
            self.encoded.opened,
            self.encoded.text,
            is_tiny(self.model),
        )
        check = answer_check(self.prompt, response, opened, self.own_length, text, tiny=tiny)
        self.notes += [] if check is None else reasoning_notes(opened + response)
        return check

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of generation; of a given response what wrote it, if that is known."""
        given = {} if self.prompt.writer is None else {"writer": self.prompt.writer}
        return given if self.response else self.options.generation | self.choice.settings
