"""What a metric works on and what it gives: a Subject in, Cells out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvsim.analysis.attention.intermittence import SHARE, Gaps, attention_gaps, default_width
from kvsim.analysis.kept.bursts import Bursts, dropped_bursts
from kvsim.analysis.kept.regions import steps
from kvsim.analysis.kept.retention import LENGTHS, THRESHOLDS, Wipeout, wipeout
from kvsim.analysis.kept.segments import AMS, PROXY, Segments, ams_segments, proxy_segments
from kvsim.analysis.kept.slots import LeavingSlots, SlotWipeout
from kvsim.analysis.output.error import OutputError
from kvsim.core.record import Record
from kvsim.core.trace import Trace

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Cells:
    """Values of one metric for one layer: [m], or [m, E] where `events` [E] names the rows.

    layer: None for what a trace has as a whole, such as its text. heads: the axis that m runs over;
    chance: what chance alone would give, like values.
    """

    layer: int | None
    values: Floats
    heads: Literal["head", "qhead"] | None = None
    variant: str = ""
    chance: Floats | None = None
    events: NDArray[np.int64] | None = None


T = TypeVar("T")

#: A walk over a trace that answers for all of its records at once, on a device.
Walk = Callable[[Trace, Sequence[Record], str], Sequence[T]]


class Walks(Protocol):
    """Gives the answer of a walk for one record; the walk is done once for all of them."""

    def __call__(self, walk: Walk[T]) -> T:
        """What `walk` says of the record."""
        ...


@dataclass
class Subject:
    """What a metric measures: a trace, and a record of it with its output error.

    walk: what a walk over the trace that all records share says of this one. oracle: the output
    error of the record that the mass oracle gives under the same conditions.
    """

    trace: Trace
    record: Record
    output: Callable[[], OutputError]
    walk: Walks
    oracle: Callable[[], OutputError] | None = None

    @cached_property
    def rows(self) -> slice:
        """Rows after the prompt, over which row metrics average."""
        return slice(self.trace.prompt_len, None)

    @cached_property
    def gaps(self) -> dict[int, Gaps]:
        """Gaps of attention by layer, nothing where the trace is too short."""
        if not default_width(self.trace):
            return {}
        return {layer: attention_gaps(self.trace, layer) for layer in self.record.layers}

    @property
    def gaps_variant(self) -> str:
        """The share that is a top."""
        return f"share={SHARE:g}"

    @cached_property
    def wipeouts(self) -> list[tuple[int, str, Wipeout]]:
        """(layer, variant, wipe-out) for regions of each length and for the steps of the text."""
        texts = self.trace.token_text
        spaces = [(f"length={length}", length, None) for length in LENGTHS]
        by_step = [] if texts is None else [steps(texts, self.trace.prompt_len)]
        return [
            (layer, f"{space},threshold={least:g}", wipeout(evicted_at, n, least, regions=regions))
            for layer, evicted_at in self.layers()
            for space, n, regions in [*spaces, *(("space=steps", 0, found) for found in by_step)]
            for least in THRESHOLDS
        ]

    @property
    def slot_wipeouts(self) -> Iterator[tuple[int, str, SlotWipeout]]:
        """(layer, variant, wipe-out) for regions of slots of each length."""
        for layer, evicted_at in self.layers():
            leaving = LeavingSlots.of(evicted_at)
            for length in LENGTHS:
                for least in THRESHOLDS:
                    variant = f"space=slots,length={length},threshold={least:g}"
                    yield layer, variant, leaving.wipeout(length, least)

    @cached_property
    def segments(self) -> list[tuple[int, str, Segments]]:
        """(layer, kind, segments): those that the policy made, if it did, and runs of what stays.

        The two kinds differ in meaning and are never compared.
        """
        return [
            (layer, kind, found)
            for layer, evicted_at in self.layers()
            for kind, found in (
                (AMS, ams_segments(self.record, layer)),
                (PROXY, proxy_segments(evicted_at)),
            )
            if found is not None
        ]

    @cached_property
    def bursts(self) -> list[tuple[int, Bursts]]:
        """(layer, runs of all that is dropped) of the record."""
        return [(layer, dropped_bursts(evicted_at)) for layer, evicted_at in self.layers()]

    def layers(self) -> Iterator[tuple[int, NDArray[np.int32]]]:
        """(layer, the rows [H, T] after which entries are gone) of the record."""
        return zip(self.record.layers, self.record.gone_after, strict=True)
