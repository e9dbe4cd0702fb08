"""A policy on a running model, against its replay, a Record as a mask, and plain generation."""

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

import kvsim
from families import FAMILIES
from kvsim.core.pieces import Inputs
from kvsim.core.policy import Schedule
from kvsim.errors import CaptureError, NeedsError, PolicyError
from kvsim.recorder import load_model
from kvsim.recorder.forward import cache_option
from kvsim.runner.decoding import Decoding, RunningModel, prefill
from kvsim.runner.sketches import sketch
from live_runs import live_policies, logits_behind_masks, output_gap, relative, run_live
from tests.reference.masked import masked_logits

CLOSE = 1e-5
PROMPT, LENGTH, INTERVAL, BUDGET = 80, 104, 8, 64
VOCABULARY = 256
#: All tokens differ: keys of one token in layer 0 would be equally long.
TOKENS = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(0))[:LENGTH].tolist()
PLAIN = ("llama", "qwen2", "qwen3")
POLICIES = live_policies()
#: Those of which heads or layers hold different numbers of entries.
UNEVEN = ("adakv+snapkv", "criticalkv+snapkv", "cake", "pyramidkv", "global+tova")


def deep(family):
    """A family on which all policies run after the others."""
    return pytest.param(family, marks=pytest.mark.deep)


@functools.cache
def running(name, kernel=None, dtype=torch.float32):
    """A small random model of a family."""
    family = FAMILIES[name]
    sizes = {"vocab_size": VOCABULARY, **({"num_hidden_layers": 3} if name in PLAIN else {})}
    family = replace(family, changes={**family.changes, **sizes})
    return RunningModel(family.build(kernel or family.kernels[0], dtype))


@functools.cache
def tiny():
    """The shipped model, and the tokens of its sample trace."""
    return RunningModel(load_model("tiny")[0]), kvsim.open_trace(kvsim.sample_trace())


def budget_of(name):
    """A budget that every policy has a rule for; triattention protects the prompt."""
    return 96 if name == "triattention" else BUDGET


def evicting_layers(run):
    """The layers of a model that see all of `TOKENS`."""
    return Decoding(run, POLICIES["full"], BUDGET, prompt_len=PROMPT, n_pos=LENGTH).layers


@pytest.mark.parametrize("family", ["llama", *(deep(x) for x in ("qwen2", "qwen3", "gemma3"))])
def test_a_layer_that_alone_evicts_is_its_replay(family):
    """Each policy keeps the sets of the replay of the same q, k, v; outputs are by definition."""
    run = running(family)
    layers = evicting_layers(run)
    for i, (name, policy) in enumerate(POLICIES.items()):
        layer, step = layers[i % len(layers)], (None, 1, 5)[i % 3]
        options = {"interval": INTERVAL, "layers": [layer]}

        live = run_live(run, policy, budget_of(name), TOKENS, PROMPT, step=step, **options)

        record = kvsim.replay(live.trace(), policy, budget_of(name), **options)
        assert np.array_equal(live.record.evicted_at, record.evicted_at), name
        assert output_gap(live, layer, record.evicted_at[0]) < CLOSE, name


@pytest.mark.parametrize("family", ["llama", deep("qwen2"), deep("qwen3")])
def test_logits_are_those_of_the_record_as_a_mask(family):
    """A cache from which entries are gathered gives the logits of the full cache with a mask."""
    run = running(family)
    some = 5 if family == "llama" else 7
    for i, (name, policy) in [*enumerate(POLICIES.items())][::some]:
        step = (None, 1, 5)[i % 3]
        live = run_live(run, policy, budget_of(name), TOKENS, PROMPT, step=step, interval=INTERVAL)

        masked = masked_logits(run.model, torch.tensor(TOKENS), [live.record])[0]
        assert relative(live.logits[PROMPT - 1 :], masked) < CLOSE, name


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", *map(deep, ("gemma3", "smollm3", "gpt2"))])
def test_outputs_of_all_layers_are_by_definition(family):
    """So are softcaps, sinks, sliding windows that bound their layers, and layers without RoPE."""
    run = running(family)
    ropes = len({*sketch(run, POLICIES["full"], 1, LENGTH).ropes})
    for name in ("streaming_llm", "snapkv", *UNEVEN):
        if name == "cake" and ropes > 1 and family != "gemma3":  # there one layer alone evicts
            continue  # its layers share a budget, so they must compute alike
        live = run_live(run, POLICIES[name], BUDGET, TOKENS, PROMPT, step=3, interval=INTERVAL)

        record = live.record
        assert record.layers == evicting_layers(run)
        for at, layer in enumerate(record.layers):
            assert output_gap(live, layer, record.evicted_at[at]) < CLOSE, name


