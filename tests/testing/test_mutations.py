"""Seeded bugs, most of them once published: each is caught by the invariant named here."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

import kvsim
import reference
from kvsim.analysis.output import seen as metrics_seen
from kvsim.core import record as records
from kvsim.core.entries import Entries
from kvsim.core.policy import Allocator, Plan, Protection, Schedule, Scorer, Uniform
from kvsim.core.record import Record
from kvsim.core.view import View
from kvsim.engine import block as engine_block
from kvsim.engine.rows import RowView
from kvsim.engine.source import TraceSource
from kvsim.testing import InvariantError, check_policy
from kvsim.testing.invariants import INVARIANTS
from kvsim.testing.invariants.trial import Broken, Trial
from kvsim.testing.strategies import Case, make_case

Patch = pytest.MonkeyPatch

pytestmark = pytest.mark.deep


def future_queries(patch: Patch) -> None:
    """The queries of a window are read one row too late."""
    right = TraceSource.queries

    def wrong(self: TraceSource, start: int, stop: int) -> Tensor:
        late = int(stop < self._trace.n_pos)
        return right(self, start + late, stop + late)

    patch.setattr(TraceSource, "queries", wrong)


def future_softmax(patch: Patch) -> None:
    """Weights of a row are divided by a sum that includes the rows after it in the block."""

    def wrong(self: RowView) -> Tensor:
        weights = self._block_logits(self._start, self._stop).exp()[:, :, self.row - self._start]
        return weights * self.live.unsqueeze(2) / weights.sum(-1, keepdim=True)

    patch.setattr(RowView, "_softmax", wrong)


def question_in_the_setting(patch: Patch) -> None:
    """An event that ends a chunk knows how long the prompt is."""
    right = engine_block.Block.__init__

    def wrong(self: engine_block.Block, *args: Any, **more: Any) -> None:
        right(self, *args, **more)
        self._settings = (self.setting,)

    patch.setattr(engine_block.Block, "__init__", wrong)


def question_in_the_context(patch: Patch) -> None:
    """The event that ends the context fires behind the question."""
    right = Schedule.ends
    patch.setattr(Schedule, "ends", lambda self, prompt_len, *_: right(self, prompt_len, None))


def window_not_causal(patch: Patch) -> None:
    """Rows of a window see the entries of later rows of the window."""

    def wrong(self: View, start: int, stop: int, seen: int | None, **options: Any) -> Tensor:
        layers = options.get("layers", slice(None))
        q = self._source.queries(start, stop)[layers]
        keys = self.keys[layers, :, :seen].unsqueeze(2)
        z = q @ keys.transpose(-1, -2) * self._source.formula.scale
        live = self.live[layers, :, :seen]
        return z.masked_fill(~live[:, :, None, None], -torch.inf).softmax(-1)

    patch.setattr(View, "_rows", wrong)


def dead_keys_in_rows(patch: Patch) -> None:
    """Entries that left within a block of rows still count in its softmax."""

    def wrong(self: RowView) -> Tensor:
        if self._weights is None:
            z = self._block_logits(self._start, self._stop)
            self._weights = z.sub_(z.amax(-1, keepdim=True)).exp_()
        weight = self._weights[:, :, self.row - self._start]
        past = (self.pos <= self.row).unsqueeze(2)
        return weight * self.live.unsqueeze(2) / (weight * past).sum(-1, keepdim=True)

    patch.setattr(RowView, "_softmax", wrong)


def dead_keys_in_windows(patch: Patch) -> None:
    """A window's softmax runs over everything that ever was, and live columns are read from it."""

    def wrong(self: View, start: int, stop: int, seen: int | None = None) -> Tensor:
        q, k = self._source.queries(start, stop), self._source.keys
        z = q @ k.unsqueeze(2).transpose(-1, -2) * self._source.formula.scale
        rows = torch.arange(start, stop).unsqueeze(-1)
        weight = z.masked_fill(torch.arange(k.shape[2]) > rows, -torch.inf).softmax(-1)
        pos = self.pos[..., :seen].clamp(min=0)
        at = pos[:, :, None, None].expand(*weight.shape[:-1], pos.shape[-1])
        return weight.gather(-1, at) * self.live[:, :, None, None, :seen]

    patch.setattr(View, "rows", wrong)


