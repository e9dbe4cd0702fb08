"""The header of a trace: its metadata."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from typing import Any

from kvsim.core.attention import Formula, Rope
from kvsim.core.left_out import held_parts
from kvsim.core.parameters import check_fields, integer, is_finite
from kvsim.core.probe import KEY as PROBE
from kvsim.core.probe import Probe
from kvsim.core.sources import Size
from kvsim.errors import TraceError
from kvsim.schema import CHUNK, LABELS, LOGPROBS, REPETITION, SUMS, object_at

#: Optional attributes.
OPTIONAL = ("context_len", "questions", "owners", "sizes", "left_out")


@dataclass(frozen=True)
class Header:
    """Facts about one trace.

    Attributes:
        prompt_len: rows 0 to prompt_len - 1 are the prefill.
        formulas: the attention formula of each layer.
        ropes: the rotary embedding that q and k of each layer went through.
        layer_ids: the model's number of each layer.
        context_len: rows 0 to context_len - 1 are the context, later ones of the prompt the
            question; None without a context.
        questions: (start, stop) of each question after the first answer, in the rows after the
            prompt; the rows between and after them are the answers. Empty for one turn.
        name: for tables and figures; not part of the digest.
        source_dtypes: the dtype of each array in the model, such as ``bfloat16``.
        meta: provenance, ready for JSON; not part of the digest.
        left_out: rows (start, stop) of which only sums are stored, or None.
        owners: for each layer, the place of the layer whose entries it reads, itself or an earlier
            one; empty if each reads its own.
        sizes: query heads, KV heads, dimensions of keys and of values of each layer; arrays have
            the largest, padded with zeros. Empty if all layers are equal.
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
    def optional(self) -> dict[str, Any]:
        """Optional attributes, ready for JSON: attributes of files, and part of the digest."""
        facts = {name: listed(getattr(self, name)) for name in OPTIONAL}
        return {name: fact for name, fact in facts.items() if fact}

    @property
    def labels(self) -> dict[str, str | int | float]:
        """Labels of the prompt that are text or numbers (`schema.LABELS`)."""
        return self._labels(self.meta)

    def labels_of(self, turn: int) -> dict[str, str | int | float]:
        """Labels of a turn, from 1: its own, and those of the prompt."""
        return self.labels | self._labels(self.turn(turn))

    def turn(self, turn: int) -> Mapping[str, Any]:
        """The `meta` of a turn, from 1: its labels, question, response, answer check."""
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
        """Token spans (start, stop) of the prompt by name, such as its `needle`."""
        return {
            name: tuple((start, end) for start, end in spans)
            for name, spans in self.meta.get("spans", {}).items()
        }

    @property
    def other_layers(self) -> dict[int, str]:
        """Kinds of the model's layers without attention by number, such as `linear_attention`."""
        kinds = object_at(object_at(self.meta, "model"), "other_layers")
        return {number: str(kind) for kind, numbers in kinds.items() for number in numbers}

    @property
    def whole(self) -> bool:
        """Whether these are all layers with attention, as far as `meta` lists them."""
        layers, others = object_at(self.meta, "model").get("layers"), self.other_layers
        layers = layers if isinstance(layers, int) else len(self.layer_ids)
        return [*self.layer_ids] == [x for x in range(layers + len(others)) if x not in others]

    @property
    def response_logprobs(self) -> tuple[float, ...]:
        """Log-likelihood of each token of the response, in nats; else none."""
        return tuple(self.meta.get("response_logprobs", ()))

    @property
    def layer_sensitivity(self) -> tuple[float, ...]:
        """KL in nats caused by each layer's error, over that error squared; empty if unmeasured.

        Measured by `kvsim.recorder.sensitivity`.
        """
        return tuple(self.meta.get("layer_sensitivity", ()))

    def held(self, name: str, rows: range) -> list[slice]:
        """Return the stored runs of these rows of an array; the last rows are always stored."""
        return held_parts(name, rows, self.left_out)

    @property
    def probe(self) -> Probe | None:
        """The chunks and tokens of its probe; None without one."""
        return Probe.of(self.meta)

    @property
    def chunks(self) -> Sequence[tuple[int, int, int]]:
        """(start, stop, rows) of each chunk of the context that a probe repeats."""
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
        """Size of the latent in latent attention: the end of a key, and its value."""
        latent = self.meta.get("latent")
        return latent if type(latent) is int else None

    def check(self, shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
        """Raise TraceError where the header does not fit arrays of these shapes."""
        check_fields(self, where, TraceError)
        for name, value, fits, expected in self._facts(shapes):
            if not fits:
                raise TraceError(f"{where}: {name} is {reprlib.repr(value)}; expected {expected}")

    def _facts(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Any, bool, str]]:
        """Yield name, value, whether it fits the arrays, expectation; later ones need earlier."""
        n_layers, n_qheads, n_pos, dim = shapes["q"]
        heads, value_dim = shapes["v"][1::2]
        largest, meta = (n_qheads, heads, dim, value_dim), self.meta
        yield "query heads", n_qheads, n_qheads % heads == 0, f"a multiple of {heads} KV heads"
        sizes, says = self.sizes, f"(heads, KV heads, dim, value_dim) each, at most {largest}"
        yield "sizes", sizes, not sizes or _are_sizes(sizes, n_layers, largest), says
        end = self.prompt_len
        yield "prompt_len", end, 1 <= end <= n_pos, f"1 to {n_pos}, the number of tokens"
        context = end if self.context_len is None else self.context_len
        yield "context_len", context, 1 <= context <= end, f"1 to {end}, as the prompt has"
        ends = [end, *chain(*self.questions), *[n_pos] * bool(self.questions)]
        fits = all(a < b for a, b in pairwise(ends))
        yield "questions", self.questions, fits, f"[start, stop] of each between {end} and {n_pos}"
        sums, left_out = [name for name in SUMS if name in shapes], self.left_out
        start, stop = left_out or (0, 0)
        blocks = start % CHUNK == stop % CHUNK == 0 and 0 < start < stop < context
        before = shapes["received"][2] if {"attn_out", "lse", "received"} <= {*shapes} else None
        fits = not sums if left_out is None else blocks and before == stop
        says = f"whole blocks of {CHUNK} rows, with outputs, log-sum-exp and {' and '.join(SUMS)}"
        yield "left_out", left_out, fits, says
        probe, given = self.probe, meta.get(PROBE)
        fits = given is None or (probe is not None and probe.fits(context))
        yield "meta.probe", given, fits, f"chunks that repeat the {context} tokens of its context"
        rows = None if probe is None else len(probe.tokens)
        recorded = {shapes[name][2] if name in shapes else None for name in REPETITION}
        yield "meta.probe", given, recorded == {rows}, f"as many rows as {' and '.join(REPETITION)}"
        spans = meta.get("spans", {})
        yield "spans", spans, _are_spans(spans, end), f"lists of [start, end] within {end} tokens"
        for key, n, low, high in (
            *((key, n_pos - end, -math.inf, 0.0) for key in LOGPROBS),
            ("layer_sensitivity", n_layers, 0.0, math.inf),
        ):
            fits = key not in meta or meta[key] is None or _numbers(meta[key], n, low, high)
            yield key, meta.get(key), fits, f"{n} finite numbers from {low:g} to {high:g}"
        ids, owners = self.layer_ids, self.owners or range(n_layers)
        of_layers = {"layer_ids": ids, "formulas": self.formulas, "ropes": self.ropes}
        for name, values in (of_layers | {"owners": owners}).items():
            yield name, values, len(values) == n_layers, f"one for each of {n_layers} layers"
        fits = all(a < b for a, b in pairwise((-1, *ids, 1 << 31)))
        yield "layer_ids", ids, fits, "the model's layer numbers, increasing from 0 or more"
        alike = [*zip(self.formulas, self.sizes or (largest,) * n_layers, strict=True)]
        for layer, owner in enumerate(owners):
            own = owner in range(layer) and owners[owner] == owner and alike[owner] == alike[layer]
            fits = owner == layer or (own and not self.formulas[layer].sinks)
            yield "owners", owners, fits, "earlier layers with entries of their own and one formula"
        latent = meta.get("latent")
        for rope, (formula, size) in zip(self.ropes, alike, strict=True):
            n_qheads, heads, dim, value_dim = size
            own = (latent, heads, value_dim) == (value_dim, 1, min(value_dim, dim))
            says = f"{value_dim}, of a single KV head with keys as long"
            yield "latent", latent, latent is None or own, says
            n = rope.rotary_dim or 0
            yield "rotary_dim of rope", n, n <= dim, f"at most the {dim} of a head"
            n = len(formula.sinks)
            yield "number of sinks", n, n in (0, n_qheads), f"{n_qheads}, or none"


