"""Pages of a paged cache: how many a kept set frees, and how full the others are.

An engine allocates pages of `size` slots and frees a page when none of its slots holds an entry.
What outlives the event after the prompt is written into pages without gaps, as PagedEviction
(arXiv 2509.04377) does; each later entry is appended to the newest page, and no entry moves. The
heads of a table have their own entries in its slots: a page is allocated until it is empty in all
of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvsim.analysis.arrays import Floats, share
from kvsim.analysis.kept.retention import rows_that_see

#: Slots of a page, as vLLM has them by default.
PAGE = 16


@dataclass(frozen=True)
class Pages:
    """Shares over all rows after the prompt, of each page table; [n], NaN without such rows.

    freed: pages that a full cache would allocate and this one does not. fragmentation: slots of
    allocated pages that hold no entry, those not yet written included.
    """

    freed: Floats
    fragmentation: Floats


def pages(gone_after: NDArray[np.int32], prompt_len: int, size: int = PAGE) -> Pages:
    """Return the pages of tables [n, H, T]: n page tables, each of H heads that share it."""
    tables, heads, total = gone_after.shape
    position = np.arange(total)
    written = (gone_after >= prompt_len) | (position >= prompt_len)
    page = np.where(written, written.cumsum(-1) - 1, 0) // size
    number = -(-total // size)
    first = np.full((tables, number), total)
    last = np.full((tables, number), -1)
    table, head, pos = written.nonzero()
    place = table, page[table, head, pos]
    np.minimum.at(first, place, pos)
    np.maximum.at(last, place, gone_after[table, head, pos])
    rows = np.minimum(last, total - 1) + 1 - np.maximum(first, prompt_len)  # of each page
    allocated = np.maximum(rows, 0).sum(-1)
    entries = rows_that_see(gone_after, prompt_len).sum((1, 2))
    full = tables * [(position[prompt_len:] // size + 1).sum()]
    return Pages(
        1.0 - share(allocated, np.array(full)), 1.0 - share(entries, allocated * size * heads)
    )