def protection_by_score(patch: Patch) -> None:
    """Protected entries get the largest score instead of a mask, as four presses of kvpress did."""
    right = engine_block.select

    def wrong(
        values: Tensor, quotas: Tensor, protected: Tensor, live: Tensor, *rest: Any
    ) -> Tensor:
        padded = torch.where(protected, values.max(), values)
        return right(padded, quotas, torch.zeros_like(protected), live, *rest)

    patch.setattr(engine_block, "select", wrong)


def quota_drift(patch: Patch) -> None:
    """The budget goes through a ratio and back, and loses an entry to truncation now and then."""

    def wrong(self: Uniform, view: View, scores: Tensor, protected: Tensor) -> Plan:
        ratio = 1 - view.budget / view.count.double()
        return Plan((view.count * (1 - ratio)).floor().long())

    patch.setattr(Uniform, "plan", wrong)


def schedule_one_late(patch: Patch) -> None:
    """Events fire after rows prompt_len + m * interval."""
    right = Schedule.rows

    def wrong(self: Schedule, prompt_len: int, n_pos: int, *context: Any) -> list[int]:
        return [row + 1 for row in right(self, prompt_len, n_pos, *context) if row + 1 < n_pos]

    patch.setattr(Schedule, "rows", wrong)


def questions_one_late(patch: Patch) -> None:
    """Events fire after the first row behind a later question, which its answer decides."""
    right = Schedule.rows

    def wrong(self: Schedule, *sizes: Any) -> list[int]:
        *before, questions = sizes
        return right(self, *before, [(start, stop + 1) for start, stop in questions])

    patch.setattr(Schedule, "rows", wrong)


def last_question_alone(patch: Patch) -> None:
    """An event follows the last of the later questions alone, which later rows decide."""
    right = Schedule.rows

    def wrong(self: Schedule, *sizes: Any) -> list[int]:
        *before, questions = sizes
        return right(self, *before, questions[-1:])

    patch.setattr(Schedule, "rows", wrong)


def query_heads_mixed_up(patch: Patch) -> None:
    """Query head i is read as belonging to KV head i % H instead of i // G."""
    right = TraceSource.queries

    def wrong(self: TraceSource, start: int, stop: int) -> Tensor:
        q = right(self, start, stop)
        return q.flatten(1, 2).unflatten(1, (q.shape[2], q.shape[1])).transpose(1, 2)

    patch.setattr(TraceSource, "queries", wrong)


def higher_position_wins_ties(patch: Patch) -> None:
    """Of equal scores the later entry stays."""
    right = engine_block.select

    def wrong(values: Tensor, quotas: Tensor, protected: Tensor, live: Tensor, *_: Any) -> Tensor:
        back = (x.flip(-1) for x in (protected, live))
        return right(values.flip(-1), quotas, *back).flip(-1)

    patch.setattr(engine_block, "select", wrong)


def columns_stay_behind(patch: Patch) -> None:
    """Columns are cut to length instead of being gathered with their entries."""
    right = Entries.compress

    def wrong(self: Entries, keep: Tensor) -> None:
        before = dict(self.columns)
        right(self, keep)
        n = self.pos.shape[-1]
        self.columns = {name: column[..., :n].clone() for name, column in before.items()}

    patch.setattr(Entries, "compress", wrong)


def layer_counted_within_the_block(patch: Patch) -> None:
    """A draw depends on the layer's place in its block, not in the trace."""
    right = engine_block.Block.__init__

    def wrong(
        self: Any, source: Any, policy: Any, setting: Any, layers: Tensor, **rest: Any
    ) -> None:
        right(self, source, policy, setting, torch.arange(len(layers)), **rest)

    patch.setattr(engine_block.Block, "__init__", wrong)


def seen_one_row_longer(patch: Patch) -> None:
    """A Record shows entries to the row after the event that evicted them."""

    def wrong(self: Record, row: int) -> np.ndarray:
        return (np.arange(self.n_pos) <= row) & (self.evicted_at >= row - 1)

    patch.setattr(Record, "kept", wrong)


