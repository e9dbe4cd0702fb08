"""Captures that leave out rows: the same trace as one that was compacted, also after a kill."""

import functools

import pytest
import torch
from compacting import compacted

import kvsim
from kvsim.recorder import capture
from kvsim.store.reader import open_trace
from kvsim.store.verification import verify
from small_model import small

PROMPT, RESPONSE = 700, 100
LEFT_OUT = (256, 512)


def record(path, **options):
    """Record a prompt of which rows can be left out, and a response that ends a block."""
    tokens = torch.randint(0, 64, (PROMPT,), generator=torch.Generator().manual_seed(1)).tolist()
    return capture(small(), None, tokens, out=path, **{"max_new_tokens": RESPONSE, **options})


@functools.cache
def whole(folder, **options):
    """The capture of all rows."""
    return record(folder / "whole.zarr", **options)


@pytest.mark.parametrize("options", [{}, {"store_dtype": "float16"}])
def test_a_compact_capture_is_the_compacted_one(tmp_path, options):
    """Rows that stay, sums and digest are those of the capture of all rows, and verify deep."""
    few = record(tmp_path / "few.zarr", rows="response+64", **options)
    expected = compacted(whole(tmp_path, **options), 64)

    assert few.header.left_out == LEFT_OUT
    assert verify(few.path, deep=True).ok
    for name in ("received", "moments", "k"):
        assert torch.equal(few.read(name), expected.read(name))
    assert few.digest == open_trace(kvsim.save_trace(expected, tmp_path / "copy.zarr")).digest
    assert verify(tmp_path / "copy.zarr", deep=True).ok
    if not options:
        assert few.digest == expected.digest == record(None, rows="response+64").digest


def test_a_judge_needs_tokens_and_kept_sets_alone(tmp_path):
    """Judged numbers are those of the trace with all rows."""
    traces = whole(tmp_path), record(tmp_path / "few.zarr", rows="response+64")

    tables = [
        kvsim.judge(small(), trace, [kvsim.replay(trace, "h2o", 96, layers=[0])])
        for trace in traces
    ]

    assert tables[0].drop("trace").equals(tables[1].drop("trace"))
