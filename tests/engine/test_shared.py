"""Layers that read the entries of an earlier one: one kept set, one budget, bytes count once."""

import numpy as np
import pytest
import torch

import kvsim
from kvsim.core.attention import Formula, Rope
from kvsim.core.policy import Policy, Scorer
from kvsim.errors import PolicyError, TraceError
from kvsim.schema import NEVER
from kvsim.store.verification import verify
from traces import changed

LAYERS, QHEADS, HEADS, N, DIM, PROMPT = 4, 4, 2, 30, 8, 14
#: Layer 2 reads the entries of layer 0.
OWNERS = (0, 1, 0, 3)


def make(owners=OWNERS, **changes):
    """A trace whose layers read these entries, of attention that is far from uniform."""
    seeded = torch.Generator().manual_seed(3)
    q = torch.randn(LAYERS, QHEADS, N, DIM, generator=seeded, dtype=torch.float64) * 2
    k, v = torch.randn(2, LAYERS, HEADS, N, DIM, generator=seeded, dtype=torch.float64)
    read = [*owners] or slice(None)
    arrays = {"q": q, "k": k[read], "v": v[read]}
    facts = {"prompt_len": PROMPT, "rope": Rope.default(DIM), "owners": owners}
    return kvsim.Trace.from_arrays(**{**arrays, **facts, **changes})


class LastRow(Scorer):
    """The attention of the last row, summed over the query heads of a group."""

    def score(self, view):
        """[L, H, n]."""
        return view.attn(1).sum(2)[:, :, 0]


def naive(trace, layers, budget, interval):
    """When each entry leaves under `LastRow`, by a loop; layers: those whose queries count."""
    out = np.full((HEADS, N), NEVER)
    group = QHEADS // HEADS
    for h in range(HEADS):
        live = []
        for row in range(N):
            live.append(row)
            fires = row >= PROMPT - 1 and (row - PROMPT + 1) % interval == 0
            if not fires or len(live) <= budget:
                continue
            score = dict.fromkeys(live, 0.0)
            for layer in layers:
                for i in range(h * group, (h + 1) * group):
                    k = trace.read("k")[layers[0], h].numpy()
                    z = [
                        DIM**-0.5 * float(trace.read("q")[layer, i, row].numpy() @ k[p])
                        for p in live
                    ]
                    total = sum(np.exp(z))
                    for p, x in zip(live, z, strict=True):
                        score[p] += np.exp(x) / total
            kept = sorted(sorted(live, key=lambda p: -score[p])[:budget])
            out[h, [p for p in live if p not in kept]] = row
            live = kept
    return out


def test_one_set_is_kept_by_the_queries_of_all_readers():
    """Readers have the set of the layer that they read, which equals a loop over all heads."""
    trace = make()
    policy = Policy("last", LastRow())

    record = kvsim.replay(trace, policy, 7, interval=4)

    assert record.layers == (0, 1, 2, 3)
    for layer, readers in ((0, (0, 2)), (1, (1,)), (2, (0, 2)), (3, (3,))):
        assert np.array_equal(record.evicted_at[layer], naive(trace, readers, 7, 4)), layer
    alone = kvsim.replay(
        make(owners=(), k=trace.read("k"), v=trace.read("v")), policy, 7, interval=4
    )
    assert not np.array_equal(record.evicted_at[0], alone.evicted_at[0])
    only = kvsim.replay(trace, policy, 7, interval=4, layers=[2, 1])
    assert np.array_equal(only.evicted_at, record.evicted_at[[2, 1]])


