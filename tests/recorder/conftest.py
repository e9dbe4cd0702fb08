"""Fixtures of tests that record."""

import pytest
from recorder_models import four_layers

from kvsim.recorder.modules import attention_modules
from small_model import TEMPLATE, words_tokenizer


@pytest.fixture
def runs(monkeypatch):
    """Counts the forwards of the model, after the one that finds its attention."""
    calls = []
    attention_modules(four_layers())
    handle = four_layers().register_forward_pre_hook(lambda *_: calls.append(1))
    yield calls
    handle.remove()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with the small model and its tokenizer."""
    path = tmp_path_factory.mktemp("model") / "small"
    four_layers().save_pretrained(path)
    words_tokenizer(TEMPLATE).save_pretrained(path)
    return path
