"""Contexts that several prompts share: run once, with their complete blocks stored once."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from transformers.cache_utils import Cache

from kvsim.recorder.forward import one_piece
from kvsim.recorder.latent import caches_heads
from kvsim.schema import CHUNK
from kvsim.store.reader import open_trace
from kvsim.store.writer import TraceWriter


class SharedContext:
    """The rows of a context, shared from the first prompt with it to the later ones.

    left: captures that have not begun. path: the latest trace with the context, None before the
    first. layers: of its recorder (`kvsim.recorder.blocks.BlockRecorder.saved`), once it has run.
    """

    layers: Any = None
    _cache: Cache | None = None

    def __init__(self, left: int, path: Path | None) -> None:
        self.left, self.path = left, path

    def take(self) -> Cache | None:
        """Return a cache of the context's rows for the next capture; None if the rows must run."""
        self.left -= 1
        if self.left:
            return copy.deepcopy(self._cache)
        cache, self._cache = self._cache, None
        return cache

    def keep(self, cache: Cache, layers: Any) -> None:
        """Keep copies of the cache and of the recorder's layers for the remaining captures."""
        if self.left:
            self._cache, self.layers = copy.deepcopy(cache), layers

    def store(self, writer: TraceWriter, names: Iterable[str], n: int) -> None:
        """Store arrays, by name, in another trace; of arrays with rows the blocks before row n."""
        source = open_trace(str(self.path)).source  # a trace that has the context
        for name in names:
            if name not in source.shapes:
                writer.drop(name)
            else:
                writer.copy(source, [name], n // CHUNK * CHUNK)


def share_contexts(sessions: Sequence[Any], traces: Sequence[Any]) -> list[int]:
    """Let captures (`Session`) with the same context share it; return the order to run them in.

    traces: of each, the existing one, or None. Captures of one context follow each other. A model
    whose outputs differ between one forward and two runs the context with each.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for place, each in enumerate(sessions):
        n = each.encoded.context_len or 0
        alone = not 0 < n < len(each.encoded.ids)
        groups.setdefault((-1, place) if alone else tuple(each.context), []).append(place)
    for context, places in groups.items():
        new = [sessions[place] for place in places if traces[place] is None]
        if len(places) == 1 or not new:
            continue
        longest = max(([*x.encoded.ids, *x.response] for x in new), key=len)
        reason = one_piece(new[0].model, longest, len(context))
        if reason is None and caches_heads(new[0].model):
            reason = "this transformers caches heads, not the latents that they follow from"
        how = "in a forward of its own" if reason is None else f"with each: {reason}"
        shared = SharedContext(len(new), next((traces[x].path for x in places if traces[x]), None))
        for each in new:
            each.shared = shared if reason is None else None
            each.notes.append(
                f"the context of {len(context)} tokens, which {len(places)} prompts share, was run "
                f"{how}"
            )
    return [place for places in groups.values() for place in places]
