"""The effect of replays' decisions on their model, in one forward pass over the response.

Records of one trace are applied together. All rows that an eviction can reach go through the model
at once, those of several records as one sequence; in every layer a row attends to the entries that
its record retains, with the keys and values that the layers below have made of the evictions. The
rows before are those of the full cache, computed once for all records.

A live run decides again on what its own evictions have changed; here the decisions are those of the
replay. Where none would change, both are equal.

Shape letters: B records, H KV heads, w rows, T tokens, M candidates for entries, d head dimension.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import Cache

from kvsim.analysis.live.table import measure_judged
from kvsim.analysis.table import JUDGED
from kvsim.core.outcome import Forced, Outcome
from kvsim.core.pieces import Schedule
from kvsim.core.reading import Reads
from kvsim.core.record import Record
from kvsim.core.storing import Codec, round_marked, stored_after
from kvsim.core.threads import threads_for
from kvsim.core.trace import Trace
from kvsim.engine.layers import DEFAULT_MEMORY
from kvsim.errors import CaptureError, PolicyError
from kvsim.policies.model import model_of
from kvsim.policies.naming import codec_of
from kvsim.recorder import load_model
from kvsim.recorder.cache import cache_option
from kvsim.recorder.generation import check_logits, evaluating
from kvsim.recorder.hooks import Attention, KernelCall, intercepting, kernel_mask
from kvsim.recorder.layers import Residual
from kvsim.recorder.positions import scales_by_cache
from kvsim.runner.full import FullPass, compared
from kvsim.runner.model import RunningModel
from kvsim.runner.recorded import check_recorded, relative_change
from kvsim.schema import NEVER
from kvsim.store.metadata import object_at
from kvsim.store.opening import TraceLike, as_trace

#: Rows that attend to one selection of entries.
_ROWS = 64


class Judge:
    """A recorded sequence on its model, to which records of replays are applied.

    memory: bytes that a batch of records may take, 2 GiB by default. The pass with the full cache
    runs when the first record is judged, or at `check`.

    Raises:
        NeedsError: a trace without tokens, or of some layers of the model alone.
        CaptureError: another model than the recorded one.
    """

    def __init__(self, running: RunningModel, trace: Trace, memory: int | None = None) -> None:
        self._ids = check_recorded(trace, running.described)
        running.check_length(trace.n_pos)
        if scales_by_cache(running.model, trace.n_pos):
            raise CaptureError(
                f"queries of {trace.name} have a factor of the length of the cache, and the judge "
                "runs rows without one; expected a shorter text; run the policy live"
            )
        self.running, self.trace = running, trace
        self._memory = DEFAULT_MEMORY if memory is None else memory
        self._residual = Residual(running.model)
        running.check_states()

    @cached_property
    def _full(self) -> FullPass:
        return FullPass(self.running, self.trace, self._residual)

    def check(self) -> None:
        """Raise CaptureError unless the model computes what was recorded, with the full cache."""
        _ = self._full

    def outcomes(self, records: Sequence[Record]) -> list[Outcome]:
        """Judge replays of the trace; returns their outcomes in the same order.

        Raises PolicyError for a record that a forward pass cannot show (`check_judged`).
        """
        out: dict[int, Outcome] = {}
        for numbers, logits, moved in self._batches(records):
            full, response = self._full.logits, self._ids[self.trace.prompt_len :]
            same = len(full) - logits.shape[1]
            parts = (
                compared(full[:same].expand(len(numbers), -1, -1), full[:same], response[:same]),
                compared(logits, full[same:], response[same:]),
            )
            of_each = {name: np.concatenate([x[name] for x in parts], -1) for name in parts[0]}
            full_nll = of_each.pop("full_nll")
            for place, number in enumerate(numbers):
                values = {name: each[place] for name, each in of_each.items()}
                forced = Forced(**values, full_nll=full_nll, stream_error=moved[place])
                out[number] = Outcome(forced)
        return [out[number] for number in range(len(records))]

    def logits(self, records: Sequence[Record]) -> Tensor:
        """Logits [B, R, V] that predict the R tokens of the response under each record.

        Raises as `outcomes`.
        """
        out: dict[int, Tensor] = {}
        for numbers, logits, _ in self._batches(records):
            same = self._full.logits[: len(self._full.logits) - logits.shape[1]]
            together = torch.cat([same.expand(len(numbers), -1, -1), logits], dim=1)
            out.update(zip(numbers, together, strict=True))
        return torch.stack([out[number] for number in range(len(records))])

    def _batches(
        self, records: Sequence[Record]
    ) -> Iterator[tuple[list[int], Tensor, NDArray[np.float64]]]:
        """Yield the numbers of records that are judged together, and what `_judge` returns."""
        for record in records:
            check_judged(record, self.trace)
        starts = [_first_row(record, self.trace) for record in records]
        kinds = [(x, r.codec is not None) for x, r in zip(starts, records, strict=True)]
        order = sorted(range(len(records)), key=kinds.__getitem__)
        for (start, rounds), group in groupby(order, kinds.__getitem__):
            numbers, size = list(group), self._together(start, rounded=bool(rounds))
            for part in (numbers[i : i + size] for i in range(0, len(numbers), size)):
                yield part, *self._judge([records[number] for number in part], start)

    def _together(self, start: int, *, rounded: bool = False) -> int:
        """Records of a batch, whose rows begin at `start`; half of the memory is for what they add.

        A quarter is for their attention (`JudgedRows`), the rest for what they share.
        """
        if self.running.has_states:  # they go from row to row, also from one record to the next
            return 1
        model, trace = self.running.model, self.trace
        config = model.config.get_text_config()
        # logits with their copies, and about twenty activations of the hidden size
        of_row = 4 * config.vocab_size + 20 * config.hidden_size
        # which rows see an entry, where it is, and what a codec makes of it
        of_entry = 10 * trace.n_qheads + rounded * 4 * trace.n_heads * trace.entry_size
        numbers = (trace.n_pos - start) * of_row + trace.n_pos * of_entry
        return max(1, int(self._memory // 2 // (numbers * max(4, model.dtype.itemsize))))

    def _judge(self, records: Sequence[Record], start: int) -> tuple[Tensor, NDArray[np.float64]]:
        """Run records whose first rows, before row `start`, see everything.

        Returns the last logits [B, <= R, V], those before being as with the full cache, and
        |h' - h| / |h| of the input of each layer [B, L, R].
        """
        trace, full, n = self.trace, self._full, self.trace.n_pos
        first = max(start, trace.prompt_len)
        moved = np.zeros((len(records), trace.n_layers, n - trace.prompt_len))
        logits = full.logits[:0].expand(len(records), -1, -1)
        if start < n:
            entries = JudgedRows(trace, full, records, start, self.running, self._memory // 4)

            def receive(call: KernelCall) -> None:
                place = trace.layer_ids.index(call.layer)
                rows = self._residual.rows(call).unflatten(0, (len(records), -1))
                rows = rows[:, first - start :].double()
                change = relative_change(rows, full.rows.input(place)[first - trace.prompt_len :])
                moved[:, place, first - trace.prompt_len :] = change.cpu().numpy()

            running = self.running
            before = running.filled(self._ids[:start]) if running.has_states else None
            with (
                torch.inference_mode(),
                evaluating(running.model),
                intercepting(running.model, receive, attending=entries.attend),
                self._residual.following(),
            ):
                logits = self._forward(start, len(records), before)
        return logits, moved

    def _forward(self, start: int, count: int, before: Cache | None) -> Tensor:
        """Run the rows from `start` on of so many records; returns what predicts [B, w, V].

        The last logits are of the row before the last token. before: a cache of the rows before
        `start`, where layers have states.
        """
        running, n = self.running, self.trace.n_pos
        position = torch.arange(start, n, device=running.device)
        first = max(start, self.trace.prompt_len - 1) - start
        wanted = torch.arange(count, device=running.device)[:, None] * len(position)
        wanted = (wanted + torch.arange(first, len(position) - 1, device=running.device)).flatten()
        ids = torch.tensor(self._ids[start:], device=running.device)
        # a mask of four axes is taken as it is, so that none is made; `attend` makes its own
        any_mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=running.device)
        options: dict[str, Any] = {"use_cache": False, "attention_mask": any_mask}
        if before is not None:
            options = {"use_cache": True, **cache_option(running.model, before)}
        out: Tensor = running.model(
            ids.repeat(count)[None],
            position_ids=position.repeat(count)[None],
            **options,
            **running.logits_of(wanted),
        ).logits[0]
        out = out if len(out) == len(wanted) else out[wanted]
        logits = out.reshape(count, len(position) - 1 - first, out.shape[-1])
        for of_record in logits:
            check_logits(of_record, start + first)
        return logits


class _Layer(NamedTuple):
    """Entries that rows of a layer may attend to: candidates of each record.

    keys, values [H, n, d], those of all records one after the other; key_at, value_at [B, H, M]
    where candidates are in them. pos [M]; first, last [B, H or qhead, M]: the rows that see one.
    """

    keys: Tensor
    values: Tensor
    key_at: Tensor
    value_at: Tensor
    pos: Tensor
    first: Tensor
    last: Tensor


class JudgedRows:
    """The attention of rows from `start` on under each of some records.

    memory: bytes that the attention of a block of rows may take.
    """

    def __init__(
        self,
        trace: Trace,
        full: FullPass,
        records: Sequence[Record],
        start: int,
        running: RunningModel,
        memory: int,
    ) -> None:
        self._trace, self._full, self._records, self._start = trace, full, records, start
        self._added, self._memory = running.added, memory
        self._pos = torch.arange(trace.n_pos, device=running.device)
        own = torch.arange(len(records), device=running.device)[:, None] * (trace.n_pos - start)
        #: where the rows of each record are, behind those that all share [B, T]
        self._rows = torch.where(self._pos < start, self._pos, self._pos + own)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, attention: Attention
    ) -> Tensor:
        """Attention output [1, B * w, qhead, d] of queries [1, qhead, B * w, d]."""
        layer, new = self._trace.layer_ids.index(layer), query.shape[2]
        q = query[0].unflatten(1, (len(self._records), -1)).transpose(0, 1)
        of_layer = self._of_layer(layer, key[0, :, -new:], value[0, :, -new:])
        parts = []
        for first in range(self._start, self._trace.n_pos, _ROWS):
            rows = slice(first, min(first + _ROWS, self._trace.n_pos))
            part = q[:, :, rows.start - self._start : rows.stop - self._start]
            parts.append(self._attended(layer, of_layer, rows, part, attention))
        return torch.cat(parts, dim=1).flatten(0, 1)[None]

    def _gone(self, layer: int, record: Record, heads: int) -> Tensor:
        """The last row that sees each entry of a layer of H heads, int32 [H or qhead, T]."""
        if layer in record.layers:
            gone = torch.from_numpy(record.evicted_at[record.layers.index(layer)])
            return gone.to(self._pos.device)
        return torch.full((heads, len(self._pos)), NEVER, dtype=torch.int32).to(self._pos.device)

    def _of_layer(self, layer: int, key: Tensor, value: Tensor) -> _Layer:
        """The candidates of a layer; key, value [H, B * w, d] of the rows of all records."""
        trace, full, start = self._trace, self._full, self._start
        shared = (full.keys[layer][:, :start], full.values[layer][:, :start])
        tables = [torch.cat(pair, dim=1) for pair in zip(shared, (key, value), strict=True)]
        gone = [self._gone(layer, record, len(key)) for record in self._records]
        heads = max(map(len, gone))
        last = torch.stack([x.repeat_interleave(heads // len(x), 0) for x in gone])
        if trace.formulas[layer].reach is not None:
            last = torch.minimum(last, trace.formulas[layer].last_rows(self._pos).int())
        at = self._rows[:, None].expand(-1, len(key), -1)
        first = self._pos.expand_as(last)
        if self._records[0].codec is None:
            keys, values = tables
            return _Layer(keys, values, at, at, self._pos, first, last)
        return self._rounded(tables, last, first, at)

    def _rounded(self, tables: list[Tensor], last: Tensor, first: Tensor, at: Tensor) -> _Layer:
        """Four candidates for each entry: its key, and its value, exact and rounded."""
        after, places, n = [], [], len(self._pos)
        for which, exact in enumerate(tables):
            rounded, rows = [], []
            for record, gone, mine in zip(self._records, last, self._rows, strict=True):
                codec = codec_of(cast("Codec", record.codec))
                begin = _prefilled(record, self._trace) - 1
                rows.append(stored_after(gone, codec.clocks[which], begin))
                rounded.append(exact[:, mine])
                round_marked(codec, which, rounded[-1], rows[-1] != NEVER)
            tables[which] = torch.cat([exact, *rounded], dim=1)
            after.append(torch.stack(rows))
            copies = torch.arange(len(self._records), device=at.device)[:, None, None] * n
            places.append((at, (exact.shape[1] + copies + self._pos).expand_as(at)))
        until = [torch.minimum(x, last) for x in after]
        since = [torch.maximum(first, x.long() + 1) for x in after]
        both = torch.minimum(*until), torch.maximum(*since)
        # exact and exact; rounded key; rounded value; both rounded
        begins = (first, since[0], since[1], both[1])
        ends = (both[0], until[1], until[0], last)
        keys, values = places
        return _Layer(
            tables[0],
            tables[1],
            torch.cat([keys[i] for i in (0, 1, 0, 1)], dim=-1),
            torch.cat([values[i] for i in (0, 0, 1, 1)], dim=-1),
            self._pos.repeat(4),
            torch.cat(begins, dim=-1),
            torch.cat(ends, dim=-1),
        )

    def _attended(
        self, layer: int, of: _Layer, rows: slice, q: Tensor, attention: Attention
    ) -> Tensor:
        """Attention output [B, w, qhead, d] of queries [B, qhead, w, d] of some rows."""
        heads, group = len(of.keys), of.last.shape[1] // len(of.keys)
        some = (of.last >= rows.start) & (of.first < rows.stop) & (of.last >= of.first)
        some = some.unflatten(1, (heads, group)).any(2)  # [B, H, M]
        slot = some.cumsum(-1) - 1
        m = int(slot.amax()) + 1
        index = slot.new_zeros(*slot.shape[:-1], m + 1)
        candidates = torch.arange(slot.shape[-1], device=slot.device)
        index.scatter_(-1, slot.where(some, m), candidates.expand_as(slot))
        index = index[..., :m]
        valid = torch.arange(m, device=slot.device) < some.sum(-1, keepdim=True)
        # entries of KV heads and, of their queries, copies; masks, logits and weights
        numbers = (heads + q.shape[1]) * (of.keys.shape[2] + of.values.shape[2])
        numbers += 3 * q.shape[1] * q.shape[2]
        size = max(1, self._memory // (max(4, q.element_size()) * m * numbers))
        parts = []
        for start in range(0, len(q), size):
            some_records = slice(start, start + size)
            part, chosen = q[some_records], (index[some_records], valid[some_records])
            keys, values, seen = self._seen(layer, of, rows, some_records, *chosen, q.shape[1])
            mask = kernel_mask(seen, part, added=self._added)
            parts.append(attention(part, keys, values, mask))
        return torch.cat(parts)

    def _seen(
        self,
        layer: int,
        of: _Layer,
        rows: slice,
        records: slice,
        index: Tensor,
        valid: Tensor,
        qheads: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values [B, H, m, d] of candidates, and which rows see them [B, qhead, w, m].

        index: the candidates [B, H, m] of some records, of which those that are `valid` count.
        """
        heads, group = len(of.keys), of.last.shape[1] // len(of.keys)
        base = torch.arange(heads, device=index.device)[:, None] * of.keys.shape[1]
        keys, values = (
            table.flatten(0, 1)[at[records].gather(-1, index) + base]
            for table, at in ((of.keys, of.key_at), (of.values, of.value_at))
        )
        wide = index.repeat_interleave(group, 1)
        first, last = (x[records].gather(-1, wide)[:, :, None] for x in (of.first, of.last))
        row = torch.arange(rows.start, rows.stop, device=index.device)[:, None]
        seen = (first <= row) & (last >= row) & valid.repeat_interleave(group, 1)[:, :, None]
        seen = seen.repeat_interleave(qheads // seen.shape[1], 1)
        for number, record in enumerate(self._records[records]):
            if record.reads is None or layer not in record.layers:
                continue
            read = self._read(layer, record, record.reads, rows).to(index.device)
            place = of.pos[index[number]].repeat_interleave(qheads // heads, 0)[:, None]
            read = read.repeat_interleave(qheads // len(read), 0)
            seen[number] &= read.gather(-1, place.expand(-1, read.shape[1], -1))
        return keys, values, seen

    def _read(self, layer: int, record: Record, reads: Reads, rows: slice) -> Tensor:
        """Which entries of a layer rows read, bool [head, w, rows.stop]; those before read all."""
        heads = record.evicted_at.shape[1]
        gone, begin = self._gone(layer, record, heads), min(max(rows.start, reads.first), rows.stop)
        everything = torch.ones(len(gone), begin - rows.start, rows.stop, dtype=torch.bool)
        if begin == rows.stop:
            return everything
        read = reads.entries(record.layers.index(layer), slice(begin, rows.stop), gone)
        everything = everything.to(read.device).repeat_interleave(len(read) // len(gone), 0)
        return torch.cat([everything, read], dim=1)


def _prefilled(record: Record, trace: Trace) -> int:
    """The first row after the first event of the prefill."""
    return min(Schedule(compress=record.compress).ends(trace.prompt_len, trace.context_len))


def _first_row(record: Record, trace: Trace) -> int:
    """The first row that may not see all rows before it as they are; the end if all do."""
    start = min(int(record.evicted_at.min(initial=NEVER)) + 1, trace.n_pos)
    if record.reads is not None:
        start = min(start, record.reads.first)
    if record.codec is not None:
        start = min(start, _prefilled(record, trace))
    return start


def check_judged(record: Record, trace: Trace) -> None:
    """Raise PolicyError for a record that a forward pass over the recorded tokens cannot show."""
    shape = (trace.n_pos, trace.prompt_len, trace.name)
    given = (record.n_pos, record.prompt_len, record.trace)
    if shape != given:
        raise PolicyError(
            f"{record.policy}: the record is of {given[0]} tokens ({given[1]} of the prompt) of "
            f"{given[2]}; expected {shape[0]} ({shape[1]}) of {shape[2]}"
        )
    if reason := unjudged(record):
        raise PolicyError(reason)


def unjudged(record: Record) -> str:
    """Return why a forward pass over the recorded tokens cannot show a record; empty if it can."""
    reasons = {
        "keys are rotated to their slots, which depend on what else is held": (
            record.positions != "absolute"
        ),
        "rows of the prompt are dropped on the way down, and have no deeper keys": (
            record.selection is not None and record.selection.layer is not None
        ),
        "keys and values are rounded, and sets are those of query heads": (
            record.codec is not None and record.per_query_head
        ),
        "it is a live run": record.closed,
    }
    reason = next((text for text, applies in reasons.items() if applies), None)
    if reason is None:
        return ""
    return (
        f"{record.policy}: {reason}, so that no pass over the recorded tokens judges it; run it on "
        "the model (kvsim live)"
    )


def judge(
    model: Any,
    trace: TraceLike,
    records: Record | Sequence[Record],
    *,
    memory: int | None = None,
) -> pl.DataFrame:
    """Judge replays of a trace by a forward pass of its model.

    Args:
        model: a model of transformers, or what `kvsim.recorder.load_model` takes.
        trace: the trace, its path or URL, of all layers of the model, with its tokens.
        records: replays of it (`kvsim.replay`).
        memory: bytes that a batch of records may take, 2 GiB by default.

    Returns:
        A Table (`kvsim.measure`) of `response_kl`, `nll_increase`, `top_agreement` and
        `stream_error` [layer], of fidelity `judged`.

    Raises:
        NeedsError: a trace without tokens, or of some layers alone.
        CaptureError: another model than the recorded one.
        PolicyError: a record that a forward pass cannot show: keys rotated to their slots, rows of
            the prompt dropped on the way down, a live run.
    """
    trace = as_trace(trace)
    records = [records] if isinstance(records, Record) else [*records]
    if isinstance(model, str | Path):
        model = load_model(model, dtype=object_at(trace.meta, "model").get("dtype"))[0]
    with threads_for(model):
        outcomes = Judge(RunningModel(model), trace, memory).outcomes(records)
    return measure_judged(trace, records, outcomes, JUDGED)


def judge_of(trace: Trace, model: str, device: str, memory: int | None) -> Judge:
    """Return the judge of a trace by a model of that name, or by the recorded one without a name.

    Raises as `Judge`, and CaptureError where the model cannot be loaded.
    """
    name = model or str(model_of(trace)["name"] or "")
    if not name:
        raise CaptureError(f"{trace.name} does not say of which model it is; name it by --model")
    dtype = object_at(trace.meta, "model").get("dtype")
    return Judge(_running(name, dtype, device), trace, memory)


@lru_cache(maxsize=1)
def _running(name: str, dtype: str | None, device: str) -> RunningModel:
    return RunningModel(load_model(name, dtype=dtype, device=device)[0])
