"""Policies of kvsim as presses of kvpress, and the score of a press in kvsim."""

import sys

import numpy as np
import pytest
import torch
from transformers import DynamicCache

import kvsim
from kvsim.core.pieces import Scorer
from kvsim.errors import CaptureError, PolicyError
from kvsim.recorder.forward import cache_option
from kvsim.runner.decoding import Decoding, RunningModel
from traces import changed

pytestmark = pytest.mark.peers

PROMPT, LENGTH, BUDGET, INTERVAL = 80, 120, 48, 8
#: even and ragged heads, uneven layers, one budget of all layers, carried scores, a bounded window
POLICIES = (
    "tova",
    "snapkv",
    "h2o",
    "gkv",
    "streaming_llm",
    "ams+tova",
    "adakv+snapkv",
    "pyramidkv",
    "global+tova",
    "full",
    "tova+quest",
)
SCORERS = {"KnormPress": ("knorm", {}), "KeyDiffPress": ("keydiff", {})}


@pytest.fixture
def interop(kvpress):
    """The module, which imports kvpress."""
    from kvsim.studies.interop import kvpress as module

    return module


@pytest.fixture
def model(random_model):
    """A small random model of the family."""
    return random_model(7)


def decoded(model, policy, tokens, **schedule):
    """The Record of a live run over given tokens, and the logits of its rows after the prompt."""
    sizes = {"prompt_len": PROMPT, "n_pos": len(tokens)}
    decoding = Decoding(RunningModel(model), policy, BUDGET, **sizes, **schedule)
    with decoding:
        rows = [decoding.feed(tokens[:PROMPT])[-1]]
        rows += [decoding.feed([token])[-1] for token in tokens[PROMPT:]]
    return decoding.record(), torch.stack(rows)


def pressed(model, press, tokens, cache=None):
    """Logits of a plain loop over given tokens under a press, from the end of the prompt on."""
    cache = DynamicCache() if cache is None else cache
    rows, pieces = [], [tokens[:PROMPT], *([token] for token in tokens[PROMPT:])]
    with torch.no_grad(), press(model):
        start = 0
        for piece in pieces:
            at = torch.arange(start, start + len(piece))[None]
            options = {**cache_option(model, cache), "position_ids": at}
            rows.append(model(torch.tensor([piece]), **options).logits[0, -1])
            start += len(piece)
    return torch.stack(rows)


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_as_a_press_is_the_live_run(interop, model, prompt, name):
    """Kept sets and logits of a loop under the press are those of kvsim's own decoding."""
    policy, tokens = kvsim.policy(name), prompt(LENGTH, 1)
    schedule = {"interval": INTERVAL, "prefill": True}
    record, expected = decoded(model, policy, tokens, **schedule)
    press = interop.PolicyPress(policy, BUDGET, **schedule)

    logits = pressed(model, press, tokens)

    mine = press.record()
    assert np.array_equal(mine.evicted_at, record.evicted_at[..., : len(tokens)])
    assert (mine.reads is None) == (record.reads is None) == ("quest" not in name)
    if record.reads is not None:
        assert np.array_equal(mine.reads.bits, record.reads.bits)
        assert (record.reads.bits[2] != 255).any()
    gap = (logits - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert float(gap.max()) < 1e-5
    assert (len(record.events) > 3) == (name != "full")


def test_generate_under_a_press_is_the_live_run(interop, model, prompt):
    """`model.generate` counts positions on from the rows that have run, not from those held."""
    tokens, policy = prompt(PROMPT, 1), kvsim.policy("adakv+snapkv")
    press = interop.PolicyPress(policy, BUDGET, interval=INTERVAL)
    ids = torch.tensor([tokens])
    greedy = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 30}

    with press(model):
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **greedy)[0].tolist()

    record, logits = decoded(model, policy, out[:-1], interval=INTERVAL)
    assert logits.argmax(-1).tolist() == out[PROMPT:]
    assert np.array_equal(press.record().evicted_at, record.evicted_at)


