"""Traces in which some layers have a sliding window: who shares a budget, and what is said."""

import numpy as np
import pytest
import torch

import kvsim
from kvsim.core.attention import Formula, Rope
from kvsim.errors import PolicyError, TraceError
from kvsim.report import check_traces
from kvsim.schema import merged
from kvsim.sweeps.driver import replay_all

DIM = 8
PLAIN = Formula(0.3)
WINDOW = Formula(0.3, window=50)
#: Layers as Gemma 2 has them.
MIXED = (WINDOW, PLAIN, WINDOW, PLAIN, PLAIN)


def make(formulas=MIXED, n=120, *, of=None, name="long", seed=0, **more):
    """A trace whose layers compute by these formulas; of them those at the places `of`, or all."""
    made = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(len(formulas), h, n, DIM, generator=made) * 1.5 for h in (4, 2, 2))
    q *= torch.linspace(0.2, 2.0, len(formulas))[:, None, None, None]  # layers prefer differently
    at = list(range(len(formulas)) if of is None else of)
    return kvsim.Trace.from_arrays(
        *(x[at] for x in (q, k, v)),
        prompt_len=n * 3 // 4,
        rope=Rope.default(DIM),
        formulas=[formulas[layer] for layer in at],
        name=name,
        **more,
    )


@pytest.mark.parametrize(
    "policy", ["pyramidkv", "ams+pyramidkv", "cake", "cake@gkv", "adakv+pyramidkv"]
)
def test_layers_that_see_the_whole_text_share_budgets_as_if_alone(policy):
    """What each keeps is what it keeps in a trace that has these layers alone."""
    trace, alone = make(), make(of=[1, 3, 4])
    one = kvsim.policy(policy, window=8)

    record = kvsim.replay(trace, one, 80, interval=16)

    assert record.layers == (1, 3, 4)
    assert np.array_equal(record.evicted_at, kvsim.replay(alone, one, 80, interval=16).evicted_at)


def test_a_layer_replayed_alone_has_the_budget_it_has_among_the_others():
    """The slope of PyramidKV goes over all layers that see the whole text."""
    one = kvsim.policy("pyramidkv", window=8)

    alone = kvsim.replay(make(), one, 40, layers=[3])

    assert np.array_equal(alone.evicted_at[0], kvsim.replay(make(), one, 40).evicted_at[1])
    assert alone.retained(89).sum(-1).mean() != 40


@pytest.mark.parametrize("policy", ["pyramidkv", "cake"])
def test_the_mean_over_replayed_layers_is_the_budget(policy):
    """Budgets differ by layer, and the layers together hold what was requested."""
    record = kvsim.replay(make(), kvsim.policy(policy, window=8), 40)

    held = record.retained(89).sum(-1)  # after the event that ends the prompt
    assert held.mean() == 40
    assert len(set(held[:, 0].tolist())) == 3


def test_a_window_that_hides_nothing_does_not_tell_layers_apart():
    """A short text goes through layers with and without a window alike."""
    one = kvsim.policy("cake", window=4)

    record = kvsim.replay(make(n=50), one, 20)

    assert record.layers == (0, 1, 2, 3, 4)
    assert record.remark == ""
    plain = kvsim.replay(make((PLAIN,) * 5, n=50), one, 20)
    assert np.array_equal(record.evicted_at, plain.evicted_at)


def test_refusals_name_the_windows_and_a_way_out():
    """Which layers, how many tokens, and what to do, in one line."""
    sinks = Formula(0.3, sinks=(0.0, 1.0, 2.0, 3.0))
    cake = kvsim.policy("cake", window=8)
    with pytest.raises(PolicyError) as differ:
        kvsim.replay(make((WINDOW, PLAIN, WINDOW, sinks)), cake, 40)
    assert "layers 1 and 3 of long differ" in str(differ.value)
    assert "in their sinks;" in str(differ.value)
    assert "such as snapkv" in str(differ.value)

    narrow = Formula(0.3, window=20)
    with pytest.raises(PolicyError) as across:
        kvsim.replay(make((WINDOW, narrow, WINDOW, PLAIN)), kvsim.policy("asl", window=8), 40)
    assert "in layers 0, 2 (50 tokens), a sliding window in layer 1 (20 tokens)" in str(
        across.value
    )


def test_a_remark_on_traces_is_made_once_for_all_policies():
    """Whatever else is remarked on each of them."""
    traces = [make(n=n, name=f"t{n}") for n in (60, 70)]
    policies = [kvsim.policy(name) for name in ("tova", "snapkv", "cake", "observed_attention")]

    remarks = merged(replay_all(traces, policies, [36, 40], interval=8).remarks)

    windows = [remark for remark in remarks if "do not see the whole text" in remark]
    assert len(windows) == 1
    assert windows[0].startswith("2 of 5 layers do")
    assert len(remarks) == 2  # of lengths of one policy, at both budgets, as well


def test_traces_of_one_name_are_refused_wherever_they_meet(tmp_path, run):
    """As two models give them on one file of prompts; whose they are, and what to do."""
    of = ({"model": {"name": name}} for name in ("gemma", "llama"))
    one, other = (make(n=40, seed=i, meta=meta, name="p1") for i, meta in enumerate(of))
    paths = [
        kvsim.save_trace(trace, tmp_path / f"{i}.zarr") for i, trace in enumerate((one, other))
    ]
    policies = [kvsim.policy("tova")]

    for refused in (
        lambda: replay_all([one, other], policies, [20]),
        lambda: check_traces([one] * 2, []),
    ):
        with pytest.raises(TraceError, match="both called 'p1'; expected one name"):
            refused()
    _, _, err = run("replay", *paths, "--policy", "tova", "--budget", "20")
    assert f"{paths[0]} (of gemma) and {paths[1]} (of llama) are both called 'p1'" in err
    assert "record one again under another id" in err

    for i, policy in enumerate(("tova", "h2o")):  # no value of one is a value of the other
        run("replay", paths[i], "--policy", policy, "--budget", "20", "--out", tmp_path / policy)
    status, _, err = run(
        "report", tmp_path / "tova", tmp_path / "h2o", "--out", tmp_path / "a.html"
    )
    assert status == 2
    assert "replayed different traces, both called 'p1'" in err
