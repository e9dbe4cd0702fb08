"""Captures of a prompt of more than one block, for tests of what happens to them."""

import torch

from kvsim.recorder import Prompt, capture
from small_model import small

# Decoding is slow, so most tokens are prompt: one block of it, and a block that both share.
PROMPT, RESPONSE = 500, 60


def ids(n):
    """Random token ids of the small model."""
    return torch.randint(0, 64, (n,), generator=torch.Generator().manual_seed(1)).tolist()


def record(path, **options):
    """Record a prompt of more than one block, and a response that ends one and begins another."""
    settings = {"max_new_tokens": RESPONSE, **options}
    return capture(small(), None, Prompt(path.stem, ids(PROMPT)), out=path, **settings)


def stopping(at, error=KeyboardInterrupt):
    """A progress function that raises after so many tokens."""

    def progress(done, total):
        if done == at:
            raise error

    return progress


def names(folder):
    """What lies in a folder, hidden or not, but for the output projections next to traces."""
    listed = sorted(path.name for path in folder.iterdir())
    return [name for name in listed if not name.startswith("projections-")]
