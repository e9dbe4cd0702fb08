"""Sets that differ from a policy's: of the pages that rows read, and of stored entries."""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvsim.analysis.output.changed import shortened
from kvsim.core.lazy import Tensor, torch
from kvsim.core.policy import Policy
from kvsim.core.reading import SparseAttention, shared, visible
from kvsim.core.trace import Trace
from kvsim.engine.reading import chosen_pages, reads_all
from kvsim.errors import DumpError
from kvsim.studies.conformance.dump import Dump, Table

#: Kinds of differing sets: tied at the cut; another choice; everything kept at an event that
#: should evict; entries evicted where the definition has no event; evicted entries that return;
#: entries stored in other numbers of bits.
DifferenceKind = Literal["tie", "choice", "no eviction", "no event", "return", "bits"]


@dataclass(frozen=True)
class Difference:
    """A set that differs from the definition's, of one layer and head after the event after a row.

    extra: positions that stay and by definition leave; missing: that leave and by definition stay;
    returned: that had left before. gap: the highest score of what is missing less the lowest of
    what is extra, as a share of the largest score of the layer; None where one of them is empty or
    protected. highest: the extra entries are the highest positions of an exact tie. of: sets of
    entries that stay, of pages that a row reads, or of keys or values that are rounded. cut: both
    scores of the gap. bits: of a number, by the implementation and by definition.
    """

    row: int
    layer: int
    head: int
    kind: DifferenceKind
    extra: tuple[int, ...]
    missing: tuple[int, ...]
    returned: tuple[int, ...] = ()
    gap: float | None = None
    highest: bool = False
    of: str = "entries"
    cut: tuple[float, float] | None = None
    bits: tuple[float, float] | None = None


#: Numbers of so many bits are not rounded; bits that differ by less are equal.
EXACT, _BITS = 16, 0.01


def accesses(dump: Dump, policy: Policy, trace: Trace) -> int:
    """Sets of pages that are compared, and of rounded keys and values."""
    count = 0
    if dump.read is not None and policy.sparse is not None:
        of_policy = {"query": trace.n_qheads, "kv": trace.n_heads, "layer": 1}[policy.sparse.heads]
        rows = len(np.unique(dump.read["row"])) * len(dump.layers)
        count += rows * max(of_policy, int(dump.read["head"].max()) + 1)
    if dump.stored is not None:
        count += 2 * len(np.unique(dump.stored["row"])) * len(dump.layers) * trace.n_heads
    return count


