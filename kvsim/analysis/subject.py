"""The analyses of a trace, a record of it, or a live run under the record, which metrics read.

Each analysis is computed when a metric first reads it, and kept for the others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import Protocol, TypeVar

from kvsim.analysis.arrays import EvictedAt, Ints
from kvsim.analysis.attention.expectation import (
    Expectation,
    Projections,
    expected_and_observed,
    key_projections,
)
from kvsim.analysis.attention.fit import LEAST_SAMPLES
from kvsim.analysis.attention.normality import Normality, state_normality
from kvsim.analysis.attention.windows import GapsAndChance, attention_gaps, gap_windows
from kvsim.analysis.kept.bursts import Bursts, dropped_bursts
from kvsim.analysis.kept.retention import (
    LENGTHS,
    SINK,
    THRESHOLDS,
    Leaving,
    Wipeout,
    event_rows,
    steps,
)
from kvsim.analysis.kept.segments import AMS, PROXY, Segments, ams_segments, proxy_segments
from kvsim.analysis.kept.slots import LeavingSlots, SlotWipeout
from kvsim.analysis.prompt.ranking import Ranking, ranking
from kvsim.analysis.prompt.tables import Diagnosis, diagnose
from kvsim.core.checks import resolve_device
from kvsim.core.outcome import Outcome, OutputDeviation
from kvsim.core.record import Record
from kvsim.core.trace import Trace
from kvsim.engine.source import windows
from kvsim.errors import PolicyError
from kvsim.policies.asl import ASL, Selecting

#: Shares of the tokens before ASL's window that propagate, where nothing else is asked for.
SHARES = ("10%", "25%", "50%")

# ------------------------------------------------------------------------------------- of a trace


@dataclass(frozen=True)
class Analysis:
    """The analyses of one trace.

    ks: tokens that propagate next to ASL's window, as numbers or as shares (`25%`) of the tokens
    before it. rule: ASL's parameters, its defaults if None. cut: where the past ends, of whose keys
    attention is expected; the end of the prompt if None. gold: positions of the prompt that the
    answer needs, None if unknown. only: the layers that metrics of single layers read, all if None.

    An analysis that the trace is too short for, or that is not defined where some layers have a
    sliding window, is None or empty; `left_out` says why.

    Raises PolicyError for a k that is neither number nor share, and for a rule that the model has
    no layer for.
    """

    trace: Trace
    ks: Sequence[int | str] = SHARES
    rule: Selecting = field(default_factory=ASL)
    device: str = "cpu"
    cut: int | None = None
    gold: Sequence[int] | None = None
    only: Sequence[int] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", resolve_device(self.device))
        for k in self.ks:
            _tokens(k, 1)
        self.rule.check(self.trace.n_layers)

    @property
    def layers(self) -> Sequence[int]:
        """The layers that metrics of single layers read."""
        if self.only is not None:
            return self.only
        return [layer for layer in range(self.trace.n_layers) if layer not in self.trace.windowed]

    @property
    def left_out(self) -> Mapping[str, str]:
        """Why an analysis is None or empty, by its name."""
        trace, rows = self.trace, self.rule.window
        prompt, n = trace.prompt_len, trace.n_pos
        past = prompt if self.cut is None else self.cut
        window = bool(trace.windowed), f"a sliding window in {windows(trace)}"
        part, later = ("prompt", "response") if self.cut is None else ("past", "row after the cut")
        least = SINK + LEAST_SAMPLES
        checks = {
            "expectation": [
                (past < SINK + 2, f"a {part} of {past} tokens, fewer than {SINK + 2}"),
                (past >= n, f"no {later}"),
                window,
            ],
            "projections": [(n < SINK + 2, f"{n} tokens, fewer than {SINK + 2}"), window],
            "normality": [(n < least, f"{n} tokens, fewer than {least}")],
            "ranking": [
                (not trace.whole, "only some layers of the model"),
                window,
                (prompt <= rows, f"a prompt of {prompt} tokens, no more than ASL's {rows} rows"),
            ],
        }
        # the first reason of several
        return {
            name: why for name, of_name in checks.items() for fails, why in of_name[::-1] if fails
        }

    @cached_property
    def expectation(self) -> Expectation | None:
        """Attention on the keys of the past, of later rows and expected."""
        if "expectation" in self.left_out:
            return None
        cut = self.trace.prompt_len if self.cut is None else self.cut
        return expected_and_observed(self.trace, cut, sink=SINK, device=self.device)

    @cached_property
    def projections(self) -> Mapping[int, Projections]:
        """Projections of queries on keys, with the sinks' (0) and without them (`SINK`)."""
        return {
            skip: key_projections(self.trace, skip=skip, device=self.device)
            for skip in (0, SINK)
            if self.trace.n_pos >= skip + 2 and not self.trace.windowed
        }

    @cached_property
    def normality(self) -> Normality | None:
        """Effect sizes of the distribution of queries before RoPE, behind the sinks."""
        return None if "normality" in self.left_out else state_normality(self.trace, skip=SINK)

    @cached_property
    def ranking(self) -> Ranking | None:
        """Ranks of the prompt in each layer; None too where layers are missing from the trace."""
        if "ranking" in self.left_out:
            return None
        return ranking(self.trace, self.rule, device=self.device)

    @cached_property
    def diagnoses(self) -> Mapping[str, Diagnosis]:
        """ASL's test at each k, by k as it was given."""
        if (ranking := self.ranking) is None:
            return {}
        budgets = {k: _tokens(k, ranking.ranked) + self.rule.window for k in self.ks}
        return {
            str(k): diagnose(self.trace, ranking, budget, gold=self.gold, share=budget_label(k))
            for k, budget in budgets.items()
        }

    @cached_property
    def gaps(self) -> Mapping[int, GapsAndChance]:
        """Gaps of attention by layer, nothing where the trace is too short."""
        layers = self.layers if gap_windows(self.trace)[1] else ()
        return {layer: attention_gaps(self.trace, layer) for layer in layers}


