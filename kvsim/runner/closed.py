"""A recorded prompt run again on its model under a policy: the live run to compare with a replay.

Two ways. Teacher-forced: the recorded response goes through the model, whatever it would have
written, so that every row can be compared with that of the full cache. Free: the model writes its
own response, which is compared with the right answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvsim.core.outcome import Forced, Generated, Outcome, OutputDeviation
from kvsim.core.policy import Policy, Schedule
from kvsim.core.record import Record, Response, facts_of
from kvsim.core.trace import Trace
from kvsim.errors import TraceError
from kvsim.recorder.batching import GIVEN, Written
from kvsim.recorder.choice import APPLIED, Choice, following, stop_tokens
from kvsim.recorder.forward import WHOLE, evaluating, run_chunks
from kvsim.recorder.head import Predictions
from kvsim.recorder.hooks import KernelCall
from kvsim.recorder.layers import Residual
from kvsim.recorder.repetition import repeat_context
from kvsim.recorder.tokenization import response_text
from kvsim.runner.batch import run_prompt
from kvsim.runner.decoding import Decoding, Prefix, RunningModel, prefill
from kvsim.runner.full import FullPass, FullRows, compared, first_compared, uncompared
from kvsim.runner.paged import Paging
from kvsim.runner.recorded import check_recorded, relative_change
from kvsim.runner.sketches import projected
from kvsim.schema import object_at
from kvsim.text.answers import LANGUAGES, text_score


@dataclass(frozen=True)
class Writing:
    """How a response is written: at most `new_tokens`, each of the choice."""

    new_tokens: int
    choice: Choice


#: Answers, and the sequence that has them.
Own = tuple[Decoding, list[Written]]


class ClosedLoop:
    """A recorded prompt and its response on their model; what policies share is computed once.

    tokenizer: for the text of responses; None where none is wanted. writing: None for the
    teacher-forced run alone. paging: how the cache is laid out in blocks, if it is.

    Raises:
        NeedsError: a trace without tokens, or of some layers of the model alone.
        CaptureError: another model or tokenizer than the recorded ones.
        TraceError: a length of the response that is no number of tokens.
    """

    def __init__(
        self,
        running: RunningModel,
        trace: Trace,
        tokenizer: Any,
        writing: Writing | None,
        paging: Paging | None = None,
    ) -> None:
        self._ids = check_recorded(trace, running.described, tokenizer)
        self.running, self.trace = running, trace
        self._tokenizer, self._paging = tokenizer, paging
        turns = [trace.meta if n is None else trace.header.turn(n) for n, _ in trace.answers]
        self._checks = [object_at(each, "answer_check") for each in turns]
        most = [each.get("max_new_tokens") for each in self._checks]  # untrusted input
        if other := [x for x in most if x is not None and (type(x) is not int or x < 1)]:
            raise TraceError(
                f"{trace.name}: max_new_tokens of its answer_check is {other[0]!r}, expected a "
                "number of tokens; record the prompt again"
            )
        self._writings: list[Writing] = []
        if writing is not None:
            counts = (min(writing.new_tokens, x or writing.new_tokens) for x in most)
            self._writings = [replace(writing, new_tokens=count) for count in counts]
        self._residual = Residual(running.model)
        self._prefixes: dict[int, Prefix] = {}
        self._full: FullPass | None = None

    def run(
        self,
        policy: Policy,
        budget: int,
        schedule: Schedule,
        layers: Sequence[int] | None = None,
        response: Own | None = None,
    ) -> tuple[Record, Outcome]:
        """Run the prompt under a policy. Raises as `Decoding`.

        response: the one that a batch has written; by default it is written here.
        """
        decoding_of = self._decoding_of(policy, budget, schedule, layers)
        record, forced, peak, full = self._forced(decoding_of, schedule)
        answers: list[Generated] = []
        if self._writings:
            decoding, written = response or self._alone(decoding_of)
            answers = [self._generated(each, turn) for turn, each in enumerate(written)]
            peak = max(peak, decoding.decode_peak_bytes)
            full = max(full, decoding.full_bytes)
            record = replace(record, response=self._response([each.tokens for each in answers]))
        remarks = record.remark, uncompared(self.running, self.trace, schedule)
        record = replace(
            record, facts=facts_of(policy, schedule), remark="\n".join(filter(None, remarks))
        )
        first = answers[0] if answers else None
        return record, Outcome(forced, first, peak, full, tuple(answers[1:]))

    def begin(self, *cell: Any) -> tuple[Decoding, Tensor]:
        """Run the prompt under the terms of `run`; returns the logits of its last row, [V], too.

        Of a trace with one turn, whose response a batch writes.
        """
        n_pos = self.trace.prompt_len + sum(each.new_tokens for each in self._writings)
        with self._decoding_of(*cell)(n_pos=n_pos) as decoding:
            return decoding, self._prompt(decoding)

    def _decoding_of(
        self, policy: Policy, budget: int, schedule: Schedule, layers: Sequence[int] | None
    ) -> Callable[..., Decoding]:
        return partial(
            Decoding,
            self.running,
            replace(policy, schedule=schedule),
            budget,
            prompt_len=self.trace.prompt_len,
            context_len=self.trace.header.context_len,
            layers=layers,
            name=self.trace.name,
            paging=self._paging,
            repeated=self._repeated if policy.reads.context_again else None,
        )

    def _prompt(self, decoding: Decoding, first: int | None = None) -> Tensor:
        return run_prompt(decoding, self._ids[: self.trace.prompt_len], self._prefix, first)

    def _prefix(self, ids: Sequence[int]) -> Prefix:
        """The first rows with the full cache: the same for all policies."""
        if len(ids) not in self._prefixes:
            self._prefixes[len(ids)] = prefill(self.running, ids)
        return self._prefixes[len(ids)]

    @cached_property
    def _repeated(self) -> dict[str, Tensor]:
        """Rows that repeat the context, as recorded, run again: the same for all policies."""
        trace = self.trace
        context = self._ids[: trace.header.context_len or trace.prompt_len]
        return repeat_context(self.running.model, context, trace)

    def check(self, schedules: Iterable[Schedule] = ()) -> FullPass:
        """Raise CaptureError unless the model computes what was recorded, with the full cache.

        schedules: of the runs that are compared with the pass, which is returned.
        """
        first = first_compared(self.running, self.trace, schedules)
        if self._full is None or first < self._full.first:
            self._full = FullPass(self.running, self.trace, self._residual, first)
        return self._full

    def _forced(
        self, decoding_of: Callable[..., Decoding], schedule: Schedule
    ) -> tuple[Record, Forced, int, int]:
        trace, full = self.trace, self.check([schedule])
        end, response = trace.prompt_len, self._ids[trace.prompt_len :]
        first = first_compared(self.running, trace, [schedule])
        start = min(first, end - 1)  # the first row whose prediction is compared
        rows = FullRows(first, self._residual)

        def observe(call: KernelCall) -> None:
            rows.add(call, len(decoding.tokens))

        decoding = decoding_of(n_pos=trace.n_pos, observe=observe, questions=trace.header.questions)
        with decoding:
            with self._residual.following() if first < end else nullcontext():
                logits = self._prompt(decoding, first)
            with self._residual.following(), self.running.head.apart() as outputs:
                if response:
                    decoding.feed(response, logits=len(response))
        runs = [Predictions(logits, start)]
        runs += [Predictions(torch.cat(outputs), end, self.running.head)] if response else []
        runs[-1] = runs[-1][:-1]  # the last row predicts nothing
        expected = full.predictions[start - full.predicts :]
        forced = Forced(
            **compared(runs, expected, self._ids[start + 1 :]),
            stream_error=_moved_streams(rows, full.rows),
            output=self._moved_outputs(rows, full.rows, decoding.layers),
        ).parted(end - first)
        return decoding.record(), forced, decoding.decode_peak_bytes, decoding.full_bytes

    def _moved_outputs(
        self, rows: FullRows, full: FullRows, layers: Sequence[int]
    ) -> OutputDeviation:
        """The error of the attention output of some layers, of the rows from `rows.first` on."""
        trace, matrices = self.trace, projected(self.running)
        shape = (len(layers), trace.part().n_qheads, trace.n_pos - rows.first)
        error = np.zeros(shape, np.float32)
        added = None if matrices is None else np.zeros((shape[0], shape[2]), np.float32)
        for at, layer in enumerate(layers if trace.n_pos > rows.first else ()):
            live, expected = (x.output(layer, rows.first) for x in (rows, full))
            error[at] = relative_change(live, expected).cpu().numpy()
            if added is not None and matrices is not None:
                blocks = matrices.read("o_proj", slice(layer, layer + 1))[0].to(live)
                stream = torch.einsum("hnd,hdm->nm", live - expected, blocks)
                added[at] = torch.linalg.vector_norm(stream, dim=-1).cpu().numpy()
        return OutputDeviation(error, np.full(shape, np.nan, np.float32), added=added)

    def _alone(self, decoding_of: Callable[..., Decoding]) -> Own:
        spans, end = list[tuple[int, int]](), self.trace.prompt_len
        for question, writing in zip(self._questions, self._writings, strict=False):
            start = end + writing.new_tokens
            end = start + len(question)
            spans.append((start, end))
        decoding = decoding_of(n_pos=end + self._writings[-1].new_tokens, questions=spans)

        def feed(tokens: Sequence[int]) -> Tensor:
            if len(tokens) > 1:
                decoding.ask(len(decoding.tokens) + len(tokens))
            return decoding.feed(tokens)[-1]

        with decoding:
            return decoding, self._answers(self._prompt(decoding), feed)

    def _generated(self, written: Written, turn: int) -> Generated:
        tokens, score, answered = tuple(written.tokens), None, None
        if right := self._right(tokens, turn):
            counts = range(1, len(tokens) + 1)
            answered = next(n for n in counts if self._right(tokens[:n], turn))
        if "scorer" in self._checks[turn]:
            score = self._score(tokens, turn)
        full_right = self._full_right(turn)
        return Generated(tokens, right, answered, full_right, written.seconds, score)

    @cached_property
    def _questions(self) -> list[list[int]]:
        """Tokens of later questions, with the one that ended the answer before by itself."""
        stop = stop_tokens(self.running.model, self._tokenizer)
        return [
            self._ids[start - (self._ids[start - 1] in stop) : end]
            for start, end in self.trace.header.questions
        ]

    def _answers(self, logits: Tensor, feed: Callable[[Sequence[int]], Tensor]) -> list[Written]:
        """Return each answer; logits: [V] of the first token.

        feed: runs a token of an answer, or its last with the next question; returns logits [V].
        """
        out: list[Written] = []
        before = self._ids[: self.trace.prompt_len]
        stop = stop_tokens(self.running.model, self._tokenizer)
        for turn, writing in enumerate(self._writings):
            if turn:
                question = following(self._questions[turn - 1], out[-1].tokens[-1], stop)
                logits = feed([out[-1].tokens[-1], *question])
                before = [*before, *out[-1].tokens, *question]
            start = time.perf_counter()
            choose = writing.choice.begin(len(before), writing.new_tokens)
            tokens = [choose(logits, before)]
            while len(tokens) < writing.new_tokens and tokens[-1] not in stop:
                logits = feed(tokens[-1:])
                tokens.append(choose(logits, [*before, *tokens]))
            out.append(Written(tokens, None, time.perf_counter() - start))
        return out

    @cached_property
    def _full_response(self) -> list[tuple[int, ...]]:
        """Tokens of each answer with the full cache: the recorded ones if they are those."""
        trace, writings = self.trace, self._writings
        generation, after = object_at(trace.meta, "generation"), self._ids[trace.prompt_len :]
        recorded = [tuple(after[rows]) for _, rows in trace.answers]
        ends = [trace.header.turn(n).get("stopped") for n in range(1, len(writings))]
        answers = [x[: each.new_tokens] for x, each in zip(recorded, writings, strict=True)]
        whole = all(
            end == "eos" or len(tokens) == each.new_tokens
            for end, tokens, each in zip(
                [*ends, generation.get("stopped")], answers, writings, strict=True
            )
        )
        choice = writings[0].choice
        alike = all(generation.get(name) == choice.settings.get(name) for name in APPLIED)
        greedy = choice.temperature == 0 == generation.get("temperature")
        if greedy and alike and whole and answers[:-1] == recorded[:-1]:
            return answers
        step = WHOLE if self.running.continues else 1
        logits, cache = self.running.full(self._ids[: trace.prompt_len])

        def feed(tokens: Sequence[int]) -> Tensor:
            start, model = cache.get_seq_length(), self.running.model
            return [x for _, x in run_chunks(model, cache, tokens, start, 1, step)][-1][-1]

        with torch.inference_mode(), evaluating(self.running.model):
            return [tuple(each.tokens) for each in self._answers(logits[-1], feed)]

    def _full_right(self, turn: int) -> bool | None:
        """Whether an answer with the full cache is right; the recorded one unless given."""
        right = self._checks[turn].get("right")
        given = object_at(self.trace.meta, "generation").get("stopped") == GIVEN
        if not given or right is None:
            return right
        return self._right(self._full_response[turn], turn)

    def _response(self, answers: Sequence[tuple[int, ...]]) -> Response:
        def of(answers: Sequence[tuple[int, ...]]) -> tuple[Any, ...]:
            texts = [self._text(tokens) for tokens in answers]
            rights = {self._right(tokens, turn) for turn, tokens in enumerate(answers)} - {None}
            text = None if None in texts else "\n".join(map(str, texts))
            return tuple(chain(*answers)), text, all(rights) if rights else None

        return Response(*of(answers), *of(self._full_response))

    def _text(self, tokens: Sequence[int]) -> str | None:
        return None if self._tokenizer is None else response_text(tokens, self._tokenizer)

    def _right(self, tokens: Sequence[int], turn: int) -> bool | None:
        value = self._score(tokens, turn)
        return None if value is None else value == 1

    def _score(self, tokens: Sequence[int], turn: int) -> float | None:
        check, text = self._checks[turn], self._text(tokens)
        if text is None or check.get("right") is None:
            return None
        text = f"{check.get('opened') or ''}{text}"
        if (kind := str(check.get("kind"))) in LANGUAGES:
            prompt = str(object_at(self.trace.meta, "text").get("prompt"))
            check = LANGUAGES[kind](prompt, text, check)
            value = check.get("score", check["right"])
            return None if value is None else float(value)
        return text_score(text, check)


def _moved_streams(rows: FullRows, full: FullRows) -> Any:
    """|h' - h| / |h| of the residual stream before each layer, [L, n]."""
    if not rows.stream:
        return np.empty((len(full.stream), 0))
    pairs = ((x.input(at, rows.first) for x in (rows, full)) for at in range(len(full.stream)))
    return torch.stack([relative_change(*pair) for pair in pairs]).cpu().numpy()
