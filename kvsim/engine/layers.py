"""The layers of a trace to replay, and their blocks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from kvsim.core.budgets import sharing
from kvsim.core.lazy import torch
from kvsim.core.parameters import integer
from kvsim.core.parts import of_rows
from kvsim.core.pieces import ACROSS_LAYERS, Uniform
from kvsim.core.policy import Policy
from kvsim.core.shared_results import DEFAULT_MEMORY
from kvsim.core.trace import Trace
from kvsim.core.view import LOGIT_BYTES
from kvsim.engine.depth import Descent
from kvsim.engine.rows import ROWS
from kvsim.engine.source import TraceSource, check_unwindowed, read_together, windows
from kvsim.errors import MemoryLimitError, PolicyError

# Bytes per entry if layers are scored separately: position, score, place, masks.
_OF_ENTRY = 48


def layers_to_replay(trace: Trace, layers: Sequence[int] | None) -> tuple[int, ...]:
    """The layers to replay, as indices in the trace; by default all without a window."""
    if layers is None:
        chosen = tuple(i for i in range(trace.n_layers) if i not in trace.windowed)
        if not chosen:
            raise PolicyError(
                f"{trace.name}: no layer sees all of its {trace.n_pos} tokens: {windows(trace)}; "
                "record other layers of the model, or a shorter text"
            )
        return chosen
    numbers = [*map(integer, layers)] if hasattr(layers, "__iter__") else []
    known = tuple(x for x in numbers if x is not None and 0 <= x < trace.n_layers)
    if not known or len({*known}) < len(numbers):
        raise PolicyError(
            f"layers are {layers!r}; expected some of 0..{trace.n_layers - 1}, each of them once"
        )
    for number in known:
        check_unwindowed(trace, number)
    return known


def apart(policy: Policy) -> bool:
    """Whether layers share a budget but can be scored one at a time."""
    within = not policy.scorer.across_layers and isinstance(policy.allocator, Uniform)
    return within and policy.storage is None and policy.layer_budgets.shared in ACROSS_LAYERS


def _computes(trace: Trace, layer: int) -> dict[str, object]:
    """The computation of a layer without a window, part by part."""
    formula, rope = trace.formulas[layer], trace.ropes[layer]
    parts = {name: getattr(formula, name) for name in ("scale", "softcap", "sinks")}
    return {**parts, "rotary embedding": rope}


def _check_together(trace: Trace, policy: Policy, chosen: Sequence[int]) -> None:
    """Raise PolicyError if layers that share a budget or a ranking do not fit one block."""
    first = _computes(trace, chosen[0])
    for layer in chosen:
        for part, value in _computes(trace, layer).items():
            if value != first[part]:
                example = "kvzip@uniform" if policy.allocator.shared in ACROSS_LAYERS else "snapkv"
                raise PolicyError(
                    f"{policy.name}: its layers share one budget or ranking, and layers "
                    f"{chosen[0]} and {layer} of {trace.name} differ in their {part}; take a "
                    f"policy that cuts each layer by itself, such as {example}"
                )


def replay_bytes(trace: Trace, policy: Policy) -> int:
    """Bytes of the keys and values of a layer and of its events, without those of blocks of rows.

    Counts keys and values of all positions, and as gathered for an event.
    """
    scorer, keys = policy.scorer, trace.n_heads * trace.dim
    copies = 0 if scorer.per_row else scorer.reads.copies
    numbers = (2 + copies) * keys
    if copies:
        numbers += 2 * trace.n_heads * trace.value_dim
    if policy.storage is not None:  # overwrites copies
        numbers += 2 * trace.n_heads * (trace.dim + trace.value_dim)
    # layers that share entries are scored together; attention of the window and its reductions,
    # partly in float64
    rows = min(max(policy.reads.rows, ROWS * scorer.per_row), trace.n_pos) + 8
    numbers += trace.n_qheads * max(map(trace.owners.count, trace.owners)) * rows
    if scorer.reads.future and not trace.has("attn_out"):  # full attention is computed at once
        numbers += trace.n_qheads * (trace.dim + 2 * trace.value_dim)
    numbers *= trace.n_pos
    for name in filter(trace.has, scorer.reads.arrays):
        layouts = 2 if name == "o_proj" else 1
        numbers += layouts * math.prod(trace.source.shapes[name][1:])
    return numbers * trace.dtype.itemsize


def layers_per_block(trace: Trace, policy: Policy, memory: int | None) -> int:
    """Number of layers that fit the memory budget with keys, values and working space.

    MemoryLimitError if not even one does.
    """
    limit = DEFAULT_MEMORY if memory is None else memory
    layers, subject, fixed = 1, "one layer needs", 4 * LOGIT_BYTES  # a block of rows
    if apart(policy):  # entries of all layers, their positions and scores
        fixed += sharing(trace) * trace.n_heads * trace.n_pos * _OF_ENTRY
    elif policy.across_layers:
        layers, subject = sharing(trace), f"{policy.name} needs all layers at once,"
    need = layers * replay_bytes(trace, policy)
    if need + fixed > limit:
        raise MemoryLimitError(
            f"{subject} {(need + fixed) / 2**20:.0f} MiB to replay, the memory budget is "
            f"{limit / 2**20:.0f} MiB; give at least --set memory={-(-(need + fixed) // 2**20)}MiB"
        )
    return layers * int((limit - fixed) // need)


class LayerRun(NamedTuple):
    """Layers that are replayed together.

    trace: their rows. uncut: nothing is ever evicted. together: number held at once.
    """

    layers: tuple[int, ...]
    trace: Trace
    uncut: bool
    together: int

    def source(self, device: str, memory: int, *, copied: bool = False) -> TraceSource:
        """Return the source of a View; results for other replays get 1/16 of the memory."""
        trace, places = self.trace, self.layers
        if len(trace.header.readers(places[0])) > 1:
            trace, places = read_together(trace, places[0]), (0,)
        more: Any = {"memo_bytes": memory // 16, "together": self.together, "copied": copied}
        return TraceSource(trace, places, torch.device(device), **more)


def runs(
    trace: Trace,
    layers: Sequence[int],
    policy: Policy,
    *,
    descent: Descent | None = None,
    memory: int | None = None,
) -> Iterator[LayerRun]:
    """Runs of layers with the same formula and rows, as many as the memory budget holds.

    Layers of a run are consecutive, except that layers with a shared budget or ranking are one run.
    A layer whose entries others read is its own run. Raises PolicyError where this is impossible,
    and as `layers_per_block`.
    """
    if policy.across_layers:
        _check_together(trace, policy, layers)
    at_once = policy.across_layers and not apart(policy)
    together = len(layers) if at_once else layers_per_block(trace, policy, memory)
    longest = len(layers) if policy.across_layers else together

    rows = (None,) * trace.n_layers if descent is None else descent.rows
    uncut = 0 if descent is None else descent.uncut

    def kind(numbered: tuple[int, int]) -> tuple[object, ...]:
        """The properties that consecutive layers of a run share."""
        number, layer = numbered
        alone = layer if trace.owners.count(layer) > 1 else None
        place = None if policy.across_layers else layer - number
        return _computes(trace, layer), id(rows[layer]), layer < uncut, alone, place

    for _, alike in groupby(enumerate(layers), kind):
        run = tuple(layer for _, layer in alike)
        for first in range(0, len(run), longest):
            of_run = rows[run[0]]
            part = trace if of_run is None else of_rows(trace, of_run)
            yield LayerRun(run[first : first + longest], part, run[0] < uncut, together)
