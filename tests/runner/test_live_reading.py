"""What is read and stored on a running model, against its replay and by definition."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import kvsim
from families import FAMILIES
from kvsim.analysis.output.changed import log_weights, stored_after
from kvsim.errors import PolicyError
from kvsim.runner.decoding import Decoding, RunningModel, check_live, prefill
from kvsim.runner.paged import Paging
from kvsim.schema import NEVER
from kvsim.testing.loops.event import softmax
from live_runs import relative, run_live
from reference import merging, storing

CLOSE = 1e-5
PROMPT, LENGTH, BUDGET = 40, 64, 24
TOKENS = torch.randperm(128, generator=torch.Generator().manual_seed(0))[:LENGTH].tolist()
QUEST = {"page": 4, "dense_layers": 0}
#: Alone and behind evictions, of ragged heads too; sets per query head, KV head and layer.
POLICIES = {
    "quest": {**QUEST, "share": 0.5},
    "topk": {"share": 0.5},
    "topp": {},
    "h2o+quest": {**QUEST, "heads": "layer", "share": 0.4},
    "adakv+snapkv+quest": {**QUEST, "heads": "kv", "share": 0.4, "window": 8},
    "rocketkv": {"window": 8},
    "magicpig": {"bits": 4, "tables": 20, "local": 4, "dense_layers": 0},
    "adakv+snapkv+magicpig": {"bits": 2, "tables": 6, "sink": 1, "window": 8, "dense_layers": 0},
    "skip_softmax": {"page": 4, "threshold": 0.8},
    "adakv+snapkv+skip_softmax": {"page": 2, "scale": 15.0, "heads": "kv", "window": 8},
    "pqcache": {"bits": 3},
    "adakv+snapkv+pqcache": {"bits": 2, "sink": 2, "heads": "query", "share": 0.5, "window": 8},
}


@pytest.fixture(scope="module")
def running():
    """A small random model with two query heads for each KV head."""
    family = FAMILIES["llama"]
    changes = {**family.changes, "vocab_size": 128, "num_hidden_layers": 3}
    return RunningModel(replace(family, changes=changes).build(family.kernels[0], torch.float32))


def gap(live, layer, record, end=None):
    """The largest difference of a layer's outputs to attention over what its rows read; relative.

    Rows before the account's first read all that is resident; entries are rounded after the rows of
    the quantizer's clock, which begins at the first event's row, or at `end`. In float64.
    """
    at = record.layers.index(layer)
    gone = torch.from_numpy(record.evicted_at[at])
    row = torch.arange(LENGTH)
    seen = (row <= row[:, None]) & (gone[:, None] >= row[:, None])
    q, k, v = (x[layer].double() for x in (live.q, live.k, live.v))
    group = len(q) // len(k)
    (new_k, late_k), (new_v, late_v) = (
        (x.repeat_interleave(group, 0) for x in rounded(live, layer, record, which, end))
        for which in range(2)
    )
    seen, k, v = (x.repeat_interleave(group, 0) for x in (seen, k, v))
    if record.reads is not None:
        first = record.reads.first
        read = record.reads.entries(at, slice(first, LENGTH), gone)
        seen[:, first:] &= read.repeat_interleave(len(q) // len(read), 0)
    z = (q @ new_k.mT).where(late_k, q @ k.mT) * live.decoding.sketch.formulas[layer].scale
    q_of_heads, keys = live.q[layer].unflatten(0, (len(gone), -1)), live.k[layer]
    weights = log_weights(record.reads, at, slice(0, LENGTH), gone, q_of_heads, keys)
    if weights is not None:
        z += weights
    weight = z.masked_fill(~seen, -torch.inf).softmax(-1)
    expected = weight.where(late_v, 0) @ new_v + weight.where(~late_v, 0) @ v
    apart = (live.out[layer].double() - expected).norm(dim=-1) / expected.norm(dim=-1)
    return float(apart.max())


def rounded(live, layer, record, which, end=None):
    """Keys (0) or values (1) after the round trip [H, T, d], and whether rows see them so."""
    exact = (live.k, live.v)[which][layer]
    if record.storage is None:
        return exact.double(), torch.zeros(len(exact), LENGTH, LENGTH, dtype=torch.bool)
    quantizer = record.storage.of_layer(layer)
    gone = torch.from_numpy(record.evicted_at)
    ends = record.schedule.ends(PROMPT, live.decoding.sketch.header.context_len)
    first = (end or min(ends)) - 1
    after = stored_after(gone, quantizer.clocks[which], first)[record.layers.index(layer)]
    new = exact.clone()
    for head, rows in enumerate(after.tolist()):
        for row in {*rows} - {NEVER}:
            at = [pos for pos in range(LENGTH) if rows[pos] == row]
            groups = new[head, at].unflatten(0, (-1, quantizer.clocks[which].group))
            new[head, at] = (quantizer.keys, quantizer.values)[which](groups).flatten(0, 1)
            if quantizer.reads.last and not which:
                held = gone[record.layers.index(layer), head, : first + 1] > first
                q = live.q[layer].unflatten(0, (len(exact), -1))[head, :, : first + 1]
                outer = q[:, -quantizer.reads.last :, None] * exact[head, : first + 1][held]
                order = outer.double().square().sum((0, 1, 2)).argsort()
                kept = round(quantizer.bits(len(order))[0] / 16)
                new[head, at] = new[head, at].index_fill(-1, order[:-kept], 0.0)
    return new.double(), torch.arange(LENGTH)[:, None] > after[:, None]


@pytest.mark.parametrize("more", [{"least": 99}, {"dense_layers": 3}])
@pytest.mark.parametrize("name", ["full", "adakv+snapkv"])
def test_reading_all_pages_is_full_attention(running, name, more):
    """Every prediction is that of the eviction alone, however its heads differ in length."""
    given = {} if name == "full" else {"window": 8}
    policies = kvsim.policy(name, **given), kvsim.policy(name + "+quest", **given, **QUEST | more)
    plain, read = (
        run_live(running, policy, BUDGET, TOKENS, PROMPT, interval=8, step=3) for policy in policies
    )
    assert np.array_equal(plain.record.evicted_at, read.record.evicted_at)
    assert torch.equal(plain.logits.argmax(-1), read.logits.argmax(-1))
    assert (plain.logits - read.logits).abs().max() < CLOSE


def test_sparse_attention_that_a_running_model_cannot_follow_are_refused(running):
    """Rows that are gone, blocks of a pool, and rows taken over that saw everything as it was."""
    for name in ("infllm", "double_sparsity"):
        given = {"calibration": "prefix:16"} if name == "double_sparsity" else {}
        with pytest.raises(PolicyError, match="chooses what it reads by rows of the trace, which"):
            check_live(kvsim.policy(name, **given))
    policy, sizes = kvsim.policy("quest", **QUEST), {"prompt_len": PROMPT, "n_pos": LENGTH}
    with pytest.raises(PolicyError, match="run it without --paged"):
        Decoding(running, policy, BUDGET, **sizes, paging=Paging())
    prefix = prefill(running, TOKENS[: PROMPT + 1])
    for each in (policy, kvsim.policy("int8")):
        with (
            Decoding(running, each, BUDGET, **sizes) as decoding,
            pytest.raises(ValueError, match="feed the tokens"),
        ):
            decoding.begin(prefix)


#: Alone and behind evictions; `h2o` scores with rows that saw other keys than there are now.
QUANTIZERS = {
    "int4": {},
    "kivi": {"window": 8, "group": 8},
    "tova+kivi": {"window": 4, "group": 4},
    "h2o+int4": {"bits_per_number": 2},
    "adakv+snapkv+int4": {"window": 8},
    "kvquant": {"group": 8},
    "turboquant": {},
    "tova+nvfp4": {},
    "think": {"pruned": 0.7, "window": 4, "recent": 8},
    "h2o+think": {"pruned": 0.6, "recent": 4},
    "adakv+snapkv+think": {"pruned": 0.6, "window": 8, "recent": 4},
    "quest+int4": {**QUEST, "bits_per_number": 2, "share": 0.5},
    "tova+q4_0": {"k_bits": "8/16x2", "v_bits": "4/8x2"},
}


@pytest.mark.parametrize("step", [None, 3])
@pytest.mark.parametrize("given", [POLICIES, QUANTIZERS], ids=["reads", "rounds"])
def test_a_layer_that_alone_reads_or_rounds_is_its_replay(running, given, step):
    """Pages and rounded rows are those of the replay of the same q, k, v; outputs by definition."""
    for i, (name, parameters) in enumerate(given.items()):
        policy, layer = kvsim.policy(name, **parameters), i % 3
        options = {"layers": [layer], "interval": None if name == "int4" else 6}
        options["prefill"] = name not in ("h2o+int4", "h2o+think")  # scores of few rounded keys
        live = run_live(running, policy, BUDGET, TOKENS, PROMPT, step=step, **options)

        mine = live.record
        record = kvsim.replay(live.trace(), policy, BUDGET, **options)
        assert np.array_equal(mine.evicted_at, record.evicted_at), name
        assert (mine.reads is None) == (record.reads is None), name
        if record.reads is not None:
            assert vars(mine.reads) | {"bits": 0} == vars(record.reads) | {"bits": 0}, name
            assert np.array_equal(mine.reads.bits, record.reads.bits), name
        assert gap(live, layer, record) < CLOSE, name


#: Behind evictions of ragged heads too, and the rule by definition.
MERGERS = {
    "h2o+lookm": ({}, merging.lookm("pivotal")),
    "adakv+snapkv+lookm": ({"merge": "weighted", "window": 8}, merging.lookm("weighted")),
    "streaming_llm+d2o": ({}, merging.d2o(0.5)),
    "tova+d2o": ({"decay": 0.9}, merging.d2o(0.9)),
}


@pytest.mark.parametrize("step", [None, 3])
def test_a_layer_that_alone_merges_is_its_replay(running, step):
    """What is kept is that of the replay; rows attend to merged entries by definition."""
    for i, (name, (parameters, fold)) in enumerate(MERGERS.items()):
        policy, layer = kvsim.policy(name, **parameters), i % 3
        options = {"layers": [layer], "interval": 6}
        live = run_live(running, policy, BUDGET, TOKENS, PROMPT, step=step, **options)

        record = kvsim.replay(live.trace(), policy, BUDGET, **options)
        assert np.array_equal(live.record.evicted_at, record.evicted_at), name
        expected = merged_output(live, layer, record, fold)
        assert relative(live.out[layer], expected) < CLOSE, name
        plain = run_live(running, replace(policy, storage=None), BUDGET, TOKENS, PROMPT, **options)
        assert relative(live.out[layer], plain.out[layer]) > 1e-3, name


def merged_output(live, layer, record, fold):
    """Output [qhead, T, d] of a layer in float64: rows see what entries have become by then."""
    q, k, v = (x[layer : layer + 1].double().numpy() for x in (live.q, live.k, live.v))
    stored = storing.Stored(storing.merging(fold), q, k, v, 0)
    last, group = record.evicted_at[0], q.shape[1] // k.shape[1]
    out = torch.zeros(q.shape[1], LENGTH, v.shape[-1], dtype=torch.float64)
    scale = live.decoding.sketch.formulas[layer].scale
    for row in range(LENGTH):
        for head, gone in enumerate(last):
            seen = [p for p in range(row + 1) if gone[p] >= row]
            for i in range(head * group, (head + 1) * group):
                weights = softmax(scale * stored.keys[0, head, seen] @ q[0, i, row])
                out[i, row] = torch.from_numpy(weights @ stored.values[0, head, seen])
            stored.round(0, head, row, [p for p in seen if gone[p] > row])
    return out


@pytest.mark.parametrize("step", [None, 5])
def test_rows_behind_the_context_read_a_part(running, step):
    """Rows of the question choose their pages as in the replay, whatever goes through together."""
    for name in ("quest", "h2o+quest"):
        policy = kvsim.policy(name, page=4, dense_layers=0, share=0.5)
        options = {"layers": [1], "compress": "context", "interval": 6}
        sizes = {"context_len": 30, "step": step}
        live = run_live(running, policy, BUDGET, TOKENS, PROMPT, **sizes, **options)

        record = kvsim.replay(live.trace(), policy, BUDGET, **options)
        assert np.array_equal(live.record.evicted_at, record.evicted_at), name
        assert np.array_equal(live.record.reads.bits, record.reads.bits), name
        assert record.reads.first == 30
        assert gap(live, 1, record) < CLOSE, name


@pytest.mark.parametrize("fires", [True, False])
def test_rows_behind_the_context_see_rounded_entries(running, fires):
    """From the question on, whether or not an event fires there; outputs are the replay's."""
    for name in ("int4", "h2o+int4", "think", "h2o+think"):
        policy, options = kvsim.policy(name), {"layers": [1], "compress": "context"}
        options |= {"prefill": fires, "interval": 6 if name.startswith("h2o") else None}
        live = run_live(running, policy, BUDGET, TOKENS, PROMPT, context_len=30, **options)

        record = kvsim.replay(live.trace(), policy, BUDGET, **options)
        assert np.array_equal(live.record.evicted_at, record.evicted_at), name
        assert gap(live, 1, record) < CLOSE, name
        assert gap(live, 1, record, end=PROMPT) > 1e-3, "those of the question saw it exact"
