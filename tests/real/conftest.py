"""SmolLM2, for tests with the marker `real`."""

import pytest


@pytest.fixture(scope="session")
def smollm2():
    """SmolLM2 in float32 and its tokenizer."""
    from kvsim.recorder import load_model

    return load_model("smollm2")
