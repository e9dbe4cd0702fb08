"""Budgets as users state them: entries, shares of the final or the present length, bytes."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvsim
from kvsim.core.arguments import resolve_budget
from kvsim.core.attention import Formula
from kvsim.core.budgets import budgeted
from kvsim.errors import BudgetError, PolicyError
from kvsim.recorder import capture
from small_model import small, words_tokenizer
from traces import changed

T, PROMPT = 60, 40


def random_trace(seed=0, layers=2, n_pos=T):
    """A trace of 2 KV heads of 4 numbers."""
    draws = torch.Generator().manual_seed(seed)
    q = torch.randn(layers, 4, n_pos, 4, generator=draws)
    k, v = (torch.randn(layers, 2, n_pos, 4, generator=draws) for _ in "kv")
    rope = kvsim.Rope(torch.ones(2))
    return kvsim.Trace.from_arrays(q, k, v, prompt_len=PROMPT, rope=rope)


TRACE = random_trace()


def held_after(record):
    """Entries of each head after each row, [layer, head, row], by counting."""
    gone = record.evicted_at
    rows = range(gone.shape[-1])
    return np.stack([(gone[..., : row + 1] > row).sum(-1) for row in rows], -1)


@settings(max_examples=15)
@given(
    share=st.integers(20, 100),
    interval=st.integers(1, 9),
    name=st.sampled_from(["streaming_llm", "h2o", "tova", "knorm", "adakv+tova", "pyramidkv"]),
)
def test_a_share_so_far_bounds_every_event(share, interval, name):
    """After each event a layer holds at most the share of the tokens so far, and exactly that."""
    record = kvsim.replay(TRACE, kvsim.policy(name), f"{share}%so-far", interval=interval)

    events = [PROMPT - 1, *range(PROMPT - 1 + interval, T, interval)]
    held = held_after(record).mean(1)
    assert record.facts.share == f"{share}%so-far"
    assert record.budget == resolve_budget(f"{share}%", T)
    for row in events:
        allowed = max(1, share * (row + 1) // 100)
        assert held[:, row].mean() <= share * (row + 1) / 100
        if name != "pyramidkv":
            assert held[:, row].sum() == pytest.approx(allowed * len(held), abs=1)


@pytest.mark.parametrize(
    ("share", "n_pos", "entries"),
    [
        *(("25%", 63, 15), ("50%", 61, 30), ("33.3%", 8, 2), ("1%", 199, 1), ("0.1%", 60, 1)),
        *(("100%", 60, 60), ("32.3%", 1000, 323)),  # a product of floats below 323
    ],
)
def test_a_share_is_rounded_down(share, n_pos, entries):
    """Also from a half on; to one entry at least."""
    assert resolve_budget(share, n_pos) == entries


@settings(max_examples=15)
@given(
    size=st.integers(200, 9000),
    dtype=st.sampled_from(["", "@float32", "@bfloat16", "@float8"]),
    name=st.sampled_from(["streaming_llm", "tova", "adakv+tova"]),
)
def test_bytes_are_never_exceeded(size, dtype, name):
    """After an event all layers and heads together hold as many entries as fit, and no more."""
    number = {"": 2, "@float32": 4, "@bfloat16": 2, "@float8": 1}[dtype]
    entry = 2 * 2 * 8 * number
    size = max(size, 8 * entry)

    record = kvsim.replay(TRACE, name, f"{size}B{dtype}", interval=4)

    bytes_held = held_after(record)[..., PROMPT - 1 :: 4].sum((0, 1)) * 8 * number
    assert (bytes_held <= size).all()
    assert record.budget == size // entry
    assert record.facts.share == f"{size}B{dtype}"


def test_bytes_are_those_of_layers_that_hold_and_evict_entries():
    """A layer behind a window keeps what it has, and one that reads another's entries has none."""
    k, v = (torch.randn(4, 2, T, 4)[[0, 1, 1, 3]] for _ in "kv")
    shared = kvsim.Trace.from_arrays(
        *(torch.randn(4, 4, T, 4), k, v),
        prompt_len=PROMPT,
        rope=kvsim.Rope(torch.ones(2)),
        owners=(0, 1, 1, 3),
    )
    formulas = [Formula(0.5, window=20), *[Formula(0.5)] * 3]
    narrow = changed(shared, formulas=formulas, owners=shared.owners)
    entry = 2 * 8 * 2  # of two heads in a layer, in 16 bits

    for trace, layers in ((shared, 3), (narrow, 2)):
        policy, entries = budgeted(kvsim.policy("tova"), trace, f"{layers * entry * 9 + 1}B")
        assert entries == 9
        with pytest.raises(BudgetError, match=f"{layers * entry} bytes in {layers} layers"):
            budgeted(policy, trace, f"{layers * entry - 1}B")


def test_a_grown_budget_is_the_same_live_and_in_a_sweep():
    """A live run evicts from the first layer what the replay does."""
    words = " ".join(f"w{(7 * i + i * i) % 60}" for i in range(40))
    trace = capture(small(), words_tokenizer(), words, max_new_tokens=24)

    live = kvsim.live(
        *(small(), [trace], ["tova", "full"], ["40%so-far"]),
        tokenizer=words_tokenizer(),
        interval=8,
    )
    swept = kvsim.sweep(
        traces=[trace],
        policies=["tova", "full"],
        budgets=["40%so-far", 12],
        interval=8,
        records=True,
    )

    first, second = live.records[0], swept.records[0]
    assert np.array_equal(first.evicted_at[0], second.evicted_at[0])
    assert first.facts.share == second.facts.share == "40%so-far"
    assert set(live.table["share"].drop_nulls()) == {"40%so-far"}


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ("50so-far", r"expected entries \(128\), a share \(25%, 25%so-far\)"),
        ("0%so-far", "expected a share above 0%"),
        ("64MB@int3", r"or bytes \(64MiB, 64MiB@float32"),
        ("64QB", "or bytes"),
        ("10B", "an entry of each head takes 64 bytes in 2 layers; expected at least as many"),
        ("many", r"expected entries \(128\), a share \(25%, 25%so-far\) or bytes"),
    ],
)
def test_other_budgets_are_one_line(budget, message):
    """What was given, and what was expected."""
    with pytest.raises(BudgetError, match=message) as caught:
        kvsim.replay(TRACE, "tova", budget)
    assert "\n" not in str(caught.value)


def test_policies_of_a_fixed_budget_refuse_one_that_grows():
    """Also methods that drop rows, scaled lengths, and work that takes entries alone."""
    for policy in ("quest", "fastkv", kvsim.policy("snapkv@scaled")):
        with pytest.raises(PolicyError, match="no rule for a budget that grows"):
            kvsim.replay(TRACE, policy, "50%so-far")
    with pytest.raises(BudgetError, match="only budgets of replays and live runs grow"):
        resolve_budget("50%so-far", 10)
    with pytest.raises(BudgetError, match="smallest budget that works is"):
        kvsim.replay(TRACE, "snapkv", "50%so-far")
