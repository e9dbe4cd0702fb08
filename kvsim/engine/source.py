"""A trace as the source of a View: one block of layers, loaded on first use."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import groupby
from typing import Any, TypeVar

from kvsim.core.header import Header
from kvsim.core.lazy import Tensor, torch
from kvsim.core.setting import Source
from kvsim.core.shared_results import MEMO_BYTES
from kvsim.core.sources import SharedEntries
from kvsim.core.trace import Trace
from kvsim.errors import PolicyError
from kvsim.schema import AXES, CHUNK, numbered

T = TypeVar("T")

_ALL = slice(None)


def read_together(trace: Trace, layer: int) -> Trace:
    """Return the trace of one layer, with the query heads of all layers that read its entries.

    The heads of a group are those of the layer itself, then of each other reader.
    """
    source = SharedEntries(trace.source, trace.header.readers(layer))
    return Trace(source, of_layer(trace, layer), dtype=trace.dtype)


def of_layer(trace: Trace, layer: int) -> Header:
    """Return the header of a trace of one of its layers."""
    return replace(
        trace.header,
        formulas=(trace.formulas[layer],),
        ropes=(trace.ropes[layer],),
        layer_ids=(trace.layer_ids[layer],),
        owners=(),
    )


def ended(trace: Trace, prompt_len: int) -> Trace:
    """Return a trace whose prompt ends after so many tokens; what follows counts as response."""
    header = replace(trace.header, prompt_len=prompt_len, context_len=None, questions=())
    return Trace(trace.source, header, dtype=trace.dtype, token_text=trace.token_text)


class TraceSource(Source):
    """Keys, values and queries of some layers of a trace on one device.

    Args:
        trace: the trace.
        layers: their indices in it.
        device: for the computation.
        memo_bytes: memory that the trace may keep for later replays.
        together: number of layers held at once by `parts`; all by default.
        copied: read copies of a trace in memory, which a policy may write to, and share no results.

    Raises:
        PolicyError: a layer with a window or chunks, for which a View has no mask.
    """

    def __init__(
        self,
        trace: Trace,
        layers: Sequence[int],
        device: torch.device,
        *,
        memo_bytes: int = MEMO_BYTES,
        together: int | None = None,
        copied: bool = False,
    ) -> None:
        for layer in layers:
            check_unwindowed(trace, layer)
        self._trace, self._device = trace, device
        self._runs: list[slice] = []
        for _, run in groupby(enumerate(layers), lambda numbered: numbered[1] - numbered[0]):
            following = [layer for _, layer in run]
            self._runs.append(slice(following[0], following[-1] + 1))
        self.rope, self.formula = trace.ropes[layers[0]], trace.formulas[layers[0]]
        self.positions, self.n_rows = trace.positions.to(device), trace.n_pos
        self._window, self._window_start = torch.empty(0, 0, 0, 0), 0
        self._full, self._full_start = [self._window, self._window], trace.n_pos
        self._memo: dict[Hashable, Any] = {}
        self._exact_keys: Tensor | None = None  # once keys and values are copies to overwrite
        self._place, self._memo_bytes = (tuple(layers), str(device)), memo_bytes
        self._held_together, self._copied = together or len(layers), copied

    def _read(self, name: str, pos: slice = _ALL) -> Tensor:
        parts = (self._trace.read(name, run, pos, stored=True) for run in self._runs)
        read = self._together(parts).to(self._trace.dtype)
        return read.clone() if self._copied else read

    def _together(self, parts: Iterable[Tensor]) -> Tensor:
        moved = [part.to(self._device) for part in parts]
        return moved[0] if len(moved) == 1 else torch.cat(moved)

    def memo(
        self, key: tuple[Hashable, ...], compute: Callable[[], T], *, shared: bool = False
    ) -> T:
        """Return `compute()`, cached here or, unless the policy may have changed it, shared."""
        if shared and self._exact_keys is None and not self._copied:
            return self._trace.memo((*key, self._place), compute, self._memo_bytes)
        return super().memo(key, compute, shared=shared)

    @property
    def parts(self) -> Callable[[], Iterator[tuple[slice, TraceSource]]] | None:
        """Yield places of layers held at once, and their source; None if all are."""
        return self._parts if self._held_together < len(self._place[0]) else None

    def _parts(self) -> Iterator[tuple[slice, TraceSource]]:
        layers = self._place[0]
        for first in range(0, len(layers), self._held_together):
            part = slice(first, first + self._held_together)
            more: Any = {"memo_bytes": self._memo_bytes, "copied": self._copied}
            yield part, TraceSource(self._trace, layers[part], self._device, **more)

    @cached_property
    def keys(self) -> Tensor:
        """[L, H, T, d]; T is 0 if `parts` hold the layers."""
        return self._read("k", slice(0, 0) if self.parts else _ALL)

    @cached_property
    def values(self) -> Tensor:
        """[L, H, T, d]."""
        return self._read("v")

    @property
    def exact_keys(self) -> Tensor:
        """[L, H, T, d], as recorded."""
        return self.keys if self._exact_keys is None else self._exact_keys

    def writable(self, which: int) -> Tensor:
        """A writable copy of keys (0) or values (1), which replaces them here; [L, H, T, d]."""
        if self._exact_keys is None:
            self._exact_keys = self.keys
            self.keys, self.values = self.keys.clone(), self.values.clone()
        return (self.keys, self.values)[which]

    def queries(self, start: int, stop: int) -> Tensor:
        """[L, H, G, stop - start, d]."""
        first, rows = self._window_start, self._window.shape[2]
        if start < first or stop > first + rows:
            # whole chunks, because neighbouring rows are read next
            first = start // CHUNK * CHUNK
            last = min(-(-stop // CHUNK) * CHUNK, self._trace.n_pos)
            for run in self._trace.header.held("q", range(first, last)):
                if run.start <= start and stop <= run.stop:
                    first, last = run.start, run.stop
            self._window, self._window_start = self._read("q", slice(first, last)), first
        return self._grouped(self._window[:, :, start - first : stop - first])

    def _grouped(self, x: Tensor) -> Tensor:
        """x [L, query head, ...] with the query heads of each KV head, [L, H, G, ...]."""
        out: Tensor = x.unflatten(1, (self._trace.n_heads, -1))
        return out

    def array(self, name: str) -> Tensor:
        """Return another array of the layers, read once."""
        return self.memo(("array", name), lambda: self._array(name))

    def _array(self, name: str) -> Tensor:
        if name == "chunks" and self._trace.header.chunks:
            return torch.tensor(self._trace.header.chunks)
        array, trace = self._read(name), self._trace
        if name == "o_proj" and trace.has("gate"):  # its mean over the rows before the first event
            seen = slice(0, trace.header.context_len or trace.prompt_len)
            array = array * self._read("gate", seen).mean(2).unsqueeze(-1)
        return self._grouped(array) if AXES[name][1] == "qhead" else array

    def sums(self, name: str, stop: int) -> tuple[int, Tensor] | None:
        """Sums over rows up to the end of the omitted ones, [L, H, G, ...]; None without any."""
        *before, rest = self._trace.header.held("q", range(self._trace.n_pos))
        if not before:
            return None
        if stop < rest.start:
            self.queries(0, stop)  # its error names the missing rows
        return rest.start, self._grouped(self._read(name))

    def full(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Attention output [L, H, G, stop - start, d] of the full cache, and its log-sum-exp."""
        first = self._full_start
        if start < first:  # later rows are read next
            parts = zip(*(self._trace.full(x, slice(start, None)) for x in self._runs), strict=True)
            self._full = [self._grouped(self._together(array)) for array in parts]
            self._full_start = first = start
        output, lse = self._full
        return output[..., start - first : stop - first, :], lse[..., start - first : stop - first]

    def evict(self, slots: Tensor, live: Tensor, evicted_at: Tensor) -> None:
        """Keep all positions."""


def windows(trace: Trace) -> str:
    """Describe the masks of layers: `a sliding window in layers 0, 2 (4096 tokens)`."""
    by_mask: dict[tuple[str, int | None], list[int]] = {}
    for layer in trace.windowed:
        formula = trace.formulas[layer].within(trace.n_pos)
        mask = (formula.local, formula.reach) if formula.reach else ("heads of another size", None)
        by_mask.setdefault(mask, []).append(layer)
    return ", ".join(
        f"{kind} in {numbered(layers)}" + (f" ({reach} tokens)" if reach else "")
        for (kind, reach), layers in by_mask.items()
    )


def check_unwindowed(trace: Trace, layer: int) -> None:
    """Raise PolicyError for a layer without eviction."""
    if layer in trace.windowed:
        raise PolicyError(
            f"layer {layer} of {trace.name} does not see the whole text, or has heads of another "
            f"size than the last ({windows(trace)}); expected one of the other layers"
        )
