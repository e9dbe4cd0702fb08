"""Traces that tests of the store save, and how they are compared."""

import uuid
from contextlib import contextmanager

import fsspec
import numpy as np
import torch

from traces import random_trace

N = 300


def make(dtype=torch.float32, n=N, full=True, **options):
    """A trace in memory, with attention recorded if `full`."""
    settings = {
        "prompt_len": 10,
        "tokens": np.arange(n),
        "token_text": [f"tök{i}" for i in range(n)],
        "name": "made",
        "layer_ids": [2, 5],
        "meta": {"text": {"prompt": "p" * 500, "response": "r"}, "model": {"name": "m"}},
        **options,
    }
    return random_trace(n=n, dtype=dtype, computed=full, **settings)


def projected(**options):
    """The same with output projections."""
    settings = {
        "prompt_len": 10,
        "tokens": np.arange(N),
        "token_text": [f"tök{i}" for i in range(N)],
        "layer_ids": [2, 5],
        "o_proj": torch.randn(2, 4, 8, 6, generator=torch.Generator().manual_seed(1)),
        "name": "made",
        **options,
    }
    return random_trace(n=N, computed=True, **settings)


def files(folder):
    """Every file of a folder with its bytes."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def arrays(trace):
    """Arrays of a trace in the compute dtype, and its full attention."""
    return *map(trace.read, ("q", "k", "v", "o_proj", "tokens")), *trace.full()


def same(found, expected):
    """Whether two traces have the same arrays, facts and text."""
    pairs = zip(arrays(found), arrays(expected), strict=True)
    facts = ("prompt_len", "formulas", "ropes", "layer_ids", "name", "meta", "token_text", "digest")
    return all(torch.equal(*pair) for pair in pairs) and all(
        getattr(found, one) == getattr(expected, one) for one in facts
    )


@contextmanager
def elsewhere(folder):
    """The URL of a copy of a folder, in fsspec's memory."""
    system, root = fsspec.filesystem("memory"), f"/{uuid.uuid4()}"
    system.put(str(folder), root, recursive=True)
    try:
        yield f"memory:/{root}"
    finally:
        system.rm(root, recursive=True)
