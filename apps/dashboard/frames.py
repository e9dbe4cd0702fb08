"""The table behind a picture: to look at, and to take away."""

from __future__ import annotations

import io
import re

import polars as pl
import streamlit as st


def below(frame: pl.DataFrame, name: str, *, key: str, what: str = "Table") -> None:
    """What the picture above shows, folded; as CSV and Parquet.

    what: its title, no text of a trace or a run. Columns without a value stay in the files and are
    not shown.
    """
    plain = frame.with_columns(pl.selectors.enum().cast(pl.String))
    with st.expander(f"{what}, {frame.height} rows"):
        shown = [one for one in plain.columns if plain[one].null_count() < plain.height]
        st.dataframe(plain.select(shown), hide_index=True, key=f"{key}-table")
        left, right, _ = st.columns([1, 1, 3])
        left.download_button(
            "Download as CSV",
            plain.write_csv(),
            f"{file_name(name)}.csv",
            "text/csv",
            key=f"{key}-csv",
            on_click="ignore",
        )
        right.download_button(
            "Download as Parquet",
            _parquet(frame),
            f"{file_name(name)}.parquet",
            "application/vnd.apache.parquet",
            key=f"{key}-parquet",
            on_click="ignore",
        )


def file_name(text: str) -> str:
    """A name for a file from one that anyone gave: letters, digits, dots, no path."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")[:100] or "table"


def _parquet(frame: pl.DataFrame) -> bytes:
    file = io.BytesIO()
    frame.write_parquet(file)
    return file.getvalue()
