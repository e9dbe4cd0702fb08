"""Invariants of what must not change a Record.

Later rows, rows that do not reach a layer, other traces, how it is computed, the
order of the heads.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from kvsim.core.policy import Allocator, Even, Plan, Schedule
from kvsim.core.trace import Trace
from kvsim.core.view import View
from kvsim.engine.checks import Setup
from kvsim.engine.replay import run
from kvsim.errors import BudgetError, PolicyError, TraceError
from kvsim.schema import NEVER
from kvsim.testing.invariants.trial import Broken, Trial, require, smallest_budget


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
            trial.replay(trace, by_row=by_row, copied=False)
            after = _arrays(trace)
        except TraceError as error:
            raise Broken(str(error)) from error
        for name, array in before.items():
            require(torch.equal(after[name], array), f"{name} of the trace has changed")


def _arrays(trace: Trace) -> dict[str, Tensor]:
    arrays = {name: trace.read(name) for name in trace.source.shapes}
    return arrays | dict(zip(("attn_out", "lse"), trace.full(), strict=True))


def causality(trial: Trial) -> None:
    """Rows later than an event, changed or absent, change nothing at or before it."""
    case = trial.case
    now = case.prompt_len - 1 + trial.salt % (case.n - case.prompt_len + 1)
    if trial.record.events and trial.salt % 4:  # mostly a row whose event evicts
        now = trial.record.events[trial.salt % len(trial.record.events)]
    _same_before(now + 1, trial, f"rows after {now}", trial.later(now + 1), trial.first(now + 1))


def _same_before(end: int, trial: Trial, what: str, *others: Trial) -> None:
    """Raise Broken where others, with other rows from `end` on or none, evict otherwise before."""
    if trial.policy.scorer.reads.future or not all(map(_has_rule, others)):
        return
    for other in others:
        evicted_at, n = np.full_like(trial.record.evicted_at, NEVER), other.case.n
        evicted_at[:, :, :n] = other.replay().evicted_at
        change = "changed" if n == trial.case.n else "cut off"
        trial.same(evicted_at, f"{what} {change}", until=end)


def same_events(trial: Trial) -> None:
    """Events that evict alike keep the same sets, whatever the schedule has behind the trace.

    With room for the whole prompt the event after it counts for nothing.
    """
    case, policy = trial.case, trial.policy
    beyond = case.n - case.prompt_len + 1 + trial.salt % case.n
    alone, none = replace(trial, interval=beyond, prefill=True), Schedule(interval=None)
    try:
        record = run(Setup(case.trace(), policy, trial.budget, none).checked())
    except (BudgetError, PolicyError):
        require(not _has_rule(alone), f"refused with no interval, and not with {beyond}")
    else:
        alone.same(record.evicted_at, f"no interval instead of {beyond}, behind the trace")
    if policy.bounded and trial.record.selection is None and trial.budget >= case.prompt_len:
        fires = case.prompt_len - 1 not in trial.rows
        other = replace(trial, prefill=fires).replay()
        trial.same(other.evicted_at, f"prefill {fires}, where the prompt has room")


def unknown_question(trial: Trial) -> None:
    """A context is compressed as if nothing followed it; where it is the prompt, as the prompt is.

    After a context, replaying row by row gives what replaying event by event gives.
    """
    prompt_len = trial.case.prompt_len
    end = 1 + trial.salt % prompt_len
    rng = np.random.default_rng(trial.salt)
    compress: Literal["context", "both"] = "both" if rng.random() < 0.5 else "context"
    longer = int(rng.integers(end, trial.case.n + 1))
    what = f"compress {compress!r}"
    cut = replace(trial, context_len=end, compress=compress)
    if _as_the_prompt(trial, what, replace(cut, context_len=prompt_len), cut):
        others = cut.later(end, prompt_len=longer), trial.first(end, prompt_len=end)
        _same_before(end, cut, f"{what}: the question", *others)


def chunked_prompt(trial: Trial) -> None:
    """A chunk is compressed as if the prompt ended there; one chunk is the prompt as ever.

    Half of the trials are compared with the naive replay, the others with other rows.
    """
    prompt_len = trial.case.prompt_len
    chunk = 1 + trial.salt % prompt_len
    cut, whole = replace(trial, chunk=chunk), replace(trial, chunk=prompt_len + trial.salt % 2)
    if not _as_the_prompt(trial, f"chunks of {chunk}", whole, cut):
        return
    if trial.salt // 32 % 2:
        naive_replay(cut)
        return
    end = chunk * (1 + trial.salt // prompt_len % (prompt_len // chunk))  # of one of the chunks
    others = cut.later(end), cut.first(end, prompt_len=end)
    _same_before(end, cut, f"chunks of {chunk}: rows from {end} on", *others)


def later_questions(trial: Trial) -> None:
    """Events after later questions evict what the naive replay does, and are causal.

    Another last question, or none, changes nothing before it; with one turn they are none.
    """
    case, asked = trial.case, replace(trial, compress="questions")
    rng, places = np.random.default_rng(trial.salt), range(case.prompt_len + 1, case.n)
    if len(places) < 4:
        return
    a, b, c, d = sorted(rng.choice(places, 4, replace=False).tolist())
    cut = replace(asked, questions=((a, b), (c, d)))
    if not _as_the_prompt(trial, "compress 'questions'", asked, cut):
        return
    if trial.salt % 4 == 1:  # as slow as all the rest
        naive_replay(cut)
    other = replace(cut.later(c), questions=((a, b),))
    _same_before(c, cut, "the last question", other)


def _as_the_prompt(trial: Trial, what: str, whole: Trial, cut: Trial) -> bool:
    """Require that a part that is the whole prompt, and rows instead of events, change nothing.

    Returns whether the policy has a rule for the part of `cut`.
    """
    same = (whole.replay().evicted_at == trial.record.evicted_at).all()
    require(same, f"{what}: other than the prompt where it is all of it")
    if not _has_rule(cut):
        return False
    if True in cut.ways:
        cut.same(cut.replay(by_row=False).evicted_at, f"{what}: event by event")
    return True


def _has_rule(trial: Trial) -> bool:
    try:
        trace = trial.case.trace(trial.context_len, trial.questions)
        Setup(trace, trial.policy, trial.budget, trial.schedule).checked()
    except (BudgetError, PolicyError):
        return False
    return True


def absent_rows(trial: Trial) -> None:
    """Queries, keys and values of rows that do not reach a layer change nothing there."""
    if trial.present.all():
        return
    absent = ~trial.present[:, None]
    selection = trial.record.selection
    if selection is not None and selection.restarted:
        dropped = selection.dropped[0]
        absent = absent & (np.arange(len(absent)) > dropped)[:, None, None]
    record = replace(trial, case=replace(trial.case, **trial.noise(absent))).replay()
    trial.same(record.evicted_at, "rows that do not reach the layer were overwritten")


def isolation(trial: Trial) -> None:
    """A, then B, then A again: the same as A alone, and the policy object is as it was."""
    before = [repr(getattr(trial.policy, each.name)) for each in fields(trial.policy)]
    expected = trial.record.evicted_at.copy()
    trial.later(0).replay()
    require(
        (trial.replay().evicted_at == expected).all(),
        "another trace replayed in between changes the outcome",
    )
    after = [repr(getattr(trial.policy, each.name)) for each in fields(trial.policy)]
    require(after == before, f"the policy was {before}, is {after}")


def layer_blocks(trial: Trial) -> None:
    """Layers one by one as in one block."""
    layers = trial.case.shape[0]
    if layers == 1 or trial.policy.across_layers:
        return
    alone = [trial.replay(layers=[layer]).evicted_at[0] for layer in range(layers)]
    trial.same(np.stack(alone), "layers replayed one by one")


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
    if trial.record.selection is not None:  # the budget also says how many rows go on
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
    permuted = replace(trial, case=trial.case.permuted(order, qorder)).replay().evicted_at
    back = np.empty_like(permuted)
    back[:, qorder if trial.policy.per_query_head else order] = permuted
    trial.same(back, f"heads in the order {order.tolist()}")
