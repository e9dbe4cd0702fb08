"""Measurements of a shipped model in a file of JSON lines, for its card and figures."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apps.tiny.probes import FIGURES, NEEDS
from kvsim.studies.language.tasks import TASKS

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Results:
    """A file of measurements, one line of JSON each, and the weights that they are about.

    A row has the kind of measurement (``part``, and ``task``, ``level``, ``seed`` if they apply),
    the number of samples (``n``), the digest of the weights, and the measured values.
    """

    path: Path
    weights: str

    def rows(self) -> list[Row]:
        """Return the rows of these weights, in the order of measurement."""
        if not self.path.exists():
            return []
        rows = map(json.loads, self.path.read_text("utf-8").splitlines())
        return [row for row in rows if row["weights"] == self.weights]

    def has(self, **cell: Any) -> bool:
        """Return whether a row has all values of ``cell``."""
        return any(cell.items() <= row.items() for row in self.rows())

    def add(self, **row: Any) -> None:
        """Append a row."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"weights": self.weights, **row}) + "\n")


def digest(folder: Path) -> str:
    """Return the start of the SHA-256 of the weights in ``folder``, which identifies them."""
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()[:16]


def best(rows: Sequence[Row], part: str) -> dict[tuple[str, int], Row]:
    """Return for each task and level the row of a part with the most samples (the latest such)."""
    rows_of: dict[tuple[str, int], Row] = {}
    for row in rows:
        if row["part"] == part:
            key = (row["task"], row["level"])
            if key not in rows_of or row["n"] >= rows_of[key]["n"]:
                rows_of[key] = row
    order = {task: index for index, task in enumerate(TASKS)}
    return dict(sorted(rows_of.items(), key=lambda item: (order[item[0][0]], item[0][1])))


def heads(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Merge the heads of ``structure`` over the tasks: every row and every need counts once."""
    cells = list(best(rows, "structure").values())
    merged = []
    for same in zip(*(cell["heads"] for cell in cells), strict=True):
        total = sum(cell["rows"] for cell in cells)
        merged_head: dict[str, Any] = {
            "layer": same[0]["layer"],
            "head": same[0]["head"],
            "mass": {},
        }
        for name in FIGURES:
            pairs = zip(same, cells, strict=True)
            merged_head[name] = sum(head[name] * cell["rows"] for head, cell in pairs) / total
        for name in NEEDS:
            needed = [(h, c) for h, c in zip(same, cells, strict=True) if name in c["met"]]
            count = sum(cell["met"][name] for _, cell in needed)
            if count:
                mass = sum(head["mass"][name] * cell["met"][name] for head, cell in needed)
                merged_head["mass"][name] = mass / count
        merged.append(merged_head)
    return merged
