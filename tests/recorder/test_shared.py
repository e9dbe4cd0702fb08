"""Layers that read the entries of an earlier layer: what a trace has of them."""

import pytest
import torch
from shared_models import MODELS, OWNERS, shared
from transformers import DynamicCache

from kvsim.recorder import capture
from kvsim.recorder.forward import cache_option
from kvsim.recorder.hooks import attention_modules
from kvsim.store.verification import verify

IDS = [(7 * i * i + 3 * i) % 64 for i in range(60)]


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_readers_are_recorded_with_the_entries_that_they_read(name, kernel, tmp_path):
    """Owners are those of the configuration; every layer is attention in float64 of its arrays."""
    model = shared(name, kernel)

    trace = capture(model, None, IDS, max_new_tokens=6, out=tmp_path / "a.zarr")

    assert trace.owners == OWNERS
    assert verify(trace.path, deep=True).ok
    cache, given = DynamicCache(config=model.config), {}
    handles = [
        module.o_proj.register_forward_pre_hook(
            lambda _, args, layer=layer: given.update({layer: args[0][0].double()})
        )
        for layer, module in attention_modules(model).items()
    ]
    with torch.no_grad():
        model(trace.tokens[None], use_cache=True, **cache_option(model, cache))
    for handle in handles:
        handle.remove()
    future = torch.ones(trace.n_pos, trace.n_pos, dtype=torch.bool).triu(1)
    for layer, owner in enumerate(OWNERS):
        of_owner = cache.layers[owner]
        assert torch.allclose(trace.read("k")[layer], of_owner.keys[0], atol=1e-4)
        assert torch.allclose(trace.read("v")[layer], of_owner.values[0], atol=1e-4)
        q, k, v = (x[layer].double() for x in map(trace.read, "qkv"))
        k, v = (x.repeat_interleave(trace.group, 0) for x in (k, v))
        z = (trace.formulas[layer].scale * q @ k.mT).masked_fill(future, -torch.inf)
        out = (z.softmax(-1) @ v).transpose(0, 1).flatten(1)
        assert torch.allclose(out, given[layer], atol=1e-3)