class AtSlots:
    """Attention over keys that are cached before RoPE, each rotated to its place in the cache."""

    def __init__(self, model):
        self.rotary, self.rotate = model.model.rotary_emb, modeling_llama.apply_rotary_pos_emb

    def __call__(self, module, q, k, v, mask, scaling, **rest):
        """q [1, qhead, w, d], the last rows of k and v [1, head, n, d] -> [1, w, qhead, d]."""
        n, w = k.shape[2], q.shape[2]
        at = torch.arange(n)[None]
        cos, sin = self.rotary(v, at)
        _, k = self.rotate(q, k, cos, sin)
        q, _ = self.rotate(q, q, cos[:, n - w :], sin[:, n - w :])
        group = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(group, 1).double() for x in (k, v))
        z = (q.double() @ k.mT) * scaling
        z = z.masked_fill(torch.ones(w, n).triu(n - w + 1).bool(), -torch.inf)
        return (z.softmax(-1) @ v).float().transpose(1, 2), None


def test_keys_rotated_to_their_slots(monkeypatch):
    """`streaming_llm@original` gives the logits of a cache of keys that are rotated when read."""
    run, policy = running("llama"), kvsim.policy("streaming_llm@original")
    model = running("llama").model
    live = run_live(run, policy, 16, TOKENS, 40, step=1, interval=3)
    faster = run_live(run, policy, 16, TOKENS, 40, interval=3)
    record = live.record
    assert record.positions == "slot"
    absolute = run_live(run, POLICIES["streaming_llm"], 16, TOKENS, 40, interval=3)
    assert np.array_equal(record.evicted_at, absolute.record.evicted_at)

    kernel, cache = AtSlots(model), DynamicCache()
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, k, *_: (q, k))
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", kernel)
    last, logits = record.evicted_at[0, 0], []
    pos = np.arange(0)
    with torch.inference_mode():
        for ids in (TOKENS[:40], *([token] for token in TOKENS[40:])):
            logits.append(model(torch.tensor([ids]), **cache_option(model, cache)).logits[0])
            pos = np.append(pos, np.arange(len(ids)) + (pos[-1] + 1 if len(pos) else 0))
            keep = last[pos] > pos[-1]
            pos = pos[keep]
            for part in cache.layers:
                part.keys, part.values = part.keys[:, :, keep], part.values[:, :, keep]

    assert relative(live.logits, torch.cat(logits)) < CLOSE
    assert relative(faster.logits, torch.cat(logits)) < CLOSE
    assert relative(absolute.logits, torch.cat(logits)) > 100 * CLOSE
    assert live.decoding.cache_bytes == absolute.decoding.cache_bytes


def test_slots_need_all_layers_alike():
    """Layers that hold other numbers of entries have other slots, and scorers see no such keys."""
    run, sizes = running("llama"), {"prompt_len": PROMPT, "n_pos": LENGTH}
    with pytest.raises(PolicyError, match=r"layers \[1\] of 3 evict; expected all"):
        Decoding(run, kvsim.policy("streaming_llm@original"), BUDGET, **sizes, layers=[1])
    for name, reason in (("knorm", "a scorer reads keys"), ("adakv+random", "different numbers")):
        policy = replace(kvsim.policy(name), positions="slot")
        with pytest.raises(PolicyError, match=reason):
            run_live(run, policy, BUDGET, TOKENS, PROMPT)


