"""The digest of a model's weights: what it distinguishes, and what it does not depend on."""

import copy
import hashlib

import pytest
import torch
from recorder_models import small

from kvsim.errors import CaptureError
from kvsim.recorder import capture, capture_many, load_model, provenance
from kvsim.recorder.prompts import Prompt
from kvsim.recorder.provenance import config_differences, describe_model, weights_digest


def by_definition(model):
    """The digest by loops over the values of each tensor."""
    digests = []
    for _, tensor in model.named_parameters():
        bits = tensor.detach().bfloat16().view(torch.int16)
        matrix = bits.reshape(-1, bits.shape[-1]).tolist()
        sums = [sum(row) for row in matrix] + [sum(column) for column in zip(*matrix, strict=True)]
        data = b"".join((each % 2**32).to_bytes(4, "little") for each in sums)
        digests.append(hashlib.sha256(str(list(tensor.shape)).encode() + data).hexdigest())
    return "sha256:" + hashlib.sha256(" ".join(sorted(digests)).encode()).hexdigest()


@pytest.mark.parametrize("block", [1, 100, 1 << 20])
def test_the_digest_is_that_of_its_definition(block, monkeypatch):
    """Sums over rows and columns, however many values are added up at a time."""
    monkeypatch.setattr(provenance, "_BLOCK", block)

    assert weights_digest(small("qwen2")) == by_definition(small("qwen2"))


def test_a_copy_has_the_same_digest(tmp_path):
    """Through a file, in other precisions, with another kernel, and under other names."""
    model = copy.deepcopy(small("llama")).bfloat16()
    model.save_pretrained(tmp_path / "copy")
    expected = weights_digest(model)

    for dtype in ("bfloat16", "float32", "float64"):
        assert weights_digest(load_model(tmp_path / "copy", dtype=dtype)[0]) == expected
    assert weights_digest(load_model(tmp_path / "copy", attention="eager")[0]) == expected
    model.renamed, model.lm_head = model.lm_head, None
    assert weights_digest(model) == expected


def one_value(weight):
    """The next number of bfloat16 in one place."""
    weight[3, 5] *= 1 + 2**-7


def rows(weight):
    """Two rows in each other's place."""
    weight[[0, 1]] = weight[[1, 0]]


def columns(weight):
    """Two columns in each other's place."""
    weight[:, [0, 1]] = weight[:, [1, 0]]


def step(weight):
    """A small step of training."""
    weight += 1e-4 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)).sign()


@pytest.mark.parametrize("change", [one_value, rows, columns, step])
@pytest.mark.parametrize("name", ["lm_head", "model.embed_tokens", "model.layers.1.mlp.down_proj"])
def test_other_weights_have_another_digest(change, name):
    """One value, two rows, two columns or a step of training, in any matrix."""
    model = copy.deepcopy(small("llama"))
    before = weights_digest(model)
    with torch.no_grad():
        change(model.get_submodule(name).weight)

    assert weights_digest(model) != before


def test_a_resumed_capture_refuses_other_weights(tmp_path):
    """Unless the trace is older than the digest, one line says which weights it has."""
    model = copy.deepcopy(small("llama"))
    prompts = [Prompt("one", [1, 2, 3])]
    capture_many(model, None, prompts, tmp_path, max_new_tokens=1)
    (kept,) = capture_many(model, None, prompts, tmp_path, max_new_tokens=1, resume=True)
    with torch.no_grad():
        model.lm_head.weight[0] *= 2

    assert kept.meta["model"]["weights"] != weights_digest(model)
    with pytest.raises(CaptureError, match=r"its model weights is .sha256:"):
        capture_many(model, None, prompts, tmp_path, max_new_tokens=1, resume=True)


@pytest.mark.parametrize(
    ("release", "changes", "differing"),
    [
        ("same", {}, []),
        ("same", {"added": 1}, ["added"]),
        ("other", {"added": 1}, []),
        ("other", {"rope_parameters": {"added": 1}}, []),
        ("other", {"router_aux_loss_coef": 0.9}, []),
        ("other", {"rope_parameters": {"rope_theta": 7.0}}, ["rope_parameters"]),
    ],
)
def test_releases_of_transformers_do_not_make_another_model(release, changes, differing):
    """Between two releases keys come and go; those of both decide, also where weights are equal."""
    trace, described = (
        capture(small("qwen2"), None, [1, 2, 3], max_new_tokens=0),
        describe_model(small("qwen2")),
    )
    versions = trace.meta["versions"] | ({"transformers": "5.0"} if release == "other" else {})
    described["config"]["router_aux_loss_coef"] = 0.001
    model = {**trace.meta["model"]}
    model["config"] = {"router_aux_loss_coef": 0.001, **model["config"], **changes}

    assert config_differences({"model": model, "versions": versions}, described) == differing
