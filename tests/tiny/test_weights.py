"""The shipped model: what its folder holds, and that it answers."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from apps.tiny.evaluate import respond
from kvsim.recorder.loading import load_tokenizer
from kvsim.studies.language.ledger import check
from kvsim.studies.language.tasks import TASKS, prompts
from kvsim.tiny import MODELS, PATH
from kvsim.tiny.vocabulary import ID, VOCAB


@pytest.fixture(scope="module")
def tokenizer():
    """The shipped tokenizer, loaded as a user would."""
    return load_tokenizer(PATH)


@pytest.fixture(scope="module")
def model():
    """The shipped model, loaded as a user would."""
    return AutoModelForCausalLM.from_pretrained(str(PATH)).eval()


def test_the_tokenizer_has_the_vocabulary_of_the_language(tokenizer):
    """Every word has its id, and a word outside the language becomes <unk>."""
    assert tokenizer.convert_ids_to_tokens(list(range(len(VOCAB)))) == list(VOCAB)
    assert len(tokenizer) == len(VOCAB)
    assert tokenizer("facts Paris")["input_ids"] == [1, ID["facts"], ID["<unk>"]]


@pytest.mark.parametrize(
    ("name", "stored"), [("tiny", torch.float32), ("tiny-deep", torch.bfloat16)]
)
def test_weights_are_finite_and_load_in_float32(name, stored):
    """Whatever they are stored in, computing is in float32."""
    tensors = load_file(MODELS[name] / "model.safetensors").values()

    assert {tensor.dtype for tensor in tensors} == {stored}
    assert all(tensor.isfinite().all() for tensor in tensors)
    assert AutoModelForCausalLM.from_pretrained(str(MODELS[name])).dtype == torch.float32


@pytest.mark.parametrize("name", MODELS)
def test_the_weights_are_those_of_a_finished_run(name):
    """The summary beside the weights is of a run that was trained to its last step."""
    summary = json.loads((MODELS[name] / "training.json").read_text("utf-8"))

    assert summary["progress"]["step"] == summary["settings"]["steps"]
    assert len(summary["progress"]["passed"]) == len(summary["settings"]["stages"])
    assert summary["settings"]["shape"] == name


@pytest.mark.parametrize(
    "task", ["walk", *(pytest.param(x, marks=pytest.mark.deep) for x in TASKS if x != "walk")]
)
def test_the_model_answers_every_task(model, tokenizer, task):
    """Greedily with a full cache, at least 5 of 6 chains of levels 1 and 2 are exact."""
    samples = [*prompts(4, seed=17, task=task, level=1), *prompts(2, seed=17, task=task, level=2)]
    found = [
        check(sample.prompt, response)
        for sample, response in zip(samples, respond(model, tokenizer, samples), strict=True)
    ]

    assert sum(one.chain_exact and one.answer_exact for one in found) >= 5
    assert sum(one.exact for one in found) >= 4
