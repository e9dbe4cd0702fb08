"""Captures that are interrupted, and what they leave."""

import functools
import shutil

import pytest
import torch

from kvsim.core.trace import Trace
from kvsim.recorder import Prompt, capture
from kvsim.store import find_drafts, verify
from small_model import small

# Decoding is slow, so most tokens are prompt: one block of it, and a block that both share.
PROMPT, RESPONSE = 500, 60


def ids(n):
    """Random token ids of the small model."""
    return torch.randint(0, 64, (n,), generator=torch.Generator().manual_seed(1)).tolist()


def record(path, *, model=None, prompt=PROMPT, turns=(), **options):
    """Record a prompt of more than one block, and a response that ends one and begins another."""
    settings = {"max_new_tokens": RESPONSE, **options}
    whole = Prompt(path.stem, ids(prompt), turns=turns)
    return capture(model or small(), None, whole, out=path, **settings)


def stopping(at, error=KeyboardInterrupt):
    """A progress function that raises after so many tokens."""

    def progress(done, total):
        if done == at:
            raise error

    return progress


@functools.cache
def interrupted_capture(temporary):
    """A folder with the draft of a capture to `a.zarr`, recorded once for tests that copy it."""
    folder = temporary / "interrupted-capture"
    folder.mkdir()
    with pytest.raises(KeyboardInterrupt):
        record(folder / "a.zarr", progress=stopping(550))
    return folder


def interrupted(path, at=550, **options):
    """Record until an interrupt; gives the only draft beside the path."""
    if (path.name, at, options) == ("a.zarr", 550, {}):
        shutil.copytree(interrupted_capture(path.parents[1]), path.parent, dirs_exist_ok=True)
    else:
        with pytest.raises(KeyboardInterrupt):
            record(path, progress=stopping(at), **options)
    (left,) = find_drafts(path.parent)
    return left


def names(folder):
    """What lies in a folder, hidden or not, but for the output projections next to traces."""
    listed = sorted(path.name for path in folder.iterdir())
    return [name for name in listed if not name.startswith("projections-")]


ARRAYS = ("q", "k", "v", "attn_out", "lse")


def check_prefix(found: Trace, whole: Trace) -> None:
    """Raise AssertionError unless a trace has exactly the first tokens of another, and verifies."""
    n = found.n_pos
    parts = {name: getattr(whole, name)[:, :, :n] for name in ARRAYS}
    for name, part in parts.items():
        stored = getattr(found, name)
        assert stored.dtype == part.dtype
        assert torch.equal(stored, part), name
    assert torch.equal(found.tokens, whole.tokens[:n])
    assert found.token_text == (None if whole.token_text is None else whole.token_text[:n])
    made = Trace.from_arrays(
        *(parts[name] for name in "qkv"),
        attn_out=parts["attn_out"],
        lse=parts["lse"],
        prompt_len=min(n, whole.prompt_len),
        rope=whole.rope,
        scale=whole.scale,
        tokens=whole.tokens[:n],
        layer_ids=whole.layer_ids,
    )
    report = verify(found.path)
    assert report.ok, report.problems
    assert found.digest == made.digest == report.digest