def _are_sizes(sizes: Sequence[Size], n_layers: int, largest: Size) -> bool:
    """Whether each layer has a size, sizes differ, and the arrays have the largest."""
    return (
        len(sizes) == n_layers
        and len({*sizes}) > 1
        and tuple(map(max, *sizes)) == largest
        and all(min(x) > 0 and x[0] % x[1] == 0 for x in sizes)
    )


def _are_spans(spans: Any, prompt_len: int) -> bool:
    several = spans.values() if isinstance(spans, dict) else [[None]]
    return all(isinstance(each, list | tuple) for each in several) and all(
        isinstance(span, list | tuple)
        and [*map(type, span)] == [int, int]
        and 0 <= span[0] < span[1] <= prompt_len
        for span in chain(*several)
    )


def _numbers(values: Any, n: int, low: float, high: float) -> bool:
    return (
        isinstance(values, list | tuple)
        and len(values) == n > 0
        and all(type(x) in (int, float) and low <= x <= high and abs(x) < math.inf for x in values)
    )


def listed(value: Any) -> Any:
    """Return a value of a header for JSON: lists in place of tuples."""
    return [*map(listed, value)] if isinstance(value, tuple) else value


def fits_label(name: str, value: Any) -> bool:
    """Whether a value may be a label: text or a 64-bit integer, like columns of tables.

    `length` is never text, and `depth` a number from 0 to 1.
    """
    if name == "depth":
        return is_finite(value) and 0 <= value <= 1
    number = integer(value)
    return isinstance(value, str) and name != "length" if number is None else abs(number) < 1 << 63


def printable(text: str) -> str:
    """Return text valid in UTF-8: lone surrogates, legal in JSON, are escaped."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
