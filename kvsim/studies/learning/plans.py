"""Plans of heads: the error of each head when it streams, or the utility of its evicted entries."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression

from kvsim.analysis.arrays import Floats
from kvsim.analysis.output.error import output_error
from kvsim.core.lazy import Tensor
from kvsim.core.parameters import parameters
from kvsim.core.policy import Everything, Inputs, Policy, Protection, Schedule, Scorer
from kvsim.core.trace import Trace
from kvsim.core.view import View
from kvsim.engine.replay import replay
from kvsim.errors import BudgetError, PolicyError
from kvsim.policies.duo import HeadPlan
from kvsim.policies.expected_attention import quadratic
from kvsim.policies.foreign import plain_scorer
from kvsim.policies.lukv import PARAMS, PERCENTS, SCORER, SINK
from kvsim.policies.model import common_model
from kvsim.policies.naming import policy
from kvsim.schema import NEVER
from kvsim.store.opening import Traces, as_traces

# Rows whose attention is computed at once.
_ROWS = 64


def head_plan(traces: Traces, budget: int, *, sink: int = 4) -> HeadPlan:
    """Return the plan of a model: the score of each KV head, for `duo:FILE`.

    The score of a head is the error of its attention output if only it streams
    (`kvsim.policies.duo`); a layer whose sliding window bounds its cache scores 0.

    Args:
        traces: of one model, each with rows after its prompt.
        budget: entries of a head that streams, sinks included.
        sink: first positions that a streaming head keeps.

    Raises:
        PolicyError: a trace has no rows after its prompt, or traces are of different models.
        BudgetError: the budget holds no more than the sinks, or all of a trace.
    """
    streaming = policy("streaming_llm", sink=sink)
    tables: list[Floats] = []
    traces, training = _answered(traces)
    for trace in traces:
        record = replay(trace, streaming, budget, interval=1)
        if (record.evicted_at == NEVER).all():
            raise BudgetError(
                f"budget {budget} holds all {trace.n_pos} tokens of {trace.name}, so that heads do "
                "not differ; expected fewer entries"
            )
        (error,) = output_error(trace, [record], prompt=False)
        table = np.zeros((trace.n_layers, trace.part().n_heads))
        of_rows = error.error.astype(np.float64).mean(-1)
        table[list(record.layers)] = of_rows.reshape(len(of_rows), table.shape[1], -1).mean(-1)
        tables.append(table)
    return HeadPlan(np.mean(tables, axis=0).tolist(), {**training, "budget": budget, "sink": sink})


def _answered(traces: Traces) -> tuple[list[Trace], dict[str, Any]]:
    """Return traces, their digests and model; PolicyError for several models or no response."""
    traces = as_traces(traces)
    if not traces:
        raise PolicyError("there are no traces; expected traces of one model, with a response each")
    for trace in traces:
        if trace.prompt_len == trace.n_pos:
            raise PolicyError(
                f"{trace.name} has no rows after its prompt, by which heads are measured; "
                "expected a trace with a response, capture with --max-new-tokens"
            )
    digests = {trace.name: trace.digest if trace.path is not None else "" for trace in traces}
    return traces, {"traces": digests, "model": common_model(traces)}


class Utility(Scorer):
    """Maximum over later rows and query heads of attention times the norm of the value."""

    label: ClassVar[str] = "lukv"
    reads = Inputs(future=True, arrays=frozenset({"o_proj"}))  # of the values

    def score(self, view: View) -> Tensor:
        """max over rows r after the event and query heads h of A_r,h(j) |W_h v_j| / sum; [L, H, n].

        A is the full cache's attention; the sum is over query heads and entries of a layer.
        """
        keys, n, rows = view.keys, view.pos.shape[-1], view.source.n_rows
        gram = (o_proj := view.array("o_proj")) @ o_proj.mT  # [L, H, G, d, d]
        size = quadratic(view.values, gram).clamp_(min=0).sqrt_()  # [L, H, G, n]
        size /= size.sum((1, 2, 3), keepdim=True).clamp_(min=1e-30)
        best = keys.new_zeros((*keys.shape[:2], n))
        for low in range(view.row + 1, rows, _ROWS):
            high = min(low + _ROWS, rows)
            queries, lse = view.queries(range(low, high)), view.source.full(low, high)[1]
            for layer, visible in enumerate(keys.mT):  # [H, d, n]
                q = queries[layer].flatten(1, 2) * view.formula.scale  # [H, G * w, d]
                z = view.formula.capped(q @ visible).sub_(lse[layer].flatten(1).unsqueeze(-1))
                weights = z.exp_().unflatten(1, lse.shape[2:])  # [H, G, w, n]
                most = (weights.amax(2) * size[layer]).amax(1)
                best[layer] = best[layer].maximum(most)
        return best


def utility_plan(traces: Traces, *, scorer: str = SCORER, sink: int = SINK) -> HeadPlan:
    """Return the plan of a model for `lukv:FILE`: the shares of its entries that each head loses.

    `kvsim.policies.lukv` has the rule. A layer whose sliding window bounds its cache loses nothing,
    and one that reads the entries of another layer has the shares of that one.

    Args:
        traces: of one model, each with rows after its prompt and output projections.
        scorer: which entries of a head leave first; Expected Attention has the release's epsilon.
        sink: first positions that no head loses.

    Raises:
        NeedsError: a trace has no output projections.
        PolicyError: a trace has no rows after its prompt, or no entry that may leave; traces are of
            different models; or the scorer is none that leaves all heads the same number.
    """
    traces, training = _answered(traces)
    params = PARAMS if scorer == SCORER else {}
    piece = plain_scorer("lukv", scorer)
    sinks = {"sink": sink} if "sink" in parameters(piece) else {}
    tables = [_shares_of(trace, piece(**sinks, **params), sink) for trace in traces]
    training |= {"scorer": scorer, "params": params, "sink": sink}
    return HeadPlan(np.mean(tables, axis=0).tolist(), training)


def _shares_of(trace: Trace, scorer: Scorer, sink: int) -> Floats:
    """Shares of each head's evicted entries, by one trace; [99, layer, KV head]."""
    n = trace.prompt_len
    protect = scorer.protection(n) | Protection(sink=sink, recent=1)
    size = protect.size(n)
    if n <= size:
        raise PolicyError(f"lukv: all {n} tokens of the prompt of {trace.name} are protected")
    layers, scores = _scored(trace, scorer)
    _, utility = _scored(trace, Utility())
    free = slice(protect.first(n), n - protect.recent)
    # the lowest score is evicted first; ties evict the higher position
    scores, utility = scores[..., free][..., ::-1], utility[..., free][..., ::-1]
    lost = np.take_along_axis(utility, scores.argsort(-1, kind="stable"), -1)
    leaving = greedy(lost, n, n - max(size, round((1 - PERCENTS / 100) * n)))
    table = np.zeros((PERCENTS, trace.n_layers, trace.n_heads))
    table[:, layers] = leaving / n
    return table[:, list(trace.owners)]


