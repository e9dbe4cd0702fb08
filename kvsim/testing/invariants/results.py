"""What a Record says: finite numbers, retained mass, and the same after it was stored."""

from __future__ import annotations

import tempfile
from dataclasses import fields, replace
from pathlib import Path

import numpy as np

from kvsim.analysis.output.error import output_error
from kvsim.core.record import Record, read_records, write_records
from kvsim.schema import NEVER
from kvsim.testing.invariants.trial import Trial, require


def finite(trial: Trial) -> None:
    """Scores, output error and retained mass are numbers, whatever the trace holds."""
    for plans in trial.detailed.internals:
        require(not np.isnan(plans.scores[plans.pos >= 0]).any(), f"NaN score at row {plans.row}")
    result = output_error(trial.case.trace(), [trial.record])[0]
    for name in ("error", "mass", "missing"):
        finite = np.isfinite(getattr(result, name)).reshape(len(trial.present), -1, trial.case.n)
        require((finite == trial.present[:, None]).all(), f"{name} is not finite, or without a row")


def retained_mass(trial: Trial) -> None:
    """Retained mass is in [0, 1], 1 where nothing was evicted, and grows with the kept set."""
    trace, record = trial.case.trace(), trial.record
    if record.positions == "slot":  # a larger set moves the slots, and with them the logits
        return
    rng = np.random.default_rng(trial.salt)
    back = (rng.random(record.evicted_at.shape) < 0.5) & trial.present[:, None]
    larger = replace(record, evicted_at=np.where(back, NEVER, record.evicted_at).astype(np.int32))
    first = 0 if trial.present.all() else trial.case.prompt_len
    smaller, more = (e.mass[..., first:] for e in output_error(trace, [record, larger]))
    if not smaller.size:
        return
    require(
        (smaller >= 0).all() and (smaller <= 1).all(), f"mass in {smaller.min()}..{smaller.max()}"
    )
    before = (record.events[0] + 1 if record.events else trial.case.n) - first
    require((smaller[:, :, :before] == 1).all(), "mass below 1 before the first event")
    # the difference of two log-sum-exps is as exact as logits in the hundreds are
    slack = 1e-6 if trial.case.q.dtype == np.float64 else 1e-4
    require(
        (more >= smaller - slack).all(), f"mass falls by {(smaller - more).max()} with a larger set"
    )


def round_trip(trial: Trial) -> None:
    """A Record that was stored and read again is the same."""
    if trial.salt % 4:  # writing files takes longer than all the rest
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "records.zarr"
        write_records(path, [trial.record])
        (stored,) = read_records(path)
    for part in fields(Record):
        before, after = getattr(trial.record, part.name), getattr(stored, part.name)
        same = np.array_equal(before, after) if part.name == "evicted_at" else before == after
        require(same, f"{part.name} was {before}, is {after}")
