"""Tables of the data of pictures, shown folded and offered as files."""

from __future__ import annotations

import io
import re

import polars as pl
import streamlit as st

from kvsim.analysis.results import csv_text
from kvsim.schema import plural


def table(frame: pl.DataFrame, name: str, *, key: str) -> None:
    """Show the table of the picture above, folded, and offer it as CSV and Parquet.

    A file is written when it is asked for. Columns without a value are in the files but not shown.
    """
    with st.expander(f"Table, {plural(frame.height, 'row')}"):
        shown = [name for name in frame.columns if frame[name].null_count() < frame.height]
        plain = frame.select(shown).with_columns(pl.selectors.enum().cast(pl.String))
        st.dataframe(plain, hide_index=True, key=f"{key}-table")
        left, right, _ = st.columns([1, 1, 3])
        left.download_button(
            "Download as CSV",
            lambda: csv_text(frame),
            f"{file_name(name)}.csv",
            "text/csv",
            key=f"{key}-csv",
            on_click="ignore",
        )
        right.download_button(
            "Download as Parquet",
            lambda: _parquet(frame),
            f"{file_name(name)}.parquet",
            "application/vnd.apache.parquet",
            key=f"{key}-parquet",
            on_click="ignore",
        )


def file_name(text: str) -> str:
    """Return a safe file name for untrusted text: letters, digits, dots, no path."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")[:100] or "table"


def _parquet(frame: pl.DataFrame) -> bytes:
    file = io.BytesIO()
    frame.write_parquet(file)
    return file.getvalue()
