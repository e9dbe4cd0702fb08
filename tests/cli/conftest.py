"""A small trace, runs, a tokenizer without a model, and a policy of the user's own."""

import sys

import pytest
from command_line import OWN

import kvsim
import small_model
from kvsim.studies.language.tasks import prompts
from kvsim.sweeps import replay_all

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"


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


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """The run `many` over seven short prompts of tiny, and `one` over the first of them."""
    folder = tmp_path_factory.mktemp("runs")
    made = prompts(7, task="walk", level=1)
    traces = [
        kvsim.capture("tiny", None, one.prompt, max_new_tokens=24, out=folder / f"{place}.zarr")
        for place, one in enumerate(made)
    ]
    policies = [kvsim.policy(name) for name in ("tova", "streaming_llm", "full")]
    options = {"interval": 16, "metrics": ["output_error", "wipeout", "entries_seen"]}
    replay_all(traces, policies, [24, 48], out=folder / "many", **options)
    policies.append(kvsim.policy("gkv"))
    replay_all(traces[:1], policies, [24], out=folder / "one", **options)
    return folder


@pytest.fixture(scope="session")
def bytes_tokenizer(tmp_path_factory):
    """A folder with a tokenizer of bytes and a chat template, and no model."""
    path = tmp_path_factory.mktemp("bytes")
    small_model.bytes_tokenizer(template=TEMPLATE).save_pretrained(path)
    return path


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A folder with a policy of the user's own, which is the working folder."""
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    return tmp_path
