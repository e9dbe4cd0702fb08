"""StreamingLLM: attention sinks and a sliding window.

Xiao et al., "Efficient Streaming Language Models with Attention Sinks", ICLR 2024,
arXiv 2309.17453. Keeps the first `sink` positions and the most recent `budget - sink` ones, after
every row.

Deviations. The released code caches keys before RoPE and rotates each one to its slot in the cache
instead of its position in the sequence. So does `streaming_llm@original`: it keeps the same
entries, but its attention output differs. The default rotates by position, like the other policies.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from kvsim.core.lazy import Tensor
from kvsim.core.parameters import AtLeast
from kvsim.core.pieces import Scorer
from kvsim.core.view import View


class StreamingLLM(Scorer):
    """Recency, with the `sink` first positions protected."""

    sink: Annotated[int, AtLeast(0)] = 4

    per_row: ClassVar[bool] = True

    def score(self, view: View) -> Tensor:
        """The position: the more recent, the higher; exact in float64. [L, H, n]."""
        return view.pos.double()
