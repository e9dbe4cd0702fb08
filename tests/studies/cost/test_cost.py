"""What policies cost: formulas beside what really runs and is held."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from cost_models import BUDGET, EVERY, LLAMA_8B, PROMPT, SMALL, TOKENS, K, counted

import kvsim
from kvsim.core.policy import (
    Policy,
    Schedule,
    Scorer,
)
from kvsim.core.shared_results import Memo
from kvsim.errors import PolicyError
from kvsim.policies import describe, has_parameter, names
from kvsim.studies.cost.accounting import estimate
from kvsim.studies.cost.flops import Event, flops_of


def made(name, calibration="prefix:16", **params):
    """A policy by name, made for the small trace: events after the prompt and every 16 rows.

    What drops rows acts after the prompt alone, as it does by itself, and `full` never does.
    """
    wrapped = describe(name).entry.kind in ("wrapper", "allocator")
    full = f"{name}+tova" if wrapped else name
    wanted = {"window": 8, "protect_prompt": False, "sink": 2, "query_buffer": 16, "least": 4}
    wanted |= {"recent": 8} if name.endswith("vllm") or name == "random@prompt" else {}
    wanted |= {"calibration": calibration, **({"rows": 20} if name == "fastkv" else {}), **params}
    fits = {key: value for key, value in wanted.items() if has_parameter(full, key)}
    policy = kvsim.policy(full, **fits)
    if name == "full" or policy.propagation is not None:
        return policy
    return replace(policy, schedule=Schedule(EVERY, prefill=name != "rpc"))


def seen(record, row):
    """Entries that a row sees, [layer, head]."""
    pos = np.arange(record.n_pos)
    return ((pos <= row) & (record.evicted_at >= row)).sum(-1)


NOT_EXACT = {
    name
    for name in names()
    if {"near", "rule"} & {(of := made(name)).allocator.effect, of.layer_budgets.effect}
}


@pytest.mark.parametrize("name", [n for n in names() if n not in NOT_EXACT])
def test_entries_are_those_of_a_replay(name, trace):
    """Entries after an event, before the next one, and on average are what a replay really held."""
    policy = made(name)
    record = kvsim.replay(trace, policy, BUDGET)
    cost = estimate(SMALL, policy, BUDGET, TOKENS, prompt=PROMPT, trace=trace)

    held = np.stack([seen(record, row).mean(-1) for row in range(PROMPT, TOKENS)])  # [row, layer]
    at_last = seen(record, TOKENS - 1) - (record.evicted_at == TOKENS - 1).sum(-1)
    if policy.schedule.interval is None:  # the event is the end of the prompt
        at_last = (record.evicted_at[..., :PROMPT] >= PROMPT).sum(-1)
    after = at_last.mean(-1)
    if policy.across_layers:  # what is known beforehand is the mean of the layers
        held, after = (np.repeat(x.mean(-1, keepdims=True), 3, -1) for x in (held, after))
    assert cost.entries == pytest.approx(tuple(after))
    if name != "rpc":  # whose cache grows from event to event
        assert cost.peak == pytest.approx(tuple(held.max(0)))
        end = policy.schedule.interval is None
        assert cost.mean == pytest.approx(tuple(held[-1] if end else held.mean(0)))
    if record.selection is not None and record.selection.layer is not None:
        forecast = policy.propagation.forecast(BUDGET, PROMPT, 3, record.selection.layer)
        assert record.selection.counts == tuple(forecast.rows)
        assert cost.selection_layer in (record.selection.layer, None)


@pytest.mark.parametrize("kv_before", ["budget", "full"])
def test_a_trace_that_never_selects_has_no_layer(trace, kv_before):
    """Where the rule never selects there is no selection layer, and nothing is dropped."""
    policy = made("asl", tau=0.0, kv_before=kv_before)
    record = kvsim.replay(trace, policy, BUDGET)
    cost = estimate(SMALL, policy, BUDGET, TOKENS, prompt=PROMPT, trace=trace)

    assert record.selection.layer is None
    assert cost.selection_layer is None
    assert cost.selection == "measured on small"
    assert cost.rows == tuple(map(float, record.selection.counts)) == (48.0, 48.0, 48.0)
    assert cost.prefill_ratio == 1.0
    assert cost.entries == ((48.0 if kv_before == "full" else 24.0),) * 3
    assert any("asl: never selects on small" in said for said in cost.assumptions)


def test_a_size_that_follows_the_text_counts_as_everything(trace):
    """Where a threshold decides, events score all possible entries, and a remark says so."""
    policy = made("dms", threshold=0.0)
    cost = estimate(SMALL, policy, BUDGET, TOKENS, prompt=PROMPT, trace=trace)
    record = kvsim.replay(trace, policy, BUDGET)

    assert cost.entries == tuple(seen(record, TOKENS - 1).mean(-1))
    assert cost.scoring_prompt == 3 * 4 * 2 * 8 * PROMPT
    assert cost.scoring_event == 3 * 4 * 2 * 8 * TOKENS
    assert any("depends on the text" in said for said in cost.assumptions)


def test_layers_that_the_model_lacks_are_refused():
    """A parameter that names a layer is checked against the model, also where nothing binds."""
    policies = (kvsim.policy("asl", first_layer=40), kvsim.policy("fastkv", layer=40))

    for policy in policies:
        for budget in (2048, 8 * K):
            with pytest.raises(PolicyError, match=r"layer is 40, the model has layers 0\.\.31"):
                estimate(LLAMA_8B, policy, budget, 8 * K, selection_layer=3)


def test_a_selection_layer_without_effect_is_noted():
    """Policies without such a layer, and prompts within the budget, do not use it and say so."""
    plain = estimate(LLAMA_8B, kvsim.policy("pyramidinfer"), 512, 8 * K, selection_layer=3)
    fits = estimate(LLAMA_8B, kvsim.policy("asl"), 512, 8 * K, prompt=512, selection_layer=3)

    for cost in (plain, fits):
        assert any("selection layer 3 is without effect" in said for said in cost.assumptions)
        assert (cost.selection_layer, cost.selection) == (None, None)


#: kvsim's search for redundancy stops at the first match
REDUNDANT = {n for n in names() if n.startswith(("gkv", "rkv"))}
#: events in the small trace after that of the prompt
EVENTS = (TOKENS - PROMPT) // EVERY


def products(policy, trace):
    """Those of the formulas: of the prompt's event and of the events of the small trace."""
    cost = estimate(SMALL, policy, BUDGET, TOKENS, prompt=PROMPT, trace=trace)
    return cost.scoring_prompt + EVENTS * cost.scoring_event


