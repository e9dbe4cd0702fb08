"""The header of a trace: everything that it says about itself besides its arrays."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from typing import Any

from kvsim.core.attention import Formula, Rope
from kvsim.core.parameters import check_fields
from kvsim.core.probe import Chunk, Probe
from kvsim.core.sources import Size
from kvsim.errors import TraceError
from kvsim.schema import CHUNK, LABELS, LOGPROBS, SUMS, object_at


@dataclass(frozen=True)
class Header:
    """Facts about one trace.

    Attributes:
        prompt_len: rows 0 to prompt_len - 1 are the prefill.
        formulas: what each layer of the trace computes from q, k, v.
        ropes: the rotary embedding that q and k of each layer went through.
        layer_ids: the model's number of each layer.
        context_len: rows 0 to context_len - 1 are the context, the others of the prompt the
            question; None where the prompt does not say so.
        questions: (start, stop) of each question after the first answer, in the rows after the
            prompt; the rows between them, and behind the last, are the answers. Empty for one turn.
        name: for tables and figures; not part of the digest.
        source_dtypes: for each array, the dtype it had in the model, such as ``bfloat16``.
        meta: provenance, ready for JSON; not part of the digest.
        left_out: rows (start, stop) of which only sums are stored; None where there are none.
        owners: the place of the layer whose entries each layer reads, its own or an earlier one;
            empty where each reads its own.
        sizes: query heads, KV heads, dimensions of keys and of values of each layer, of which the
            arrays have the largest, padded with zeros; empty where all layers have those.
    """

    prompt_len: int
    formulas: tuple[Formula, ...]
    ropes: tuple[Rope, ...]
    layer_ids: tuple[int, ...]
    name: str = "memory"
    source_dtypes: Mapping[str, str] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)
    context_len: int | None = None
    owners: tuple[int, ...] = ()
    sizes: tuple[Size, ...] = ()
    left_out: tuple[int, int] | None = None
    questions: tuple[tuple[int, int], ...] = ()

    @property
    def labels(self) -> dict[str, str | int | float]:
        """Labels of the prompt, as far as they are text or numbers (`schema.LABELS`)."""
        return self._labels(self.meta)

    def labels_of(self, turn: int) -> dict[str, str | int | float]:
        """Labels of a turn, from 1: its own, and those of the prompt."""
        return self.labels | self._labels(self.turn(turn))

    def turn(self, turn: int) -> Mapping[str, Any]:
        """What `meta` says of a turn, from 1: its labels, question, response, answer check."""
        turns = self.meta.get("turns")
        of_turn = turns[turn - 1] if isinstance(turns, list) and len(turns) >= turn else None
        return of_turn if isinstance(of_turn, dict) else {}

    def answers(self, n_pos: int) -> list[tuple[int, int]]:
        """Return (start, stop) of the answer of each turn in a sequence of n_pos tokens."""
        ends = [self.prompt_len, *chain(*self.questions), n_pos]
        return list(zip(ends[::2], ends[1::2], strict=True))

    @staticmethod
    def _labels(document: Mapping[str, Any]) -> dict[str, str | int | float]:
        values = object_at(document, "labels")
        return {
            name: printable(values[name]) if isinstance(values[name], str) else values[name]
            for name in LABELS
            if fits_label(name, values.get(name))
        }

    @property
    def spans(self) -> dict[str, tuple[tuple[int, int], ...]]:
        """Token spans of the prompt by name, such as its `needle`: first position, behind last."""
        return {
            name: tuple((start, end) for start, end in spans)
            for name, spans in self.meta.get("spans", {}).items()
        }

    @property
    def other_layers(self) -> dict[int, str]:
        """Kinds of the model's layers without attention, by number: such as `linear_attention`."""
        kinds = object_at(object_at(self.meta, "model"), "other_layers")
        return {number: str(kind) for kind, numbers in kinds.items() for number in numbers}

    @property
    def whole(self) -> bool:
        """Whether these are all layers with attention, as far as `meta` says which these are."""
        layers, others = object_at(self.meta, "model").get("layers"), self.other_layers
        layers = layers if isinstance(layers, int) else len(self.layer_ids)
        return [*self.layer_ids] == [x for x in range(layers + len(others)) if x not in others]

    @property
    def response_logprobs(self) -> tuple[float, ...]:
        """Log-likelihood of each token of the response, in nats; else none."""
        return tuple(self.meta.get("response_logprobs", ()))

    @property
    def mean_logprobs(self) -> tuple[float, ...]:
        """Mean log-likelihood over the vocabulary at each token of the response; else none."""
        return tuple(self.meta.get("mean_logprobs", ()))

    @property
    def layer_sensitivity(self) -> tuple[float, ...]:
        """For each layer the KL in nats that its error causes over that error squared; else none.

        How it is measured: `kvsim.recorder.sensitivity`.
        """
        return tuple(self.meta.get("layer_sensitivity", ()))

    @property
    def probe(self) -> Probe | None:
        """The chunks and tokens of its probe; None without one."""
        return Probe.of(self.meta, self.context_len or self.prompt_len, self.name)

    @property
    def probe_chunks(self) -> tuple[Chunk, ...]:
        """The chunks of its probe; none without one."""
        return () if self.probe is None else self.probe.chunks

    @property
    def uniform(self) -> bool:
        """Whether all layers compute plain causal attention, with one scale and one rotation."""
        return self.formulas[0].plain and len({*zip(self.formulas, self.ropes, strict=True)}) == 1

    def readers(self, layer: int) -> tuple[int, ...]:
        """Return the layers that read the entries of a layer with its own, by place, it first."""
        return tuple(i for i, owner in enumerate(self.owners) if owner == layer) or (layer,)

    def within(self, n_pos: int) -> Header:
        """Return the header for `n_pos` positions: windows that mask nothing out are dropped."""
        return replace(self, formulas=tuple(each.within(n_pos) for each in self.formulas))

    @property
    def latent(self) -> int | None:
        """Of latent attention, the size of the latent, which ends a key and is its value."""
        latent = self.meta.get("latent")
        return latent if type(latent) is int else None

    def check(self, shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
        """Raise TraceError where the header does not fit arrays of these shapes."""
        n_layers, n_qheads, n_pos, dim = shapes["q"]
        check_fields(self, where, TraceError)
        heads, value_dim = shapes["v"][1::2]
        self._check_sizes((n_qheads, heads, dim, value_dim), n_layers, where)
        sizes = self.sizes or ((n_qheads, heads, dim, value_dim),) * n_layers
        if not 1 <= self.prompt_len <= n_pos:
            raise TraceError(
                f"{where}: prompt_len is {self.prompt_len}, expected 1 to {n_pos}, "
                "the number of tokens"
            )
        if self.context_len is not None and not 1 <= self.context_len <= self.prompt_len:
            raise TraceError(
                f"{where}: context_len is {self.context_len}, expected 1 to {self.prompt_len}, the "
                "number of tokens of the prompt"
            )
        ends = [self.prompt_len, *chain(*self.questions), n_pos]
        if not all(len(each) == 2 for each in self.questions) or not all(
            type(b) is int and a < b for a, b in pairwise(ends[: None if self.questions else 1])
        ):
            raise TraceError(
                f"{where}: questions are {reprlib.repr(self.questions)}, expected a list of "
                f"[start, stop] behind the prompt of {self.prompt_len} and before the end of "
                f"{n_pos} tokens, each followed by tokens of its answer"
            )
        self._check_left_out(shapes, where)
        _check_spans(self.meta.get("spans", {}), self.prompt_len, where)
        Probe.of(self.meta, self.context_len or self.prompt_len, where)
        for key, n in dict.fromkeys(LOGPROBS, n_pos - self.prompt_len).items():
            logprobs = self.meta.get(key)
            if logprobs is not None and not _numbers(logprobs, n, -math.inf, 0.0):
                raise TraceError(
                    f"{where}: {key} are {reprlib.repr(logprobs)}, expected a finite number, at "
                    f"most 0, for each of the {n} tokens of the response; record it again"
                )
        sensitivity = self.meta.get("layer_sensitivity")
        if sensitivity is not None and not _numbers(sensitivity, n_layers, 0.0, math.inf):
            raise TraceError(
                f"{where}: layer_sensitivity is {reprlib.repr(sensitivity)}, expected a finite "
                f"number, at least 0, for each of the {n_layers} layers; record it again"
            )
        of_layers = {
            "layer numbers": (int, self.layer_ids),
            "formulas": (Formula, self.formulas),
            "ropes": (Rope, self.ropes),
            **({"owners": (int, self.owners)} if self.owners else {}),
        }
        for name, (kind, values) in of_layers.items():
            if len(values) != n_layers:
                raise TraceError(
                    f"{where}: {len(values)} {name} for {n_layers} layers; expected one for each"
                )
            if not all(type(value) is kind for value in values):
                raise TraceError(
                    f"{where}: {name} are {reprlib.repr(values)}, expected {kind.__name__} each"
                )
        self._check_owners(where)
        ordered = all(a < b for a, b in pairwise(self.layer_ids))
        if not (ordered and 0 <= self.layer_ids[0] <= self.layer_ids[-1] < 1 << 31):
            raise TraceError(
                f"{where}: layer is {reprlib.repr(list(self.layer_ids))}, expected the model's "
                "layer numbers, increasing from 0 or more"
            )
        self._check_layers(sizes, where)

    def _check_layers(self, sizes: Sequence[Size], where: str) -> None:
        latent = self.meta.get("latent")
        for _, heads, dim, value_dim in sizes if latent is not None else ():
            if (latent, heads, value_dim) != (value_dim, 1, min(value_dim, dim)):
                raise TraceError(
                    f"{where}: latent is {reprlib.repr(latent)}, of {heads} KV heads with keys of "
                    f"{dim} and values of {value_dim} dimensions; expected the size of the values "
                    "of one head, which end its keys; record it again"
                )
        for rope, formula, (n_qheads, _, dim, _) in zip(
            self.ropes, self.formulas, sizes, strict=True
        ):
            width = 2 * len(rope.inv_freq)
            if width > dim:
                raise TraceError(
                    f"{where}: rope rotates {width} dimensions, but a head has {dim}; "
                    f"expected at most {dim // 2} frequencies"
                )
            if len(formula.sinks) not in (0, n_qheads):
                raise TraceError(
                    f"{where}: {len(formula.sinks)} sinks for {n_qheads} query heads; "
                    "expected one for each, or none"
                )

    def _check_sizes(self, largest: Size, n_layers: int, where: str) -> None:
        whole = [[*map(type, x)] == [int] * 4 and min(x) > 0 for x in self.sizes]
        valid = not self.sizes or (
            whole == [True] * n_layers
            and len({*self.sizes}) > 1
            and tuple(map(max, *self.sizes)) == largest
            and all(qheads % heads == 0 for qheads, heads, *_ in self.sizes)
        )
        if not valid:
            raise TraceError(
                f"{where}: sizes are {reprlib.repr(self.sizes)}, expected query heads, KV heads, "
                f"dimensions of keys and of values for each of {n_layers} layers, at most {largest}"
            )

    def _check_left_out(self, shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
        if self.left_out is None:
            if sums := [name for name in SUMS if name in shapes]:
                raise TraceError(
                    f"{where}: it has {sums[0]} and leaves out no rows, expected both or neither"
                )
            return
        start, stop = self.left_out
        blocks = start % CHUNK == stop % CHUNK == 0
        if not (blocks and 0 < start < stop < (self.context_len or self.prompt_len)):
            raise TraceError(
                f"{where}: rows {start} to {stop - 1} are left out; expected whole blocks of "
                f"{CHUNK} rows, the first one and the last row of the prompt not among them"
            )
        missing = [name for name in ("attn_out", "lse", "received") if name not in shapes]
        if missing or shapes["received"][2] != stop:
            raise TraceError(
                f"{where}: rows {start} to {stop - 1} are left out, and "
                f"{missing[0] if missing else 'received'} is not there or of other rows; expected "
                "outputs, log-sum-exp and the attention received from them"
            )

    def _check_owners(self, where: str) -> None:
        for layer, owner in enumerate(self.owners):
            before = 0 <= owner < layer and self.owners[owner] == owner
            formula = self.formulas[layer]
            sizes = self.sizes or [()] * len(self.owners)
            same = before and (self.formulas[owner], sizes[owner]) == (formula, sizes[layer])
            alike = same and not formula.sinks
            if owner != layer and not alike:
                raise TraceError(
                    f"{where}: layer {layer} reads the entries of layer {owner}; expected an "
                    "earlier layer with entries of its own, and one formula without sinks"
                )


def _numbers(values: Any, n: int, low: float, high: float) -> bool:
    """Whether these are n finite numbers, none below `low` or above `high`."""
    return (
        isinstance(values, list | tuple)
        and len(values) == n > 0
        and all(type(x) in (int, float) and low <= x <= high and abs(x) < math.inf for x in values)
    )


def _check_spans(spans: Any, prompt_len: int, where: str) -> None:
    """Raise TraceError unless each name has spans of the prompt."""
    for each in spans.values() if isinstance(spans, dict) else [[[spans]]]:
        for span in each if isinstance(each, list | tuple) else [each]:
            whole = isinstance(span, list | tuple) and [*map(type, span)] == [int, int]
            if not whole or not 0 <= span[0] < span[1] <= prompt_len:
                raise TraceError(
                    f"{where}: spans has {reprlib.repr(span)}, expected [start, end] within the "
                    f"{prompt_len} tokens of the prompt, in a list for each name; record the trace "
                    "again"
                )


def fits_label(name: str, value: Any) -> bool:
    """Whether a value may be a label: text or a whole number of 64 bits, as columns of tables are.

    `length` is never text, and `depth` a number from 0 to 1.
    """
    if name == "depth":
        return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1
    whole = isinstance(value, int) and not isinstance(value, bool)
    return abs(value) < 1 << 63 if whole else isinstance(value, str) and name != "length"


def printable(text: str) -> str:
    """Return text that UTF-8 can hold: halves of surrogate pairs, legal in JSON, are escaped."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