#: Parameters with which they drop rows of a short prompt in a small model.
DROPPING = (
    ("asl", {"tau": 5.0, "kv_before": "full"}),
    ("fastkv@proportional", {"layer": 1, "rows": 0.9}),
    ("pyramidinfer", {"least": 8, "ratio": 0.5}),
)


@pytest.mark.parametrize(("name", "params"), DROPPING)
@pytest.mark.parametrize("interval", [None, INTERVAL])
def test_rows_that_are_dropped_on_the_way_down(monkeypatch, name, params, interval):
    """Logits are those of the Record as a mask."""
    run = running("llama")
    policy = kvsim.policy(name, **params)
    options = {"prompt_len": PROMPT, "n_pos": LENGTH, "interval": interval}

    with Decoding(run, policy, BUDGET, **options) as live:
        logits = [live.feed(TOKENS[: PROMPT + 2], logits=3)]
        logits += [live.feed([token]) for token in TOKENS[PROMPT + 2 :]]
    record = live.record()
    assert record.selection.dropped
    masked = logits_behind_masks(monkeypatch, run.model, TOKENS, record)[PROMPT - 1 :]
    assert relative(torch.cat(logits), masked) < CLOSE
    kept = int((record.evicted_at >= LENGTH).sum())
    assert live.cache_bytes == kept * 16 * 2 * 4


@pytest.mark.parametrize("family", ["gemma3", "granite", deep("olmo2"), deep("phi4-mini")])
def test_families_whose_layers_run_one_by_one(monkeypatch, family):
    """Embeddings that are scaled and several rotary embeddings are those of the model."""
    run, n = running(family, "sdpa"), 90  # shorter than any window
    policy = kvsim.policy("fastkv", layer=0, rows=50)
    with Decoding(run, policy, 40, prompt_len=70, n_pos=n) as live:
        logits = live.feed(TOKENS[:70]), live.feed(TOKENS[70:n], logits=n - 70)

    masked = logits_behind_masks(monkeypatch, run.model, TOKENS[:n], live.record())
    assert relative(torch.cat(logits), masked[69:]) < CLOSE
    with pytest.raises(CaptureError, match=r"final_logit_softcapping.: 30\.0"):
        Decoding(running("gemma2"), policy, 40, prompt_len=70, n_pos=n)


@pytest.mark.parametrize("name", ["gemfilter", "asl_2pass"])
def test_rows_that_run_through_all_layers_again(name):
    """After the selection it is the plain model on the selected tokens alone."""
    run = running("llama")
    policy = kvsim.policy(name, **({"tau": 0.0} if name == "asl_2pass" else {}))
    options = {"prompt_len": PROMPT, "n_pos": LENGTH}

    with Decoding(run, policy, BUDGET, **options) as live:
        logits = [live.feed(TOKENS[:PROMPT])]
        logits += [live.feed(TOKENS[n : n + 5], logits=5) for n in range(PROMPT, LENGTH, 5)]
    record = live.record()

    assert record.positions == "slot"
    rows = np.flatnonzero(record.evicted_at[0, 0, :PROMPT] > LENGTH)
    assert len(rows) == BUDGET
    with torch.inference_mode():
        ids = [TOKENS[row] for row in rows] + TOKENS[PROMPT:]
        plain = run.model(torch.tensor([ids])).logits[0, BUDGET - 1 :]
    assert relative(torch.cat(logits), plain) < CLOSE


