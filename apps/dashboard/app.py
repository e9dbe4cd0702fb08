"""The dashboard: widgets and layout; everything that is shown comes from kvsim.

`kvsim dashboard DIR` runs it on the traces and runs of a folder; so does
`streamlit run apps/dashboard/app.py -- DIR`, but then on every network interface.
"""

from __future__ import annotations

import streamlit as st

import chosen

PAGES = {
    "trace": "Trace",
    "retention": "Retention",
    "segments": "Segments",
    "compare": "Compare",
    "layers": "Layers",
    "fidelity": "Fidelity",
}

st.set_page_config(page_title="kvsim", layout="wide")
# no icons: the browser would fetch them from elsewhere
pages = [
    st.Page(f"views/{name}.py", title=title, url_path=name, default=name == "trace")
    for name, title in PAGES.items()
]
page = st.navigation(pages, position="top")
chosen.sidebar()
page.run()
