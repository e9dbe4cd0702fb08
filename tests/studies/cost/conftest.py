"""The small trace, beside whose replays costs are counted."""

import numpy as np
import pytest
from cost_models import PROMPT, TOKENS
from probes import repeated

import kvsim
from kvsim.core.attention import Rope


@pytest.fixture(scope="module")
def trace():
    """A small trace with an output projection, and rows that repeat the prompt."""
    rng = np.random.default_rng(7)
    q, k, v = (rng.normal(size=(3, heads, TOKENS, 8)).astype("float32") for heads in (4, 2, 2))
    out = kvsim.Trace.from_arrays(
        q,
        k,
        v,
        prompt_len=PROMPT,
        rope=Rope.default(8),
        o_proj=rng.normal(size=(3, 4, 8, 24)).astype("float32"),
        name="small",
        **repeated(q, k, PROMPT),
    )
    out.full()  # computed once, so that no policy pays for it
    return out