def test_a_prompt_that_is_dropped_from_comes_whole():
    """Half a prompt has no selection, and a shared prefix has all rows."""
    run, options = running("llama"), {"prompt_len": PROMPT, "n_pos": LENGTH}
    with Decoding(run, kvsim.policy("fastkv"), BUDGET, **options) as live:
        with pytest.raises(ValueError, match="40 tokens are given after 0; expected at least 80"):
            live.feed(TOKENS[:40])
        with pytest.raises(ValueError, match="feed the tokens"):
            live.begin(prefill(run, TOKENS[:PROMPT]))
    with pytest.raises(PolicyError, match=r"layers \[1\] of 3 evict; expected all"):
        Decoding(run, kvsim.policy("fastkv"), BUDGET, **options, layers=[1])


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *(("llama", name) for name in ("full", "snapkv", "h2o", "adakv+snapkv", "cake")),
        *((family, "adakv+snapkv") for family in ("gemma3", "gpt_oss", "tiny")),
    ],
)
def test_with_room_for_all_it_is_plain_generation(family, name):
    """Greedy tokens are those of `generate`, and bytes those of transformers' own cache."""
    run = tiny()[0] if family == "tiny" else running(family)
    cache, new = DynamicCache(config=run.model.config), LENGTH - PROMPT
    expected = run.model.generate(
        torch.tensor([TOKENS[:PROMPT]]),
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        **cache_option(run.model, cache),
    )[0].tolist()

    with Decoding(run, POLICIES[name], LENGTH, prompt_len=PROMPT, n_pos=LENGTH) as live:
        logits = live.feed(TOKENS[:PROMPT])
        while len(live.tokens) < PROMPT + new - 1:  # the last token is in no cache
            logits = live.feed([int(logits[-1].argmax())])

    assert [*live.tokens, int(logits[-1].argmax())] == expected
    assert (
        live.cache_bytes
        == live.peak_bytes
        == sum(array.nbytes for part in cache.layers for array in (part.keys, part.values))
    )
    assert (live.record().evicted_at > LENGTH).all()


def stored(live):
    """Bytes of keys and values in memory: with pads, and with room for more rows."""
    tables = [table for _, source in live._blocks for table in (source._keys, source._values)]
    return sum(table._array.untyped_storage().nbytes() for table in tables)


def queries(live):
    """Bytes of the queries that the policy may still read."""
    kept = [part for _, x in live._blocks for part in (x._queries._array, x._first_queries)]
    return sum(part.nbytes for part in kept)


def test_bytes_of_a_uniform_policy():
    """A head holds the budget after an event, and at most `interval` entries more before one."""
    run = running("llama")
    entry = 3 * 2 * 16 * 2 * 4  # layers, heads, dim, keys and values, float32
    live = Decoding(
        run, POLICIES["streaming_llm"], BUDGET, prompt_len=PROMPT, n_pos=LENGTH, interval=INTERVAL
    )
    with live:
        live.feed(TOKENS[:PROMPT])
        assert live.peak_bytes == PROMPT * entry
        for n, token in enumerate(TOKENS[PROMPT:], start=1):
            assert live.cache_bytes == (BUDGET + (n - 1) % INTERVAL) * entry
            assert stored(live) <= (BUDGET + INTERVAL) * entry
            live.feed([token])
    assert live.peak_bytes == PROMPT * entry

    short = Decoding(
        run, POLICIES["streaming_llm"], BUDGET, prompt_len=10, n_pos=LENGTH, interval=8
    )
    with short:
        short.feed(TOKENS)
    assert short.peak_bytes == (BUDGET + INTERVAL) * entry


@pytest.mark.parametrize("name", UNEVEN)
def test_bytes_without_pads(name):
    """Only live entries count; evicted ones are in no tensor any more, and pads are 0."""
    run = running("llama")
    with Decoding(run, POLICIES[name], BUDGET, prompt_len=PROMPT, n_pos=LENGTH) as live:
        live.feed(TOKENS[:PROMPT])
    kept = (live.record().evicted_at >= PROMPT).sum((1, 2))

    assert live.cache_bytes == int(kept.sum()) * 16 * 2 * 4
    assert live.cache_bytes <= stored(live) < live.peak_bytes
    for block, source in live._blocks:
        pads = ~block.entries.live
        assert not source.keys[pads].any()
        assert not source.values[pads].any()


@pytest.mark.parametrize(("name", "rows"), [("h2o", 8), ("snapkv", 32), ("qfilter", 24)])
def test_queries_are_kept_as_long_as_an_event_can_read_them(name, rows):
    """Those since the last event, of the window, and of the calibration; none without events."""
    run = running("llama")
    row = 3 * 6 * 16 * 4  # layers, query heads, dim, float32
    options = {"prompt_len": PROMPT, "n_pos": 400, "interval": INTERVAL}
    with Decoding(run, POLICIES[name], BUDGET, **options) as live:
        live.feed((TOKENS * 4)[:399])
        assert queries(live) <= (rows + INTERVAL) * row

    with Decoding(run, POLICIES["full"], BUDGET, prompt_len=PROMPT, n_pos=LENGTH) as live:
        live.feed(TOKENS)
        assert queries(live) == 0