def read_apart(
    trace: Trace,
    layer: int,
    sparse: SparseAttention,
    gone: Tensor,
    budget: int,
    dump: Dump,
    tolerance: float,
) -> Iterator[Difference]:
    """Yield the rows and heads of a layer that read other pages than sparse attention chooses.

    A row of which another layer alone has lines reads everything. layer: its index in the trace;
    gone: after which row each entry has left, int [H, T].
    """
    table: Any = dump.read
    n_heads, size, number = int(table["head"].max()) + 1, dump.page, trace.layer_ids[layer]
    rows, first = _by_row(table, number), trace.prompt_len
    known = (1, trace.n_heads, trace.n_qheads)
    if n_heads not in known or min(rows, default=first) < first:
        raise DumpError(
            f"{dump.name}: pages of {n_heads} heads, from row {min(rows, default=first)} on; "
            f"expected 1, {known[1]} or {known[2]} heads, and rows from {first} on"
        )
    for start, chosen, scores in _blocks(trace, layer, sparse.at(trace, budget), gone, budget):
        for row in sorted(x for x in rows if start <= x < start + chosen.shape[1]):
            held = visible(gone, slice(row, row + 1))[:, 0].sum(-1).tolist()
            for head in range(count := max(n_heads, len(chosen))):
                of_dump, of_rule, of_held = (
                    head * x // count for x in (n_heads, len(chosen), len(held))
                )
                n, head_of_line = held[of_held], rows[row]["head"]
                page = rows[row]["page"][head_of_line == of_dump]
                page = page if len(head_of_line) else np.arange(-(-n // size))
                mine = chosen[of_rule, row - start].numpy().repeat(sparse.page)[:n].nonzero()[0]
                theirs = (page[:, None] * size + np.arange(size)).ravel()
                theirs = theirs[(theirs < n) | (theirs // size > (n - 1) // size)]
                pair = (theirs, mine), (mine, theirs)
                extra, missing = (np.unique(np.setdiff1d(*x) // sparse.page) for x in pair)
                if len(extra) or len(missing):
                    cut, gap = _cut(scores[of_rule, row - start].numpy(), extra, missing)
                    kind: Any = "tie" if gap is not None and abs(gap) <= tolerance else "choice"
                    sets = tuple(extra.tolist()), tuple(missing.tolist())
                    yield Difference(row, number, head, kind, *sets, gap=gap, of="pages", cut=cut)


def _blocks(
    trace: Trace, layer: int, sparse: SparseAttention, gone: Tensor, budget: int
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Blocks of rows: the first row, the pages they read and the scores of these, [head, w, P]."""
    first, n = trace.prompt_len, trace.n_pos
    if reads_all(trace, sparse, layer):
        every = torch.ones(1, n - first, -(-n // sparse.page))
        yield first, every.bool(), every
        return
    only, watched, last = slice(layer, layer + 1), copy(sparse), list[Tensor]()

    def chosen(scores: Tensor, entries: Tensor, budget: int) -> Tensor:
        last[:] = [shared(sparse.heads, scores, entries)[0].flatten(0, 1)]
        return sparse.chosen(scores, entries, budget)

    object.__setattr__(watched, "chosen", chosen)
    qkv = [trace.read("q", only, slice(first, None))[0], *(trace.read(x, only)[0] for x in "kv")]
    for start, pages in chosen_pages(trace, layer, watched, gone, budget, qkv):
        yield start, pages, last[0]


def _cut(
    scores: NDArray[Any], extra: NDArray[Any], missing: NDArray[Any]
) -> tuple[tuple[float, float] | None, float | None]:
    """The scores of the best missing and the worst extra page, and their gap."""
    if len(extra) != len(missing) or extra[-1] >= len(scores):
        return None, None
    largest = float(np.abs(scores[np.isfinite(scores)]).max(initial=0)) or 1.0
    best, worst = float(scores[missing].max()), float(scores[extra].min())
    return (best, worst), (best - worst) / largest


def stored_apart(
    trace: Trace, layer: int, storage: object, gone: Tensor, first: int, table: Table
) -> Iterator[Difference]:
    """Yield where a layer stores keys or values of other entries rounded, or in other bits.

    first: the row after which the first entries are rounded; other terms as in `read_apart`. An
    entry that is held and has no line is exact.
    """
    key_dim, value_dim = dims = [trace.read(x, slice(layer, layer + 1)).shape[-1] for x in "kv"]
    rules = shortened(storage, trace.owners[layer], gone, first, (key_dim, value_dim))
    number = trace.layer_ids[layer]
    for row, lines in _by_row(table, number).items():
        held = gone[:, : row + 1].numpy() >= row + 1
        for (after, bits), dim, of in zip(rules, dims, ("keys", "values"), strict=True):
            theirs, mine = np.full((2, *held.shape), math.inf)
            theirs[lines["head"], lines["pos"]] = lines[f"{of[:-1]}_bits"]
            theirs[(theirs >= EXACT) | ~held] = math.inf
            mine[held & (after[:, : row + 1].numpy() <= row)] = bits / dim
            differs = ~np.isclose(theirs, mine, rtol=0, atol=_BITS)
            for head in differs.any(-1).nonzero()[0].tolist():
                a, b, at = theirs[head], mine[head], differs[head]
                both = a[at & np.isfinite(a) & np.isfinite(b)]
                kind: Any = "bits" if len(both) else "choice"
                widths = (float(both[0]), bits / dim) if len(both) else None
                extra, missing = (tuple((at & np.isinf(x)).nonzero()[0].tolist()) for x in (b, a))
                yield Difference(row, number, head, kind, extra, missing, of=of, bits=widths)


def _by_row(table: Table, number: int) -> dict[int, dict[str, NDArray[Any]]]:
    """The lines of a layer, by each row of the table, ascending; none where it has no line."""
    of_layer = {name: column[table["layer"] == number] for name, column in table.items()}
    return {
        row: {name: column[of_layer["row"] == row] for name, column in of_layer.items()}
        for row in np.unique(table["row"]).tolist()
    }
