"""A small trace, and a policy of the user's own."""

from __future__ import annotations

import sys

import pytest
from command_line import OWN

import kvsim
from kvsim.tiny.tasks import prompts


@pytest.fixture(scope="session")
def prompt():
    """A prompt that tiny answers in a moment."""
    return prompts(1, task="walk", facts=6, lines=6, kinds=3)[0].prompt


@pytest.fixture(scope="session")
def trace(tmp_path_factory, prompt):
    """The path of a small trace."""
    path = tmp_path_factory.mktemp("traces") / "small.zarr"
    kvsim.capture("tiny", None, prompt, max_new_tokens=64, out=path)
    return path


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A folder with a policy of the user's own, which is the working folder."""
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    return tmp_path
