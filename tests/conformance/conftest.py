"""Small random models of three families, and the library that kept sets are compared with."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    """llama, qwen2 and qwen3 in turn."""
    return request.param


@pytest.fixture
def random_model(family: str) -> Callable[..., PreTrainedModel]:
    """Makes a model: 3 layers, 4 query heads, 2 KV heads, dim 8, attention far from uniform."""
    config_class, model_class = FAMILIES[family]

    def make(seed: int, kernel: str = "sdpa") -> PreTrainedModel:
        config = config_class(
            vocab_size=97,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=512,
            attn_implementation=kernel,
        )
        torch.manual_seed(seed)
        model = model_class(config).eval()
        for name, weight in model.named_parameters():
            if "q_proj.weight" in name or "k_proj.weight" in name:
                weight.data.mul_(6.0)
            elif "q_norm" in name or "k_norm" in name:  # qwen3 normalises after the projection
                weight.data.mul_(1.5)
        return model

    return make


@pytest.fixture
def prompt() -> Callable[..., list[int]]:
    """Makes random token ids."""

    def make(length: int, seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, 97, (length,), generator=generator).tolist()

    return make


@pytest.fixture(scope="session")
def kvpress():
    """The kvpress package. Without it the test is skipped, but not in CI: there it has to be."""
    table = ALL_ATTENTION_FUNCTIONS._global_mapping
    before = dict(table)
    with warnings.catch_warnings():  # what it imports warns about Python 3.13
        warnings.simplefilter("ignore")
        if os.environ.get("CI", "").lower() not in ("", "0", "false"):
            import kvpress as package
        else:
            package = pytest.importorskip("kvpress")
    # importing it wraps every attention kernel of the process; only presses that mask need that
    table.clear()
    table.update(before)
    return package
