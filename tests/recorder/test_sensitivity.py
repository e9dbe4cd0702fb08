"""The sensitivity of layers against forwards of the model, one for each layer; who has it."""

from functools import partial

import pytest
import torch

from families import FAMILIES, ids
from kvsim.errors import CaptureError
from kvsim.recorder import capture
from kvsim.recorder.hooks import intercepting
from kvsim.recorder.modules import attention_modules

PROMPT, ROWS = 270, 16


def kept(heads):
    """The entries of the prompt that each head of a perturbed layer keeps: lists of positions."""
    draws = torch.rand(heads, PROMPT, generator=torch.Generator().manual_seed(0)).tolist()
    sizes = PROMPT // 4
    return [
        {0, 1, 2, 3, *sorted(range(4, PROMPT), key=lambda at: -draw[at])[: sizes - 4]}
        for draw in draws
    ]


def hide(perturbed, heads, layer, query, mask):
    """The model's mask, and in one layer without what rows after the prompt do not see."""
    if layer != perturbed:
        return mask
    n = query.shape[2]
    seen = torch.ones(n, n, dtype=torch.bool).tril() if mask is None else mask[0, 0]
    seen = (seen if seen.dtype == torch.bool else seen == 0).expand(query.shape[1], -1, -1).clone()
    for head in range(query.shape[1]):
        gone = sorted({*range(PROMPT)} - kept(heads)[head // (query.shape[1] // heads)])
        seen[head, PROMPT:, gone] = False
    if mask is None or mask.dtype == torch.bool:
        return seen[None]
    return torch.zeros(seen.shape, dtype=query.dtype).masked_fill(~seen, -1e30)[None]


def forward(model, tokens, heads, perturbed=None):
    """Log-probabilities after the prompt, and what attention of each layer adds [n, hidden]."""
    added, hooks = {}, []
    for layer, module in attention_modules(model).items():
        keep = lambda _module, _args, out, at=layer: added.update({at: out[0][0]})  # noqa: E731
        hooks.append(module.register_forward_hook(keep))
    masking = None if perturbed is None else partial(hide, perturbed, heads)
    with torch.no_grad(), intercepting(model, lambda _: None, masking=masking):
        logits = model(torch.tensor([tokens])).logits[0, PROMPT:]
    for hook in hooks:
        hook.remove()
    return logits.double().log_softmax(-1), added


@pytest.mark.parametrize("family", [name for name in FAMILIES if "dynamic" not in name])
def test_it_is_what_forwards_of_the_whole_sequence_say(family, tmp_path):
    """KL and squared error by one forward for each layer, with that layer masked."""
    experts = FAMILIES[family].model in ("GptOss", "Qwen3Moe")
    dtype, close = (torch.float32, 0.01) if experts else (torch.float64, 1e-4)
    model = FAMILIES[family].build(FAMILIES[family].kernels[0], dtype)
    tokens = ids(PROMPT + 30)

    trace = capture(model, None, tokens[:PROMPT], response=tokens[PROMPT:], out=tmp_path / "a.zarr")

    full, before = forward(model, tokens[: PROMPT + ROWS], trace.n_heads)
    assert len(trace.header.layer_sensitivity) == trace.n_layers
    for layer, found in enumerate(trace.header.layer_sensitivity):
        moved, after = forward(model, tokens[: PROMPT + ROWS], trace.n_heads, layer)
        kl = (full.exp() * (full - moved)).sum()
        squared = ((after[layer] - before[layer])[PROMPT:] ** 2).sum()
        assert found == pytest.approx(float(kl / squared), rel=close)


@pytest.mark.parametrize(
    ("given", "n"),
    [
        ({"sensitivity": False}, 9),
        ({"o_proj": False}, 9),
        ({"layers": [1]}, 9),
        ({}, 1),
        ({"store_dtype": "float16"}, 2),
    ],
)
def test_who_has_it(given, n, tmp_path):
    """Traces with output projections of all layers and a response of two tokens, if asked for."""
    model = FAMILIES["llama"].build("sdpa")

    trace = capture(model, None, ids(40), max_new_tokens=n, out=tmp_path / "a.zarr", **given)

    assert bool(trace.header.layer_sensitivity) == (given == {"store_dtype": "float16"})


def test_frequencies_that_change_with_the_length_have_none(tmp_path):
    """Rows that go through the model again would be rotated by others than the recorded ones."""
    family = FAMILIES["llama, dynamic scaling"]

    trace = capture(family.build("sdpa"), None, ids(270), response=ids(9), out=tmp_path / "a.zarr")

    assert trace.header.layer_sensitivity == ()


def test_a_model_that_cannot_be_perturbed_is_recorded_without_it(tmp_path, monkeypatch):
    """As where its perturbed logits are not finite; a note says why."""
    model = FAMILIES["llama"].build("sdpa")

    def refuse(*_):
        raise CaptureError("row 40 has NaN in its logits; load it in another precision")

    monkeypatch.setattr("kvsim.recorder.steps.layer_sensitivity", refuse)

    trace = capture(model, None, ids(40), max_new_tokens=9, out=tmp_path / "a.zarr")

    assert trace.header.layer_sensitivity == ()
    note = "recorded without layer_sensitivity: row 40 has NaN in its logits"
    assert trace.meta["notes"] == [note]
