"""The sample trace of SmolLM2, against the model."""

import json
from pathlib import Path

import pytest
import torch

import kvsim

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