def forgotten_field(patch: Patch) -> None:
    """A stored Record forgets that its keys were rotated to slots."""
    kept = tuple(name for name in records._STORED if name != "positions")
    patch.setattr(records, "_STORED", kept)


def acts_without_need(patch: Patch) -> None:
    """An event acts when one more entry would fit."""
    right = engine_block.Block.__init__

    def wrong(self: Any, source: Any, policy: Any, setting: Any, *rest: Any, **more: Any) -> None:
        smaller = replace(setting, budget=max(1, setting.budget - 1))
        right(self, source, policy, smaller, *rest, **more)

    patch.setattr(engine_block.Block, "__init__", wrong)


def plan_for_later_events(patch: Patch) -> None:
    """The budgets of layers count with an event that may lie behind the end of the trace."""

    def wrong(self: Schedule, prompt_len: int, budget: int, *more: Any, **context: Any) -> int:
        return max(prompt_len * self.prefill, budget + (self.interval or 0), 1)

    patch.setattr(Schedule, "longest", wrong)


def mass_of_the_evicted(patch: Patch) -> None:
    """Attention of what left is counted to what stays."""
    right = metrics_seen._Seen.outcome

    def wrong(self: Any) -> tuple[Tensor, Tensor]:
        out, mass = right(self)
        return out, mass * 1.5

    patch.setattr(metrics_seen._Seen, "outcome", wrong)
    patch.setattr(torch.Tensor, "clamp_", lambda self, *_, **__: self)


Bug = Callable[[Patch], None]

CAUGHT: list[tuple[Bug, str, dict[str, Any], tuple[str, ...]]] = [
    (future_queries, "tova", {}, ("causality", "naive_replay")),
    (future_queries, "h2o", {}, ("causality", "naive_replay")),
    (future_queries, "snapkv", {"window": 4}, ("causality", "naive_replay")),
    (future_softmax, "tova", {}, ("causality", "rows_equal_events")),
    (window_not_causal, "snapkv", {"window": 4}, ("naive_replay",)),
    (window_not_causal, "h2o", {}, ("naive_replay",)),
    (dead_keys_in_rows, "tova", {}, ("no_peeking_at_the_dead", "rows_equal_events")),
    (dead_keys_in_windows, "tova", {}, ("no_peeking_at_the_dead",)),
    (dead_keys_in_windows, "snapkv", {"window": 4}, ("no_peeking_at_the_dead", "naive_replay")),
    (protection_by_score, "snapkv", {"window": 4}, ("protected_survive", "naive_replay")),
    (protection_by_score, "tova@kvpress", {}, ("protected_survive",)),
    (quota_drift, "snapkv", {"window": 4}, ("exact_size", "naive_replay")),
    (quota_drift, "tova@kvpress", {}, ("exact_size",)),
    (schedule_one_late, "tova", {}, ("exact_size", "naive_replay")),
    (schedule_one_late, "snapkv@kvpress", {"window": 4}, ("exact_size", "naive_replay")),
    (questions_one_late, "tova", {}, ("later_questions",)),
    (last_question_alone, "knorm", {}, ("later_questions",)),
    (query_heads_mixed_up, "h2o", {}, ("head_permutation", "naive_replay")),
    (query_heads_mixed_up, "snapkv", {"window": 4}, ("head_permutation",)),
    (higher_position_wins_ties, "tova", {}, ("tie_rule", "naive_replay")),
    (higher_position_wins_ties, "snapkv", {"window": 4}, ("tie_rule", "naive_replay")),
    (columns_stay_behind, "h2o", {}, ("naive_replay",)),
    (layer_counted_within_the_block, "random", {}, ("layer_blocks",)),
    (seen_one_row_longer, "streaming_llm", {}, ("nothing_returns",)),
    (forgotten_field, "streaming_llm@original", {}, ("round_trip",)),
    (acts_without_need, "tova", {}, ("no_effect_while_there_is_room", "exact_size")),
    (question_in_the_context, "tova", {}, ("unknown_question",)),
    (plan_for_later_events, "pyramidkv", {"window": 2}, ("same_events", "naive_replay")),
    (mass_of_the_evicted, "tova", {}, ("retained_mass",)),
]


