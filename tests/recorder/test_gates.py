"""Gates between attention and output projection: recorded, and part of every number after them."""

import functools

import pytest
import torch

import kvsim
from families import Family, ids
from kvsim.analysis.output.error import output_error
from kvsim.engine.source import TraceSource
from kvsim.policies.criticalkv import projected_size
from kvsim.recorder.hooks import attention_modules
from kvsim.store.verification import verify

EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "num_dense_layers": 1}
AFMOE = Family("Afmoe", "", changes={**EXPERTS, "layer_types": ["full_attention"] * 2})


@functools.cache
def recorded():
    """A model with gates that are far from each other, and its trace in memory."""
    model = AFMOE.build("sdpa")
    with torch.no_grad():
        for module in attention_modules(model).values():
            module.gate_proj.weight.mul_(30)
    return model, kvsim.capture(model, None, ids(60), max_new_tokens=20, o_proj=True)


def of_one_forward(model, tokens):
    """Gates, and what the projections get, in one forward [layer, n, qhead * d]."""
    gates, inputs, handles = [], [], []
    for module in attention_modules(model).values():
        gate = module.gate_proj.register_forward_hook(lambda _, __, out: gates.append(out[0]))
        before = module.o_proj.register_forward_pre_hook(lambda _, args: inputs.append(args[0][0]))
        handles += [gate, before]
    with torch.no_grad():
        model(tokens[None], use_cache=False)
    for handle in handles:
        handle.remove()
    return torch.stack(gates).sigmoid(), torch.stack(inputs)


def test_the_gate_is_the_models_own(tmp_path):
    """It is the sigmoid of the gate's module, and times the output what the projection gets."""
    model, trace = recorded()
    gates, inputs = of_one_forward(model, trace.tokens)

    gate = trace.read("gate")
    passed = (gate * trace.full()[0]).transpose(1, 2).flatten(2)

    assert (gate.amax() - gate.amin()) > 0.3
    torch.testing.assert_close(gate.transpose(1, 2).flatten(2), gates, rtol=1e-4, atol=1e-5)
    assert float((passed - inputs).abs().max() / inputs.abs().max()) < 1e-5
    stored = kvsim.capture(model, None, ids(60), max_new_tokens=20, out=tmp_path / "a.zarr")
    assert torch.equal(stored.read("gate"), gate)
    assert torch.equal(stored.read("o_proj"), trace.read("o_proj"))
    assert stored.meta["notes"] == []
    assert verify(stored.path, deep=True).ok


def test_the_layer_error_is_that_of_the_gated_output():
    """Equal to a loop over rows in float64, which projects gated outputs."""
    _, trace = recorded()
    record = kvsim.replay(trace, "streaming_llm", 16, interval=8)
    (found,) = output_error(trace, [record], projected=True)

    q, k, v, gate, o_proj = (
        trace.read(name).double() for name in ("q", "k", "v", "gate", "o_proj")
    )
    for layer in range(2):
        for row in range(trace.prompt_len, trace.n_pos):
            kept, total = record.kept(row)[layer], torch.zeros(48, dtype=torch.float64)
            for head in range(6):
                keys, values = k[layer, head // 3, : row + 1], v[layer, head // 3, : row + 1]
                logits = trace.formulas[0].scale * keys @ q[layer, head, row]
                gone = ~torch.as_tensor(kept[head // 3, : row + 1])
                moved = logits.masked_fill(gone, -torch.inf).softmax(0) - logits.softmax(0)
                total += (gate[layer, head, row] * (moved @ values)) @ o_proj[layer, head]
            expected = float(total.norm())
            assert found.added[layer, row] == pytest.approx(expected, rel=1e-3, abs=1e-5)


def test_policies_get_the_projection_of_values_under_the_mean_gate():
    """CriticalKV measures W_o of each value times the mean gate of the prompt."""
    _, trace = recorded()
    source = TraceSource(trace, [0, 1], torch.device("cpu"))
    gate, o_proj, v = (trace.read(name).double() for name in ("gate", "o_proj", "v"))

    sizes = projected_size(source.values, source.array("o_proj"))

    for layer, head, pos in [(0, 0, 3), (0, 1, 40), (1, 0, 79), (1, 1, 59)]:
        total = 0.0
        for qhead in range(3 * head, 3 * head + 3):
            mean = sum(gate[layer, qhead, row] for row in range(60)) / 60
            total += float(((mean * v[layer, head, pos]) @ o_proj[layer, qhead]).abs().sum()) / 3
        assert float(sizes[layer, head, pos]) == pytest.approx(total, rel=1e-4)


def test_sensitivity_counts_the_gated_error():
    """The squared error of a layer is that of its projection's outputs in the perturbed run."""
    model, _ = recorded()
    outputs, logits = [], []
    handles = [
        module.o_proj.register_forward_hook(lambda _, __, out: outputs.append(out[0]))
        for module in attention_modules(model).values()
    ]
    handles.append(model.register_forward_hook(lambda _, __, out: logits.append(out.logits[0])))
    trace = kvsim.capture(model, None, ids(60), max_new_tokens=20, o_proj=True)
    for handle in handles:
        handle.remove()

    full, *others = logits[-1].double().log_softmax(-1).unflatten(0, (3, -1))
    for layer, out in enumerate(outputs[-2:]):
        rows = out.double().unflatten(0, (3, -1))
        expected = float((rows[layer + 1] - rows[0]).square().sum())
        kl = float((full.exp() * (full - others[layer])).sum())
        assert trace.meta["layer_sensitivity"][layer] == pytest.approx(kl / expected, rel=1e-3)
