"""A Record as a mask: the pairs of the definition in every form, and attention under them."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.attention import flex_attention as flex

import kvsim
from kvsim.analysis.output.error import output_error
from kvsim.errors import OutputError, PolicyError
from kvsim.studies.interop.masks import Masks, masking, read_masks, write_masks
from kvsim.sweeps.driver import replay_all
from small_model import small
from tests.reference.masked import masked_logits
from traces import changed

PROMPT, N, BUDGET, INTERVAL = 30, 90, 20, 15


@pytest.fixture(scope="module")
def trace():
    """A small random model's trace of 90 tokens."""
    ids = torch.randperm(63, generator=torch.Generator().manual_seed(1)).tolist()
    return kvsim.capture(small(), None, (ids * 2)[:PROMPT], max_new_tokens=N - PROMPT)


@pytest.fixture(scope="module")
def record(trace):
    """A record in which heads and layers keep sets of different sizes."""
    assert trace.n_pos == N
    policy = kvsim.policy("adakv+snapkv", window=4)
    return kvsim.replay(trace, policy, BUDGET, interval=INTERVAL, prefill=True)


def pairs(record, layer, head):
    """The definition, pair by pair."""
    last = record.evicted_at[layer, head]
    return np.array([[p <= r <= last[p] for p in range(N)] for r in range(N)])


def test_dense_masks_are_the_definition(record):
    """Rows see the positions p with p <= r <= evicted_at[p]; so says the function of a mask."""
    masks = Masks.of(record)
    for layer, head in np.ndindex(2, 2):
        assert (masks.dense(layer)[head].numpy() == pairs(record, layer, head)).all()
    some = slice(40, 50)
    assert (masks.dense(1, some) == masks.dense(1)[:, some]).all()
    dense = flex.create_mask(masks.mask_mod(0, 2), None, 4, N, N, device="cpu")
    assert (dense[0] == masks.dense(0).repeat_interleave(2, 0)).all()


def test_sets_of_query_heads_are_masks_of_query_heads(trace):
    """Of a policy that keeps a set for each, whatever the group."""
    masks = Masks.of(kvsim.replay(trace, kvsim.policy("snapkv@original", window=4), BUDGET))
    dense = flex.create_mask(masks.mask_mod(0, 2), None, 4, N, N, device="cpu")
    assert (dense[0] == masks.dense(0)).all()


def attention(trace, layer, visible):
    """Softmax attention under a mask, a plain computation in float64; [qhead, n, d]."""
    q, k, v = (trace.read(name)[layer].double() for name in "qkv")
    k, v = (x.repeat_interleave(2, 0) for x in (k, v))
    z = (q @ k.mT * trace.formulas[0].scale).masked_fill(
        ~visible.repeat_interleave(2, 0), -torch.inf
    )
    return z.softmax(-1) @ v


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_attention_under_a_mask_is_the_output_of_a_replay(trace, record, monkeypatch):
    """Its distance from the full cache is the replay's output error; flex_attention has it too."""
    # tracing would take seconds
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    masks = Masks.of(record)
    error = output_error(trace, [record])[0].error
    causal = torch.ones(2, N, N, dtype=torch.bool).tril()
    for layer in (0, 1):
        out, full = (attention(trace, layer, x) for x in (masks.dense(layer), causal))
        moved = (out - full).norm(dim=-1) / full.norm(dim=-1)
        assert float(moved.max()) > 0.1
        assert np.abs(moved.numpy() - error[layer])[:, PROMPT:].max() < 1e-5
        q, k, v = (trace.read(name)[layer][None] for name in "qkv")
        visible = masks.mask_mod(layer, 2)  # of two query heads of each KV head
        blocks = flex.create_block_mask(visible, None, 4, N, N, device="cpu", BLOCK_SIZE=16)
        other = flex.flex_attention(
            q, k, v, block_mask=blocks, scale=trace.formulas[0].scale, enable_gqa=True
        )
        assert float((other[0] - out).abs().max()) < 1e-5


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_a_masked_model_has_the_logits_of_the_runner(trace, record, kernel):
    """One forward under the masks is what the runner computes; gradients reach the weights."""
    model = small()
    before = model.config._attn_implementation
    model.set_attn_implementation(kernel)
    try:
        expected = masked_logits(model, trace.tokens, [record])[0]
        with masking(model, Masks.of(record)):
            logits = model(trace.tokens[None]).logits[0, PROMPT - 1 :]
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
        logits.sum().backward()
        assert float(model.model.layers[0].self_attn.k_proj.weight.grad.abs().max()) > 0
        full = model(trace.tokens[None]).logits[0, PROMPT - 1 :]
        assert float((full - logits).detach().abs().max()) > 1e-3
        expecting = pytest.raises(PolicyError, match="1 x 5 tokens run under masks of 1 x 90")
        with masking(model, Masks.of(record)), expecting:
            model(trace.tokens[None, :5])
    finally:
        model.zero_grad()
        model.set_attn_implementation(before)