@pytest.mark.parametrize(
    ("bug", "name", "params", "invariant"),
    [(*case[:3], invariant) for case in CAUGHT for invariant in case[3]],
    ids=lambda value: value.__name__ if callable(value) else str(value),
)
def test_seeded_bug_is_caught(bug, name, params, invariant, monkeypatch):
    """The invariant that is meant to catch the bug does, alone, and says its own name."""
    bug(monkeypatch)
    with pytest.raises(InvariantError, match=f"invariant '{invariant}'"):
        reference.check(name, params, max_examples=1000, max_n=16, only=[invariant], shrink=False)


def _trial(name: str, params: dict[str, Any], case: Case, **of_trial: Any) -> Trial:
    policy = kvsim.policy(name, **params)
    return Trial(policy, case, prefill=None, salt=650, rule=reference.rule_of(policy), **of_trial)


_ROWS = _trial("h2o", {"recent": 0}, make_case("sharp", heads=2, seed=2), budget=4, interval=1)
_PROMPT = make_case("sharp", heads=2, prompt_len=12, seed=2)
_CHUNKS = _trial("h2o@kvpress", {}, _PROMPT, budget=4, interval=None)


@pytest.mark.parametrize(
    ("bug", "trial", "invariant"),
    [
        (question_in_the_setting, _CHUNKS, "chunked_prompt"),
        (question_in_the_setting, replace(_CHUNKS, salt=650 + 32), "chunked_prompt"),
        (dead_keys_in_rows, _ROWS, "no_peeking_at_the_dead"),
        (dead_keys_in_rows, _ROWS, "naive_replay"),
    ],
)
def test_seeded_bug_that_few_cases_show_is_caught(bug, trial, invariant, monkeypatch):
    """The same on a trial made by hand, on which the invariant holds without the bug."""
    INVARIANTS[invariant](replace(trial))  # another, for a trial remembers its records
    bug(monkeypatch)
    with pytest.raises(Broken):
        INVARIANTS[invariant](replace(trial))


@dataclass(frozen=True)
class Mine(Scorer):
    """A scorer of the user's own: attention of the last row."""

    columns: ClassVar[dict[str, float]] = {}
    per_row: ClassVar[bool] = False

    def score(self, view: View) -> Tensor:
        """Mean over the group."""
        return view.attn(1, group="mean")[..., 0, :]

    def protection(self, budget: int) -> Protection:
        """Nothing."""
        return Protection()


@dataclass(frozen=True)
class Remembering(Mine):
    """Adds what it computed at its last call, in whatever replay that was."""

    last: list[Tensor] = field(default_factory=list, repr=False)

    def score(self, view: View) -> Tensor:
        """Half of it is a memory."""
        now = super().score(view)
        before = self.last.pop() if self.last else torch.zeros_like(now)
        self.last.append(now)
        n = min(now.shape[-1], before.shape[-1])
        if before.shape[:2] != now.shape[:2]:
            return now
        return now + torch.nn.functional.pad(before[..., :n].to(now), (0, now.shape[-1] - n))


@dataclass(frozen=True)
class CountingUp(Mine):
    """Remembers in its own fields how often it was asked."""

    calls: list[int] = field(default_factory=list)

    def score(self, view: View) -> Tensor:
        """The policy object is not what it was."""
        self.calls.append(view.row)
        return super().score(view)


def counting_pads(scores: Tensor, view: View) -> Tensor:
    """Even slots first, pads included."""
    even = torch.arange(view.pos.shape[-1]) % 2 == 0
    return scores + even.to(view.keys.dtype)


def peeking(_: Tensor, view: View) -> Tensor:
    """Similarity to the mean of all keys of the trace, those to come included."""
    mean = view._source.keys.nanmean(2, keepdim=True)
    return torch.nn.functional.cosine_similarity(view.keys, mean, dim=-1)


