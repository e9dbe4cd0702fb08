"""The pages of the dashboard and the sidebar that they share."""

from __future__ import annotations

import streamlit as st

from . import controls
from .views import compare, fidelity, layers, retention, segments, trace

#: The module of each page by its address; the first one opens by default.
PAGES = {
    "trace": trace,
    "retention": retention,
    "segments": segments,
    "compare": compare,
    "layers": layers,
    "fidelity": fidelity,
}


def run() -> None:
    """Show the page that the link names, with the sidebar."""
    st.set_page_config(page_title="kvsim", layout="wide")
    # no icons: the browser would fetch them from elsewhere
    pages = [
        st.Page(view.page, title=name.capitalize(), url_path=name, default=name == "trace")
        for name, view in PAGES.items()
    ]
    page = st.navigation(pages, position="top")
    controls.sidebar()
    page.run()
