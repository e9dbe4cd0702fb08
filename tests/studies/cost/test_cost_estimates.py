"""Estimates of whole configurations."""

import pytest
from cost_models import LLAMA_8B, QWEN_7B, K

import kvsim
from kvsim.errors import BudgetError, PolicyError
from kvsim.policies import CATALOGUE, describe, names
from kvsim.studies.cost.accounting import estimate


def test_estimates_reproduce_appendix_b():
    """`estimate` gives the prefill and memory of ASL's appendix B, with its mean layers assumed."""
    llama, qwen = (
        [estimate(m, kvsim.policy(name), 2048, 128 * K) for name in ("asl", "fastkv")]
        for m in (LLAMA_8B, QWEN_7B)
    )

    assert [round(c.prefill_ratio, 2) for c in (*llama, *qwen)] == [0.78, 0.5, 0.81, 0.54]
    assert [c.selection_layer for c in (*llama, *qwen)] == [23.9, 15, 21.6, 14]
    assert [round(c.kv_full_bytes / 1e9, 1) for c in (llama[0], qwen[0])] == [17.2, 7.5]
    assert any("23.9 of 32 is assumed" in said for said in llama[0].assumptions)


def test_estimate_reproduces_appendix_g():
    """`estimate` gives the peak of G-KV's appendix G, (b + s) / 16384, and its score cache."""
    for budget, percent in ((512, 96.1), (1024, 93.0), (2048, 86.7)):
        cost = estimate(QWEN_7B, kvsim.policy("gkv"), budget, 16 * K, prompt=256)

        assert round(100 * (1 - cost.kv_peak_bytes / cost.kv_full_bytes), 1) == percent
        assert cost.score_bytes == 28 * 4 * (budget + 128) * 4


def test_full_cache_before_the_selection():
    """With full caches up to the selection ASL holds 0.78 of the cache on Llama, not 0.016."""
    cost = estimate(LLAMA_8B, kvsim.policy("asl", kv_before="full"), 2048, 128 * K)
    shares = sorted(set(cost.entries))

    assert cost.kv_ratio == pytest.approx(24.9 / 32 + 7.1 / 32 * 2048 / (128 * K))
    assert shares[0] == 2048
    assert shares[-1] == 128 * K
    assert cost.entries[24] == pytest.approx(0.9 * 128 * K + 0.1 * 2048)  # between 23 and 24


def test_selection_layers_are_given_or_refused():
    """A selection layer that is given is used, and one that the model lacks is an error."""
    given = estimate(LLAMA_8B, kvsim.policy("fastkv"), 512, 8 * K, selection_layer=3)

    assert (given.selection_layer, given.selection) == (3, "given")
    assert given.prefill_ratio < 0.5
    with pytest.raises(PolicyError, match=r"selection layer is 32; expected 0\.\.31"):
        estimate(LLAMA_8B, kvsim.policy("asl"), 512, 8 * K, selection_layer=32)


@pytest.mark.parametrize("name", [n for n in names() if describe(n).entry.kind == "scorer"])
def test_a_budget_that_never_binds_costs_nothing(name):
    """At a budget of the whole context all ratios are 1 and nothing is scored."""
    policy = kvsim.policy(name, **CATALOGUE[name.partition("@")[0]].required)
    cost = estimate(LLAMA_8B, policy, 4096, 4096)
    model = LLAMA_8B.per_query_head() if policy.per_query_head else LLAMA_8B

    assert cost.prefill_ratio == pytest.approx(1.0)
    assert cost.kv_bytes == cost.kv_peak_bytes == model.kv_bytes(4096)
    assert cost.scoring_prompt == cost.scoring_event == 0.0


def test_values_of_a_context_are_refused():
    """A prompt longer than the context and budgets without a rule are errors that say what fits."""
    with pytest.raises(PolicyError, match="prompt is 9 tokens of a context of 8; expected 1 to 8"):
        estimate(LLAMA_8B, kvsim.policy("tova"), 4, 8, prompt=9)
    with pytest.raises(BudgetError, match="smallest budget that works is 32"):
        estimate(LLAMA_8B, kvsim.policy("snapkv"), 8, 4096)
    with pytest.raises(BudgetError, match="budget is 0"):
        estimate(LLAMA_8B, kvsim.policy("tova"), 0, 8)
    keeps_the_prompt = kvsim.policy("triattention", calibration="prefix:4")
    with pytest.raises(BudgetError, match="budget"):
        estimate(LLAMA_8B, keeps_the_prompt, 512, 4096)
    assert estimate(LLAMA_8B, keeps_the_prompt, 512, 4096, prompt=256).kv_ratio == 512 / 4096
