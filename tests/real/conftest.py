"""SmolLM2, for tests with the marker `real`."""

import functools

import pytest


@pytest.fixture(scope="session")
def smollm2():
    """SmolLM2 in float32 and its tokenizer. The first process dequantises it, for a user once."""
    from kvsim.recorder import gguf, load_model

    # Its files stay as they are: their 630 MB are hashed once, however often a test loads them.
    # Those of other tests change, so they are hashed every time.
    def once(function, ours):
        cached = functools.cache(function)
        return lambda *given: cached(*given) if ours(*given) else function(*given)

    with pytest.MonkeyPatch.context() as patch:
        file = once(gguf._digest, lambda given: given.name == gguf._FILE)
        folder = once(gguf._manifest, lambda given, _: given.name == gguf._SHA256)
        patch.setattr(gguf, "_digest", file)
        patch.setattr(gguf, "_manifest", folder)
        yield load_model("smollm2")
