"""KVzip on tiny keeps what kvpress's KVzipPress keeps, which repeats the prompt by itself."""

import numpy as np
import pytest
import torch
from transformers import DynamicCache

import kvsim
from kvsim.core.probe import Chunk, Probe
from kvsim.recorder import load_model
from kvsim.recorder.repetition import read_probe
from kvsim.studies.language.tasks import prompts
from traces import changed

pytestmark = pytest.mark.peers

BUDGET, CHUNK = 40, 100


@pytest.fixture(scope="module")
def tiny():
    """tiny, and a prompt of three chunks."""
    model, tokenizer = load_model("tiny")
    (sample,) = prompts(1, seed=3, task="get")
    return model, tokenizer, list(tokenizer(sample.prompt)["input_ids"])


@pytest.fixture(scope="module")
def presses(tiny, kvpress):
    """The press as it ran, over all layers and layer by layer: scores and what it masks."""
    model, _, tokens = tiny
    out = {}
    for layerwise in (False, True):
        ratio = (len(tokens) - BUDGET + 1e-6) / len(tokens)  # half an entry is rounded down
        press = kvpress.KVzipPress(ratio, layerwise=layerwise, chunk_size=CHUNK)
        noted = {}
        prepare, post = press.prepare, press.compress_post

        def keep(*args, _prepare=prepare, _noted=noted):
            _noted["pairs"] = _prepare(*args)
            return _noted["pairs"]

        def end(of, _press=press, _post=post, _noted=noted):
            _noted["scores"] = _press.score_val[:, 0].clone()
            _post(of)

        press.prepare, press.compress_post = keep, end
        with torch.no_grad(), press(model):
            model(input_ids=torch.tensor([tokens]), past_key_values=DynamicCache())
        masked = torch.zeros_like(noted["scores"], dtype=torch.bool)
        for number, layer in enumerate(model.model.layers):
            _, heads, positions = layer.self_attn.masked_key_indices
            masked[number, heads, positions] = True
            layer.self_attn.masked_key_indices = None
        out[layerwise] = noted["pairs"], noted["scores"], masked.numpy()
    return out


@pytest.fixture(scope="module")
def trace(tiny, presses):
    """The prompt with the rows that the press ran, recorded by kvsim."""
    model, _, tokens = tiny
    pairs = presses[False][0]
    ends = np.cumsum([0, *(part.shape[1] for part, _ in pairs)]).tolist()
    rows = [ids[0].tolist() for _, ids in pairs]
    chunks = tuple(Chunk(a, b, len(ids)) for a, b, ids in zip(ends, ends[1:], rows, strict=False))
    probe = Probe("repeat", chunks, tuple(token for ids in rows for token in ids))
    queries, keys = read_probe(model, tokens, probe, range(len(model.model.layers)))
    plain = kvsim.capture(model, None, tokens, max_new_tokens=0)
    return changed(
        plain,
        probe_q=queries.clone(),
        probe_k=keys.clone(),
        meta={"probe": probe.document()},
    )


@pytest.mark.parametrize(
    ("layerwise", "name", "params"),
    [(False, "kvzip@kvpress", {}), (True, "adakv+kvzip@kvpress", {"floor": 0.0})],
)
def test_sets_are_those_of_kvpress(presses, trace, layerwise, name, params):
    """One ranking over all layers, and one for each layer, with 4 sinks and chunks of 100."""
    _, scores, masked = presses[layerwise]
    assert len(trace.header.probe.chunks) == 3

    record = kvsim.replay(trace, kvsim.policy(name, **params), BUDGET, internals=True)

    mine = np.concatenate([plans.scores for plans in record.internals])
    assert np.allclose(mine[..., 4:], scores[..., 4:].numpy(), rtol=1e-4, atol=1e-7)
    assert masked.sum() == masked.size - BUDGET * masked[..., 0].size
    assert np.array_equal(record.evicted_at == trace.prompt_len - 1, masked)


@pytest.fixture(scope="module")
def composed(tiny, kvpress):
    """What KVComposePress keeps, and the prompt with the rows that it runs: the prompt again."""
    model, _, tokens = tiny
    n, layers = len(tokens), len(model.model.layers)
    rows = Probe("repeat", (Chunk(0, n, n),), tuple(tokens))
    queries, keys = read_probe(model, tokens, rows, range(layers))
    trace = changed(
        kvsim.capture(model, None, tokens, max_new_tokens=0),
        probe_q=queries.clone(),
        probe_k=keys.clone(),
        meta={"probe": rows.document()},
    )
    press, cache = kvpress.KVComposePress(compression_ratio=1 - (BUDGET + 1e-6) / n), DynamicCache()
    with torch.no_grad(), press(model):
        model(input_ids=torch.tensor([tokens]), past_key_values=cache)
    kept = torch.zeros(layers, trace.n_heads, n, dtype=torch.bool)
    for layer in range(layers):
        near = torch.cdist(
            cache.layers[layer].keys[0].double(), trace.read("k")[layer].double()
        ).min(-1)
        assert float(near.values.max()) < 1e-4
        kept[layer].scatter_(-1, near.indices, value=True)
    return trace, kept.numpy()


def test_kvcompose_keeps_what_its_press_keeps(composed):
    """Layers get what their composite tokens are worth, heads keep sets of their own."""
    trace, kept = composed

    record = kvsim.replay(trace, "kvcompose", BUDGET)

    sizes = kept.sum(-1)
    assert (sizes == sizes[:, :1]).all()
    assert len({*sizes[:, 0].tolist()}) > 1
    assert (kept[:, :1] != kept).any()
    assert (record.retained(trace.prompt_len - 1) == kept).all()
    for other in ("kvzip", "kvzip@uniform", "adakv+kvcompose"):
        assert (kvsim.replay(trace, other, BUDGET).retained(trace.prompt_len - 1) != kept).any()


@pytest.mark.parametrize("change", ["kvzip", "kvzip@uniform", "snapkv"])
def test_another_policy_does_not_equal_kvpress(presses, trace, change):
    """Without sinks, with equal heads, or by other scores, the sets differ."""
    record = kvsim.replay(trace, change, BUDGET)

    assert not np.array_equal(record.evicted_at == trace.prompt_len - 1, presses[False][2])