def _scored(trace: Trace, scorer: Scorer) -> tuple[list[int], Floats]:
    """Layers, and the scores of their entries after the prompt, [L, H, n]."""
    everything = Policy("lukv", scorer, Everything(), Schedule(interval=None))
    plans = replay(trace, everything, 1, internals=True).internals
    layers = [layer for each in plans for layer in each.layers]
    return layers, np.concatenate([each.scores for each in plans])


def greedy(lost: Floats, n: int, most: int) -> NDArray[np.int64]:
    """Entries of each head that have left at 1..99 per cent of all entries, int [99, L, H].

    The cheapest entry of all heads leaves first, by the steps of the lower convex hull of a head's
    cumulative loss; ties by the lower layer, then the lower head. lost [L, H, m]: utility of
    entries in the order in which they leave. n: entries of a head; most: that may leave.
    """
    layers, heads, _ = lost.shape
    width = layers * heads
    # the slopes of the hull of a cumulative sum are the isotonic regression of its steps
    steps = np.apply_along_axis(lambda x: isotonic_regression(x).x, -1, lost)[..., :most]
    head = np.maximum.accumulate(steps, -1).argsort(axis=None, kind="stable") // most
    targets = (np.arange(1, PERCENTS + 1) / 100 * (width * n)).round()
    first = np.searchsorted(targets, np.arange(len(head)), side="right")  # at which it has left
    counts = np.bincount(first * width + head, minlength=(PERCENTS + 1) * width)
    return counts.reshape(-1, layers, heads)[:PERCENTS].cumsum(0)