SNAPKV = {"window": 3}
POLICIES = {"snapkv": SNAPKV, "h2o": {}, "tova": {}, "knorm": {}, "adakv+snapkv": SNAPKV}
POLICIES |= {"expected_attention": {"n_future": 8}, "criticalkv+snapkv": SNAPKV}


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_see_the_readers_as_one_group(policy):
    """What is kept is what one layer keeps that has the query heads of all."""
    trace = make(o_proj=torch.randn(LAYERS, QHEADS, DIM, 12, dtype=torch.float64))
    policy = kvsim.policy(policy, **POLICIES[policy])

    record = kvsim.replay(trace, policy, 12, interval=5)

    def together(x):
        pairs = torch.stack([x[[0]].unflatten(1, (HEADS, -1)), x[[2]].unflatten(1, (HEADS, -1))], 2)
        return pairs.flatten(1, 3)

    q, o_proj = together(trace.read("q")), together(trace.read("o_proj"))
    one = kvsim.Trace.from_arrays(
        q,
        trace.read("k")[:1],
        trace.read("v")[:1],
        o_proj=o_proj,
        prompt_len=PROMPT,
        rope=trace.ropes[0],
    )
    expected = kvsim.replay(one, policy, 12, interval=5)
    assert np.array_equal(record.evicted_at[0], expected.evicted_at[0])
    assert np.array_equal(record.evicted_at[2], expected.evicted_at[0])


def test_bytes_count_once_and_errors_in_each_layer():
    """A layer that reads another's entries holds none, and its output errs by its own queries."""
    trace = make()
    record = kvsim.replay(trace, kvsim.policy("knorm"), 7, interval=4)

    table, apart = (
        kvsim.measure(x, record, metrics=["bytes_held", "output_error"])
        for x in (trace, make(owners=(), k=trace.read("k"), v=trace.read("v")))
    )

    held = table.filter(table["metric"] == "bytes_held").sort("layer")["value"].to_list()
    assert held[2] == 0 < held[0] == held[1]
    assert apart.filter(apart["metric"] == "bytes_held")["value"].min() > 0
    errors, expected = (x.filter(x["metric"] == "output_error") for x in (table, apart))
    assert len(errors) == LAYERS * QHEADS
    assert errors["value"].to_list() == expected["value"].to_list()


def test_entries_have_the_bits_of_the_layer_that_holds_them():
    """A plan's bits of a layer without entries of its own mean nothing."""
    trace = make()
    plans = ("3/4/5/6", "3/4/16/6", "16/4/5/6")

    def values(bits):
        record = kvsim.replay(trace, kvsim.policy("knorm+int8", k_bits=bits), 7, interval=4)
        table = kvsim.measure(trace, record, metrics=["bytes_read", "output_error"])
        return table["value"].to_list(), record.evicted_at.tolist()

    first, same, other = map(values, plans)
    assert first == same
    assert first[0] != other[0]


REFUSED = {"pyramidkv": {"window": 2}, "cake": {"window": 2}, "asl+tova": {"window": 2}}
REFUSED |= {"snapkv@original": {"window": 3}}


@pytest.mark.parametrize("policy", REFUSED)
def test_policies_without_a_rule_for_it_are_refused(policy):
    """One line names the layers, for policies that treat layers apart."""
    with pytest.raises(PolicyError, match="layers that read the entries of others") as said:
        kvsim.replay(make(), kvsim.policy(policy, **REFUSED[policy]), 12)
    assert "\n" not in str(said.value)


def test_a_stored_trace_says_who_reads_what(tmp_path):
    """The owners read back, verify, and are part of the digest."""
    trace = make(tokens=list(range(N)))
    path = kvsim.save_trace(trace, tmp_path / "a.zarr")

    again = kvsim.open_trace(path)

    assert again.owners == OWNERS
    assert (
        again.digest == trace.digest != make(owners=(), k=trace.read("k"), v=trace.read("v")).digest
    )
    assert verify(path, deep=True).ok
    record = kvsim.replay(again, kvsim.policy("tova"), 9)
    assert np.array_equal(record.evicted_at, kvsim.replay(trace, "tova", 9).evicted_at)


@pytest.mark.parametrize("owners", [(0, 1, 0), (1, 1, 2, 3), (0, 0, 1, 3), (0, 1, -1, 3)])
def test_owners_that_cannot_be_are_refused(owners):
    """One for each layer: itself, or an earlier one with entries of its own."""
    with pytest.raises(TraceError, match="owners is"):
        changed(make(owners=()), owners=owners)
    formulas = [Formula(0.3), Formula(0.3), Formula(0.4), Formula(0.3)]
    with pytest.raises(TraceError, match="owners is"):
        make(formulas=formulas)
