"""Live runs and the judge on models with gates, layers of several sizes, and shared caches."""

import functools
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from shared_models import MODELS as SHARED
from shared_models import OWNERS, shared
from sized_models import MODELS as SIZED
from sized_models import SIZES, sized
from transformers import cache_utils

import kvsim
from kvsim.errors import CaptureError, PolicyError
from kvsim.runner.decoding import Decoding, RunningModel
from kvsim.runner.judging import Judge
from kvsim.runner.paged import Paging
from live_runs import judged_logits, output_gap, run_live
from tests.hybrids import hybrid
from tests.recorder.test_gates import AFMOE

PROMPT, LENGTH, BUDGET = 40, 60, 24
TOKENS = torch.randperm(64, generator=torch.Generator().manual_seed(0))[:LENGTH].tolist()
POLICIES = {"snapkv": {"window": 4}, "h2o": {}, "adakv+snapkv": {"window": 4}, "knorm+quest": {}}
#: Models with a gate between attention and output projection; a hybrid needs a cache with states.
GATED = ["afmoe", *["qwen3_next"] * hasattr(cache_utils, "LinearAttentionLayer")]


@dataclass
class Recorded:
    """A small random model, its trace, the layer that evicts, and those that lose its entries."""

    running: RunningModel
    trace: kvsim.Trace
    layer: int
    layers: tuple[int, ...]
    rule: str

    def live(self, rule, **options):
        """A finished live run of the layer, and the logits that predict the response."""
        of = {"prompt_len": PROMPT, "n_pos": LENGTH, "layers": [self.layer], **options}
        with Decoding(self.running, policy(rule), BUDGET, **of) as decoding:
            first = decoding.feed(TOKENS[:PROMPT])
            rest = decoding.feed(TOKENS[PROMPT:], logits=LENGTH - PROMPT)
        return decoding, torch.cat([first, rest[:-1]])


@functools.cache
def recorded(name):
    """One of each model, with projections where no layer reads the entries of another."""
    if name in SHARED:
        model, layers = shared(name), (3, 5)
    elif name.startswith("sized "):
        model, layers = sized(name.removeprefix("sized ")), (2,)
    else:
        model, layers = AFMOE.build("sdpa") if name == "afmoe" else hybrid(name), (1,)
    given = {"response": TOKENS[PROMPT:], "o_proj": name not in SHARED}
    trace = kvsim.capture(model, None, TOKENS[:PROMPT], **given)
    assert trace.has("gate") == (name in GATED)
    rule = "snapkv" if name in SHARED else "h2o"
    return Recorded(RunningModel(model), trace, layers[0], layers, rule)


def policy(name):
    """A policy with a window that fits."""
    return kvsim.policy(name, **POLICIES.get(name, {}))


@pytest.mark.parametrize("name", [*GATED, *(f"sized {x}" for x in SIZED), *SHARED])
def test_one_evicting_layer_keeps_what_its_replay_keeps_and_is_judged(name):
    """The judge gives the logits of that run, and with all entries the model's own."""
    case, terms = recorded(name), {"interval": 1000, "prefill": True}
    replayed = kvsim.replay(case.trace, policy(case.rule), BUDGET, layers=[*case.layers], **terms)
    decoding, logits = case.live(case.rule, **terms)

    assert decoding.record().layers == replayed.layers == case.layers
    assert np.array_equal(decoding.record().evicted_at, replayed.evicted_at)
    judge, records = Judge(case.running, case.trace), [replayed]
    if name == "Gemma3n":  # several streams
        with pytest.raises(CaptureError, match="one stream, which judged and live runs need"):
            judged_logits(judge, records)
        return
    of_live, of_full = judged_logits(judge, [replayed, kvsim.replay(case.trace, "full", LENGTH)])
    with torch.no_grad():
        own = case.running.model(torch.tensor([TOKENS])).logits[0, PROMPT - 1 : -1]
    torch.testing.assert_close(of_live, logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(of_full, own, atol=1e-4, rtol=1e-4)
    assert float((of_live - of_full).abs().max()) > 1e-3


@pytest.mark.parametrize("name", SIZED)
@pytest.mark.parametrize("rule", ["h2o", "criticalkv+tova"])
def test_bytes_are_those_of_each_layers_own_heads_and_dimensions(name, rule):
    """Of a layer that evicts during the response as its replay does."""
    case = recorded(f"sized {name}")
    decoding, _ = case.live(rule, interval=5)

    replayed = kvsim.replay(case.trace, rule, BUDGET, interval=5, layers=[case.layer])
    assert np.array_equal(decoding.record().evicted_at, replayed.evicted_at)
    sizes = [heads * (dim + value) * 4 for _, heads, dim, value in SIZES[name]]
    assert decoding.full_bytes == sum(sizes) * LENGTH
    held = int((replayed.evicted_at[0] > LENGTH).sum())
    heads, *others = replayed.evicted_at.shape[1], *sizes[:-1]
    assert decoding.cache_bytes == sum(others) * LENGTH + held * sizes[-1] // heads


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("rule", POLICIES)
def test_a_live_run_keeps_one_set_for_all_readers(name, rule):
    """Its sets are those of a replay of its own numbers, and outputs are by definition."""
    live = run_live(recorded(name).running, policy(rule), BUDGET, TOKENS, PROMPT, interval=5)

    record = live.record
    expected = kvsim.replay(live.trace(), policy(rule), BUDGET, interval=5)
    assert np.array_equal(record.evicted_at, expected.evicted_at)
    for layer, owner in enumerate(OWNERS):
        assert np.array_equal(record.evicted_at[layer], record.evicted_at[owner])
        if record.reads is None:
            assert output_gap(live, layer, record.evicted_at[layer]) < 1e-5


@pytest.mark.parametrize("name", SHARED)
def test_the_caches_hold_each_shared_entry_once(name):
    """Of a layer that evicts, with its reader, and of three whole ones."""
    decoding, _ = recorded(name).live("snapkv", interval=1000)

    entries = 3 * LENGTH + (BUDGET + LENGTH - PROMPT)
    assert decoding.cache_bytes == entries * 2 * 2 * 16 * 4
    assert decoding.full_bytes == 4 * LENGTH * 2 * 2 * 16 * 4


def test_blocks_of_a_pool_are_refused():
    """One line says which layers read the entries of another."""
    with pytest.raises(PolicyError, match=r"entries that layers \[5\] read of layer 3"):
        recorded("Gemma3n").live("snapkv", paging=Paging(8))