def mourning(_: Tensor, view: View) -> Tensor:
    """Similarity to the mean of all keys so far, those that left included."""
    mean = view._source.keys[:, :, : view.row + 1].mean(2, keepdim=True)
    return torch.nn.functional.cosine_similarity(view.keys, mean, dim=-1)


def dividing(_: Tensor, view: View) -> Tensor:
    """The first component of the normalised key, whose norm can be 0."""
    return view.keys[..., 0] / view.keys.norm(dim=-1)


def first_head(scores: Tensor, view: View) -> Tensor:
    """The ranking of KV head 0 for all heads."""
    return scores[:, :1].expand_as(view.pos)


def normalising(scores: Tensor, view: View) -> Tensor:
    """Keys are normalised in place, as fast code is written for tensors of one's own."""
    view.keys.div_(1 + view.keys.norm(dim=-1, keepdim=True))
    return scores


def through_numpy(scores: Tensor, view: View) -> Tensor:
    """Queries of the most recent row are set to 0 in memory that tensors share."""
    view.queries(1).numpy()[:] = 0
    return scores


def clamping(scores: Tensor, view: View) -> Tensor:
    """Pads move to position 0, in the table of the entries."""
    view.pos.clamp_(min=0)
    return scores


def reweighting(scores: Tensor, view: View) -> Tensor:
    """Attention that is memoised for all pieces of the policy is doubled."""
    return scores + view.attn(1).mul_(2).sum((2, 3))


def undeclared(_: Tensor, view: View) -> Tensor:
    """Negative scores, and no word of it."""
    return -view.keys.norm(dim=-1)


def mine(bug: Callable[[Tensor, View], Tensor]) -> Mine:
    """The user's scorer with a bug."""
    score = {"score": lambda self, view: bug(Mine.score(self, view), view)}
    scorer: Mine = type(bug.__name__, (Mine,), score)()
    return scorer


@dataclass(frozen=True)
class Greedy(Allocator):
    """An allocator that keeps one entry more in the first head."""

    def plan(self, view: View, scores: Tensor, protected: Tensor) -> Plan:
        """One too many."""
        quotas = view.budget.expand_as(view.count).clone()
        quotas[:, 0] += 1
        return Plan(quotas)


@pytest.mark.parametrize(
    ("scorer", "invariant"),
    [
        (mine(normalising), "input_unchanged"),
        (mine(through_numpy), "input_unchanged"),
        (mine(clamping), "input_unchanged"),
        (mine(reweighting), "input_unchanged"),
        (Remembering(), "isolation"),
        (CountingUp(), "isolation"),
        (mine(counting_pads), "ragged"),
        (mine(peeking), "causality"),
        (mine(mourning), "no_peeking_at_the_dead"),
        (mine(dividing), "finite"),
        (mine(first_head), "head_permutation"),
        (mine(undeclared), "declared_sign"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Mine) else value,
)
def test_bug_in_a_policy_of_the_users_own_is_caught(scorer, invariant):
    """Leaked state, pads, the future, the dead, NaN and mixed heads, each by its own invariant."""
    policy = kvsim.Policy("mine", scorer)
    with pytest.raises(InvariantError, match=f"invariant '{invariant}'"):
        check_policy(policy, max_examples=1000, only=[invariant], shrink=False)


def test_allocator_that_exceeds_the_budget_is_caught():
    """What a layer holds is counted where the budget is shared."""
    policy = kvsim.Policy("mine", Mine(), allocator=Greedy())
    with pytest.raises(InvariantError, match="invariant 'exact_size'"):
        check_policy(policy, max_examples=100, shrink=False)


def test_policy_without_a_bug_passes():
    """The scorer that the buggy ones are made from satisfies every invariant."""
    check_policy(kvsim.Policy("mine", Mine()), max_examples=12)


def test_failure_shows_the_case():
    """The message has the policy, the invariant and a case that can be built again."""
    with pytest.raises(InvariantError) as caught:
        check_policy(kvsim.Policy("mine", mine(first_head)), only=["head_permutation"])
    for part in ("mine", "'head_permutation'", "budget=", "Case(", "seed=", "prompt_len="):
        assert part in str(caught.value)
