"""Folders for the dashboard to look into."""

import functools
import shutil
import sys
from pathlib import Path

import browsing
import pytest
import zarr

import kvsim
from kvsim.samples import sample_trace
from traces import random_trace as build

APP = Path(__file__).parents[2] / "apps" / "dashboard" / "app.py"

#: Tokens that would do something if anything took them for markup.
HOSTILE = [
    "<img src='http://tokens.invalid/a.png'>",
    "![x](http://tokens.invalid/b.png)",
    "<script>document.title='taken'</script>",
    "<b>bold</b><a href='http://tokens.invalid'>x</a>",
    "[bold red]rich[/]",
    "\u202eright to left",
    "a\x00b\x1b[31m",
    "$\\alpha$ :material/error: :smile:",
    "|a|b|\n|-|-|",
    "%{x}</pre></div><style>*{display:none}</style>",
    "\u2067\u05e9\u05dc\u05d5\u05dd",
]
#: A megabyte in one token, in one line and in a million.
HUGE = ["<b>" + "x" * 1_000_000, "\n" * 1_000_000]


def made(n=120, texts=None, **options):
    """A small trace of random numbers."""
    return build(n=n, seed=n, size=1.0, token_text=texts, **options)


def hostile(n=120):
    """A trace whose tokens and name are markup, and whose last tokens are huge."""
    texts = [HOSTILE[place % len(HOSTILE)] for place in range(n - len(HUGE))] + HUGE
    return made(n, texts, name="<img src='http://names.invalid/a.png'>")


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """`sample.zarr`, a hostile and a plain one in `more`, one broken, one hidden as unfinished."""
    root = tmp_path_factory.mktemp("dashboard")
    shutil.copytree(sample_trace(), root / "sample.zarr")
    (root / "more").mkdir()
    kvsim.save_trace(hostile(), root / "more" / "hostile.zarr")
    kvsim.save_trace(made(), root / "more" / "plain.zarr")
    shutil.copytree(root / "more" / "plain.zarr", root / "broken.zarr")
    (root / "broken.zarr" / "zarr.json").write_text("{")
    shutil.copytree(root / "more" / "plain.zarr", root / "more" / "unfinished.zarr")
    zarr.open_group(root / "more" / "unfinished.zarr").attrs["complete"] = False
    (root / ".coming.zarr").mkdir()
    return root


@pytest.fixture
def random_trace():
    """Build a small trace of random numbers: `random_trace(n, texts, **options)`."""
    return made


@pytest.fixture(scope="session")
def serve():
    """Return a context manager that runs `kvsim dashboard` and gives the address it prints."""
    return browsing.serve


@pytest.fixture(scope="session")
def scanned_once():
    """Streamlit reads what every installed package says of itself for each AppTest: only once."""
    from streamlit.components.v2 import manifest_scanner

    scan = functools.cache(manifest_scanner.scan_component_manifests)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest_scanner, "scan_component_manifests", scan)
        yield


@pytest.fixture
def switch():
    """Turn an AppTest to another page: `switch(app, page)`, before it runs again."""
    from streamlit.util import calc_hash

    def turn(app, page):
        app._page_hash = calc_hash(page)  # switch_page() finds pages by file; these are functions

    return turn


@pytest.fixture
def opened(monkeypatch, switch, scanned_once):
    """Give a folder to the app: `opened(folder, page, **link)` is its AppTest after one run."""
    from streamlit.testing.v1 import AppTest

    def run(folder, page="answer", **link):
        monkeypatch.setattr(sys, "argv", ["app.py", str(folder)])
        app = AppTest.from_file(str(APP), default_timeout=120)
        for name, value in link.items():
            app.query_params[name] = value
        if page != "answer":
            switch(app, page)
        return app.run()

    return run
