"""The notebooks run, and show what they compute: texts, and numbers up to rounding."""

import ast
import contextlib
import io
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")


def code_of(name):
    """The source of each code cell, and its stored outputs."""
    document = json.loads((FOLDER / f"{name}.ipynb").read_text("utf-8"))
    cells = [cell for cell in document["cells"] if cell["cell_type"] == "code"]
    return [("".join(cell["source"]), cell["outputs"]) for cell in cells]


def shown(source, module):
    """Run a cell; what it prints, and the last value as text and as HTML."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "<cell>", "exec"), vars(module))  # noqa: S102  our own notebook
        value = (
            None
            if last is None
            else eval(  # noqa: S307  as above
                compile(ast.Expression(last.value), "<cell>", "eval"), vars(module)
            )
        )
    html = getattr(value, "_repr_html_", lambda: None)()
    return printed.getvalue(), "" if value is None else repr(value), html or ""


def stored(outputs):
    """The same of stored outputs; pictures are left to whoever looks at them."""
    kinds = {"stream", "execute_result"}
    assert {output["output_type"] for output in outputs} <= kinds
    printed = "".join("".join(each["text"]) for each in outputs if each["output_type"] == "stream")
    data = [each["data"] for each in outputs if each["output_type"] == "execute_result"]
    text, html = ("".join(data[0].get(f"text/{x}", "")) if data else "" for x in ("plain", "html"))
    return printed, text, html


def parts(text):
    """A text without elements, numbers and digests; and its numbers."""
    plain = re.sub(r"<[^<>]*>|sha256:\w+", " ", text) if text.startswith("<") else text
    return NUMBER.sub("#", plain), [float(each) for each in NUMBER.findall(plain)]


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_and_shows_what_it_computes(name, tmp_path, monkeypatch):
    """Each cell in turn in an empty folder; `python docs/notebooks.py` stores new outputs."""
    monkeypatch.chdir(tmp_path)
    module = ModuleType("notebook_page")
    monkeypatch.setitem(sys.modules, module.__name__, module)

    for source, outputs in code_of(name):
        for computed, before in zip(shown(source, module), stored(outputs), strict=True):
            (words, numbers), (old, expected) = parts(computed), parts(before)
            assert words == old
            assert numbers == pytest.approx(expected, rel=0.02, abs=2e-3)


def test_there_are_four_with_outputs_and_without_errors():
    """Each is linked, has a result, no path of a machine, and is small."""
    index = FOLDER.with_name("index.md").read_text("utf-8")
    assert NAMES == ["compare", "expectation", "policy", "record"]
    for name in NAMES:
        text = (FOLDER / f"{name}.ipynb").read_text("utf-8")
        assert len(text) < 200_000
        assert '"output_type": "execute_result"' in text
        assert '"output_type": "error"' not in text
        assert f"](notebooks/{name}.ipynb)" in index
        assert not re.search(r"/(tmp|home|root|work|Users)/", text)
