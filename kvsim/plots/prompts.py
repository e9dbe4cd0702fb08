"""Records of several prompts: which layers and heads are shown, and means with their intervals."""

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
        """The rows [H, T] after which entries are gone, for each of the layers shown.

        Of a record per query head, the query heads of the KV head.
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
        """The labels of the layers shown; kind as `kvsim.analysis.fidelity` has it."""
        layers = [layer for layer in record.layers if self.layer in (None, layer)]
        return {fidelity(trace, record, kind, layer) for layer in layers}

    def text(self, trace: Trace) -> str:
        """The layer and the head in words."""
        layer = "all layers" if self.layer is None else f"layer {trace.layer_ids[self.layer]}"
        head = "all KV heads" if self.head is None else f"KV head {self.head}"
        return f"{layer}, {head}"


@dataclass
class Prompts:
    """What each prompt says of a policy at a budget: arrays of the same shape."""

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
        """`value` of the layers shown of every record; records that have none are left out.

        Raises:
            TraceError: a record of none of the traces.
            PolicyError: no record has a value, because nothing left.
        """
        known = {trace.name: trace for trace in traces}
        out = cls()
        for record in records:
            if record.trace not in known:
                raise TraceError(
                    f"a record of {record.trace!r}, but the traces are {', '.join(known)}; give "
                    "the traces that were replayed"
                )
            trace = known[record.trace]
            check_record(trace, record)
            found = value(shown.gone(trace, record))
            if found is not None:
                asked = record.share or str(record.budget)
                out.values.setdefault((record.policy, asked), []).append(found)
                out.fidelities |= shown.fidelities(trace, record, "sets")
        if not out.values:
            raise PolicyError("nothing left the cache, so there is nothing to show; lower --budget")
        return out

    @property
    def policies(self) -> list[str]:
        """In the order of the records."""
        return list(dict.fromkeys(policy for policy, _ in self.values))

    @property
    def budgets(self) -> list[str]:
        """As they were asked for, from the smallest."""
        return asked_order([asked for _, asked in self.values])

    @property
    def counted(self) -> str:
        """Over how many prompts the means are."""
        return counted(len(found) for found in self.values.values())


def counted(counts: Iterable[int]) -> str:
    """The prompts that means are over, in words, where each mean has a count."""
    known = sorted(set(counts))
    if known == [1]:
        return "one prompt"
    count = str(known[0]) if len(known) == 1 else f"{known[0]} to {known[-1]}"
    return f"{count} prompts, with 95 % interval"


def mean_line(axis: Axes, at: Floats, values: Sequence[Floats], **style: object) -> Floats:
    """Draw the mean over prompts of values [n] over `at` [n], its interval as a band; the mean."""
    ends = Interval.of_each(list(np.stack(list(values)).T))
    mean, low, high = (
        np.array([getattr(one, end) for one in ends]) for end in ("mean", "low", "high")
    )
    (line,) = axis.plot(at, mean, **style)  # type: ignore[arg-type]  # what style.series holds
    step: Literal["post"] | None = "post" if line.get_drawstyle() == "steps-post" else None
    axis.fill_between(at, low, high, color=line.get_color(), alpha=0.15, lw=0, step=step)
    return mean
