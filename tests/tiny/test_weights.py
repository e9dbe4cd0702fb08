"""The shipped model: what its folder holds, and that it answers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvsim.tiny import PATH
from kvsim.tiny.evaluate import respond
from kvsim.tiny.ledger import ID, VOCAB, check, prompts

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """The shipped tokenizer, loaded as a user would."""
    return AutoTokenizer.from_pretrained(str(PATH))


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """The shipped model, loaded as a user would."""
    return AutoModelForCausalLM.from_pretrained(str(PATH)).eval()


def test_the_tokenizer_gives_the_training_ids(tokenizer: Any) -> None:
    """A prompt becomes <bos> and one id for each word."""
    for sample in prompts(4, seed=3):
        words = sample.prompt.split()

        assert tokenizer(sample.prompt)["input_ids"] == [1, *(ID[word] for word in words)]


def test_text_survives_the_tokenizer(tokenizer: Any) -> None:
    """Decoding gives back what was encoded, prompts and responses alike."""
    for sample in prompts(4, seed=3):
        prompt = tokenizer(sample.prompt)["input_ids"]
        response = tokenizer(sample.response, add_special_tokens=False)["input_ids"]

        assert tokenizer.decode(prompt, skip_special_tokens=True) == sample.prompt
        assert tokenizer.decode(prompt) == f"<bos> {sample.prompt}"
        assert tokenizer.decode(response) == sample.response


def test_the_tokenizer_has_the_vocabulary_of_the_language(tokenizer: Any) -> None:
    """Every word has its id, and a word outside the language becomes <unk>."""
    assert tokenizer.convert_ids_to_tokens(list(range(len(VOCAB)))) == list(VOCAB)
    assert len(tokenizer) == len(VOCAB)
    assert tokenizer("facts Paris")["input_ids"] == [1, ID["facts"], ID["<unk>"]]


def test_the_weights_are_small_float32_safetensors() -> None:
    """The folder holds one file of weights, at most 8 MB, in float32 and without odd values."""
    (weights,) = PATH.glob("*.safetensors")
    tensors = load_file(weights)

    assert weights.stat().st_size <= 8e6
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert all(tensor.isfinite().all() for tensor in tensors.values())


def test_the_configuration_names_a_plain_architecture() -> None:
    """The model needs no code of ours to load."""
    config = json.loads((PATH / "config.json").read_text())

    assert config["architectures"] == ["Qwen2ForCausalLM"]
    assert "auto_map" not in config
    assert (config["num_hidden_layers"], config["num_key_value_heads"]) == (3, 2)


def test_the_model_answers_prompts_of_the_demo(model: PreTrainedModel, tokenizer: Any) -> None:
    """Generating greedily with a full cache, at least 5 of 6 whole responses are exact."""
    samples = [
        *prompts(3, seed=17, task="walk", facts=32, lines=48),
        *prompts(3, seed=17, task="get", facts=40, lines=40),
    ]
    found = [
        check(sample.prompt, response)
        for sample, response in zip(samples, respond(model, tokenizer, samples), strict=True)
    ]

    assert all(400 <= sample.tokens <= 700 for sample in samples)
    assert sum(one.exact and one.answer_exact for one in found) >= 5
