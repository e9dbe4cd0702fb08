"""The header of a trace: everything that it says about itself besides its arrays."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterator, Mapping, Sequence
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
        check_fields(self, where, TraceError)
        Probe.of(self.meta, self.context_len or self.prompt_len, where)
        for fact, fits, expected in self._facts(shapes):
            if not fits:
                raise TraceError(f"{where}: {fact}; expected {expected}; record the trace again")

    def _facts(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, bool, str]]:
        """Each fact, whether it fits the arrays, and what is expected; later ones need earlier."""
        n_layers, n_qheads, n_pos, dim = shapes["q"]
        heads, value_dim = shapes["v"][1::2]
        largest = n_qheads, heads, dim, value_dim
        shown = reprlib.repr
        yield (
            f"sizes are {shown(self.sizes)}",
            not self.sizes or _are_sizes(self.sizes, n_layers, largest),
            (
                "query heads, KV heads, dimensions of keys and of values for each of "
                f"{n_layers} layers, at most {largest}"
            ),
        )
        end = self.prompt_len
        yield f"prompt_len is {end}", 1 <= end <= n_pos, f"1 to {n_pos}, the number of tokens"
        context = end if self.context_len is None else self.context_len
        yield f"context_len is {context}", 1 <= context <= end, f"1 to {end}, as the prompt has"
        pairs = all(len(each) == 2 for each in self.questions)
        ends = [end, *chain(*self.questions), n_pos] if self.questions else [end]
        yield (
            f"questions are {shown(self.questions)}",
            pairs and all(type(b) is int and a < b for a, b in pairwise(ends)),
            (
                f"a list of [start, stop] behind the prompt of {end} and before the end of {n_pos} "
                "tokens, each followed by tokens of its answer"
            ),
        )
        yield from self._left_out_facts(shapes)
        spans = self.meta.get("spans", {})
        yield (
            f"spans are {shown(spans)}",
            isinstance(spans, dict) and all(_are_spans(each, end) for each in spans.values()),
            f"a list of [start, end] within the {end} tokens of the prompt for each name",
        )
        response = n_pos - end
        for key, n, low, high in (
            *((key, response, -math.inf, 0.0) for key in LOGPROBS),
            ("layer_sensitivity", n_layers, 0.0, math.inf),
        ):
            numbers = self.meta.get(key)
            yield (
                f"{key} is {shown(numbers)}",
                numbers is None or _numbers(numbers, n, low, high),
                f"{n} finite numbers from {low:g} to {high:g}",
            )
        ids, owners = self.layer_ids, self.owners or range(n_layers)
        for name, kind, values in (
            ("layer numbers", int, ids),
            ("formulas", Formula, self.formulas),
            ("ropes", Rope, self.ropes),
            ("owners", int, owners),
        ):
            yield (
                f"{name} are {shown(values)}",
                len(values) == n_layers and all(type(value) is kind for value in values),
                f"{kind.__name__} for each of {n_layers} layers",
            )
        yield (
            f"layer is {shown([*ids])}",
            all(a < b for a, b in pairwise((-1, *ids, 1 << 31))),
            "the model's layer numbers, increasing from 0 or more",
        )
        sizes = self.sizes or (largest,) * n_layers
        for layer, owner in enumerate(owners):
            formula = self.formulas[layer]
            yield (
                f"layer {layer} reads the entries of layer {owner}",
                owner == layer
                or (
                    0 <= owner < layer
                    and owners[owner] == owner
                    and (self.formulas[owner], sizes[owner]) == (formula, sizes[layer])
                    and not formula.sinks
                ),
                "an earlier layer with entries of its own, and one formula without sinks",
            )
        latent = self.meta.get("latent")
        for rope, formula, (n_qheads, heads, dim, value_dim) in zip(
            self.ropes, self.formulas, sizes, strict=True
        ):
            yield (
                (
                    f"latent is {shown(latent)}, of {heads} KV heads with keys of {dim} and values "
                    f"of {value_dim} dimensions"
                ),
                latent is None or (latent, heads, value_dim) == (value_dim, 1, min(value_dim, dim)),
                "the size of the values of one head, which end its keys",
            )
            width = 2 * len(rope.inv_freq)
            yield (
                f"rope rotates {width} dimensions, but a head has {dim}",
                width <= dim,
                f"at most {dim // 2} frequencies",
            )
            yield (
                f"{len(formula.sinks)} sinks for {n_qheads} query heads",
                len(formula.sinks) in (0, n_qheads),
                "one for each, or none",
            )

    def _left_out_facts(
        self, shapes: Mapping[str, tuple[int, ...]]
    ) -> Iterator[tuple[str, bool, str]]:
        sums = [name for name in SUMS if name in shapes]
        if self.left_out is None:
            yield f"it has {sums} and leaves out no rows", not sums, "both or neither"
            return
        start, stop = self.left_out
        blocks = start % CHUNK == stop % CHUNK == 0
        yield (
            f"rows {start} to {stop - 1} are left out",
            blocks and 0 < start < stop < (self.context_len or self.prompt_len),
            (
                f"whole blocks of {CHUNK} rows, the first one and the last row of the prompt not "
                "among them"
            ),
        )
        yield (
            f"rows {start} to {stop - 1} are left out of {', '.join(shapes)}",
            {"attn_out", "lse", "received"} <= shapes.keys() and shapes["received"][2] == stop,
            "outputs, log-sum-exp and the attention received from them",
        )


def _are_sizes(sizes: Sequence[Size], n_layers: int, largest: Size) -> bool:
    """Whether there is a size for each layer, not all the same, and the arrays have the largest."""
    whole = [[*map(type, x)] == [int] * 4 and min(x) > 0 for x in sizes]
    return (
        whole == [True] * n_layers
        and len({*sizes}) > 1
        and tuple(map(max, *sizes)) == largest
        and all(qheads % heads == 0 for qheads, heads, *_ in sizes)
    )


def _are_spans(spans: Any, prompt_len: int) -> bool:
    """Whether these are pairs of positions of the prompt."""
    return isinstance(spans, list | tuple) and all(
        isinstance(span, list | tuple)
        and [*map(type, span)] == [int, int]
        and 0 <= span[0] < span[1] <= prompt_len
        for span in spans
    )


def _numbers(values: Any, n: int, low: float, high: float) -> bool:
    """Whether these are n finite numbers, none below `low` or above `high`."""
    return (
        isinstance(values, list | tuple)
        and len(values) == n > 0
        and all(type(x) in (int, float) and low <= x <= high and abs(x) < math.inf for x in values)
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
