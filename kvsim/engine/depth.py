"""The prefill in depth order, for policies that drop rows of the prompt between layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from kvsim.core.entries import Entries
from kvsim.core.lazy import Tensor, torch
from kvsim.core.parts import of_rows
from kvsim.core.policy import Policy
from kvsim.core.record import Selection
from kvsim.core.trace import Trace
from kvsim.core.view import Setting, Source, View
from kvsim.engine.source import TraceSource


@dataclass(frozen=True)
class Descent:
    """The rows of the prompt that reach each layer.

    rows: positions for each layer, int [k] ascending, None for all; layers with the same rows share
    one tensor. uncut: number of first layers with caches that are never cut.
    """

    selection: Selection
    rows: tuple[Tensor | None, ...]
    uncut: int = 0


#: Returns the view of a layer at the end of the prefill over rows of the prompt (None: all).
Look = Callable[[int, Tensor | None], View]


def descend(policy: Policy, n_layers: int, prompt_len: int, look: Look) -> Descent | None:
    """Call the propagation after each layer, and pass its selected rows to the next one.

    None for a policy that drops no rows.

    Layers after a selection select from `look`: recorded attention over all tokens (open loop), or
    a layer computed only on these rows.
    """
    propagation = policy.propagation
    if propagation is None:
        return None
    rows: Tensor | None = None
    of_layer: list[Tensor | None] = []
    dropped: list[int] = []
    notes: dict[str, list[float | None]] = {}
    facts, again = propagation.facts(n_layers), propagation.caches == "again"
    memory, done = None, False
    for layer in range(n_layers):
        of_layer.append(rows)
        if done or (layer == n_layers - 1 and not again):
            continue
        view = look(layer, rows)
        step = propagation.after(view, memory)
        memory, done = step.memory, step.done
        for name, number in step.notes.items():
            notes.setdefault(name, [None] * n_layers)[layer] = number
        if step.rows is not None and len(step.rows) <= view.row:  # fewer than all
            at = step.rows.to("cpu")
            rows = at if rows is None else rows[at]
            dropped.append(layer)
    if again:
        of_layer = [rows] * n_layers
    selection = Selection(
        dropped=tuple(dropped),
        counts=tuple(prompt_len if at is None else len(at) for at in of_layer),
        restarted=again and bool(dropped),
        notes={**facts, **notes},
    )
    uncut = 0
    if propagation.kv_before == "full":
        last = facts.get("layer", n_layers - 1) if selection.layer is None else selection.layer
        uncut = last + 1
    return Descent(selection, tuple(of_layer), uncut)


def recorded(trace: Trace, setting: Setting, device: str, *, copied: bool = False) -> Look:
    """Return views of recorded queries, keys and values, restricted to the rows of a layer."""
    on = torch.device(device)

    def look(layer: int, rows: Tensor | None) -> View:
        part = trace if rows is None else of_rows(trace, rows)
        source = TraceSource(part, [layer], on, copied=copied)
        return prompt_view(source, setting, layer, part.prompt_len)

    return look


def prompt_view(source: Source, setting: Setting, layer: int, prompt_len: int) -> View:
    """Return the view of one layer at the end of a prefill of `prompt_len` rows."""
    like = source.keys
    entries = Entries(1, like.shape[1], {}, like=like)
    entries.append(0, prompt_len)
    layers = torch.tensor([layer], device=like.device)
    return View(
        source,
        entries,
        replace(setting, prompt_len=prompt_len),
        row=prompt_len - 1,
        since=torch.full_like(layers, -1),
        layers=layers,
    )
