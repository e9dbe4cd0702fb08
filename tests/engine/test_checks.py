"""Remarks on stages of a policy that never act."""

import pytest
import torch

import kvsim
from kvsim.core.reading import visible
from kvsim.core.storing import stored_after
from kvsim.testing.strategies import make_case

PROMPT, N = 12, 30
TRACE = make_case("sharp", layers=2, heads=2, group=2, n=N, prompt_len=PROMPT, seed=3).trace()


@pytest.mark.parametrize("window", [1, 8, 14, 15, 30])
@pytest.mark.parametrize("eviction", ["", "adakv+knorm+"])
@pytest.mark.parametrize("interval", [4])
def test_a_codec_that_rounds_nothing_is_remarked(window, eviction, interval):
    """Exactly where the clocks let no entry be rounded that a later row still reads."""
    policy = kvsim.policy(f"{eviction}kivi", group=1, window=window)

    record = kvsim.replay(TRACE, policy, 9, interval=interval, prefill=True)

    gone = torch.from_numpy(record.gone_after)
    after = [stored_after(gone, clock, PROMPT - 1) for clock in policy.codec.clocks]
    seen = any(bool((rows < gone.clamp(max=N - 1)).any()) for rows in after)
    assert ("no entry is rounded before the last row" in record.remark) != seen


@pytest.mark.parametrize("budget", [10, 29, 30])
@pytest.mark.parametrize("eviction", ["", "adakv+knorm+"])
@pytest.mark.parametrize(
    ("reader", "params"),
    [("quest", {"page": 3}), ("topk", {"heads": "kv"}), ("quest", {"page": 2, "dense_layers": 9})],
)
def test_a_reader_that_reads_everything_is_remarked(reader, params, eviction, budget):
    """Exactly where every row of every layer reads all entries that are there."""
    policy = kvsim.policy(f"{eviction}{reader}", **{"dense_layers": 1, "share": 1.0, **params})

    record = kvsim.replay(TRACE, policy, budget, interval=6, prefill=True)

    rows = slice(PROMPT, N)
    whole = True
    for at, gone in enumerate(torch.from_numpy(record.gone_after)):
        read, there = record.reads.entries(at, rows, gone), visible(gone, rows)
        whole &= record.reads.dense(at) or torch.equal(
            read, there.repeat_interleave(len(read) // len(there), 0)
        )
    assert ("every row reads all that is held" in record.remark) == whole
