"""Blocks, slots and attention, against what vLLM's block manager and kernel for CPU answered."""

import functools
import json

import pytest
import torch
from conformance import vllm_blocks as vllm

from kvsim.core.attention import Formula
from kvsim.runner.blocks import Pool, Sequences, paged_attention


@functools.cache
def recorded():
    """What vLLM answered, by block size."""
    return {part["size"]: part for part in json.loads(vllm.FILE.read_text())["parts"]}


def replayed(size):
    """Yield sequences of kvsim after each of the operations."""
    sequences = Sequences(Pool(size, vllm.HEADS, torch.empty(0), vllm.DIM), vllm.SEQUENCES)
    following = 0
    for kind, at, *rest in recorded()[size]["operations"]:
        if kind == "begin" and rest[0] is not None:
            sequences.share(at, sequences, rest[0])
        if kind in ("begin", "append"):
            new = range(following, following + rest[-1])
            following += rest[-1]
            sequences.append(at, vllm.keys(new), vllm.values(new))
        elif kind == "compact":
            first, n = rest
            last = sequences.lengths[at]
            index = [*range(first), *range(last - (n - first), last)]
            sequences.compact(at, torch.tensor([index] * vllm.HEADS))
        elif kind == "end":
            sequences.pool.free(sequences.tables[at])
            sequences.tables[at], sequences.lengths[at] = [], 0
        yield sequences


@pytest.mark.parametrize("size", [1, 8, 16, 32])
def test_blocks_are_counted_as_by_the_block_manager_of_vllm(size):
    """As many blocks in use, and each sequence shares the same ones, counted as often."""
    for sequences, state in zip(replayed(size), recorded()[size]["states"], strict=True):
        pool = sequences.pool
        assert pool.held == state["used"]
        assert [[pool.counts[x] for x in table] for table in sequences.tables] == state["counts"]
        pairs = {
            pair
            for table, other in zip(sequences.tables, state["tables"], strict=True)
            for pair in zip(table, other, strict=True)
        }
        assert len(pairs) == len({mine for mine, _ in pairs}) == len({block for _, block in pairs})
    assert pool.shared
    assert pool.freed


@pytest.mark.parametrize("size", [1, 8, 16, 32])
def test_slots_are_those_of_vllm(size):
    """The slot of an entry in a block table is that of vLLM's slot mapping."""
    *_, sequences = replayed(size)
    sequences.tables = recorded()[size]["states"][-1]["tables"]
    slots = [sequences.slots(at).tolist() for at in range(vllm.SEQUENCES)]
    assert slots == recorded()[size]["slots"]
    assert sum(map(len, slots)) > 3


@pytest.mark.parametrize("kind", ["plain", "softcap", "sinks"])
@pytest.mark.parametrize("size", vllm.ATTENDED)
def test_paged_attention_is_that_of_vllm(size, kind):
    """After all of the operations, rows of each sequence read what vLLM's kernel reads."""
    *_, sequences = replayed(size)
    formula = Formula(vllm.SCALE, softcap=vllm.SOFTCAP if kind == "softcap" else None)
    sinks = torch.tensor(vllm.SINKS).view(vllm.HEADS, -1) if kind == "sinks" else None
    q = vllm.queries().transpose(0, 1).unflatten(0, (vllm.HEADS, -1))
    outputs = recorded()[size]["attention"][kind]
    assert sum(map(bool, outputs)) > 1
    for at, expected in enumerate(outputs):
        if expected:
            table, n = sequences.tables[at], sequences.lengths[at]
            out = paged_attention(q, sequences.pool, table, n, formula, None, sinks)
            mine = out.flatten(0, 1).transpose(0, 1)[..., ::8].flatten()
            torch.testing.assert_close(mine, torch.tensor(expected), rtol=0, atol=1e-5)
