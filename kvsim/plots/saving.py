"""Figures as files, and as data URLs."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Literal

import matplotlib as mpl
from matplotlib.figure import Figure


def save(figure: Figure, path: str | Path) -> Path:
    """Write a figure as PNG, SVG or PDF without a date in it: equal figures are equal files."""
    out = Path(path)
    stamp = {".svg": "Date", ".pdf": "CreationDate"}.get(out.suffix.lower(), "Software")
    with mpl.rc_context({"svg.hashsalt": "kvsim"}):  # names inside an SVG are random otherwise
        figure.savefig(out, metadata={stamp: None})
    return out


def data_url(figure: Figure, form: Literal["svg", "png"] = "svg") -> str:
    """Return a figure as a data URL; form: PNG where an SVG of many points is too large."""
    image = io.BytesIO()
    figure.savefig(image, format=form, metadata={"Date" if form == "svg" else "Software": None})
    kind = "svg+xml" if form == "svg" else "png"
    return f"data:image/{kind};base64," + base64.b64encode(image.getvalue()).decode("ascii")
