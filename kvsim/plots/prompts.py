"""Records of several prompts: the layers and heads shown, and means with intervals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from kvsim.analysis.output.error import check_record
from kvsim.analysis.summaries import Interval
from kvsim.analysis.table import fidelity
from kvsim.core.record import Record
from kvsim.core.trace import Trace
from kvsim.errors import PolicyError, TraceError
from kvsim.plots.style import asked_order

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]


@dataclass(frozen=True)
class Shown:
    """The layer and the KV head that a figure shows, as indices in the trace; None for all."""

    layer: int | None = None
    head: int | None = None

    def gone(self, trace: Trace, record: Record) -> list[Ints]:
        """Return the rows [H, T] after which entries are gone, for each of the layers shown.

        Of a record per query head, these are the query heads of the KV head.
        """
        heads = slice(None)
        if self.head is not None:
            size = trace.group if record.per_query_head else 1
            heads = slice(self.head * size, (self.head + 1) * size)
        return [
            gone[heads]
            for layer, gone in zip(record.layers, record.gone_after, strict=True)
            if self.layer in (None, layer)
        ]

    def fidelities(self, trace: Trace, record: Record, kind: str) -> set[str]:
        """Return the fidelity labels of the layers shown; kind: as of `kvsim.analysis.fidelity`."""
        layers = [layer for layer in record.layers if self.layer in (None, layer)]
        return {fidelity(trace, record, kind, layer) for layer in layers}

    def text(self, trace: Trace) -> str:
        """Return the layer and the head in words."""
        layer = "all layers" if self.layer is None else f"layer {trace.layer_ids[self.layer]}"
        head = "all KV heads" if self.head is None else f"KV head {self.head}"
        return f"{layer}, {head}"


@dataclass
class Prompts:
    """Arrays of one shape for each prompt, by policy and budget."""

    values: dict[tuple[str, str], list[Floats]] = field(default_factory=dict)
    fidelities: set[str] = field(default_factory=set)

    @classmethod
    def of(
        cls,
        traces: Sequence[Trace],
        records: Sequence[Record],
        shown: Shown,
        value: Callable[[list[Ints]], Floats | None],
    ) -> Prompts:
        """Return `value` of the layers shown for every record, without records that have no value.

        Raises TraceError for a record of none of the traces, PolicyError if no record has a value.
        """
        by_name = {trace.name: trace for trace in traces}
        prompts = cls()
        for record in records:
            if record.trace not in by_name:
                raise TraceError(
                    f"a record of {record.trace!r}, but the traces are {', '.join(by_name)}; give "
                    "the traces that were replayed"
                )
            trace = by_name[record.trace]
            check_record(trace, record)
            array = value(shown.gone(trace, record))
            if array is not None:
                budget = record.share or str(record.budget)
                prompts.values.setdefault((record.policy, budget), []).append(array)
                prompts.fidelities |= shown.fidelities(trace, record, "sets")
        if not prompts.values:
            raise PolicyError("nothing left the cache, so there is nothing to show; lower --budget")
        return prompts

    @property
    def policies(self) -> list[str]:
        """Policies in the order of the records."""
        return list(dict.fromkeys(policy for policy, _ in self.values))

    @property
    def budgets(self) -> list[str]:
        """Budgets as they were requested, from the smallest."""
        return asked_order([budget for _, budget in self.values])

    @property
    def counted(self) -> str:
        """The number of prompts behind the means, in words."""
        return counted(len(arrays) for arrays in self.values.values())


def counted(counts: Iterable[int]) -> str:
    """Return the number of prompts behind means, in words; counts: of each mean."""
    numbers = sorted(set(counts))
    if numbers == [1]:
        return "one prompt"
    count = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
    return f"{count} prompts, with 95 % interval"


def mean_line(axis: Axes, at: Floats, values: Sequence[Floats], **style: object) -> Floats:
    """Draw and return the mean over prompts of values [n] over `at` [n], its interval as a band."""
    ends = Interval.of_each(list(np.stack(list(values)).T))
    lines: Floats = np.array([(end.mean, end.low, end.high) for end in ends], dtype=np.float64)
    mean, low, high = lines.T
    (line,) = axis.plot(at, mean, **style)  # type: ignore[arg-type]  # what style.series holds
    step: Literal["post"] | None = "post" if line.get_drawstyle() == "steps-post" else None
    axis.fill_between(at, low, high, color=line.get_color(), alpha=0.15, lw=0, step=step)
    return lines[:, 0]