def test_a_scorer_that_reads_undeclared_rows_is_refused(monkeypatch):
    """Queries that are gone are no zeros: an error says what to declare."""
    monkeypatch.setattr(type(POLICIES["expected_attention"].scorer), "reads", Inputs(last=8))
    with pytest.raises(PolicyError, match=r"reads the queries of rows .* \(reads\)"):
        run_live(running("llama"), POLICIES["expected_attention"], BUDGET, TOKENS, 40, interval=8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_in_half_precision(dtype):
    """Policies decide in float32 on what the cache holds, as a replay of it does."""
    run = running("llama", "eager", dtype)
    for name in ("snapkv", "h2o", "expected_attention", "ams", "adakv+snapkv"):
        live = run_live(run, POLICIES[name], BUDGET, TOKENS, PROMPT, step=1, interval=INTERVAL)

        record = kvsim.replay(live.trace(), POLICIES[name], BUDGET, interval=INTERVAL)
        assert np.array_equal(live.record.evicted_at, record.evicted_at), name
        kept = int((record.evicted_at >= LENGTH).sum())
        assert live.decoding.cache_bytes == kept * 16 * 2 * 2
        for layer in range(3):
            assert output_gap(live, layer, record.evicted_at[layer]) < 0.1, name


@pytest.mark.parametrize("compress", ["context", "both"])
@pytest.mark.parametrize("name", ["snapkv", "expected_attention"])
def test_the_context_before_its_question(compress, name):
    """Events after the context, and after both, are those of the replay."""
    policy = POLICIES[name]
    options = {"compress": compress, "interval": INTERVAL, "prefill": True, "layers": [1]}
    live = run_live(running("llama"), policy, BUDGET, TOKENS, PROMPT, context_len=72, **options)

    record = kvsim.replay(live.trace(), policy, BUDGET, **options)
    assert np.array_equal(live.record.evicted_at, record.evicted_at)
    assert 71 in record.events


@pytest.mark.parametrize("compress", ["prompt", "both"])
@pytest.mark.parametrize("name", ["h2o", "pyramidkv"])
def test_a_prompt_in_chunks(compress, name):
    """A layer that alone evicts after each chunk is its replay, and so is the first of all."""
    policy, run = POLICIES[name], running("llama")
    options = {"compress": compress, "interval": INTERVAL, "prefill": True, "prefill_chunk": 30}
    for layers in ([1], None):
        terms = options | {"layers": layers}
        live = run_live(run, policy, 40, TOKENS, PROMPT, context_len=72, **terms)

        record = kvsim.replay(live.trace(), policy, 40, **terms)
        alike = slice(None) if layers else slice(1)
        assert np.array_equal(live.record.evicted_at[alike], record.evicted_at[alike])
        assert record.events[:2] == ([59, 71] if compress == "both" else [59, 79])
        assert live.record.schedule == record.schedule


@pytest.mark.parametrize("prompt_len", [1, 3])
@pytest.mark.parametrize("prefill", [True, False])
def test_short_prompts(prompt_len, prefill):
    """A prompt of one token, or shorter than the budget, is followed as in the replay."""
    for name in ("streaming_llm", "h2o", "tova", "knorm"):
        options = {"interval": 3, "prefill": prefill, "layers": [2]}
        live = run_live(running("qwen2"), POLICIES[name], 16, TOKENS, prompt_len, **options)

        record = kvsim.replay(live.trace(), POLICIES[name], 16, **options)
        assert np.array_equal(live.record.evicted_at, record.evicted_at), name
        assert record.events[0] > 16


def test_a_prefix_serves_many_runs():
    """A prefill taken over is one that was fed, and the prefix stays as it was."""
    run = running("gemma3")
    prefix = prefill(run, TOKENS[:PROMPT])
    before = [x.clone() for x in (*prefix.keys, *prefix.values, *prefix.queries)]
    for name in ("snapkv", "adakv+snapkv", "full"):
        options = {"prompt_len": PROMPT, "n_pos": LENGTH, "interval": INTERVAL}
        fed = run_live(run, POLICIES[name], BUDGET, TOKENS, PROMPT, interval=INTERVAL)
        with Decoding(run, POLICIES[name], BUDGET, **options) as live:
            live.begin(prefix)
            logits = live.feed(TOKENS[PROMPT:], logits=LENGTH - PROMPT)

        assert relative(prefix.logits, fed.logits[PROMPT - 1]) < CLOSE
        assert relative(logits, fed.logits[PROMPT:]) < CLOSE
        assert np.array_equal(live.record().evicted_at, fed.record.evicted_at)
        assert live.peak_bytes == fed.decoding.peak_bytes
    after = (*prefix.keys, *prefix.values, *prefix.queries)
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))

    options = {"prompt_len": 40, "n_pos": LENGTH, "interval": INTERVAL}
    with (
        Decoding(run, POLICIES["knorm"], 16, **options) as live,
        pytest.raises(ValueError, match="feed the tokens"),
    ):
        live.begin(prefix)


