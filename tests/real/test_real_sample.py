"""The sample trace of SmolLM2, against the model."""

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from smollm2_sample import judged

import kvsim
from kvsim.samples import sample_judged

pytestmark = pytest.mark.real

PROMPTS = Path(__file__).parents[2] / "traces" / "sample-smollm2.jsonl"


def test_recording_again_gives_the_sample(smollm2):
    """The prompt file of the repository, recorded by the model, gives its tokens and numbers."""
    sample = kvsim.open_trace(kvsim.sample_trace("smollm2"))
    row = json.loads(PROMPTS.read_text("utf-8"))
    again = kvsim.capture(
        *smollm2, row["prompt"], response=row["response"], layers=sample.layer_ids
    )

    assert torch.equal(again.tokens, sample.tokens)
    assert again.prompt_len == sample.prompt_len
    for name in ("q", "k", "v", "attn_out"):
        stored, recorded = (each.read(name, slice(None)) for each in (sample, again))
        # half a unit in the last place of 16 bits; sums of another machine round differently too
        torch.testing.assert_close(stored, recorded, rtol=2**-11, atol=1e-3)


@pytest.mark.deep
def test_judging_again_gives_the_stored_values():
    """The Table that the demo shows is what its script writes; KL to the rounding of a machine."""
    stored = pl.read_parquet(sample_judged())
    again = judged()

    keys = [name for name in stored.columns if name not in ("value", "chance")]
    assert again.select(keys).equals(stored.select(keys))
    np.testing.assert_allclose(again["value"], stored["value"], rtol=1e-3, atol=1e-4)
