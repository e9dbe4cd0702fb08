"""`head_plan`: which heads of a model lose most if they hold sinks and recent entries alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvsim.analysis.arrays import Floats
from kvsim.analysis.output.error import output_error
from kvsim.core.trace import Trace
from kvsim.engine.replay import replay
from kvsim.errors import PolicyError
from kvsim.policies.duo import HeadPlan
from kvsim.policies.model import common_model
from kvsim.policies.naming import policy
from kvsim.store.opening import Traces, as_traces


def head_plan(traces: Traces, budget: int, *, sink: int = 4) -> HeadPlan:
    """Return the plan of a model: the score of each KV head, for `duo:FILE`.

    The score of a head is the error of its attention output if it alone streams
    (`kvsim.policies.duo`); a layer whose sliding window bounds its cache scores 0.

    Args:
        traces: of one model, each with rows after its prompt.
        budget: entries of a head that streams, sinks included.
        sink: first positions that a streaming head keeps.

    Raises:
        PolicyError: a trace has no rows after its prompt, or traces are of different models.
        BudgetError: the budget holds no more than the sinks.
    """
    streaming = policy("streaming_llm", sink=sink)
    tables: list[Floats] = []
    traces, training = answered(traces)
    for trace in traces:
        record = replay(trace, streaming, budget, interval=1)
        (error,) = output_error(trace, [record], prompt=False)
        table = np.zeros((trace.n_layers, trace.n_heads))
        of_rows = error.error.astype(np.float64).mean(-1)
        table[list(record.layers)] = of_rows.reshape(len(of_rows), trace.n_heads, -1).mean(-1)
        tables.append(table)
    return HeadPlan(np.mean(tables, axis=0).tolist(), {**training, "budget": budget, "sink": sink})


def answered(traces: Traces) -> tuple[list[Trace], dict[str, Any]]:
    """Return traces, their digests and model. Raises PolicyError for several, or no response."""
    traces = as_traces(traces)
    if not traces:
        raise PolicyError("there are no traces; expected traces of one model, with a response each")
    model = common_model(traces)
    for trace in traces:
        if trace.prompt_len == trace.n_pos:
            raise PolicyError(
                f"{trace.name} has no rows after its prompt, by which heads are measured; "
                "expected a trace with a response, capture with --max-new-tokens"
            )
    digests = {trace.name: trace.digest if trace.path is not None else "" for trace in traces}
    return traces, {"traces": digests, "model": model}