def test_a_forward_of_several_rows_is_one_step(interop, model, prompt):
    """Events that fall within a question fire together after its last row, the next one on time."""
    schedule = {"interval": INTERVAL, "prefill": False}
    tokens, press = (
        prompt(LENGTH, 1),
        interop.PolicyPress(kvsim.policy("knorm"), BUDGET, **schedule),
    )
    cache = DynamicCache()
    with torch.no_grad(), press(model):
        for start, stop in ((0, PROMPT), (PROMPT, 100), (100, 104)):
            model(torch.tensor([tokens[start:stop]]), past_key_values=cache)

    left = press.record().evicted_at
    assert set(np.unique(left[left < LENGTH])) <= {99, 103}
    assert (press.record().retained(103).sum(-1) == BUDGET).all()
    assert cache.get_seq_length() == 104


def test_the_press_refuses_what_it_cannot_follow(interop, model, prompt):
    """Batches, padding, other caches, going back, and policies without a place in a press."""
    press = interop.PolicyPress(kvsim.policy("knorm"), BUDGET, interval=8, new_tokens=4)
    ids = torch.tensor([prompt(PROMPT, 1)])
    cache = DynamicCache()
    with torch.no_grad():
        filled = model(ids, use_cache=True).past_key_values
        with press(model):
            with pytest.raises(CaptureError, match="one sequence at a time"):
                model(ids.repeat(2, 1), past_key_values=DynamicCache())
            with pytest.raises(CaptureError, match="is no DynamicCache"):
                model(ids)
            with pytest.raises(CaptureError, match="80 rows are cached"):
                model(ids[:, :1], past_key_values=filled)
            mask = torch.ones_like(ids)
            mask[0, 0] = 0
            with pytest.raises(CaptureError, match="without padding"):
                model(ids, past_key_values=DynamicCache(), attention_mask=mask)
            model(ids, past_key_values=cache)
            at = torch.tensor([[PROMPT - 1]])
            with pytest.raises(CaptureError, match="has position 79; expected 80"):
                model(ids[:, :1], past_key_values=cache, position_ids=at)
            with pytest.raises(CaptureError, match="larger new_tokens"):
                model(ids[:, :5], past_key_values=cache)
        with pytest.raises(CaptureError, match="outside of its Decoding or press"):
            model(ids[:, :1], past_key_values=cache)
    for name in ("streaming_llm@original", "fastkv"):
        with pytest.raises(PolicyError, match="for which a press has no place"):
            interop.PolicyPress(kvsim.policy(name), BUDGET)
    assert "forward" not in vars(model.model)


@pytest.mark.parametrize("name", SCORERS)
def test_the_score_of_a_press_is_a_scorer(kvpress, recorded, name):
    """At the prompt's end and in decoding the sets are those of kvsim's policy of that name."""
    preset, arguments = SCORERS[name]
    press = getattr(kvpress, name)(**arguments)

    class Pressed(Scorer):
        """The scorer of docs/kvpress.md."""

        scale = "signed"

        def score(self, view):
            """The press's score of each layer."""
            layers = zip(view.keys, view.values, strict=True)
            scores = [press.score(None, None, k[None], v[None], None, {}) for k, v in layers]
            return torch.cat(scores)

    trace = changed(recorded("llama", 150)[2], prompt_len=100)
    schedule = {"interval": 10, "prefill": True}

    record = kvsim.replay(trace, kvsim.Policy(name, Pressed()), 60, **schedule)

    expected = kvsim.replay(trace, kvsim.policy(preset), 60, **schedule)
    assert len(record.events) == 6
    assert np.array_equal(record.evicted_at, expected.evicted_at)


def test_without_kvpress_one_line_says_how_to_install_it(kvpress, monkeypatch):
    """The import of the module fails with the command that helps."""
    monkeypatch.setitem(sys.modules, "kvpress", None)
    monkeypatch.delitem(sys.modules, "kvsim.studies.interop.kvpress", raising=False)
    with pytest.raises(ImportError, match=r"kvpress is not .*: pip install 'kvsim\[kvpress"):
        import kvsim.studies.interop.kvpress  # noqa: F401 - fails
