"""The source of a View, and the setting of all events.

Shape letters: L layers of the block, H KV heads, G query heads of a group, w rows, T rows of the
whole sequence, d head dimension, D of the residual stream.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvsim.core.attention import Formula, Rope
from kvsim.core.lazy import Tensor

T = TypeVar("T")


class Source(ABC):
    """Keys, values and queries of a block of layers, of one formula and one rotary embedding.

    Attributes:
        compacted: holds only live entries, in the slots of `Entries`; else all positions.
        rope: the model's rotary embedding.
        formula: attention formula of the layers.
        n_rows: rows of the whole sequence, those after the event included.
        positions: each row's RoPE position; int [T].
    """

    compacted: bool = False
    rope: Rope
    formula: Formula
    n_rows: int
    positions: Tensor
    _memo: dict[Hashable, Any]

    @property
    @abstractmethod
    def keys(self) -> Tensor:
        """[L, H, T, d], after RoPE."""

    @property
    @abstractmethod
    def values(self) -> Tensor:
        """[L, H, T, d]."""

    @property
    def exact_keys(self) -> Tensor:
        """The keys before they are rounded, [L, H, T, d]."""
        return self.keys

    @property
    def parts(self) -> Callable[[], Iterator[tuple[slice, Source]]] | None:
        """Yield places and sources of layers that are held together; None if all are."""
        return None

    def sums(self, name: str, stop: int) -> tuple[int, Tensor] | None:
        """The number of first rows, and a sum over them; None if the queries of all rows are held.

        NeedsError if there are more of them than `stop`. name: `received` [L, H, G, n] or `moments`
        [L, H, G, 1 + d, d].
        """
        return None

    def memo(
        self, key: tuple[Hashable, ...], compute: Callable[[], T], *, shared: bool = False
    ) -> T:
        """Return `compute()`, cached unless other replays may share it (`View.memo`)."""
        if shared:
            return compute()
        if key not in self._memo:
            self._memo[key] = compute()
        kept: T = self._memo[key]
        return kept

    @abstractmethod
    def array(self, name: str) -> Tensor:
        """Return another array, by the query heads of each KV head; NeedsError without it.

        o_proj [L, H, G, d, D]: output projections, times the prompt's mean gate if there is one.
        probe_q [L, H, G, P, d], probe_k [L, H, P, d]: of rows that repeat the context in chunks;
        chunks [chunk, 3]: start, stop and rows of each.
        """

    @abstractmethod
    def queries(self, start: int, stop: int) -> Tensor:
        """[L, H, G, stop - start, d], after RoPE."""

    def full(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Attention output [L, H, G, stop - start, d] and log-sum-exp of these rows, full cache."""
        raise NotImplementedError

    @abstractmethod
    def writable(self, which: int) -> Tensor:
        """The keys (0) or values (1), to be overwritten; [L, H, T, d]."""

    @abstractmethod
    def evict(self, slots: Tensor, live: Tensor, evicted_at: Tensor) -> None:
        """Drop the entries evicted at an event.

        Args:
            slots: the previous slot of each entry, int [L, H, n].
            live: False on pads, bool [L, H, n].
            evicted_at: the row after which each position left, int32 [L, H, T].
        """


@dataclass(frozen=True)
class Scores:
    """Result of a scorer: values [L, H, n], higher = keep, and the new values of its columns."""

    values: Tensor
    columns: Mapping[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def of(returned: Tensor | Scores) -> Scores:
        """Wrap the result of a scorer; a stateless one returns only values."""
        return returned if isinstance(returned, Scores) else Scores(returned)


@dataclass(frozen=True)
class Setting:
    """The setting of a replay; budget, prompt_len and protected belong to one event.

    Attributes:
        budget: the policy's, in entries per head.
        prompt_len: tokens that the event treats as the prompt.
        ends: of each prefill event, ascending; the last also applies to all later events.
        interval: rows between events after the prompt, None without any.
        n_layers: layers of the trace.
        clairvoyant: the scorer may read rows after the event.
        protected: protected entries of a head, once they exist.
        longest: returns, for a number of tokens, the largest cache of a head before an event, if
            every layer gets the budget.
        windowed: layers with a window or chunks shorter than the text, which are not replayed.
        scorer_protection: returns the scorer's protection at a budget, for the allocator.
        events: rows after which events fire, for clairvoyant scorers only.
        protected_ends: numbers of protected first and most recent positions, likewise.
        response: the first row after the prompt, likewise.
        policy: its name, for errors.
    """

    budget: int
    prompt_len: int
    interval: int | None
    n_layers: int
    clairvoyant: bool = False
    protected: int = 0
    longest: Callable[[int], int] = int
    windowed: tuple[int, ...] = ()
    scorer_protection: Any = None
    events: tuple[int, ...] = ()
    protected_ends: tuple[int, int] = (0, 0)
    response: int = 0
    policy: str = "a policy"
    ends: tuple[int, ...] = ()