@pytest.fixture
def alone(monkeypatch):
    """Rows one by one, so each over what it sees, and nothing that an earlier replay computed."""
    for module in ("view", "weights"):
        monkeypatch.setattr(f"kvsim.core.{module}.LOGIT_BYTES", 1)
    monkeypatch.setattr("kvsim.core.weights.LEAST_ADDED", 1)
    monkeypatch.setattr(Memo, "__call__", lambda _memo, _key, compute, _most: compute())
    monkeypatch.setattr("kvsim.policies.oracle._MOST", 1)


@pytest.mark.parametrize("name", [n for n in names() if n not in {*NOT_EXACT, "rpc", "oracle"}])
@pytest.mark.usefixtures("alone")
def test_products_are_those_of_the_scorer(name, trace):
    """The products in the formulas are those that a replay of the real pieces computes."""
    policy = made(name, calibration=trace)
    # layers that hold different numbers are padded, too
    parts = [[0], [1], [2]] if name == "pyramidkv" else [None]
    for part in parts:  # what is learned once is learned here
        kvsim.replay(trace, policy, BUDGET, layers=part)
    done = sum(
        counted(lambda part=part: kvsim.replay(trace, policy, BUDGET, layers=part))
        for part in parts
    )
    expected = products(policy, trace)

    if {policy.allocator.shared, policy.layer_budgets.shared} - {"none"}:
        assert expected <= done < 1.1 * expected  # heads are padded to the longest
    elif name in REDUNDANT:
        whole = made(name, variant="original") if name == "rkv@ams" else policy
        two_vectors = 3 * (1 + EVENTS) * 2 * 2 * 2 * PROMPT * 8
        assert 0 < done <= products(whole, trace) + two_vectors
    else:
        assert done == expected


@pytest.mark.usefixtures("alone")
def test_products_of_the_oracle(trace):
    """They are of the rows to come and all entries, which replays share."""
    policy = made("oracle")
    done = counted(lambda: kvsim.replay(trace, policy, BUDGET))
    events = [Event(SMALL, 48, 48, 48, BUDGET, prompt=True, later=48)]
    events += [Event(SMALL, row, row, 16, BUDGET, later=TOKENS - row) for row in (64, 80, 96)]

    assert done == 3 * sum(flops_of(policy.scorer, x) for x in events)


@dataclass(frozen=True)
class Mine(Scorer):
    """A user's own scorer."""

    def score(self, view):
        """Positions."""
        return view.pos.float()


@dataclass(frozen=True)
class MySnapKV(type(kvsim.policy("snapkv").scorer)):
    """A subclass of a known one with another score, whose FLOPs nobody knows."""

    score = Mine.score


@pytest.mark.parametrize("scorer", [Mine(), MySnapKV()])
def test_a_scorer_of_ones_own_is_unknown(scorer):
    """FLOPs of a piece without a formula are None, and reported as unknown; the rest is known."""
    policy = Policy("mine", scorer, schedule=Schedule(128))
    cost = estimate(LLAMA_8B, policy, 512, 4096)

    assert cost.scoring_prompt is cost.scoring_event is cost.scoring_token_share is None
    assert cost.kv_ratio == 512 / 4096
    assert any(f"no formula for {type(scorer).__name__}" in said for said in cost.assumptions)


def test_a_probe_costs_a_prefill_whose_rows_see_the_prompt_and_their_chunk():
    """Counted row by row, in chunks of 2,048."""
    prompt = 10_000
    seen = sum(prompt + 1 + row % 2048 for row in range(prompt))
    layer = 2 * prompt * LLAMA_8B.layer_matrices + LLAMA_8B.attention_flops(seen)

    cost = estimate(LLAMA_8B, kvsim.policy("kvzip"), 512, prompt)
    (remark,) = (text for text in cost.assumptions if "repeats the prompt" in text)
    assert f"these {32 * layer:.3g} FLOPs" in remark
