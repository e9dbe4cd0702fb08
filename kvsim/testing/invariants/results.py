"""Invariants of a Record: sizes, protection, ties, finite numbers, the same after storing."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np

from kvsim.analysis.output.error import output_error
from kvsim.core.pieces import ACROSS_LAYERS, Everything
from kvsim.core.record import record_document, record_of
from kvsim.schema import GUIDE, NEVER
from kvsim.testing.invariants.trial import Trial, require


def exact_size(trial: Trial) -> None:
    """After an event that acts, a layer holds exactly its budget; at others nothing leaves."""
    record, policy = trial.detailed, trial.policy
    heads, due = record.evicted_at.shape[1], trial.rows
    end = trial.case.prompt_len - 1
    # rows of the prompt are dropped whether an event fires or not
    allowed = set(due) if trial.present.all() else {*due, end}
    require(set(record.events) <= allowed, f"entries left after rows {record.events}, due {due}")
    if isinstance(policy.allocator, Everything):
        due = [row for row in due if row == end]
    if policy.effect != "exact":
        return
    pooled = policy.allocator.shared in ACROSS_LAYERS
    shared = policy.layer_budgets.shared in ACROSS_LAYERS or pooled
    for row in due:
        before, after = record.kept(row).sum(-1), record.retained(row).sum(-1)
        budgets = np.full(len(before), trial.budget)
        for plans in (plans for plans in record.internals if plans.row == row):
            budgets[list(plans.layers)] = plans.budgets
        require(
            budgets.sum() == budgets.size * trial.budget,
            f"after row {row} the layers' budgets are {budgets.tolist()}",
        )
        if shared:
            acts = np.full(len(before), before.sum() > before.size * trial.budget)
        else:
            acts = before.sum(-1) > heads * budgets
        expected = np.where(acts, heads * budgets, before.sum(-1))
        require(
            pooled or bool((after.sum(-1) == expected).all()),
            f"after row {row} layers hold {after.tolist()}, expected {expected} over their heads",
        )
        if trial.plain:
            uneven = after[acts] != budgets[acts, None]
            require(not uneven.any(), f"after row {row} heads hold {after.tolist()}")
        if shared and acts.all():
            require(
                after.sum() == after.size * trial.budget,
                f"after row {row} the layers together hold {after.sum()}",
            )


def nothing_returns(trial: Trial) -> None:
    """Each row has its own entry, and sees it and what has not left after an earlier row."""
    last, n, row = trial.record.evicted_at, trial.case.n, trial.salt % trial.case.n
    early, absent = last < np.arange(n), ~trial.present[:, None]
    require((early == absent).all(), "an entry left before its own row")
    require((last[early] == early.nonzero()[2] - 1).all(), "a row that never was has an end")
    seen = (np.arange(n) <= row) & (row <= last)
    require((trial.record.kept(row) == seen).all(), f"kept({row}) is not what row {row} sees")
    held = trial.record.retained(row) == seen & (row < last)
    require(held.all(), f"retained({row}) is not what the cache holds")


def protected_survive(trial: Trial) -> None:
    """No event evicts an entry that is protected at it."""
    last = trial.detailed.evicted_at
    for plans in trial.detailed.internals:
        for layer, budget in zip(plans.layers, plans.budgets.tolist(), strict=True):
            lost = (last[layer] == plans.row) & trial.protected(plans.row, budget, layer)
            require(
                not lost.any(),
                f"after row {plans.row} protected {np.unique(lost.nonzero()[1])} left",
            )


def full_budget(trial: Trial) -> None:
    """While there is room nothing leaves, and the output error is exactly 0."""
    if not trial.policy.bounded:
        return
    first = int(trial.record.gone_after.min())
    require(first >= trial.budget, f"an entry left after row {first}, which had room")
    for budget in (trial.case.n, trial.case.n + 3):
        record = replace(trial, budget=budget).replay()
        require((record.evicted_at == NEVER).all(), f"an entry left at budget {budget}")
    if record.reads is not None or trial.policy.rounds:  # nothing leaves, and yet
        return
    error = output_error(trial.case.trace(), [record])[0]
    require((error.error == 0).all(), f"output error {error.error.max()} with nothing evicted")
    require((error.mass == 1).all(), f"retained mass {error.mass.min()} with nothing evicted")


def tie_rule(trial: Trial) -> None:
    """Of the unprotected entries those with the higher score stay; of equal ones the lower."""
    last = trial.detailed.evicted_at
    for plans in trial.detailed.internals:
        for i, head in np.ndindex(plans.pos.shape[:2]):
            live, layer = plans.pos[i, head] >= 0, plans.layers[i]
            pos, score = plans.pos[i, head][live], plans.scores[i, head][live]
            require((np.diff(pos) > 0).all(), f"entries out of order at row {plans.row}")
            gone = last[layer, head, pos] == plans.row
            rest = ~gone & ~trial.protected(plans.row, int(plans.budgets[i]), layer)[pos]
            if plans.eligible is not None:
                gone &= plans.eligible[i, head][live]
            group = np.zeros_like(pos) if plans.groups is None else plans.groups[i, head][live]
            order = np.lexsort((pos, -score))  # the best first
            for index in np.unique(group[gone]):
                stays, leaves = (order[(x & (group == index))[order]] for x in (rest, gone))
                worst, best = stays[-1:], leaves[:1]
                require(
                    not len(worst) or (order == worst).argmax() < (order == best).argmax(),
                    f"after row {plans.row} of layer {layer}, head {head}: position {pos[best]} "
                    f"with score {score[best]} left, {pos[worst]} with {score[worst]} stayed",
                )


def declared_sign(trial: Trial) -> None:
    """Scores are 0 or more, unless the scorer declares another scale."""
    if trial.policy.scorer.scale != "positive":
        return
    for plans in trial.detailed.internals:
        live = plans.pos >= 0
        least = plans.scores[live].min(initial=0.0)
        require(
            least >= 0,
            f"a score is {least:.3g} after row {plans.row}, and the scorer does not say that some "
            f"can be negative; expected `scale = 'signed'`, see {GUIDE}",
        )


def finite(trial: Trial) -> None:
    """Scores, output error and retained mass are numbers, whatever the trace holds."""
    for plans in trial.detailed.internals:
        require(not np.isnan(plans.scores[plans.pos >= 0]).any(), f"NaN score at row {plans.row}")
    result = output_error(trial.case.trace(), [trial.record])[0]
    for name in ("error", "mass", "missing"):
        finite = np.isfinite(getattr(result, name)).reshape(len(trial.present), -1, trial.case.n)
        require((finite == trial.present[:, None]).all(), f"{name} is not finite, or without a row")


def round_trip(trial: Trial) -> None:
    """A Record that was stored and read again is the same."""
    record = trial.record
    bits = None if record.reads is None else record.reads.bits
    document = json.loads(json.dumps(record_document(record)))
    again = record_document(record_of(document, record.evicted_at, bits))
    require(json.loads(json.dumps(again)) == document, f"{document} became {again}")
