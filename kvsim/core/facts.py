"""What a trace says about itself beside its arrays: its header, and the sizes of its layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain, pairwise
from typing import Final, TypeVar

from kvsim.core.attention import Rope
from kvsim.core.header import Header
from kvsim.core.sources import Size
from kvsim.errors import NeedsError
from kvsim.schema import numbered

T = TypeVar("T")


class _OfSize:
    """A number of the size that all layers of a trace share; else NeedsError."""

    def __init__(self, place: int) -> None:
        self.place = place

    def __get__(self, facts: Facts, _: type[Facts]) -> int:
        return facts.size_of(range(facts.n_layers))[self.place]


class Facts:
    """Facts of a trace with arrays of these shapes; `Trace` has their meaning."""

    n_qheads, n_heads, dim, value_dim = map(_OfSize, range(4))

    def __init__(self, header: Header, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.header: Final = header
        layers, qheads, n_pos, dim = shapes["q"]
        largest = qheads, shapes["k"][1], dim, shapes["v"][3]
        self.n_layers: Final = layers
        self.n_pos: Final = n_pos
        #: query heads, KV heads, dimensions of keys and of values of each layer
        self.sizes: Final[tuple[Size, ...]] = header.sizes or (largest,) * layers
        #: layers that can be read; others are of another size (`Trace.alike`)
        self.readable = tuple(range(layers))
        self.prompt_len: Final = header.prompt_len
        self.context_len: Final = header.context_len
        self.questions: Final = header.questions
        self.formulas: Final = header.formulas
        self.ropes: Final = header.ropes
        self.layer_ids: Final = header.layer_ids
        self.owners: Final = header.owners or tuple(range(layers))
        self.name: Final = header.name
        self.meta: Final = header.meta
        self.source_dtypes: Final = header.source_dtypes

    def size_of(self, layers: Iterable[int]) -> Size:
        """Return query heads, KV heads, dim, value_dim of layers; NeedsError where they differ."""
        places: dict[Size, list[int]] = {}
        for layer in layers if self.header.sizes else (0,):
            places.setdefault(self.sizes[layer], []).append(layer)
        if len(places) > 1:
            kinds = ", ".join(f"{numbered(x)} {size}" for size, x in places.items())
            raise NeedsError(
                f"{self.name}: layers differ in (query heads, KV heads, dimensions, of values): "
                f"{kinds}; expected layers of one size, read one by one or by Trace.alike"
            )
        return next(iter(places), self.sizes[0])

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.n_qheads // self.n_heads

    @property
    def entry_size(self) -> int:
        """Numbers that a cache holds of an entry in one head."""
        return self.dim + (0 if self.header.latent else self.value_dim)

    @property
    def row_size(self) -> int:
        """Numbers that a full cache holds of one position, in all layers."""
        shared = 0 if self.header.latent else 1
        sizes = (self.sizes[layer] for layer in {*self.owners})
        return sum(heads * (dim + shared * value_dim) for _, heads, dim, value_dim in sizes)

    @property
    def scale(self) -> float:
        """Factor of the logits q . k, if all layers share it; else NeedsError."""
        return self._shared("scale", [formula.scale for formula in self.formulas])

    @property
    def rope(self) -> Rope:
        """The rotary embedding, if all layers share it; else NeedsError."""
        return self._shared("rope", self.ropes)

    def _shared(self, name: str, of_layers: Sequence[T]) -> T:
        if len({*of_layers}) > 1:
            raise NeedsError(
                f"{self.name}: the layers have {len({*of_layers})} kinds of {name}, expected one; "
                f"see trace.formulas and trace.ropes, which have one for each layer"
            )
        return of_layers[0]

    @cached_property
    def windowed(self) -> tuple[int, ...]:
        """Layers in which replays do not evict, by their place.

        Their window or chunks mask something out for some row; or their size is another than that
        of the last layer of which none does.
        """
        n_pos = self.n_pos
        whole = [i for i, x in enumerate(self.formulas) if (x.reach or n_pos) >= n_pos]
        size = self.sizes[whole[-1]] if whole else None
        return tuple(i for i, x in enumerate(self.sizes) if i not in whole or x != size)

    @property
    def whole(self) -> bool:
        """Whether these are all layers with attention, as far as `meta` says which these are."""
        return self.header.whole

    @property
    def labels(self) -> dict[str, str | int | float]:
        """Labels of the prompt, as far as it has them (`schema.LABELS`)."""
        return self.header.labels

    @property
    def spans(self) -> dict[str, tuple[tuple[int, int], ...]]:
        """Token spans of the prompt by name, such as its `needle`: first position, behind last."""
        return self.header.spans

    @property
    def segments(self) -> tuple[tuple[str, int, int], ...]:
        """(kind, start, stop) of `context`, then `question` and `answer` of each turn.

        Empty ones, such as the answer of a prompt alone, are left out.
        """
        ends = [0, self.context_len or 0, self.prompt_len, *chain(*self.questions), self.n_pos]
        kinds = ["context", *["question", "answer"] * (1 + len(self.questions))]
        spans = zip(kinds, *zip(*pairwise(ends), strict=True), strict=True)
        return tuple((kind, start, stop) for kind, start, stop in spans if start < stop)

    @property
    def extent(self) -> tuple[int, int, int | None, tuple[tuple[int, int], ...]]:
        """What `Schedule.rows` takes: prompt_len, n_pos, context_len, questions."""
        return self.prompt_len, self.n_pos, self.context_len, self.questions

    @property
    def answers(self) -> tuple[tuple[int | None, slice], ...]:
        """Number of each turn, from 1, and the rows of its answer, counted from the end.

        None and all rows, whatever they are, where there is one turn.
        """
        if not self.questions:
            return ((None, slice(None)),)
        n, spans = self.n_pos, self.header.answers(self.n_pos)
        return tuple(enumerate((slice(a - n, b - n or None) for a, b in spans), start=1))

    @property
    def response_logprobs(self) -> tuple[float, ...]:
        """Log-likelihood of each token of the response, in nats; else none."""
        return self.header.response_logprobs
