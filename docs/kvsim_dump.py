# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: INP001 - a file to copy
"""Write what a KV cache keeps, reads or rounds, for `kvsim conform`. Needs numpy alone: copy it.

    dump = Dump(budget=256, interval=128)
    dump.kept(layer, row, positions)                  # after an event
    dump.read(layer, row, pages)                      # sparse attention, in a row
    dump.stored(layer, row, positions, 4.5, 8.5)      # bits of keys and of values, after a row
    dump.states(q, k, v, prompt_len=n, inv_freq=f)    # what your attention was given
    dump.save("engine.npz")

`layer`, `row` and `positions` count from 0, rows and positions in prompt and response; an event
after row 99 follows the attention of the 100th token. Arrays are numpy's, torch's or lists. Sets
are one list for each KV head (of `read`, for each head that chooses pages), or one for all heads.
"""

from typing import Any

import numpy as np

#: Columns of the tables of a file; the names of the last two begin with `read_` and `stored_`.
KEPT = ("layer", "head", "row", "pos")
READ = ("layer", "head", "row", "page")
STORED = ("layer", "head", "row", "pos", "key_bits", "value_bits")


class Dump:
    """Sets of entries by event, and of pages by row.

    heads: KV heads, where one list stands for all. page: entries of a page; pages are runs of the
    entries that are held, in the order of the text. budget, interval, prefill: entries per head,
    rows between events (0: none in decoding), and whether an event follows the prompt. layers: the
    only ones that are compared; otherwise a layer without a line keeps, reads and leaves exact
    everything, as a row of it does where other layers have lines.
    """

    def __init__(self, heads: int = 1, page: int = 1, **settings: Any) -> None:
        self._heads, self._arrays = heads, {"page": page, **settings}
        self._tables: dict[str, list[tuple[float, ...]]] = {"": [], "read_": [], "stored_": []}

    def kept(self, layer: int, row: int, positions: Any) -> None:
        """Add the positions that each head holds after an event; negative ones are pads."""
        self._add("", layer, row, positions)

    def read(self, layer: int, row: int, pages: Any) -> None:
        """Add the pages, from 0, that each head reads in a row."""
        self._add("read_", layer, row, pages)

    def stored(
        self, layer: int, row: int, positions: Any, key_bits: float, value_bits: float
    ) -> None:
        """Add entries that each head holds with so many bits a number, with their share of scales.

        16 and more are exact, and so is an entry that is held and not listed.
        """
        self._add("stored_", layer, row, positions, key_bits, value_bits)

    def states(self, q: Any, k: Any, v: Any, prompt_len: int, inv_freq: Any, **more: Any) -> None:
        """Add q [layer, qhead, pos, dim], k and v [layer, head, pos, dim] after RoPE.

        more: scale of the logits; attention_scaling, rotary_dim and layout of the rotation.
        """
        arrays = {"q": q, "k": k, "v": v, "inv_freq": inv_freq}
        self._arrays |= {name: _array(x) for name, x in arrays.items() if x is not None}
        self._arrays |= {"prompt_len": prompt_len, **more}

    def save(self, path: Any) -> None:
        """Write the `.npz` file."""
        arrays = {name: x for name, x in self._arrays.items() if x is not None}
        for prefix, names in {"": KEPT, "read_": READ, "stored_": STORED}.items():
            for name, column in zip(names, zip(*self._tables[prefix])):  # noqa: B905  old Pythons
                kind = np.float64 if name.endswith("bits") else np.int32
                arrays[prefix + name] = np.array(column, kind)
        np.savez(path, **arrays)

    def _add(self, table: str, layer: int, row: int, sets: Any, *bits: float) -> None:
        ragged = len(sets) > 0 and np.ndim(sets[0]) > 0
        for head, of_head in enumerate(sets if ragged else [sets] * self._heads):
            at = (int(x) for x in _array(of_head).ravel() if x >= 0)
            self._tables[table] += [(layer, head, row, x, *bits) for x in at]


def _array(x: Any) -> Any:
    for name in ("detach", "cpu", "float"):  # of torch
        x = getattr(x, name)() if hasattr(x, name) else x
    return np.asarray(x)
