"""Invariants of reads and storage: rows read resident entries as stored at that time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvsim.analysis.output.changed import folds
from kvsim.analysis.output.error import output_error
from kvsim.core.merging import Merger
from kvsim.core.reading import Reads
from kvsim.core.storing import Quantizer
from kvsim.engine.reading import read
from kvsim.testing.invariants.trial import Trial, require

# Budget with which sparse attention that counts from it reads every page.
_MOST = 1 << 20


def _account(
    trial: Trial, evicted_at: npt.NDArray[np.int32], budget: int, **arrays: Any
) -> Reads | None:
    """Reads of the policy on a trace with other arrays; None where rows read everything."""
    if trial.policy.sparse is None:
        return None
    trace = replace(trial.case, **arrays).trace()
    layers = range(len(evicted_at))
    with torch.inference_mode():
        return read(trace, trial.policy.sparse, evicted_at, budget, layers, "cpu")


def reads_what_is_resident(trial: Trial) -> None:
    """No row reads a page that it does not have, and what has left has no say in what is read."""
    record = trial.record
    if record.reads is None or trial.case.kind in _TIED:
        return
    for at in range(len(record.layers)):
        for row in range(record.reads.first, trial.case.n):
            pages = np.unpackbits(record.reads.bits[at, :, row - record.reads.first], axis=-1)
            most = int(record.kept(row)[at].sum(-1).max())
            beyond = pages[:, -(-most // record.reads.page) :]
            require(
                record.reads.dense(at) or not beyond.any(),
                f"row {row} of layer {at} reads a page of which it has no entry",
            )
    last = max([record.reads.first - 1, *(e for e in record.events if e < trial.case.n - 1)])
    noise = trial.noise(record.evicted_at <= last)
    noise["q"] = trial.case.q
    other = _account(trial, record.evicted_at, trial.budget, **noise)
    _same_reads(record.reads, other, slice(last + 1, trial.case.n), "dead entries overwritten")


def reading_is_causal(trial: Trial) -> None:
    """Rows later than one change nothing of what it reads."""
    record = trial.record
    if record.reads is None or trial.case.kind in _TIED or record.reads.first == trial.case.n:
        return
    now = record.reads.first + trial.salt % (trial.case.n - record.reads.first)
    later = (np.arange(trial.case.n) > now)[None, None]
    other = _account(trial, record.evicted_at, trial.budget, **trial.noise(later))
    _same_reads(record.reads, other, slice(record.reads.first, now + 1), f"rows after {now}")


#: Kinds of traces whose scores tie exactly in one order of summation and not in another.
_TIED = ("grid", "zero_keys", "repeated_keys", "steep")


def _same_reads(reads: Reads, other: Reads | None, rows: slice, change: str) -> None:
    span = slice(rows.start - reads.first, rows.stop - reads.first)
    assert other is not None  # noqa: S101  a record with reads
    same = (reads.bits[:, :, span] == other.bits[:, :, span]).all()
    require(same, f"{change}: rows {rows.start} to {rows.stop - 1} read other pages")


def reading_everything(trial: Trial) -> None:
    """A row that reads every page computes what it computes without sparse attention."""
    record, sparse = trial.record, trial.policy.sparse
    if record.reads is None or sparse is None:
        return
    full = replace(record.reads, bits=np.full_like(record.reads.bits, 255), weighted=False)
    accounts = [full]
    account = _account(trial, record.evicted_at, _MOST)
    if sparse.effect == "exact" and account is not None:
        accounts.append(account)
    trace = trial.case.trace()
    for account in accounts:
        pair = [replace(record, reads=account), replace(record, reads=None)]
        through, plain = output_error(trace, pair)
        slack = 1e-6 if trial.case.q.dtype == np.float64 else 1e-3
        for name in ("error", "mass"):
            apart = abs(getattr(through, name) - getattr(plain, name)).max(initial=0)
            require(apart <= slack, f"reading every page: {name} is {apart:.3g} apart")


def quantizer_is_a_function(trial: Trial) -> None:
    """A group of entries becomes the same again, in any company, and what is given stays."""
    quantizer = trial.policy.storage
    if not isinstance(quantizer, Quantizer):
        return
    quantizer = quantizer.of_layer(trial.record.layers[0])
    dim = trial.case.shape[-1]
    numbers = trial.case.trace().read("k").reshape(-1, dim)
    for which, rounds in enumerate((quantizer.keys, quantizer.values)):
        size = quantizer.clocks[which].group
        groups = numbers.repeat(-(-2 * size // len(numbers)), 1)
        groups = groups[: len(groups) // size * size].unflatten(0, (-1, size)).contiguous()
        given = groups.clone()
        out = rounds(groups)
        what = f"{quantizer.label}: {('keys', 'values')[which]}"
        require(torch.equal(groups, given), f"{what} of the cache are written to")
        fits = out.shape == groups.shape and out.dtype == groups.dtype
        require(fits, f"{what} are {out.dtype} {[*out.shape]}, expected {groups.dtype} as given")
        require(bool(out.isfinite().all()), f"{what} are not finite")
        order = torch.from_numpy(np.random.default_rng(trial.salt).permutation(len(groups)))
        again = rounds(groups[order])
        require(torch.equal(again, out[order]), f"{what} depend on the order of the groups")
        require(torch.equal(rounds(groups[:1]), out[:1]), f"{what} depend on other groups")
    require(min(quantizer.bits(dim)) > 0, f"{quantizer.label}: bits are {quantizer.bits(dim)}")


def heads_merge_apart(trial: Trial) -> None:
    """What merges in a head does not depend on other heads."""
    merger, layers = trial.policy.storage, list(trial.record.layers)
    if not isinstance(merger, Merger):
        return
    trace, gone = trial.case.trace(), torch.from_numpy(trial.record.gone_after)

    def folded(heads: slice) -> list[Tensor]:
        stored = [trace.read(x)[layers, heads].clone() for x in "kv"]
        for of_layer, keys, values in zip(gone[:, heads].contiguous(), *stored, strict=True):
            _ = [*folds(merger, keys, values, of_layer)]
        return stored

    every = folded(slice(None))
    for head in range(gone.shape[1]):
        for mine, other in zip(every, folded(slice(head, head + 1)), strict=True):
            near = torch.allclose(mine[:, head], other[:, 0], 1e-4, 1e-4)
            require(near, f"head {head} depends on others")
