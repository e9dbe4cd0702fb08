"""Captures that leave out rows: the same trace as one that was compacted, also after a kill."""

import functools

import pytest
import torch

import kvsim
from kvsim.errors import CaptureError, TraceError
from kvsim.recorder import capture
from kvsim.recorder.options import Options
from kvsim.store import TraceWriter, find_drafts, open_trace, recover, verify
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
    expected = whole(tmp_path, **options).compacted(64)

    assert few.left_out == LEFT_OUT
    assert verify(few.path, deep=True).ok
    for name in ("received", "moments", "k"):
        assert torch.equal(few.read(name), expected.read(name))
    assert few.digest == open_trace(expected.save(tmp_path / "copy.zarr")).digest
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


def test_a_response_may_be_empty(tmp_path):
    """The last row of the prompt stays, from which policies score."""
    few = record(tmp_path / "few.zarr", rows="response+0", max_new_tokens=0)

    assert few.left_out == LEFT_OUT
    assert kvsim.replay(few, "tova", 96).events[0] == PROMPT - 1


def test_a_short_prompt_leaves_nothing_out(tmp_path):
    """Then the trace is the usual one, in the usual version of the format."""
    few = record(tmp_path / "few.zarr", rows="response")

    assert few.left_out is None
    assert few.digest == whole(tmp_path).digest


@pytest.mark.parametrize("rows", ["prompt", "response+-1", "response+x", "response+", "", "64"])
def test_other_rows_are_refused(rows):
    """One line says what is expected."""
    with pytest.raises(CaptureError, match=r"expected 'response', or 'response\+N'"):
        Options(rows=rows)


@pytest.mark.parametrize("options", [{"attention": "full"}, {"residual": True}])
def test_arrays_of_all_rows_are_refused(options):
    """Dense attention and the residual stream have no rows without queries."""
    with pytest.raises(CaptureError, match="are both given, expected one of them"):
        Options(rows="response", **options)


def test_a_capture_of_other_rows_is_not_kept(tmp_path):
    """`resume` compares what is left out."""
    record(tmp_path / "few.zarr", rows="response+64")

    with pytest.raises(CaptureError, match=r"the rows left out are \(256, 512\), expected None"):
        record(tmp_path / "few.zarr", resume=True)


def test_a_killed_capture_is_recovered(tmp_path):
    """Behind the rows left out, the committed tokens make a compact trace."""

    def stop(done, total):
        if done == PROMPT + 80:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record(tmp_path / "a.zarr", rows="response+64", progress=stop)
    (draft,) = find_drafts(tmp_path)
    found = open_trace(recover(tmp_path / "a.zarr"))

    assert draft.tokens == found.n_pos == 768
    assert found.left_out == LEFT_OUT
    assert verify(found.path, deep=True).ok
    expected = whole(tmp_path)
    assert torch.equal(found.read("q", pos=slice(512, 768)), expected.q[:, :, 512:768])


def test_a_capture_killed_within_the_rows_left_out_is_refused(tmp_path, monkeypatch):
    """One line says that no row behind them is there, and how to remove the draft."""
    append = TraceWriter.append

    def stop(self, name, layer, block):
        append(self, name, layer, block)
        if self._committed == 512:
            raise KeyboardInterrupt

    monkeypatch.setattr(TraceWriter, "append", stop)
    with pytest.raises(KeyboardInterrupt):
        record(tmp_path / "a.zarr", rows="response+64")
    monkeypatch.undo()

    with pytest.raises(TraceError, match=r"rows 256 to 511 are left out .*only 512 tokens"):
        recover(tmp_path / "a.zarr")
