"""Each public function has an example in its docstring, which runs, and a signature with types."""

import doctest
import inspect
import re

import pytest

import kvsim
from kvsim.plots.registry import FIGURES
from kvsim.testing import check_policy

FUNCTIONS = [name for name in kvsim.__all__ if inspect.isfunction(getattr(kvsim, name))]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_examples_run(name, tmp_path, monkeypatch):
    """One to five lines that print what they say."""
    monkeypatch.chdir(tmp_path)
    text = inspect.getdoc(getattr(kvsim, name))
    example = doctest.DocTestParser().get_doctest(text, {"kvsim": kvsim}, name, None, None)
    report = []

    results = doctest.DocTestRunner(verbose=False).run(example, out=report.append)

    assert results.attempted > 0
    assert report == []


#: Parameters of any type: values of a policy's parameters, arrays by name, an object with `submit`.
ANY = {
    ("policy", "params"),
    ("from_arrays", "more"),
    ("sweep", "executor"),
    ("check_policy", "params"),
}
DRAWN = [getattr(kvsim.plots, name) for name in FIGURES]
PUBLIC = [*(getattr(kvsim, name) for name in FUNCTIONS), *DRAWN, kvsim.plots.save]


@pytest.mark.parametrize("function", [*PUBLIC, kvsim.Trace.from_arrays, check_policy])
def test_signatures_have_types(function):
    """No parameter is of any type, but values in JSON and the few of `ANY`."""
    parameters = inspect.signature(function).parameters.values()
    kinds = {x.name: re.sub(r"\w+\[str, Any\]", "", str(x.annotation)) for x in parameters}

    assert {(function.__name__, x) for x, kind in kinds.items() if "Any" in kind} <= ANY


@pytest.mark.parametrize("function", DRAWN)
def test_docstrings_of_figures_say_how_to_read_and_call_them(function):
    """Summary, how to read it, arguments, result and errors; docs/figures.md is made of them."""
    paragraphs = inspect.getdoc(function).split("\n\n")
    given = re.findall(r"(?m)^    (\w+):", paragraphs[2])

    assert paragraphs[2].startswith("Args:\n")
    assert given == list(inspect.signature(function).parameters)
    assert re.match(r"Returns a Figure\. Raises \w+", paragraphs[3])
