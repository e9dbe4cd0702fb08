"""The pages of the dashboard and the sidebar that they share."""

from __future__ import annotations

import streamlit as st

from . import controls
from .views import answer, compare, response, retention, segments

RUN, HEAD = ("run",), ("trace", "layer", "head")
#: The module of each page by its address; the first one opens by default.
PAGES = {
    "answer": answer,
    "retention": retention,
    "response": response,
    "segments": segments,
    "compare": compare,
}
#: Choices of the sidebar for a page; a page whose numbers are a run's has no trace.
SHOWN = {"compare": RUN, "response": (*RUN, *HEAD)}

#: Less room above titles and between parts, nothing cut in boxes and numbers, and links to pages on
#: narrow screens, where streamlit's are in the folded sidebar; everything else is streamlit's.
_STYLE = """<style>
[data-testid=stMainBlockContainer] {padding: 4.25rem 2rem 2rem}
[data-testid=stSidebarHeader] {height: 2.5rem; margin: 0; padding-block: .5rem 0}
[data-testid=stSidebarUserContent] {padding-top: .5rem}
h2 {font-size: 1.6rem !important; padding: 0 !important}
h3 {font-size: 1.15rem !important; padding: .25rem 0 !important}
[data-testid=stMultiSelect] * {max-height: none !important}
[data-testid=stMetric] * {white-space: normal !important}
@media (min-width: 768px) {div:has(> .st-key-pages) {display: none}}
</style>"""


def run() -> None:
    """Show the page that the link names, with the sidebar."""
    st.set_page_config(page_title="kvsim", layout="wide")
    # no icons: the browser would fetch them from elsewhere
    pages = [
        st.Page(view.page, title=name.capitalize(), url_path=name, default=name == "answer")
        for name, view in PAGES.items()
    ]
    page = st.navigation(pages, position="top")
    st.html(_STYLE)
    with st.container(horizontal=True, gap="small", key="pages"):
        for each in pages:
            st.page_link(each)
    first = RUN if controls.runs() else HEAD
    controls.sidebar(first if page.url_path == "" else SHOWN.get(page.url_path, HEAD))
    try:
        page.run()
    finally:  # a page may stop
        controls.folder()
