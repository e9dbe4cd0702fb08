"""Reinforcement learning under eviction: rollouts, and the objective of RL-Sparse (G-KV, eq. 6).

The sampler is the model whose cache a policy compresses. What its rows saw becomes the mask of the
pass that has gradients, so that both are one distribution.

    group = rollouts(RunningModel(model), ids, policy, budget, count=8, new_tokens=64, stop={2})
    weights = advantages(rewards, cut=[not each.ended for each in group])
    loss = -objective(log_likelihoods(model, group), group, weights)
    loss.backward()
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from kvsim.core.policy import Policy, Schedule
from kvsim.core.trace import Trace
from kvsim.engine.block import Block
from kvsim.engine.checks import check_cell
from kvsim.engine.layers import replayed, runs
from kvsim.engine.replay import settings_of
from kvsim.engine.source import TraceSource
from kvsim.errors import PolicyError
from kvsim.recorder.cache import cache_option, full_cache
from kvsim.recorder.generation import check_logits, evaluating
from kvsim.recorder.hooks import Attention, intercepting, kernel_mask
from kvsim.runner.checks import check_live
from kvsim.runner.model import RunningModel
from kvsim.schema import NEVER
from kvsim.studies.interop.masks import Masks, masking

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Rollout:
    """A response that a model sampled while a policy evicted from its cache.

    Attributes:
        tokens: prompt and response.
        prompt_len: tokens of the prompt.
        logprobs: of each token of the response, under the sampler [R].
        masks: what its rows saw.
        ended: whether a token of `stop` ended it; else it was cut.
    """

    tokens: tuple[int, ...]
    prompt_len: int
    logprobs: Tensor
    masks: Masks
    ended: bool


def rollouts(
    running: RunningModel,
    ids: Sequence[int],
    policy: Policy,
    budget: int,
    *,
    count: int,
    new_tokens: int,
    stop: Collection[int],
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
    interval: int | None = None,
    prefill: bool | None = None,
) -> list[Rollout]:
    """Sample responses to one prompt, all at once, while a policy evicts from each cache.

    Evicted entries are masked, not freed: each sequence has its own, and kept sets are those of
    `kvsim.live`.

    Args:
        running: of the model's present weights.
        ids: tokens of the prompt.
        policy: what evicts.
        budget: entries of each KV head after an event.
        count: responses.
        new_tokens: most tokens of a response.
        stop: tokens that end a response, as its last one.
        temperature: of the sampler, above 0.
        generator: draws the tokens, on the CPU.
        interval: rows between events, as for `kvsim.replay`.
        prefill: whether an event ends the prompt, as for `kvsim.replay`.

    Raises:
        PolicyError: a policy that a mask cannot express, or that a running model cannot follow.
        CaptureError: a sequence longer than the model's context, logits that are not finite.
        BudgetError, NeedsError: as `kvsim.replay`.
    """
    schedule = policy.schedule.override(interval, prefill, None)
    lengths = len(ids), len(ids) + new_tokens
    with torch.inference_mode(), evaluating(running.model):
        sequences = _Sequences(running, policy, budget, schedule, *lengths, count)
        logits = sequences.feed(torch.tensor([[*ids]]).expand(count, -1))
        tokens = torch.empty(count, 0, dtype=torch.int64)
        logprobs = torch.empty(count, 0)
        running_on = torch.ones(count, dtype=torch.bool)
        while True:
            scores = (logits / temperature).float().log_softmax(-1).cpu()
            drawn = torch.multinomial(scores.exp(), 1, generator=generator)
            tokens = torch.cat([tokens, drawn], 1)
            logprobs = torch.cat([logprobs, scores.gather(1, drawn)], 1)
            running_on &= torch.tensor([int(token) not in stop for token in drawn])
            if not running_on.any() or tokens.shape[1] == new_tokens:
                break
            logits = sequences.feed(drawn, running_on)
    out = []
    for index, response in enumerate(tokens.tolist()):
        ends = [at for at, token in enumerate(response) if token in stop]
        n = ends[0] + 1 if ends else len(response)
        whole = (*ids, *response[:n])
        masks = sequences.masks(index, len(whole))
        out.append(Rollout(whole, len(ids), logprobs[index, :n].clone(), masks, bool(ends)))
    return out


class _Rows(TraceSource):
    """Keys, values and queries of some layers of a sequence that is being written."""

    def __init__(self, sketch: Trace, layers: Sequence[int], like: Tensor) -> None:
        super().__init__(sketch, layers, like.device)
        shape = len(layers), sketch.n_heads, sketch.n_pos, sketch.dim
        self.keys, self.values = like.new_zeros(shape), like.new_zeros(shape)
        self.rows = like.new_zeros(shape[0], sketch.n_qheads, *shape[2:])

    def lasting(self, key: tuple[Hashable, ...], compute: Callable[[], T]) -> T:
        """Return `compute()`: each event has other rows."""
        return compute()

    def queries(self, start: int, stop: int) -> Tensor:
        """[L, H, G, stop - start, d]."""
        return self._grouped(self.rows[:, :, start:stop])


class _Sequences:
    """Some sequences of equal length, each with its own kept sets, in one batch of a model."""

    def __init__(
        self,
        running: RunningModel,
        policy: Policy,
        budget: int,
        schedule: Schedule,
        prompt_len: int,
        n: int,
        count: int,
    ) -> None:
        check_live(policy)
        masked = policy.positions == "absolute" and not (policy.reader or policy.codec)
        if not masked or policy.propagation is not None or "probe_q" in policy.scorer.needs:
            raise PolicyError(
                f"{policy.name}: its keys are rotated to their slots or rounded, its rows read a "
                "part of what is resident, are dropped between layers or repeat the context; "
                "expected a policy that evicts alone, as a mask can say"
            )
        self.running, self.policy, self.budget = running, policy.at(budget), budget
        self.sketch = running.sketch(self.policy, prompt_len, n, None, "rollout").evicting
        check_cell(self.sketch, self.policy, budget, None, schedule)
        self.cache, self.length = full_cache(running.model), 0
        self._schedule = schedule
        self._events = deque(schedule.rows(prompt_len, n, None))
        setting, context = settings_of(self.sketch, self.policy, budget, schedule)
        like = torch.empty(0, device=running.device, dtype=running.model.dtype)
        #: of each run of layers, the source and the block of each sequence
        self._parts: list[tuple[tuple[int, ...], list[tuple[_Rows, Block]]]] = []
        for run in runs(self.sketch, replayed(self.sketch, None), self.policy):
            layers = torch.tensor(run.layers, device=like.device)
            of_run = []
            for _ in range(count):
                source = _Rows(self.sketch, run.layers, like)
                block = Block(source, self.policy, setting, layers, context=context)
                of_run.append((source, block))
            self._parts.append((run.layers, of_run))
        self._place = {
            layer: (part, index)
            for layers, part in self._parts
            for index, layer in enumerate(layers)
        }

    def feed(self, ids: Tensor, living: Tensor | None = None) -> Tensor:
        """Run the next tokens [count, w] of each; returns the logits [count, V] of the last row.

        living: the sequences in which events fire; all by default.
        """
        logits = ids
        while ids.shape[1]:
            stop = self._events[0] + 1 if self._events else self.sketch.n_pos
            piece, ids = ids[:, : stop - self.length], ids[:, stop - self.length :]
            at = torch.arange(self.length, self.length + piece.shape[1], device=self.running.device)
            with intercepting(self.running.model, None, attending=self._attend):
                logits = self.running.model(
                    piece.to(self.running.device),
                    position_ids=at.expand(len(piece), -1),
                    use_cache=True,
                    **cache_option(self.running.model, self.cache),
                    **self.running.logits_of(1),
                ).logits[:, -1]
            self.length += piece.shape[1]
            if self.length == stop:
                self._fire(self._events.popleft(), living)
        return check_logits(logits, self.length - 1)

    def _fire(self, row: int, living: Tensor | None) -> None:
        for _, part in self._parts:
            for index, (_, block) in enumerate(part):
                if living is None or living[index]:
                    block.event(row)

    def _attend(
        self, layer: int, query: Tensor, keys: Tensor, values: Tensor, attention: Attention
    ) -> Tensor | None:
        if layer not in self._place:
            return None
        part, at = self._place[layer]
        new = slice(self.length, self.length + query.shape[2])
        for index, (source, _) in enumerate(part):
            source.rows[at, :, new] = query[index]
            source.keys[at, :, new] = keys[index, :, new]
            source.values[at, :, new] = values[index, :, new]
        last = torch.stack([block.evicted_at[at, :, : new.stop] for _, block in part])
        pos = torch.arange(new.stop, device=query.device)
        row = pos[new, None]
        visible = (pos <= row) & (row <= last.unsqueeze(2))  # [count, head, w, n]
        visible = visible.repeat_interleave(query.shape[1] // last.shape[1], 1)
        mask = kernel_mask(visible, query, added=self.running.added)
        return attention(query, keys, values, mask)

    def masks(self, index: int, n: int) -> Masks:
        """Return what the first n rows of a sequence saw."""
        last = torch.cat([part[index][1].evicted_at[..., :n] for _, part in self._parts])
        layers = tuple(layer for layers, _ in self._parts for layer in layers)
        labels = {
            "trace": self.sketch.name,
            "policy": self.policy.name,
            "params": dict(self.policy.params),
            "budget": self.budget,
            "interval": self._schedule.interval,
            "prefill": self._schedule.prefill,
            "prompt_len": self.sketch.prompt_len,
        }
        last = last.masked_fill(last >= n, NEVER).cpu()
        return Masks(last, tuple(self.sketch.layer_ids[layer] for layer in layers), labels)


def log_likelihoods(
    model: PreTrainedModel,
    group: Sequence[Rollout],
    *,
    temperature: float = 1.0,
    masked: bool = True,
) -> list[Tensor]:
    """Compute the log-likelihood of each token of each response [R], with gradients, in one pass.

    masked: rows see what the sampler's rows saw; else all before them.
    """
    n = max(len(each.tokens) for each in group)
    # what follows a sequence is seen by none of its rows
    padded = [[*each.tokens, *[0] * (n - len(each.tokens))] for each in group]
    ids = torch.tensor(padded, device=model.device)
    with masking(model, [each.masks for each in group]) if masked else nullcontext():
        logits = model(ids).logits
    out = []
    for row, each in zip(logits, group, strict=True):
        of_response = row[each.prompt_len - 1 : len(each.tokens) - 1] / temperature
        targets = ids.new_tensor(each.tokens[each.prompt_len :]).unsqueeze(-1)
        out.append(of_response.float().log_softmax(-1).gather(-1, targets).squeeze(-1))
    return out


def advantages(rewards: Sequence[float], cut: Sequence[bool]) -> Tensor:
    """Return (reward - mean) / standard deviation over the group, 0 for responses that were cut.

    0 for all where the rewards are equal. The deviation is that of the group itself (divided by
    the number of responses), which equation 6 leaves open.
    """
    values = torch.tensor(rewards, dtype=torch.float32)
    spread = values.std(correction=0)
    scaled = (values - values.mean()) / spread if spread > 0 else torch.zeros_like(values)
    return scaled.masked_fill(torch.tensor(cut), 0.0)


def objective(
    logprobs: Sequence[Tensor],
    group: Sequence[Rollout],
    weights: Tensor,
    *,
    clip: float = 0.2,
    corrected: bool = True,
) -> Tensor:
    """Compute equation 6 for one group: the mean over responses of the mean over their tokens.

    Args:
        logprobs: of `log_likelihoods`.
        group: the rollouts.
        weights: their advantages.
        clip: how far the ratio of likelihoods may be from 1 before its gradient stops.
        corrected: weight tokens by their ratio to the sampler; else the ratio is taken as 1.
    """
    total = torch.zeros((), device=logprobs[0].device)
    for new, each, weight in zip(logprobs, group, weights.tolist(), strict=True):
        sampler = each.logprobs.to(new.device) if corrected else new.detach()
        ratio = (new - sampler).exp()
        bounded = ratio.clamp(1 - clip, 1 + clip)
        total = total + torch.minimum(ratio * weight, bounded * weight).mean()
    return total / len(group)
