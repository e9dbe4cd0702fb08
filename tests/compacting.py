"""Traces without the rows that are long before the response (docs/record.md)."""

from __future__ import annotations

from dataclasses import replace

from kvsim.core.lazy import Tensor, torch
from kvsim.core.left_out import Sums, left_out_before, stored_part
from kvsim.core.trace import Trace
from kvsim.errors import TraceError
from kvsim.schema import CHUNK


def compacted(trace: Trace, rows: int = 512) -> Trace:
    """Return a trace without the rows that are long before the response, and with their sums.

    rows: how many before the end of the prompt, or of its context, stay at least.
    """
    if trace.header.left_out is not None or not torch.equal(
        trace.positions, torch.arange(trace.n_pos)
    ):
        raise TraceError(f"{trace.name} has only some rows already; expected a trace with all rows")
    left_out = left_out_before(trace.header.context_len or trace.prompt_len, rows)
    if left_out is None:
        return trace
    header = replace(trace.header, left_out=left_out)
    source = _WithoutRows(trace, left_out)
    return Trace(source, header, dtype=trace.dtype, token_text=trace.token_text)


class _WithoutRows:
    """The source of a trace without some of its rows, with their sums."""

    def __init__(self, trace: Trace, left_out: tuple[int, int]) -> None:
        self._trace, self._left_out = trace, left_out
        self.positions = trace.positions
        #: output projections next to the trace
        self.projections = getattr(trace.source, "projections", None)
        layers = [_summed(trace, layer, left_out[1]) for layer in range(trace.n_layers)]
        names = set.intersection(*({*of_layer} for of_layer in layers))
        self._sums = {name: torch.stack([x[name] for x in layers]) for name in sorted(names)}
        self.shapes = {
            **trace.source.shapes,
            "attn_out": (*trace.source.shapes["q"][:3], trace.value_dim),
            "lse": trace.source.shapes["q"][:3],
            **{name: tuple(x.shape) for name, x in self._sums.items()},
        }
        self.shapes.pop("residual", None)  # for layers that are computed again, from all rows

    def read(self, name: str, layers: slice, pos: slice) -> Tensor:
        """Part of an array."""
        if name in self._sums:
            return self._sums[name][layers]
        stored_part(name, pos, self._trace.n_pos, self._left_out, self._trace.name)
        if name in ("attn_out", "lse") and not self._trace.has(name):
            return self._trace.full(layers, pos)[name == "lse"]
        return self._trace.source.read(name, layers, pos)


def _summed(trace: Trace, layer: int, stop: int) -> dict[str, Tensor]:
    """The sums of a layer over its first rows."""
    rope, only = trace.ropes[layer], slice(layer, layer + 1)
    sums = Sums(trace.formulas[layer], None if rope.layout == "unknown" else rope)
    k = trace.read("k", only, slice(0, stop))[0]
    for start in range(0, stop, CHUNK):
        block = slice(start, start + CHUNK)
        sums.add(trace.read("q", only, block)[0], k[:, : block.stop])
    return sums.arrays()
