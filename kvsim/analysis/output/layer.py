"""One layer of a trace in the layout of measurements, with attention over visible entries.

Shape letters: H KV heads, G query heads of a group, w rows, n entries, T tokens, d dimension of a
head, D of the residual stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from kvsim.core.attention import Formula, Rope, attend, with_sinks
from kvsim.core.lazy import Tensor, torch
from kvsim.core.trace import Trace

#: exp of less is subnormal in float32, which makes products a hundred times slower.
LOWEST = -87.0

#: A smaller mass has lost precision; the rows' own logits are used.
FAINT = 1e-24


@dataclass
class Layer:
    """One layer of a trace: k, v [H, T, d] and, of its rows, q [H, G, w, d], full output and lse.

    Rows that the trace leaves out are NaN. o_proj: the output projection [H * G * d, D], None
    unless needed. gate: factor of the output before it [H, G, w, d]; None without one. first: the
    first of the rows.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    formula: Formula
    rope: Rope
    o_proj: Tensor | None = None
    gate: Tensor | None = None
    first: int = 0

    @classmethod
    def read(
        cls,
        trace: Trace,
        layer: int,
        device: torch.device,
        *,
        projected: bool = False,
        first: int = 0,
    ) -> Layer:
        """Read rows from `first` on of a layer; with its output projection if `projected`."""
        only = slice(layer, layer + 1)
        k, v = (trace.read(name, only)[0].to(device) for name in "kv")
        gated = projected and trace.has("gate")

        def read(rows: slice) -> Iterator[Tensor]:
            names = ("q", "gate") if gated else ("q",)
            arrays = (*(trace.read(name, only, rows) for name in names), *trace.full(only, rows))
            return (x[0].to(device).unflatten(0, (len(k), -1)) for x in arrays)

        held = trace.header.held("q", range(first, trace.n_pos))
        missing = trace.n_pos - first - sum(run.stop - run.start for run in held)
        if not missing:
            q, *gates, out, lse = read(slice(first, None))
        else:
            start = held[-1].start - missing
            pairs = zip(read(slice(first, start)), read(held[-1]), strict=True)
            q, *gates, out, lse = (_around(missing, *pair) for pair in pairs)
        o_proj = trace.read("o_proj", only)[0].flatten(0, 1).to(device) if projected else None
        formula, rope = trace.formulas[layer], trace.ropes[layer]
        return cls(q, k, v, out, lse, formula, rope, o_proj, gates[0] if gates else None, first)

    def at(self, of_rows: Tensor, rows: slice | Tensor) -> Tensor:
        """Return these rows [H, G, w, ...] of q, output, log-sum-exp or gate."""
        if isinstance(rows, slice):
            return of_rows[:, :, rows.start - self.first : rows.stop - self.first]
        return of_rows[:, :, rows - self.first]

    def per_query_head(self) -> Layer:
        """The same layer with every query head its own KV head."""
        k, v = (x.repeat_interleave(self.q.shape[1], 0) for x in (self.k, self.v))
        q, out, lse = (x.flatten(0, 1).unsqueeze(1) for x in (self.q, self.out, self.lse))
        gate = None if self.gate is None else self.gate.flatten(0, 1).unsqueeze(1)
        return replace(self, q=q, k=k, v=v, out=out, lse=lse, gate=gate)

    @cached_property
    def unrotated(self) -> tuple[Tensor, Tensor]:
        """q and k before RoPE."""
        pos = torch.arange(self.k.shape[1], device=self.k.device)
        return self.rope.unrotate(self.q, pos[self.first :]), self.rope.unrotate(self.k, pos)

    # with one dimension more, products of queries and keys give the logarithm of full attention's
    # weights, and products of weights and values give the sum of weights too

    @cached_property
    def keys(self) -> Tensor:
        """Keys and a last dimension of 1, [H, T, d + 1]."""
        return torch.cat([self.k, torch.ones_like(self.k[..., :1])], dim=-1)

    @cached_property
    def values(self) -> Tensor:
        """Values and a last dimension of 1, [H, T, d + 1]."""
        return torch.cat([self.v, torch.ones_like(self.v[..., :1])], dim=-1)

    def queries(self, rows: slice, head: int) -> Tensor:
        """Scaled queries of a head's group, with minus the log-sum-exp; [d + 1, G * w].

        With a softcap the last dimension is 0, and `shifted` subtracts.
        """
        shift = torch.zeros_like if self.formula.softcap else torch.neg
        lse = shift(self.at(self.lse, rows)[head]).unsqueeze(-1)
        q = torch.cat([self.at(self.q, rows)[head] * self.formula.scale, lse], dim=-1)
        return q.flatten(0, 1).mT

    def shifted(self, z: Tensor, rows: slice, head: int) -> Tensor:
        """Products z [n, G * w] of `keys` and `queries` as logarithms of weights, in place."""
        if self.formula.softcap is None:
            return z
        return self.formula.capped(z).sub_(self.at(self.lse, rows)[head].flatten())

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **seen: Any) -> tuple[Tensor, Tensor]:
        """`attend` by the layer's formula, over some visible entries, without sinks."""
        return attend(q, k, v, self.formula, **seen)

    def whole(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """All visible entries with the sinks; out [H, G, w, d], lse [H, G, w]."""
        if not self.formula.sinks:
            return out, lse
        return with_sinks(out, lse, self.formula.sink(out, len(out)))


def _around(count: int, before: Tensor, after: Tensor) -> Tensor:
    """Pad rows [H, G, w, ...] with NaN for `count` others between before and after."""
    between = before.new_full((*before.shape[:2], count, *before.shape[3:]), torch.nan)
    return torch.cat([before, between, after], 2)


class Rows(NamedTuple):
    """Output and mass of rows of a layer, next to the output with the full cache.

    at: the rows. out: output over visible entries [H, G, w, d], to be overwritten. mass: its share
    of full attention [H, G, w]. full: the full cache's output [H, G, w, d], of length size [H, G,
    w].
    """

    at: slice | Tensor
    out: Tensor
    mass: Tensor
    full: Tensor
    size: Tensor

    @classmethod
    def of(cls, layer: Layer, rows: slice | Tensor, out: Tensor, mass: Tensor) -> Rows:
        """The rows `at` of a layer."""
        full = layer.at(layer.out, rows)
        return cls(rows, out, mass, full, length(full, -1))


def length(x: Tensor, dim: int) -> Tensor:
    """Euclidean length along a dimension; torch's own is several times slower."""
    return x.square().sum(dim).sqrt_()


def marked(mask: Tensor) -> Tensor:
    """Positions marked in mask [H, T], ascending; [H, n], heads with fewer padded on the left."""
    count = mask.sum(-1)
    longest = int(count.max())
    if int(count.min()) == longest:
        return mask.nonzero()[:, 1].view(len(mask), longest)
    return mask.byte().sort(dim=-1, stable=True).indices[:, mask.shape[-1] - longest :]


def take(stored: Sequence[Tensor], positions: Tensor) -> list[Tensor]:
    """Rows at[H, n] of tensors [H, T, any]; [H, n, any] each."""
    heads, total = stored[0].shape[:2]
    base = torch.arange(heads, device=positions.device).mul_(total).unsqueeze(-1)
    flat = (positions + base).flatten()
    return [x.flatten(0, 1).index_select(0, flat).unflatten(0, (heads, -1)) for x in stored]
