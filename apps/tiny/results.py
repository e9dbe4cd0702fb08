"""Measurements of a tiny model in a file of JSON lines, and what card and pictures read from it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apps.tiny.probes import FIGURES, NEEDS
from kvsim.tiny.tasks import TASKS

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Results:
    """A file of measurements, one line of JSON each, and the weights that they are about.

    A row says what was measured (``part``, and ``task``, ``level``, ``seed`` where they apply), of
    how many samples (``n``), of which weights, and what was found.
    """

    path: Path
    weights: str

    def rows(self) -> list[Row]:
        """The rows about these weights, in the order in which they were measured."""
        if not self.path.exists():
            return []
        rows = map(json.loads, self.path.read_text("utf-8").splitlines())
        return [row for row in rows if row["weights"] == self.weights]

    def has(self, **wanted: Any) -> bool:
        """There is a row that agrees with ``wanted``."""
        return any(wanted.items() <= row.items() for row in self.rows())

    def add(self, **row: Any) -> None:
        """Write a row behind the others."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"weights": self.weights, **row}) + "\n")


def digest(folder: Path) -> str:
    """What tells the weights in ``folder`` from others: the start of their SHA-256."""
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()[:16]


def best(rows: Sequence[Row], part: str) -> dict[tuple[str, int], Row]:
    """By task and level the row of one part with the most samples, of those the latest."""
    found: dict[tuple[str, int], Row] = {}
    for row in rows:
        if row["part"] == part:
            key = (row["task"], row["level"])
            if key not in found or row["n"] >= found[key]["n"]:
                found[key] = row
    order = {task: index for index, task in enumerate(TASKS)}
    return dict(sorted(found.items(), key=lambda item: (order[item[0][0]], item[0][1])))


def heads(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The heads of ``structure``, the tasks together: every row and every need counts once."""
    cells = list(best(rows, "structure").values())
    merged = []
    for same in zip(*(cell["heads"] for cell in cells), strict=True):
        total = sum(cell["rows"] for cell in cells)
        one: dict[str, Any] = {"layer": same[0]["layer"], "head": same[0]["head"], "mass": {}}
        for name in FIGURES:
            pairs = zip(same, cells, strict=True)
            one[name] = sum(head[name] * cell["rows"] for head, cell in pairs) / total
        for name in NEEDS:
            known = [(h, c) for h, c in zip(same, cells, strict=True) if name in c["met"]]
            count = sum(cell["met"][name] for _, cell in known)
            if count:
                mass = sum(head["mass"][name] * cell["met"][name] for head, cell in known)
                one["mass"][name] = mass / count
        merged.append(one)
    return merged
