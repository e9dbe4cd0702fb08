"""A policy's view of one event: the live entries, recent queries, attention received.

A View shows no later rows and no evicted entries.

Shape letters: L layers of the block, H KV heads, G query heads of a group, w rows of a window,
n entries (left-padded where heads hold different numbers), d head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from itertools import starmap
from typing import Any, TypeVar

from kvsim.core.attention import Reduction, reduce_group
from kvsim.core.entries import Entries, gather
from kvsim.core.lazy import Tensor, torch
from kvsim.core.moments import SINKS, moments
from kvsim.core.parameters import of_a_user
from kvsim.core.setting import Scores, Setting, Source
from kvsim.core.weights import LOGIT_BYTES, row_grid, row_weights
from kvsim.errors import PolicyError
from kvsim.schema import GUIDE

__all__ = ["LOGIT_BYTES", "Setting", "Source", "View"]

T = TypeVar("T")


class View:
    """A policy's view of the cache right after row `row` has attended.

    Its tensors are shared and must not be changed in place: `x * 2`, not `x.mul_(2)`.
    """

    def __init__(
        self,
        source: Source,
        entries: Entries,
        setting: Setting,
        *,
        row: int,
        since: Tensor,
        layers: Tensor,
        rounded_after: Tensor | None = None,
        rounded: bool = False,
    ) -> None:
        self._source, self._entries = source, entries
        self._padded = entries.padded  # whether a slot may hold no live entry
        #: absolute position of each entry, ascending, -1 on pads, int [L, H, n]; if only some rows
        #: of the prompt propagate, the place among these
        self.pos = entries.pos
        #: False on pads; bool [L, H, n]
        self.live = entries.live
        #: the model's rotary embedding
        self.rope = source.rope
        #: attention formula of the layers
        self.formula = source.formula
        #: row of the last event that acted on each layer, -1 before the first; int [L]
        self.since = since
        self._rounded_after = rounded_after  # row of each key's rounding, int32 [L, H, T]
        #: whether keys may change between events, by rounding or merging
        self.rounded = rounded
        self._gathered: dict[str, Tensor] = {}
        self._windows: dict[int, Tensor] = {}
        #: constants of all events
        self.setting = setting
        #: the row after which the event fires; nothing later is visible
        self.row = row
        #: index of each layer of the block in the trace, int [L]
        self.layers = layers
        self._budget, self._reads_budget = torch.full_like(layers, setting.budget)[:, None], False

    @property
    def budget(self) -> Tensor:
        """Entries that each head keeps if heads share the layer's budget equally, int [L, 1]."""
        self._reads_budget = True
        return self._budget

    @budget.setter
    def budget(self, budget: Tensor) -> None:
        self._budget = budget

    def parts(self) -> Iterator[View]:
        """Yield views of the layers that are held at once; itself if all are."""
        if self._source.parts is None:
            yield self
            return
        for at, source in self._source.parts():
            entries, since, layers = self._entries.of_layers(at), self.since[at], self.layers[at]
            part = View(source, entries, self.setting, row=self.row, since=since, layers=layers)
            part.budget = self._budget[at]
            yield part

    @property
    def is_prompt(self) -> bool:
        """True at the event that ends the prefill."""
        return self.row == self.setting.prompt_len - 1

    @property
    def positions(self) -> Tensor:
        """Position in the text of each row so far; not its number if rows were dropped."""
        return self._source.positions[: self.row + 1]

    @property
    def source(self) -> Source:
        """The whole recording, later rows included; only for clairvoyant scorers."""
        self._look(self.row + 2)
        return self._source

    def __getitem__(self, column: str) -> Tensor:
        if column not in self._entries.columns:
            declared = ", ".join(self._entries.columns) or "none"
            raise PolicyError(
                f"{self.setting.policy}: reads a column {column!r} that it does not declare; it "
                f"declares {declared}; add it to `columns`, see {GUIDE}"
            )
        return self._entries.columns[column]

    @property
    def count(self) -> Tensor:
        """Live entries of each head; int [L, H]."""
        return self._entries.count

    @property
    def slot(self) -> Tensor:
        """Index of each entry among the live ones of its head, negative on pads; int [L, H, n]."""
        n = self.pos.shape[-1]
        return torch.arange(n, device=self.pos.device) - (n - self.count).unsqueeze(-1)

    def array(self, name: str) -> Tensor:
        """Return an array named in the scorer's `reads.arrays` (`Source.array`)."""
        return self._source.array(name)

    @property
    def keys(self) -> Tensor:
        """Keys of the entries after RoPE, 0 on pads; [L, H, n, d]."""
        return self._gather("keys", self._source.keys)

    @property
    def values(self) -> Tensor:
        """Values of the entries, 0 on pads; [L, H, n, d]."""
        return self._gather("values", self._source.values)

    def _gather(self, name: str, stored: Tensor) -> Tensor:
        if name not in self._gathered:
            self._gathered[name] = gather(stored, self._entries)
        return self._gathered[name]

    def queries(self, rows: int | range, *, rotated: bool = True) -> Tensor:
        """Return queries, before RoPE unless `rotated`; [L, H, G, w, d].

        Args:
            rows: a number of recent rows, or a range; later ones only for clairvoyant scorers.
            rotated: False for pre-RoPE queries.
        """
        rows = self._rows(rows)
        queries = self._source.queries(rows.start, rows.stop)
        if rotated:
            return queries
        return self.rope.unrotate(queries, self._source.positions[rows.start : rows.stop])

    def moments(self, rows: range, *, covariance: bool = True) -> tuple[int, Tensor, Tensor | None]:
        """Return number, mean [L, H, G, d] and covariance [L, H, G, d, d] of queries before RoPE.

        The covariance is None unless requested. Replays share them.
        """

        def compute() -> tuple[int, Tensor, Tensor | None]:
            start, before = rows.start, None
            sums = self._source.sums("moments", rows.stop) if start == SINKS else None
            if sums is not None:
                start, both = sums
                before = start - SINKS, both[..., 0, :], both[..., 1:, :]
            blocks = starmap(range, row_grid(start, rows.stop))
            queries = (self.queries(block, rotated=False) for block in blocks)
            return moments(queries, covariance, before)

        return self.memo(("moments", rows.start, rows.stop, covariance), compute, shared=True)

    def memo(
        self, key: tuple[Hashable, ...], compute: Callable[[], T], *, shared: bool = False
    ) -> T:
        """Return `compute()`, cached from the first event that needs it.

        Args:
            key: the kind of result, and its inputs other than the layers and fixed rows of the
                view.
            compute: returns any value; if shared, read-only tensors of fixed rows or of the full
                cache.
            shared: keep it for all replays of the trace.
        """
        return self._source.memo(key, compute, shared=shared)

    def scored(self, scorer: Any) -> Scores:
        """Return the scores of a scorer, which are read-only.

        Before the first eviction, policies with equal scorers of kvsim share them, at all budgets
        unless the scorer reads the budget.
        """
        if self._source.parts is not None:
            parts = [part.scored(scorer) for part in self.parts()]
            of_all = {x: torch.cat([part.columns[x] for part in parts]) for x in parts[0].columns}
            return Scores(torch.cat([part.values for part in parts]), of_all)
        foreign = of_a_user(type(scorer))
        if foreign or not self._entries.complete:
            self._reads_budget |= foreign  # or any other input
            return Scores.of(scorer.score(self))
        setting, before = self.setting, self._reads_budget

        def score() -> tuple[Any, ...]:
            self._reads_budget = False
            scores = Scores.of(scorer.score(self))
            budgets = self._budget.tolist() if self._reads_budget else None
            return scores.values, *scores.columns.values(), (*scores.columns,), budgets

        looks = setting.ends, setting.events, setting.protected_ends, setting.response
        key = ("scores", scorer, self.row, setting.prompt_len, setting.interval, looks)
        values, *columns, names, budgets = self.memo(key, score, shared=True)
        self._reads_budget = before or budgets is not None
        if budgets not in (None, self._budget.tolist()):
            return Scores.of(scorer.score(self))
        return Scores(values, dict(zip(names, columns, strict=True)))

    def _rows(self, rows: int | range) -> range:
        """Return a range of rows; PolicyError for later ones unless clairvoyant."""
        if not isinstance(rows, range):
            return range(max(0, self.row + 1 - rows), self.row + 1)
        self._look(rows.stop)
        return rows

    def _look(self, stop: int) -> None:
        if stop > self.row + 1 and not self.setting.clairvoyant:
            raise PolicyError(
                f"{self.setting.policy}: reads row {stop - 1} at the event after row {self.row}; a "
                "score may use rows up to the event, and only one with `reads = "
                f"Inputs(future=True)` later ones, see {GUIDE}"
            )

    def logits(self, rows: int | range) -> Tensor:
        """Scaled logits of recent rows, -inf for invisible entries; [L, H, G, w, n]."""
        return self._weights_of(self._rows(rows), weigh=False)

    def attn(
        self, rows: int | range, group: Reduction | None = None, *, log: bool = False
    ) -> Tensor:
        """Attention of recent rows over the live entries; [L, H, G, w, n].

        Each row is at its own position and sees the live entries up to it. Its weights sum to 1
        over them, less the share of a learned sink, and are 0 elsewhere. Attention of the most
        recent rows is cached per event; a larger window serves a smaller one.

        Args:
            rows: a number of recent rows, or a range; request many rows block by block.
            group: reduce the query heads of a group: "mean", "max" or "sum"; then [L, H, w, n].
            log: return logarithms in float64, which do not underflow; -inf for invisible entries.
        """
        if log:
            return reduce_group(self._logarithms(self._rows(rows)), group)
        if isinstance(rows, range):
            return reduce_group(self._weights_of(self._rows(rows)), group)
        size = next((size for size in self._windows if size >= rows), rows)
        if size not in self._windows:
            self._windows[size] = self._weights_of(self._rows(size))
        window = self._windows[size]
        return reduce_group(window[..., max(0, window.shape[-2] - rows) :, :], group)

    def _logarithms(self, rows: range) -> Tensor:
        z = self._weights_of(rows, weigh=False).double()
        total = z.logsumexp(-1, keepdim=True)
        if self.formula.sinks:
            total = total.logaddexp(self.formula.sink(z, z.shape[1])[..., None, None])
        hidden = z == -torch.inf
        return z.sub_(total).masked_fill_(hidden, -torch.inf)

    def received(self) -> Tensor:
        """Attention to each entry since the last event that acted on its layer; [L, H, n].

        Summed over those rows and the query heads of the group. Each row sees the live entries up
        to its own position, with keys as stored when it attended.
        """
        first = int(self.since.min()) + 1
        if first == self.row:
            return self.attn(1, group="sum")[..., 0, :]
        if first == 0 and self._entries.complete:  # the same under every policy and budget
            key = "received", self.row
            return self.memo(key, lambda: self._received(0), shared=True).clone()
        return self._received(first)

    def _received(self, first: int) -> Tensor:
        example = self.keys
        layers, heads, n = example.shape[:3]
        if first == 0:
            total, acted = self._received_of_all(), self.since >= 0
            if bool(acted.any()):  # in other layers
                since = self._received(int(self.since[acted].min()) + 1)
                total = since.where(acted.view(-1, 1, 1), total)
            return total
        per_row = layers * heads * self._source.queries(first, first + 1).shape[2] * n
        # a quarter: blocks of fewer rows mask out fewer entries
        step = max(1, LOGIT_BYTES // (4 * per_row * example.element_size()))
        total, attended = example.new_zeros(layers, heads, n), self._rounded_after is not None
        for start in range(first, self.row + 1, step):
            stop = min(start + step, self.row + 1)
            seen = n - (self.row + 1 - stop)  # their own entries are the last slots of each head
            attention = self._weights_of(range(start, stop), seen, attended=attended).sum(2)
            if int(self.since.max()) >= start:  # some layers acted later than others
                counted = torch.arange(start, stop, device=total.device) > self.since.unsqueeze(-1)
                attention = attention * counted[:, None, :, None]
            total[..., :seen] += attention.sum(2)
        return total

    def _received_of_all(self) -> Tensor:
        """Attention received from all rows, in layers without evictions; [L, H, n].

        The order of the sum is the same in any block of layers and at any event.
        """
        queries = self._source.queries(self.row, self.row + 1)
        total = queries.new_zeros(*queries.shape[:3], self.row + 1)  # [L, H, G, n]
        start, attended = 0, self._rounded_after is not None
        if (sums := self._source.sums("received", self.row + 1)) is not None:
            start, total[..., : sums[0]] = sums
        size = total[0, ..., 0].numel() * total.element_size()
        for low, high in row_grid(start, self.row + 1, size):
            most = max(1, LOGIT_BYTES // ((high - low) * high * size))
            for layer in range(0, len(total), most):
                only = slice(layer, layer + most)
                rows = range(low, high)
                part = self._weights_of(rows, high, attended=attended, layers=only)
                total[only, ..., :high] += part.sum(3)
        return total.sum(2)

    def _weights_of(
        self,
        rows: range,
        seen: int | None = None,
        *,
        weigh: bool = True,
        attended: bool = False,
        layers: slice = slice(None),
    ) -> Tensor:
        """Attention of rows over the first `seen` slots; [L, H, G, w, seen].

        weigh: False for logits, -inf for invisible entries. attended: with keys as stored when the
        row attended, not as now.
        """
        start, stop = rows.start, rows.stop
        queries = self._source.queries(start, stop)[layers]
        k = self.keys[layers, :, :seen].flatten(0, 1)
        pos, live = (x[layers, :, :seen].flatten(0, 1) for x in (self.pos, self.live))
        n_layers, heads, group, count = queries.shape[:4]
        q = queries.flatten(2, 3).flatten(0, 1)  # [L * H, G * w, d]
        row = torch.arange(start, stop, device=q.device).expand(group, -1).flatten()  # [G * w]
        before: tuple[Tensor, Tensor] | None = None
        if attended and self._rounded_after is not None:
            exact = gather(self._source.exact_keys, self._entries)[layers, :, :seen]
            after = self._rounded_after.gather(-1, self.pos.clamp(min=0))[layers, :, :seen]
            before = exact.flatten(0, 1), after.flatten(0, 1)
        # the first slot that may hold an entry later than a row; positions ascend
        younger, padded = self._entries.stop - 1 - start, self._padded
        first = min(k.shape[1], max(0, self.pos.shape[-1] - younger))
        out = row_weights(
            *(q, k, self.formula, row, pos[:, first:], n_layers),
            live=live if padded else None,
            before=before,
            weigh=weigh,
        )
        if weigh and (padded or not first):
            # a row older than every live entry sees nothing
            oldest = pos.masked_fill(~live, stop).amin(-1, keepdim=True)
            blind = oldest > row
            if bool(blind.any()):
                out.masked_fill_(blind.unsqueeze(-1), 0.0)
        return out.view(n_layers, heads, group, count, -1)
