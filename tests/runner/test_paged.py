"""A cache in blocks: no block leaks, and the model writes the text of the ordinary cache."""

import functools
import gc
from dataclasses import replace

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import kvsim
from families import FAMILIES
from kvsim.core.attention import Formula
from kvsim.engine.checks import check_budget
from kvsim.errors import CaptureError, PolicyError
from kvsim.policies import names
from kvsim.runner import blocks, paged
from kvsim.runner.blocks import Pool, Sequences, paged_attention
from kvsim.runner.decoding import Decoding, RunningModel, prefill
from kvsim.runner.paged import PagedSource, Paging
from live_runs import COMPOSED
from small_model import small

HEADS = 2


class Poisoned(Pool):
    """A pool whose freed blocks hold NaN."""

    def free(self, blocks):
        """Overwrite what nothing holds any more."""
        super().free(blocks)
        free = [block for block in {*blocks} if not self.counts[block]]
        with torch.inference_mode():  # as the model's tensors
            self.keys[free] = self.values[free] = torch.nan


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    monkeypatch.setattr(paged, "Pool", Poisoned)


class Blocks(RuleBasedStateMachine):
    """Sequences that begin, grow, share, are compacted and end, and a dictionary of their entries.

    An entry of a head is a number that no other has; the value beside a key is its negative.
    """

    @initialize(size=st.sampled_from([1, 3, 4]))
    def begin(self, size):
        """A pool of blocks."""
        self.pool = Poisoned(size, HEADS, torch.empty(0), 1)
        self.sequences = Sequences(self.pool, 4)
        self.entries = {at: [[] for _ in range(HEADS)] for at in range(4)}
        self.next = 1.0

    @rule(at=st.integers(0, 3), n=st.integers(1, 7))
    def append(self, at, n):
        """New entries at the end of a sequence."""
        new = torch.arange(n * HEADS).view(n, HEADS, 1) + self.next
        self.next += n * HEADS
        self.sequences.append(at, new, -new)
        for head in range(HEADS):
            self.entries[at][head] += new[:, head, 0].tolist()

    @rule(at=st.integers(0, 3), other=st.integers(0, 3), n=st.integers(0, 2))
    def share(self, at, other, n):
        """A sequence ends and begins as another one; both may go on by themselves."""
        if at == other:
            return
        self.end(at)
        self.sequences.share(at, self.sequences, other)
        self.entries[at] = [list(x) for x in self.entries[other]]
        for each in (at, other) if n else ():
            self.append(each, n)

    @rule(at=st.integers(0, 3), data=st.data())
    def compact(self, at, data):
        """Each head keeps entries of its own, as many as the others; one may have a pad."""
        n = self.sequences.lengths[at]
        count = data.draw(st.integers(0, n))
        slots = st.permutations(range(n))
        index = [sorted(data.draw(slots)[:count]) for _ in range(HEADS)]
        if count and data.draw(st.booleans()):
            index[1] = [-1, *index[1][1:]]
        self.sequences.compact(at, torch.tensor(index, dtype=torch.long).view(HEADS, count))
        for head, kept in enumerate(index):
            row = self.entries[at][head]
            self.entries[at][head] = [0.0 if i < 0 else row[i] for i in kept]

    @rule(at=st.integers(0, 3))
    def end(self, at):
        """A sequence frees its blocks."""
        self.pool.free(self.sequences.tables[at])
        self.sequences.tables[at], self.sequences.lengths[at] = [], 0
        self.entries[at] = [[] for _ in range(HEADS)]

    @invariant()
    def contents_are_those_of_the_dictionary(self):
        """Every head of every sequence has its entries in order, and no NaN of a freed block."""
        for at, heads in self.entries.items():
            keys, values = self.sequences.read(at)
            assert keys[..., 0].T.tolist() == heads
            assert (values == -keys).all()

    @invariant()
    def no_block_leaks(self):
        """Counts are the tables that hold a block; the others are free, each once."""
        pool, tables = self.pool, self.sequences.tables
        held = [sum(table.count(block) for table in tables) for block in range(len(pool.counts))]
        assert pool.counts == held
        assert sorted(pool._free) == [block for block, n in enumerate(held) if not n]
        assert pool.held == sum(map(bool, held))
        for table, n in zip(tables, self.sequences.lengths, strict=True):
            assert len(table) == -(-n // pool.size)


Blocks.TestCase.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
test_no_block_leaks = Blocks.TestCase
test_no_block_leaks.__doc__ = "Allocate, share, compact and free in any order: counts and contents."


@pytest.mark.parametrize("size", [1, 5, 16])
@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("kind", ["plain", "softcap", "sinks"])
def test_paged_attention_is_attention(size, rows, kind, monkeypatch):
    """Block by block, with pads and tiles of few blocks, it is softmax attention in float64."""
    monkeypatch.setattr(blocks, "_TILE", 10)
    generator = torch.Generator().manual_seed(0)
    n, pads = 37, torch.tensor([0, 12])
    pool = Poisoned(size, HEADS, torch.empty(0, dtype=torch.float64), 8)
    sequences = Sequences(pool, 2)
    keys, values = torch.randn(2, n, HEADS, 8, generator=generator, dtype=torch.float64)
    for start in range(0, n, 7):  # interleaved with another sequence
        sequences.append(0, keys[start : start + 7], values[start : start + 7])
        sequences.append(1, keys[:3], values[:3])
    q = torch.randn(HEADS, 3, rows, 8, generator=generator, dtype=torch.float64)
    formula = Formula(0.3, softcap=2.0 if kind == "softcap" else None)
    sinks = torch.arange(6, dtype=torch.float64).view(HEADS, 3) / 3 if kind == "sinks" else None
    out = paged_attention(q, pool, sequences.tables[0], n, formula, pads, sinks)
    z = torch.einsum("hgwd,nhd->hgwn", q, keys) * 0.3
    z = 2 * (z / 2).tanh() if kind == "softcap" else z
    at = torch.arange(n)
    hidden = (at > at[n - rows :, None]) | (at < pads.view(-1, 1, 1, 1))
    weights = z.masked_fill(hidden, -torch.inf).exp()
    total = weights.sum(-1, keepdim=True)
    total = total if sinks is None else total + sinks.exp()[..., None, None]
    expected = weights / total @ values.transpose(0, 1)[:, None]
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


PROMPT, NEW, BUDGET, INTERVAL = 22, 10, 14, 4
SIZES = {"window": 4, "min_segment": 2, "max_segment": 8, "lag": 3, "rows": 16, "layer": 0}
SIZES |= {"sink": 2, "first_layer": 0, "look_back": 4, "calibration": "prefix:12", "recent": 4}


@functools.cache
def live_policies():
    """Every policy that a running model can follow, by name, with lengths that fit the budget."""
    out = {}
    for name in (*names(), *COMPOSED):
        try:
            declared = kvsim.policies.parameters(name)
            sizes = SIZES | ({"page": 4} if "crush" in declared else {})
            policy = kvsim.policy(name, **{x: y for x, y in sizes.items() if x in declared})
            policy = replace(policy, schedule=policy.schedule.override(INTERVAL, prefill=True))
            check_budget(policy, BUDGET, prompt_len=PROMPT, n_layers=2)
            Decoding(running(), policy, BUDGET, prompt_len=PROMPT, n_pos=PROMPT + NEW)
        except (PolicyError, CaptureError):
            continue
        out[name] = policy
    return out


def running():
    """The small model, whose first tokens are captured once."""
    if not hasattr(running, "model"):
        running.model = RunningModel(small())
        running.prefix = prefill(running.model, [i * 7 % 63 for i in range(PROMPT)])
    return running.model


def written(policy, paging=None, *, shared=False, run=None):
    """Tokens and logits that a model writes under a policy behind its prefix, and its Decoding."""
    model, prefix = run or (running(), running.prefix)
    sizes = {"prompt_len": PROMPT, "n_pos": PROMPT + NEW}
    with Decoding(model, policy, BUDGET, **sizes, paging=paging) as decoding:
        if shared and policy.propagation is None:
            decoding.begin(prefix)
            logits = [prefix.logits]
        else:
            logits = [decoding.feed(prefix.tokens)[-1]]
        while len(logits) < NEW:
            logits.append(decoding.feed([int(logits[-1].argmax())])[-1])
    return [int(x.argmax()) for x in logits], torch.stack(logits), decoding


@pytest.mark.deep
def test_all_policies_write_the_text_of_the_ordinary_cache():
    """Token for token in blocks of 1, 8 and 16: ragged heads, shared prefixes."""
    policies, ragged = live_policies(), set()
    assert len(policies) > 40
    assert {"ams", "adakv+snapkv", "streaming_llm@original", "fastkv", "cake"} <= policies.keys()
    pools = {size: Paging(size) for size in (1, 8, 16)}
    for i, (name, policy) in enumerate(policies.items()):
        text, logits, plain = written(policy)
        for j, size in enumerate((1, 8, 16)):
            more, rows, decoding = written(policy, pools[size], shared=bool((i // 2 + j) % 4))
            assert more == text, (name, size)
            torch.testing.assert_close(rows, logits, rtol=0, atol=1e-5, msg=name)
            assert (decoding.record().evicted_at == plain.record().evicted_at).all(), (name, size)
            sizes = [(each.peak_bytes, each.cache_bytes) for each in (decoding, plain)]
            assert sizes[0] == sizes[1], (name, size)
            sources = [source for _, source in decoding._blocks]
            assert all(isinstance(source, PagedSource) for source in sources)
            ragged |= {(name, size) for source in sources if bool(source._pads.any())}
    del decoding, plain, sources
    gc.collect()
    assert {size for _, size in ragged} == {1, 8, 16}
    for paging in pools.values():
        assert paging.pool.shared > paging.pool.held > 0  # the prefix alone
        paging.release()
        assert paging.pool.held == sum(paging.pool.counts) == 0


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_a_softcap_and_sinks_are_applied_in_blocks(family):
    """Models with either write the text of the ordinary cache."""
    model = RunningModel(FAMILIES[family].build())
    run = model, prefill(model, [i * 7 % 63 for i in range(PROMPT)])
    for name in ("adakv+snapkv", "tova"):
        policy = live_policies()[name]
        text, logits, _ = written(policy, shared=True, run=run)
        more, rows, decoding = written(policy, Paging(8), shared=True, run=run)
        assert all(x.formula.softcap or x.formula.sinks for _, x in decoding._blocks)
        assert more == text, name
        torch.testing.assert_close(rows, logits, rtol=0, atol=1e-5)


def test_a_shared_prefix_is_stored_once():
    """Two sequences hold the blocks of a prompt; what they write goes into copies."""
    paging = Paging(8)
    none = kvsim.policy("full")
    first = written(none, paging, shared=True)
    alone = paging.pool.held
    second = written(none, paging, shared=True)
    assert first[0] == second[0]
    per_layer = PROMPT // 8  # whole blocks; the last is copied on the first write
    assert paging.pool.held == 2 * alone - 2 * per_layer - 2
    assert paging.pool.copied == 4
    assert max(paging.pool.counts) == 3
    freed = paging.pool.freed
    text = first[0]
    del first
    gc.collect()
    assert paging.pool.freed > freed
    assert written(none, paging, shared=True)[0] == text


def test_ragged_heads_are_padded():
    """The table of a layer holds more than its heads do, as long as the longest of them."""
    paging = Paging(1)
    *_, decoding = written(live_policies()["adakv+snapkv"], paging)
    held = [source._sequences for _, source in decoding._blocks]
    size = sum(len(x) * each.pool.block_bytes for each in held for x in each.tables)
    assert size > decoding.cache_bytes
    assert paging.padded_bytes > 0