def test_masks_are_of_the_layers_of_the_model(trace, record):
    """The record of a trace of layer 1 masks layer 1 of the model, and no other."""
    arrays = {name: trace.read(name)[1:] for name in "qkv"}
    some = changed(trace, **arrays, rope=trace.ropes[0], formulas=trace.formulas[1:], layer_ids=[1])
    policy = kvsim.policy("adakv+snapkv", window=4)
    masks = Masks.of(kvsim.replay(some, policy, BUDGET, interval=INTERVAL, prefill=True))
    assert masks.layers == (1,)
    assert (masks.last_row[0] == Masks.of(record).last_row[1]).all()
    second = replace(Masks.of(record), last_row=Masks.of(record).last_row[1:], layers=(1,))
    model, logits = small(), []
    for each in (masks, second, replace(second, layers=(0,))):
        with torch.inference_mode(), masking(model, each):
            logits.append(model(trace.tokens[None]).logits)
    assert (logits[0] == logits[1]).all()
    assert not torch.allclose(logits[0], logits[2], atol=1e-3)
    with pytest.raises(PolicyError, match="LlamaForCausalLM has no layer 2"):
        masking(model, replace(second, layers=(2,))).__enter__()


@pytest.mark.parametrize("name", ["streaming_llm@original", "fastkv", "tova+quest", "tova+kivi"])
def test_records_that_no_mask_can_say_are_refused(trace, name):
    """Keys at slots or rounded, rows that deeper layers lack, and sparse attention are refused."""
    policy = kvsim.policy(name, **({"window": 4, "layer": 0} if name == "fastkv" else {}))
    with pytest.raises(PolicyError, match="as a mask does"):
        Masks.of(kvsim.replay(trace, policy, BUDGET))


def test_files_hold_the_masks(record, tmp_path):
    """What is written returns, and what is no such file is one error."""
    written = [Masks.of(record) for _ in range(2)]
    back = read_masks(write_masks(tmp_path / "m.safetensors", written))
    for each, other in zip(written, back, strict=True):
        assert (each.last_row == other.last_row).all()
        assert (each.layers, each.labels["policy"]) == (other.layers, other.labels["policy"])
    paths = [write_masks(tmp_path / f"{i}.safetensors", written) for i in range(3)]
    assert len({path.read_bytes() for path in paths}) == 1
    (tmp_path / "x.safetensors").write_bytes(b"nothing")
    for name in ("x.safetensors", "none.safetensors"):
        with pytest.raises(OutputError, match="has no masks"):
            read_masks(tmp_path / name)
    with pytest.raises(OutputError, match=r"ends in \.safetensors"):
        write_masks(tmp_path / "m.pt", written)


def test_the_command_writes_the_masks_of_a_run(trace, tmp_path, run):
    """It has a mask per record, of the policies that were requested."""
    policies = [kvsim.policy("tova"), kvsim.policy("knorm")]
    results = replay_all([trace], policies, [BUDGET], interval=INTERVAL)
    results.save(tmp_path / "r")
    path = tmp_path / "m.safetensors"
    status, out, _ = run("study", "masks", tmp_path / "r", "--out", path, "--policy", "knorm")
    assert status == 0
    assert len(out.splitlines()) == 2
    (masks,) = read_masks(path)
    (expected,) = (x for x in results.records if x.policy == "knorm")
    assert (masks.last_row.numpy() == expected.evicted_at).all()
    status, out, _ = run("study", "masks", tmp_path / "r", "--out", path, "--overwrite", "--json")
    assert [x["policy"] for x in json.loads(out)["masks"]] == ["tova", "knorm"]
    new = ["study", "masks", tmp_path / "r", "--out", tmp_path / "n.safetensors"]
    status, _, err = run(*new, "--policy", "tov")
    assert status == 2
    assert "is not in" in err
