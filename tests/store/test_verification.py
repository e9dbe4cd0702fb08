"""Verification of stored traces, and their description."""

import json

import numpy as np
import pytest
import torch
import zarr

import kvsim
from damage import flip, reseal
from kvsim.store import verification
from kvsim.store.reader import open_trace
from kvsim.store.verification import describe, verify
from saved_traces import N
from traces import random_arrays


def test_verify_accepts_what_was_saved(saved):
    """With errors far below the stated tolerances; progress counts layers."""
    seen = []
    report = verify(saved, deep=True, progress=lambda *layers: seen.append(layers))

    assert seen == [(1, 2), (2, 2)]
    assert report.ok
    assert max(report.output_error) < 1e-6
    assert max(report.lse_error) < 1e-5
    assert report.output_tolerance == 1e-4


def test_verify_recomputes_blocks_of_rows(stored, monkeypatch):
    """Blocks have the errors of the whole layer; damage in a later one is found in its array."""
    whole = verify(stored, deep=True)
    monkeypatch.setattr(verification, "ROWS", 256)
    blocks = verify(stored, deep=True)
    flip(stored / "attn_out" / "c" / "1" / "0" / "1" / "0")
    damaged = verify(stored, deep=True)

    assert open_trace(stored).n_pos > 256
    assert blocks.ok
    assert blocks.output_error == pytest.approx(whole.output_error, abs=1e-6)
    assert blocks.lse_error == pytest.approx(whole.lse_error, abs=1e-5)
    assert len(damaged.problems) == 1
    assert "attn_out/c/1/0/1/0' is damaged" in damaged.problems[0]
    assert (len(damaged.output_error), len(damaged.lse_error)) == (1, 2)


def test_each_layer_has_its_own_tolerance(tmp_path):
    """Logits of thousands in one layer excuse no log-sum-exp of the next."""
    arrays = random_arrays(layers=2, heads=1, group=1, dim=16, n=40)
    arrays["q"] = torch.as_tensor(arrays["q"]) * torch.tensor([3000.0, 1.0])[:, None, None, None]
    made = {"prompt_len": 20, "rope": kvsim.Rope.default(16)}
    lse = kvsim.Trace.from_arrays(**arrays, **made).full()[1]
    stored = kvsim.save_trace(
        kvsim.Trace.from_arrays(**arrays, lse=lse, **made), tmp_path / "a.zarr"
    )
    rewrite(stored, "lse", lambda values: np.add.at(values, 1, np.float32(5e-4)))

    report = verify(stored, deep=True)

    assert report.lse_tolerance > 5e-4
    assert any("lse of layer 1 differs by 0.0005" in problem for problem in report.problems)


def rewrite(path, name, change):
    """Change the values of a stored array, with valid chunks and a valid seal."""
    array = zarr.open_group(path, mode="r+", use_consolidated=False)[name]
    values = np.asarray(array[:])
    change(values)
    array[:] = values
    reseal(path)


@pytest.mark.parametrize("name", ["q", "k", "v", "attn_out", "lse", "tokens"])
def test_verify_finds_a_changed_number(stored, name):
    """A number changed with a valid checksum of its chunk is found by the array's checksum."""

    def change(values):
        values[(1, 0, 5) if values.ndim > 1 else 0] += 2

    rewrite(stored, name, change)

    first, *others = verify(stored, deep=True).problems

    assert f"the checksum of {name} " in first
    assert any("from that of q, k, v" in problem for problem in others) == (name != "tokens")


def test_describe(saved):
    """The description has sizes, dtypes, model and the head of the text, ready for JSON."""
    found = json.loads(json.dumps(describe(saved)))

    assert found["tokens"] == N
    assert found["arrays"]["q"]["shape"] == [2, 4, N, 8]
    assert found["arrays"]["q"]["dtype"] == found["arrays"]["q"]["source_dtype"] == "float32"
    assert found["bytes"] > found["arrays"]["q"]["bytes"] > 0
    assert found["prompt"] == "p" * 200 + "..."
    assert found["model"] == {"name": "m"}
    assert found["answer_check"] is None
