"""The registry of figures: what it declares is what the functions take and the docs show."""

import inspect
import re
from pathlib import Path

import pytest

from kvsim import plots
from kvsim.plots.registry import FIGURES

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", FIGURES)
def test_a_declaration_fits_its_function(name):
    """As many required positional arguments as inputs; every option is a keyword of it."""
    figure = FIGURES[name]
    parameters = inspect.signature(getattr(plots, name)).parameters.values()
    required = [one.name for one in parameters if one.default is one.empty]

    assert getattr(plots, name).__module__ == figure.module
    assert len(required) == len(figure.inputs)
    assert {*figure.options} <= {one.name for one in parameters} - {*required}


@pytest.mark.parametrize("name", FIGURES)
def test_a_summary_is_a_sentence_and_the_source_is_cited(name):
    """One sentence that is no longer than a line of a table; a source that the docstring cites."""
    figure = FIGURES[name]
    text = inspect.getdoc(getattr(plots, name))

    assert figure.summary[0].isupper()
    assert figure.summary.endswith(".")
    assert figure.summary.count(". ") == 0
    assert len(figure.summary) < 100
    if figure.source.startswith(("AMS", "G-KV", "ASL")):
        assert "arXiv" in text
        (number,) = re.findall(r"(?:Figs?|App)\. (\w+)", figure.source)
        assert re.search(rf"(?:Figs?|App)\. {number}\b", text)


def test_no_public_figure_is_missing_from_the_registry():
    """Every public function of the modules that returns a Figure is declared."""
    modules = {inspect.getmodule(getattr(plots, name)) for name in FIGURES}
    drawn = {
        name
        for module in modules
        for name, one in inspect.getmembers(module, inspect.isfunction)
        if one.__module__ == module.__name__
        and not name.startswith("_")
        and inspect.signature(one).return_annotation == "Figure"
    }

    assert drawn == {*FIGURES}
