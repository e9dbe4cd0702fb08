"""Reinforcement learning under eviction: rollouts, and the objective of RL-Sparse (G-KV, eq. 6).

The sampler is the model whose cache a policy compresses. What its rows saw becomes the mask of the
pass that has gradients, so that both are one distribution.

    group = rollouts(RunningModel(model), ids, policy, budget, count=8, new_tokens=64, stop={2})
    weights = advantages(rewards, cut=[not each.ended for each in group])
    loss = -objective(log_likelihoods(model, group), group, weights)
    loss.backward()
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvsim.core.policy import Policy
from kvsim.errors import CaptureError, PolicyError
from kvsim.recorder.batching import separate
from kvsim.recorder.head import check_logits
from kvsim.runner.batch import respond, run_prompt
from kvsim.runner.decoding import Decoding, RunningModel
from kvsim.runner.decoding import prefill as first_rows
from kvsim.schema import NEVER
from kvsim.studies.interop.masks import Masks, masking

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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

    Kept sets are those of `kvsim.live`.

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
        CaptureError: no responses, a sequence longer than the model's context, logits that are not
            finite.
        BudgetError, NeedsError: as `kvsim.replay`.
    """
    if count < 1:
        raise CaptureError(f"count is {count}, expected at least 1 response")
    masked = policy.positions == "absolute" and not (policy.reader or policy.codec)
    if not masked or policy.propagation is not None or "probe_q" in policy.scorer.needs:
        raise PolicyError(
            f"{policy.name}: its keys are rotated to their slots or changed, its rows read a part "
            "of what is resident, are dropped between layers or repeat the context; expected a "
            "policy that evicts alone, as a mask can say"
        )
    reason = separate(running.model, len(ids) + new_tokens)
    if reason is not None:
        raise CaptureError(f"sequences cannot share a batch: {reason}; expected a model that can")
    length = {"prompt_len": len(ids), "n_pos": len(ids) + new_tokens}
    options: dict[str, Any] = {**length, "interval": interval, "prefill": prefill}
    lanes = [Decoding(running, policy, budget, **options, name="rollout") for _ in range(count)]
    prefix_of = functools.cache(functools.partial(first_rows, running))
    firsts = []
    for lane in lanes:
        with lane:
            firsts.append(run_prompt(lane, (*ids,), prefix_of))
    scores, logprobs = torch.zeros(count, firsts[0].shape[-1]), [list[float]() for _ in lanes]

    def draw(logits: Tensor, writing: Sequence[int]) -> list[int]:
        check_logits(logits, len(ids) + len(logprobs[writing[0]]) - 1)
        scores[[*writing]] = (logits / temperature).float().log_softmax(-1).cpu()
        # of those that have ended too, which leaves the draws of the others as they are
        drawn = torch.multinomial(scores.exp(), 1, generator=generator)
        for at in writing:
            logprobs[at].append(float(scores[at, drawn[at]]))
        return drawn[[*writing], 0].tolist()

    written = respond(lanes, firsts, [new_tokens] * count, stop=stop, draw=draw)
    return [
        Rollout(
            (*ids, *each.tokens),
            len(ids),
            torch.tensor(of_response),
            _masks(lane),
            each.ended is not None,
        )
        for lane, each, of_response in zip(lanes, written, logprobs, strict=True)
    ]


def _masks(lane: Decoding) -> Masks:
    """Return what the rows of a response saw; its last token was not run."""
    masks = Masks.of(lane.record())
    last_row = torch.nn.functional.pad(masks.last_row, (0, 1), value=NEVER)
    return replace(masks, last_row=last_row)


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
