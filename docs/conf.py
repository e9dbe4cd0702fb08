# ruff: noqa: INP001 - lies in docs/, which is no package
"""Configuration of the documentation site: Sphinx over the Markdown files of the repository.

sphinx-build -W -c docs . build/site

The repository is the source folder, so that links between pages, and from pages to other files,
mean on the site what they mean in a checkout.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

from kvsim import __version__

project = "kvsim"
version = release = __version__
author = copyright = "The kvsim developers"  # noqa: A001 - the name that Sphinx reads

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**.md", "docs/notebooks/*.ipynb", "traces/README.md"]
# folders that the search for pages would walk through for nothing
exclude_patterns = [".*", "build", "dist", "kvsim", "results", "runs", "tests", "traces/*.zarr"]

myst_heading_anchors = 4  # as the links of the pages, which GitHub resolves
nb_execution_mode = "off"  # notebooks have their outputs; tests say whether these are true
smartquotes = False  # "--option" stays two hyphens
default_role = "code"  # docstrings have `names` in single backticks

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
maximum_signature_line_length = 80
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = f"kvsim {release}"
html_copy_source = False
html_show_sphinx = False


def add_navigation(_: Sphinx, page: str, source: list[str]) -> None:
    """Turn each section of the first page into a branch of the navigation, by the links in it."""
    if page != root_doc:
        return
    _, *sections = re.split(r"(?m)^## ", source[0])
    for section in sections:
        title, _, text = section.partition("\n")
        links = re.findall(r"\[([^]]+)\]\((?:\.\.(/\S+)|(\w\S*))\.(?:md|ipynb)\)", text)
        pages = "\n".join(f"{label} <{path or '/docs/' + name}>" for label, path, name in links)
        source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n{pages}\n```\n"


def add_rules(_: Sphinx, page: str, source: list[str]) -> None:
    """Append the docstrings of all policies to their page."""
    if page == "docs/policies":
        sys.path.append(str(Path(__file__).parent))
        from rules import with_rules  # noqa: PLC0415 - lies beside this file

        source[0] = with_rules(source[0])


def add_board(_: Sphinx, page: str, source: list[str]) -> None:
    """Append a table to sort and filter to the leaderboard."""
    if page == "docs/leaderboard":
        sys.path.append(str(Path(__file__).parent))
        from leaderboard_site import with_rows  # noqa: PLC0415 - lies beside this file

        source[0] = with_rows(source[0])


def add_entrance(app: Sphinx, error: Exception | None) -> None:
    """Let the top of the site lead to its first page."""
    if error is None:
        target = f"{root_doc}.html"
        page = f'<meta http-equiv="refresh" content="0; url={target}"><a href="{target}">kvsim</a>'
        Path(app.outdir, "index.html").write_text(f"<!doctype html>{page}\n", "utf-8")


def setup(app: Sphinx) -> None:
    """Connect what this file adds."""
    app.connect("source-read", add_navigation)
    app.connect("source-read", add_rules)
    app.connect("source-read", add_board)
    app.connect("build-finished", add_entrance)
