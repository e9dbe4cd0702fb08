"""Each public function has an example in its docstring, which runs."""

import doctest
import inspect

import pytest

import kvsim

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
