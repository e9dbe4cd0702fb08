"""Figures as files."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure


def save(figure: Figure, path: str | Path) -> Path:
    """Write a figure as PNG without a date in it, so that equal figures are equal files."""
    out = Path(path)
    figure.savefig(out, metadata={"Software": None})
    return out
