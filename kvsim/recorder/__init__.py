"""Recording of a model's attention into a trace.

No family of models is known by name. A model is recorded only if attention recomputed from its
q, k, v by the formula that its kernel was given equals the kernel's output, and if one of its
rotary embeddings rotates queries and keys as the model does, at all positions of the prompt and at
the last of each 256 later ones.

The names below are imported on first use, so that the command line reads the options without
loading a model's libraries.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvsim.recorder.capturing import capture, capture_many
    from kvsim.recorder.loading import load_model
    from kvsim.recorder.options import Options
    from kvsim.recorder.prompt_file import read_prompts
    from kvsim.recorder.prompts import Prompt, Turn

__all__ = ["Options", "Prompt", "Turn", "capture", "capture_many", "load_model", "read_prompts"]

_HOME = {
    "Options": "options",
    "Prompt": "prompts",
    "Turn": "prompts",
    "capture": "capturing",
    "capture_many": "capturing",
    "load_model": "loading",
    "read_prompts": "prompt_file",
}


def __getattr__(name: str) -> object:
    """Import a public name from its module on first use (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
