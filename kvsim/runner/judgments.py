"""Replays judged by a model that is given or loaded by name, and the Table of their outcomes."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import polars as pl

from kvsim.analysis.live.metrics import JUDGED, KL_TOKENS
from kvsim.analysis.live.table import measure_live
from kvsim.core.lazy import threads_for
from kvsim.core.record import Record
from kvsim.core.trace import Trace
from kvsim.errors import CaptureError
from kvsim.policies.model import model_of
from kvsim.recorder import load_model
from kvsim.recorder.loading import ModelLike
from kvsim.runner.full import uncompared
from kvsim.runner.judging import Judge
from kvsim.runner.model import RunningModel
from kvsim.schema import object_at
from kvsim.store.opening import TraceLike, as_trace


def judge(
    model: ModelLike,
    trace: TraceLike,
    records: Record | Sequence[Record],
    *,
    memory: int | None = None,
    tokens: bool = False,
) -> pl.DataFrame:
    """Judge replays of a trace by a forward pass of its model.

    Args:
        model: a model of transformers, or what `kvsim.recorder.load_model` takes.
        trace: the trace, its path or URL, of all layers of the model, with its tokens.
        records: replays of it (`kvsim.replay`).
        memory: bytes that a batch of records may take, 2 GiB by default.
        tokens: add the KL of each token of the response, `response_kl_tokens`.

    Returns:
        A Table (`kvsim.measure`) of `response_kl`, `nll_increase`, `top_agreement` and
        `stream_error` [layer], of fidelity `judged`. A warning names rows of the prompt that are
        left out because they take more than 1 GiB.

    Raises:
        NeedsError: a trace without tokens, or of some layers alone.
        CaptureError: another model than the recorded one.
        PolicyError: a record that a forward pass cannot show: keys rotated to their slots, rows of
            the prompt dropped on the way down, a live run.

    Example:
        >>> record = kvsim.replay("sample", "tova", 64)
        >>> table = kvsim.judge("tiny", "sample", record)
        >>> table["metric"].unique().sort().to_list()
        ['nll_increase', 'response_kl', 'stream_error', 'top_agreement']
    """
    trace = as_trace(trace)
    records = [records] if isinstance(records, Record) else [*records]
    if isinstance(model, str | Path):
        model = load_model(model, dtype=object_at(trace.meta, "model").get("dtype"))[0]
    with threads_for(model):
        running = RunningModel(model)
        outcomes = Judge(running, trace, memory).outcomes(records)
    for remark in sorted({uncompared(running, trace, x.schedule) for x in records} - {""}):
        warnings.warn(remark, stacklevel=2)
    return measure_live(trace, records, outcomes, (*JUDGED, *[KL_TOKENS] * tokens))


def judge_of(trace: Trace, model: str, device: str, memory: int | None) -> Judge:
    """Return the judge of a trace by a model of that name, or by the recorded one without a name.

    The hub is not asked for a model that only a trace names. Raises as `Judge`, and CaptureError
    where the model cannot be loaded.
    """
    name = model or str(model_of(trace)["name"] or "")
    if not name:
        raise CaptureError(f"{trace.name} does not say of which model it is; name it by --model")
    dtype = object_at(trace.meta, "model").get("dtype")
    try:
        running = _running(name, dtype, device, cached=not model)
    except CaptureError as error:
        advice = "" if model else f"; {trace.name} names this model, give yours by --model"
        raise CaptureError(f"{error}{advice}") from error
    return Judge(running, trace, memory)


@lru_cache(maxsize=1)
def _running(name: str, dtype: str | None, device: str, *, cached: bool) -> RunningModel:
    return RunningModel(load_model(name, dtype=dtype, device=device, cached=cached)[0])
