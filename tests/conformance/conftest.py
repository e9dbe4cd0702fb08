"""Small random models of three families, and the library that kept sets are compared with."""

import warnings
from collections.abc import Callable, Iterator
from functools import cache
from types import ModuleType

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

import kvsim

FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
VOCABULARY = 256

Recorded = tuple[PreTrainedModel, list[int], kvsim.Trace]


def random_model_of(
    family: str, seed: int, kernel: str = "sdpa", layers: int = 3
) -> PreTrainedModel:
    """4 query heads, 2 KV heads, dim 8, attention far from uniform."""
    config_class, model_class = FAMILIES[family]
    config = config_class(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
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
        elif "q_norm" in name or "k_norm" in name:  # qwen3 normalises after the projection, and
            weight.data.uniform_(0.5, 2.5)  # one weight for all would make all keys equally long
    return model


def random_tokens(length: int, seed: int) -> list[int]:
    """Random token ids, all different: keys of one token in layer 0 would be equally long."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(VOCABULARY, generator=generator)[:length].tolist()


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    """llama, qwen2 and qwen3 in turn."""
    return request.param


@pytest.fixture
def random_model(family: str) -> Callable[..., PreTrainedModel]:
    """Makes a model of the family from a seed and the name of a kernel."""
    return lambda seed, kernel="sdpa": random_model_of(family, seed, kernel)


@pytest.fixture
def prompt() -> Callable[..., list[int]]:
    """Makes random token ids."""
    return random_tokens


@pytest.fixture(scope="session")
def recorded() -> Callable[..., Recorded]:
    """Model, tokens and full-cache trace of a family, a length and a kernel; each made once."""

    @cache
    def make(family: str, length: int, kernel: str = "sdpa") -> Recorded:
        model, tokens = random_model_of(family, length, kernel), random_tokens(length, length)
        trace = kvsim.capture(model, None, tokens, max_new_tokens=0, o_proj=True)
        return model, tokens, trace

    return make


@pytest.fixture(scope="session")
def kvpress() -> ModuleType:
    """The kvpress package."""
    with warnings.catch_warnings():  # what it imports warns about Python 3.13
        warnings.simplefilter("ignore")
        import kvpress as package
    # importing it wraps every attention kernel of the process; see `fake_keys`
    ALL_ATTENTION_FUNCTIONS._local_mapping.clear()
    return package


@pytest.fixture
def fake_keys(kvpress: ModuleType) -> Iterator[None]:
    """Attention as kvpress wraps it, which overwrites the keys that a press has masked."""
    kvpress.attention_patch.patch_attention_functions()
    yield
    ALL_ATTENTION_FUNCTIONS._local_mapping.clear()