def budget_label(k: int | str) -> str:
    """The budget that leaves k tokens next to ASL's window, in words."""
    return f"{k} + window"


def _tokens(k: int | str, ranked: int) -> int:
    """Tokens that propagate next to the window: a number, or a share of the ranked ones."""
    match = re.fullmatch(r"(?P<share>\d+(\.\d+)?)%|(?P<tokens>\d+)", str(k).strip())
    share, tokens = (None, None) if match is None else match.group("share", "tokens")
    if tokens and int(tokens) > 0:
        return int(tokens)
    if share and 0 < float(share) <= 100:
        return max(1, int(ranked * float(share) / 100 + 1e-9))
    raise PolicyError(f"k is {k!r}; expected tokens (128) or a share of those ranked (25%)")


# ------------------------------------------------------------------------------------ of a record

T = TypeVar("T")

#: A walk over a trace that computes something for all of its records at once, on a device.
Walk = Callable[[Trace, Sequence[Record], str], Sequence[T]]


class Walks(Protocol):
    """Callable that returns one record's values of a walk, which computes all records at once."""

    def __call__(self, walk: Walk[T]) -> T:
        """Return what `walk` computes for the record."""


#: Entries of the layers that are computed together: more would take memory and save no time.
TOGETHER = 1 << 20

Layers = Sequence[int]
#: Layers, and the rows [layer x H, T] after which entries of their heads are gone.
LayerGroup = tuple[Layers, EvictedAt]


def _regions(trace: Trace, records: Sequence[Record], _: str) -> Sequence[list[Ints]]:
    """The steps of the text of a trace, the same for all records; no regions without a text."""
    texts = trace.token_text
    return [[] if texts is None else [steps(texts, trace.prompt_len)]] * len(records)


@dataclass
class Subject:
    """A trace, and a record of it with its output error.

    walk: the result for this record of a walk over the trace that all records share. beside: by
    name (`Metric.beside`), records that it is compared with, and their output errors.
    """

    trace: Trace
    record: Record
    output: Callable[[], OutputDeviation]
    walk: Walks
    beside: Mapping[str, tuple[Record, Callable[[], OutputDeviation]]] = field(default_factory=dict)

    @cached_property
    def rows(self) -> slice:
        """Rows after the prompt, over which row metrics average."""
        return slice(self.trace.prompt_len, None)

    @cached_property
    def layer_groups(self) -> list[LayerGroup]:
        """The layers of the record, together where entries leave after the same rows."""
        gone = self.record.gone_after
        by_rows: dict[bytes, list[int]] = {}
        for index, evicted_at in enumerate(gone):
            by_rows.setdefault(event_rows(evicted_at).tobytes(), []).append(index)
        most = max(1, TOGETHER // max(1, gone[:1].size))
        groups = (
            group[start : start + most]
            for group in by_rows.values()
            for start in range(0, len(group), most)
        )
        return [
            ([self.record.layers[i] for i in group], gone[group].reshape(-1, gone.shape[-1]))
            for group in groups
        ]

    @cached_property
    def leaving(self) -> list[tuple[Layers, Leaving]]:
        """The entries that leave each group of layers."""
        return [(layers, Leaving.of(evicted_at)) for layers, evicted_at in self.layer_groups]

    @cached_property
    def wipeouts(self) -> list[tuple[Layers, str, Wipeout]]:
        """(layers, variant, wipe-out) for regions of each length and for the steps of the text."""
        spaces = [(f"length={length}", length, None) for length in LENGTHS]
        by_step = self.walk(_regions)
        return [
            (layers, f"{space},threshold={least:g}", leaving.wipeout(n, least, regions=regions))
            for layers, leaving in self.leaving
            for space, n, regions in [*spaces, *(("space=steps", 0, spans) for spans in by_step)]
            for least in THRESHOLDS
        ]

    @property
    def slot_wipeouts(self) -> Iterator[tuple[Layers, str, SlotWipeout]]:
        """(layers, variant, wipe-out) for regions of slots of each length."""
        for layers, entries in self.leaving:
            leaving = LeavingSlots.of(entries)
            for length, least in product(LENGTHS, THRESHOLDS):
                variant = f"space=slots,length={length},threshold={least:g}"
                yield layers, variant, leaving.wipeout(length, least)

    @cached_property
    def segments(self) -> list[tuple[Layers, str, Segments]]:
        """(layers, kind, segments): those that the policy cut, if it did, and runs of what stays.

        The two kinds differ in meaning and are never compared.
        """
        cut = {layer: ams_segments(self.record, layer) for layer in self.record.layers}
        runs = ((layers, proxy_segments(evicted_at)) for layers, evicted_at in self.layer_groups)
        return [
            *(([layer], AMS, segments) for layer, segments in cut.items() if segments is not None),
            *((layers, PROXY, segments) for layers, segments in runs),
        ]

    @cached_property
    def bursts(self) -> list[tuple[Layers, Bursts]]:
        """(layers, runs of all that is evicted) of the record."""
        return [(layers, dropped_bursts(evicted_at)) for layers, evicted_at in self.layer_groups]


@dataclass(frozen=True)
class LiveSubject:
    """A trace, a record of its tokens or its prompt, and its model's outcome: live, or judged."""

    trace: Trace
    record: Record
    outcome: Outcome
