"""What must have no influence: later rows, dead entries, and rows that do not reach a layer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvsim.errors import KvsimError
from kvsim.schema import NEVER
from kvsim.testing.invariants.trial import Broken, Trial


def causality(trial: Trial) -> None:
    """Rows later than an event, changed or absent, change nothing at or before it."""
    case = trial.case
    if trial.policy.scorer.clairvoyant:
        return
    now = case.prompt_len - 1 + trial.salt % (case.n - case.prompt_len + 1)
    if trial.record.events and trial.salt % 4:  # mostly a row whose event evicts
        now = trial.record.events[trial.salt % len(trial.record.events)]
    rng = np.random.default_rng(trial.salt)
    later = {}
    for name in "qkv":
        array = getattr(case, name).copy()
        array[:, :, now + 1 :] = 3 * rng.standard_normal(array[:, :, now + 1 :].shape)
        later[name] = array
    changed = replace(trial, case=replace(case, **later))
    trial.same(changed.replay().evicted_at, f"rows after {now} changed", until=now + 1)
    past = {name: getattr(case, name)[:, :, : now + 1] for name in "qkv"}
    short = replace(trial, case=replace(case, **past)).replay().evicted_at
    padded = np.full_like(trial.record.evicted_at, NEVER)
    padded[:, :, : now + 1] = short
    trial.same(padded, f"rows after {now} cut off", until=now + 1)


def no_peeking_at_the_dead(trial: Trial) -> None:
    """Keys and values overwritten with NaN at the moment they leave change nothing."""
    for by_row in (True, False):
        try:
            record = trial.replay(poison=True, by_row=by_row)
        except KvsimError as error:
            raise Broken(f"a dead entry shows: {error}") from error
        trial.same(record.evicted_at, "dead entries overwritten")


def absent_rows(trial: Trial) -> None:
    """Queries, keys and values of rows that do not reach a layer change nothing there."""
    if trial.present.all():
        return
    rng = np.random.default_rng(trial.salt)
    absent = ~trial.present[:, None, :, None]
    if trial.policy.propagation is not None and trial.policy.propagation.restarts:
        dropped = trial.record.selection.dropped[0] if trial.record.selection else 0
        absent = absent & (np.arange(len(absent)) > dropped)[:, None, None, None]
    case = trial.case
    moved = {}
    for name in "qkv":
        array = getattr(case, name)
        noise = (3 * rng.standard_normal(array.shape)).astype(array.dtype)
        moved[name] = np.where(absent, noise, array)
    record = replace(trial, case=replace(case, **moved)).replay()
    trial.same(record.evicted_at, "rows that do not reach the layer were overwritten")
