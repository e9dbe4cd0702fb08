"""Results that all replays of one trace share; bounded in bytes."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from kvsim.core.lazy import Tensor

T = TypeVar("T")

#: Default memory of a block of layers: keys, values and working space.
DEFAULT_MEMORY = 2 << 30
#: Bytes that a trace caches for later replays, if these may take 2 GiB.
MEMO_BYTES = 128 << 20


class Memo:
    """Results by key, whose first part is their kind; threads may share a memo.

    When full, it drops results of other kinds. Those of the same kind stay: replays request them in
    the same order, so each would be dropped just before its use.
    """

    def __init__(self) -> None:
        self._results: dict[tuple[Hashable, ...], tuple[Any, int]] = {}
        self._bytes = 0

    def __call__(self, key: tuple[Hashable, ...], compute: Callable[[], T], most: int) -> T:
        """Return the cached or computed tensor, or tuple, of the key; most: bytes to keep."""
        kept = self._results.get(key)
        if kept is not None:
            before: T = kept[0]
            return before
        result = compute()
        if key in self._results:  # another thread was faster
            return result
        parts = result if isinstance(result, tuple) else (result,)
        size = sum(part.nbytes for part in parts if isinstance(part, Tensor))
        for other in list(self._results):
            if other[0] != key[0] and self._bytes + size > most:
                self._bytes -= self._results.pop(other, (None, 0))[1]
        if self._bytes + size <= most:
            self._results[key] = result, size
            self._bytes += size
        return result