def state(model):
    """What a run changes in a model and in transformers while it is open."""
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    return hooks, dict(ALL_ATTENTION_FUNCTIONS._local_mapping), model.training


def test_an_error_leaves_the_model_as_it_was():
    """After an error inside a forward the model is itself again, and the run is over."""
    run = running("llama")
    run.model.train()
    before = state(run.model)
    options = {"prompt_len": PROMPT, "n_pos": LENGTH}
    calls = []

    def fail(call):
        calls.append(call.layer)
        if calls == [0, 1, 2, 0, 1]:
            raise RuntimeError("in layer 1")

    live = Decoding(run, POLICIES["snapkv"], BUDGET, **options, observe=fail)
    with live:
        live.feed(TOKENS[:PROMPT])
        with pytest.raises(RuntimeError, match="in layer 1"):
            live.feed(TOKENS[PROMPT:])
    with live, pytest.raises(ValueError, match="after an error"):
        live.feed(TOKENS[PROMPT:])
    with pytest.raises(ValueError, match="outside the `with` block"):
        Decoding(run, POLICIES["snapkv"], BUDGET, **options).feed(TOKENS[:PROMPT])

    assert state(run.model) == before
    assert not torch.is_inference_mode_enabled()
    run.model.eval()


def test_what_cannot_run_is_refused():
    """Each refusal says what was given and what works."""
    run, of_context = running("llama"), Schedule(compress="context")
    sizes = {"prompt_len": PROMPT, "n_pos": LENGTH}
    for name, reason in (
        ("oracle", "rows of the future"),
        ("snapkv@original", "per query head"),
    ):
        with pytest.raises(PolicyError, match=reason):
            Decoding(run, kvsim.policy(name), 512, **sizes)
    with pytest.raises(PolicyError, match="the smallest budget that works is 32"):
        Decoding(run, POLICIES["snapkv"], 8, **sizes)
    with pytest.raises(NeedsError, match="context"):
        Decoding(run, replace(POLICIES["snapkv"], schedule=of_context), BUDGET, **sizes)
    with pytest.raises(PolicyError, match="layer 0 of live does not see the whole text"):
        Decoding(running("gemma3"), POLICIES["snapkv"], BUDGET, **sizes, layers=[0])
    with pytest.raises(CaptureError, match="may have 1025 tokens; expected at most 1024"):
        Decoding(run, POLICIES["snapkv"], BUDGET, prompt_len=PROMPT, n_pos=1025)
    with pytest.raises(CaptureError, match="may have 513 tokens; expected at most 512"):
        Decoding(running("phi4-mini"), POLICIES["snapkv"], BUDGET, prompt_len=PROMPT, n_pos=513)
    model = running("qwen2").model
    before, model.config._attn_implementation = model.config._attn_implementation, "flex_attention"
    with pytest.raises(CaptureError, match="attends by 'flex_attention'; expected one of eager, s"):
        RunningModel(model)
    model.config._attn_implementation = before
