"""Invariants that say what a Record does not depend on.

Later rows, rows that do not reach a layer, other traces, how it is computed, the
order of the heads.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, fields, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from kvsim.core.policy import Allocator, Even, Plan, Policy, Schedule
from kvsim.core.trace import Trace
from kvsim.core.view import View
from kvsim.engine import check_cell, layers_per_block
from kvsim.engine.replay import ReplayOptions, run
from kvsim.errors import BudgetError, MemoryLimitError, PolicyError, TraceError
from kvsim.schema import NEVER
from kvsim.testing.invariants.trial import Broken, Trial, require, smallest_budget
from kvsim.testing.strategies import make_case


@dataclass(frozen=True)
class PerHead(Allocator):
    """A testing allocator: a fixed number of entries for each KV head."""

    quotas: tuple[int, ...]

    def plan(self, view: View, scores: Tensor, protected: Tensor) -> Plan:
        """The same quotas in every layer and at every event."""
        return Plan(torch.tensor(self.quotas).expand_as(view.count))


def input_unchanged(trial: Trial) -> None:
    """A replay writes to nothing that it reads, so that the next policy reads the same trace."""
    trace = trial.case.trace()
    before = {name: array.clone() for name, array in _arrays(trace).items()}
    for by_row in trial.ways:
        try:
            trial.replay(trace, by_row=by_row)
            after = _arrays(trace)
        except TraceError as error:
            raise Broken(str(error)) from error
        for name, array in before.items():
            require(torch.equal(after[name], array), f"{name} of the trace has changed")


def _arrays(trace: Trace) -> dict[str, Tensor]:
    """The arrays of a trace, and its full attention."""
    arrays = {name: trace.read(name) for name in trace.source.shapes}
    return arrays | dict(zip(("attn_out", "lse"), trace.full(), strict=True))


def causality(trial: Trial) -> None:
    """Rows later than an event, changed or absent, change nothing at or before it."""
    case = trial.case
    if trial.policy.scorer.clairvoyant:
        return
    now = case.prompt_len - 1 + trial.salt % (case.n - case.prompt_len + 1)
    if trial.record.events and trial.salt % 4:  # mostly a row whose event evicts
        now = trial.record.events[trial.salt % len(trial.record.events)]
    later = trial.noise((np.arange(case.n) > now)[None, None])
    changed = replace(trial, case=replace(case, **later))
    trial.same(changed.replay().evicted_at, f"rows after {now} changed", until=now + 1)
    past = {name: getattr(case, name)[:, :, : now + 1] for name in "qkv"}
    short = replace(trial, case=replace(case, **past)).replay().evicted_at
    padded = np.full_like(trial.record.evicted_at, NEVER)
    padded[:, :, : now + 1] = short
    trial.same(padded, f"rows after {now} cut off", until=now + 1)


def same_events(trial: Trial) -> None:
    """Events that evict alike keep the same sets, whatever the schedule has behind the trace.

    With room for the whole prompt the event after it counts for nothing.
    """
    case, policy = trial.case, trial.policy
    beyond = case.n - case.prompt_len + 1 + trial.salt % case.n
    alone, none = replace(trial, interval=beyond, prefill=True), Schedule(interval=None)
    try:
        record = run(case.trace(), policy, trial.budget, none, ReplayOptions())
    except (BudgetError, PolicyError):
        require(not _has_rule(alone), f"refused with no interval, and not with {beyond}")
    else:
        alone.same(record.evicted_at, f"no interval instead of {beyond}, behind the trace")
    if policy.bounded and policy.propagation is None and trial.budget >= case.prompt_len:
        fires = case.prompt_len - 1 not in trial.rows
        other = replace(trial, prefill=fires).replay()
        trial.same(other.evicted_at, f"prefill {fires}, where the prompt has room")


def unknown_question(trial: Trial) -> None:
    """A context is compressed as if nothing followed it; where it is the prompt, as the prompt is.

    After a context, replaying row by row gives what replaying event by event gives.
    """
    case, prompt_len = trial.case, trial.case.prompt_len
    context_len = 1 + trial.salt % prompt_len
    rng = np.random.default_rng(trial.salt)
    compress: Literal["context", "both"] = "both" if rng.random() < 0.5 else "context"
    whole = replace(trial, context_len=prompt_len, compress=compress)
    same = (whole.replay().evicted_at == trial.record.evicted_at).all()
    require(same, f"compress {compress!r}: other than the prompt where the context is all of it")
    cut = replace(trial, context_len=context_len, compress=compress)
    if not _has_rule(cut):
        return
    if True in cut.ways:
        cut.same(cut.replay(by_row=False).evicted_at, f"compress {compress!r}: event by event")
    other = trial.noise((np.arange(case.n) >= context_len)[None, None])
    longer = int(rng.integers(context_len, case.n + 1))
    changed = replace(cut, case=replace(case, prompt_len=longer, **other))
    past = {name: getattr(case, name)[:, :, :context_len] for name in "qkv"}
    short = replace(trial, case=replace(case, prompt_len=context_len, **past))
    if trial.policy.scorer.clairvoyant or not (_has_rule(changed) and _has_rule(short)):
        return
    evicted_at = changed.replay().evicted_at
    cut.same(evicted_at, f"compress {compress!r}: another question", until=context_len)
    alone = np.full_like(evicted_at, NEVER)
    alone[:, :, :context_len] = short.replay().evicted_at
    cut.same(alone, f"compress {compress!r}: the context as a prompt", until=context_len)


def chunked_prompt(trial: Trial) -> None:
    """A chunk is compressed as if the prompt ended there; one chunk is the prompt as ever.

    Half of the trials are compared with the naive replay, the others with other rows.
    """
    case, prompt_len = trial.case, trial.case.prompt_len
    chunk = 1 + trial.salt % prompt_len
    whole = replace(trial, chunk=prompt_len + trial.salt % 2)
    same = (whole.replay().evicted_at == trial.record.evicted_at).all()
    require(same, "a chunk as long as the prompt: other than without chunks")
    cut = replace(trial, chunk=chunk)
    if not _has_rule(cut):
        return
    if trial.salt // 32 % 2:
        naive_replay(cut)
        if True in cut.ways:
            cut.same(cut.replay(by_row=False).evicted_at, f"chunks of {chunk}: event by event")
        return
    end = chunk * (1 + trial.salt // prompt_len % (prompt_len // chunk))  # of one of the chunks
    past = {name: getattr(case, name)[:, :, :end] for name in "qkv"}
    short = replace(cut, case=replace(case, prompt_len=end, **past))
    if trial.policy.scorer.clairvoyant or not _has_rule(short):
        return
    later = trial.noise((np.arange(case.n) >= end)[None, None])
    changed = replace(cut, case=replace(case, **later))
    cut.same(changed.replay().evicted_at, f"chunks of {chunk}: rows from {end} on", until=end)
    alone = np.full_like(cut.record.evicted_at, NEVER)
    alone[:, :, :end] = short.replay().evicted_at
    cut.same(alone, f"chunks of {chunk}: the first {end} rows as a prompt", until=end)


def later_questions(trial: Trial) -> None:
    """Events after later questions evict what the naive replay does, and are causal.

    Another last question, or none, changes nothing before it; with one turn they are none.
    """
    case, asked = trial.case, replace(trial, compress="questions")
    same = (asked.replay().evicted_at == trial.record.evicted_at).all()
    require(same, "compress 'questions': other than the prompt where there is one turn")
    if case.n - case.prompt_len < 5:
        return
    rng, places = np.random.default_rng(trial.salt), range(case.prompt_len + 1, case.n)
    a, b, c, d = sorted(rng.choice(places, 4, replace=False).tolist())
    cut = replace(asked, questions=((a, b), (c, d)))
    if not _has_rule(cut):
        return
    if True in cut.ways:
        cut.same(cut.replay(by_row=False).evicted_at, "after questions: event by event")
    if trial.salt % 4 == 1:  # as slow as all the rest
        naive_replay(cut)
    later = trial.noise((np.arange(case.n) >= c)[None, None])
    changed = replace(cut, case=replace(case, **later), questions=((a, b),))
    if not trial.policy.scorer.clairvoyant and _has_rule(changed):
        cut.same(changed.replay().evicted_at, "another last question", until=c)


def _has_rule(trial: Trial) -> bool:
    """Whether the policy has a rule for the budget, the context and the length of a trial."""
    trace = trial.case.trace(trial.context_len)
    try:
        trace = trial.case.trace(trial.context_len, trial.questions)
        check_cell(trace, trial.policy, trial.budget, None, trial.schedule)
    except (BudgetError, PolicyError):
        return False
    return True


def absent_rows(trial: Trial) -> None:
    """Queries, keys and values of rows that do not reach a layer change nothing there."""
    if trial.present.all():
        return
    absent = ~trial.present[:, None]
    if trial.policy.propagation is not None and trial.policy.propagation.restarts:
        dropped = trial.record.selection.dropped[0] if trial.record.selection else 0
        absent = absent & (np.arange(len(absent)) > dropped)[:, None, None]
    record = replace(trial, case=replace(trial.case, **trial.noise(absent))).replay()
    trial.same(record.evicted_at, "rows that do not reach the layer were overwritten")


def isolation(trial: Trial) -> None:
    """A, then B, then A again: the same as A alone, and the policy object is as it was."""
    before = _pieces(trial.policy)
    expected = trial.record.evicted_at.copy()
    layers, heads, group, n, dim = trial.case.shape
    other = make_case(
        "sharp",
        layers=layers,
        heads=heads,
        group=group,
        n=n,
        dim=dim,
        prompt_len=trial.case.prompt_len,
        seed=trial.salt + 1,
    )
    replace(trial, case=other).replay()
    require(
        (trial.replay().evicted_at == expected).all(),
        "another trace replayed in between changes the outcome",
    )
    after = _pieces(trial.policy)
    require(after == before, f"the policy was {before}, is {after}")


def _pieces(policy: Policy) -> str:
    """Every field of a policy and its pieces; the repr of a policy shows some."""
    return ", ".join(f"{each.name}={getattr(policy, each.name)!r}" for each in fields(policy))


def layer_blocks(trial: Trial) -> None:
    """Layers one by one, or in the smallest memory that works, as in one block."""
    layers = trial.case.shape[0]
    if layers == 1 or trial.policy.across_layers:
        return
    alone = [trial.replay(layers=[layer]).evicted_at[0] for layer in range(layers)]
    trial.same(np.stack(alone), "layers replayed one by one")
    trial.same(trial.replay(memory=_smallest_memory(trial)).evicted_at, "smallest memory")


def _smallest_memory(trial: Trial) -> int:
    trace = trial.case.trace()
    trace = trace.per_query_head() if trial.policy.per_query_head else trace

    def enough(memory: int) -> bool:  # whatever is evicted
        try:
            return layers_per_block(trace, trial.policy, memory) > 0
        except MemoryLimitError:
            return False

    return bisect_left(range(1 << 40), x=True, key=enough)


def thread_count(trial: Trial) -> None:
    """The number of threads changes nothing."""
    before = torch.get_num_threads()
    try:
        for threads in {1, 2} - {before}:
            torch.set_num_threads(threads)
            trial.same(trial.replay().evicted_at, f"with {threads} threads")
    finally:
        torch.set_num_threads(before)


def rows_equal_events(trial: Trial) -> None:
    """The path for an interval of 1 and the general one give the same Record.

    Internals are those of events, so that a Record with them never takes the path for rows.
    """
    trial.same(trial.detailed.evicted_at, "with internals, by events instead of rows")


def naive_replay(trial: Trial) -> None:
    """The policy evicts what its rule evicts in a naive float64 loop."""
    difference, _ = trial.against_rule
    require(not difference, difference)


def ragged(trial: Trial) -> None:
    """Heads that keep different numbers keep what each would keep at its own number.

    It is skipped where protection depends on the budget, and where there is no room to differ.
    """
    heads, n = trial.record.evicted_at.shape[1], trial.case.n
    if heads < 2 or not trial.plain or not isinstance(trial.policy.layer_budgets, Even):
        return
    if trial.policy.propagation is not None:  # the budget also says how many rows go on
        return
    least = smallest_budget(trial.policy, trial.case)
    spread = 1 + trial.salt % 3
    budget = least + spread
    quotas = [budget] * heads
    quotas[trial.salt % heads] += spread
    quotas[(trial.salt + 1) % heads] -= spread
    fit = trial.policy.at(budget)
    always = fit.protection(budget)
    if budget + spread >= n or min(quotas) < always.size(n):
        return
    # the prompt is longer than every quota, so that all heads act at the same events
    prompt_len = max(trial.case.prompt_len, budget + spread + 1)
    case = replace(trial.case, prompt_len=prompt_len)
    together = replace(
        trial,
        policy=replace(trial.policy, allocator=PerHead(tuple(quotas))),
        rule=None,
        case=case,
        budget=budget,
        prefill=True,
    ).replay()
    for head, quota in enumerate(quotas):
        if trial.policy.at(quota) != fit or fit.protection(quota) != always:
            continue
        alone = replace(trial, case=case, budget=quota, prefill=True)
        evicted_at = alone.record.evicted_at.copy()
        evicted_at[:, head] = together.evicted_at[:, head]
        alone.same(evicted_at, f"head {head} with {quota} entries among heads with {quotas}")


def head_permutation(trial: Trial) -> None:
    """Permuting the KV heads, their queries with them, permutes the outcome."""
    _, heads, group, _, _ = trial.case.shape
    order = np.random.default_rng(trial.salt).permutation(heads)
    qorder = (order[:, None] * group + np.arange(group)).ravel()
    case = trial.case
    moved = replace(
        case,
        q=case.q[:, qorder],
        k=case.k[:, order],
        v=case.v[:, order],
        o_proj=None if case.o_proj is None else case.o_proj[:, qorder],
        probe_q=case.probe_q[:, qorder],
        probe_k=case.probe_k[:, order],
    )
    permuted = replace(trial, case=moved).replay().evicted_at
    back = np.empty_like(permuted)
    back[:, qorder if trial.policy.per_query_head else order] = permuted
    trial.same(back, f"heads in the order {order.tolist()}")
