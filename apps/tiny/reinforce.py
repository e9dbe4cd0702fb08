"""RL-Sparse of G-KV on the shipped model: reinforcement learning under eviction, on CPU cores.

    python -m apps.tiny.reinforce --out DIR [--steps 200] [--budget 64] [--minutes 10]
    python -m apps.tiny.reinforce --out DIR --resume [--minutes 10]

The model samples a group of responses to each prompt while the policy evicts from its cache. The
reward is the share of the words that are right, because nearly all groups are right or wrong as a
whole (`--exact`: 1 for a response that is right in all words, else 0). Rewards standardised
within the group weigh the tokens (equation 6). The pass with gradients sees what the sampler's rows
saw. A leash holds the distribution with the full cache to that of the start. `--no-masked` trains
without the sparse mask, `--no-corrected` without the ratio to the sampler. Checkpoints, `--resume`
and the written model are as for `apps.tiny.distill`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import kl_div

from apps.tiny.adapt import Run, Settings, Training, draw, encode
from kvsim.runner.decoding import RunningModel
from kvsim.studies.interop.rollouts import (
    Rollout,
    advantages,
    log_likelihoods,
    objective,
    rollouts,
)
from kvsim.tiny.vocabulary import EOS, ID


@dataclass(frozen=True)
class Reinforced(Settings):
    """The settings of reinforcement learning.

    Attributes:
        steps: total number of optimiser steps, one for each batch of rollouts.
        learning_rate: peak.
        share: of the student in the weights that are written.
        prompts: prompts of a step.
        group: responses to each prompt.
        new_tokens: most tokens of a response; a longer one is cut, and weighs nothing.
        temperature: of the sampler.
        clip: of equation 6.
        leash: weight of KL(start ‖ student) of a token of the responses, with the full cache.
        exact: reward only responses that are right in all words.
        masked: train under the masks of the rollouts.
        corrected: weight tokens by their ratio to the sampler.
        start: folder of the weights to begin with; the shipped model by default.
    """

    steps: int = 200
    learning_rate: float = 1e-4
    share: float = 1.0
    prompts: int = 16
    group: int = 8
    new_tokens: int = 64
    temperature: float = 1.0
    clip: float = 0.2
    leash: float = 1.0
    exact: bool = False
    masked: bool = True
    corrected: bool = True
    start: str = ""


def take_step(run: Run[Reinforced]) -> dict[str, float]:
    """Take one optimiser step; return means over its rollouts."""
    settings, policy = run.settings, run.policy
    running = RunningModel(run.student)  # of the present weights
    means: dict[str, list[float]] = {
        name: [] for name in ("reward", "right", "length", "cut", "leash", "useful")
    }
    for _ in range(settings.prompts):
        ids, prompt_len = encode(draw(run.rng))
        group = rollouts(
            running,
            ids[:prompt_len],
            policy,
            settings.budget,
            count=settings.group,
            new_tokens=settings.new_tokens,
            stop={ID[EOS]},
            temperature=settings.temperature,
            generator=torch.Generator().manual_seed(run.rng.getrandbits(63)),
            interval=settings.interval,
            prefill=True,
        )
        right = [list(each.tokens) == ids for each in group]
        rewards = [float(x) for x in right] if settings.exact else _shares(group, ids)
        cut = [not each.ended for each in group]
        weights = advantages(rewards, cut)
        loss = settings.leash * (leash := _leash(run, group))
        if weights.any():
            logprobs = log_likelihoods(
                run.student, group, temperature=settings.temperature, masked=settings.masked
            )
            loss = loss - objective(
                logprobs, group, weights, clip=settings.clip, corrected=settings.corrected
            )
        (loss / settings.prompts).backward()
        means["reward"] += rewards
        means["right"] += right
        means["length"] += [len(each.tokens) - each.prompt_len for each in group]
        means["cut"] += cut
        means["leash"].append(leash.item())
        means["useful"].append(bool(weights.any()))
    run.update()
    return {name: round(sum(values) / len(values), 5) for name, values in means.items()}


def _shares(group: Sequence[Rollout], ids: Sequence[int]) -> list[float]:
    """Return the share of the right response's words that stand at their place in each."""
    start = group[0].prompt_len
    right = len(ids) - start
    return [
        sum(a == b for a, b in zip(each.tokens[start:], ids[start:], strict=False)) / right
        for each in group
    ]


def _leash(run: Run[Reinforced], group: Sequence[Rollout]) -> Tensor:
    """KL(start ‖ student) with the full cache, mean over the tokens of the responses."""
    n = max(len(each.tokens) for each in group)
    ids = torch.tensor([[*each.tokens, *[0] * (n - len(each.tokens))] for each in group])
    of_response = torch.tensor(
        [[each.prompt_len - 1 <= row < len(each.tokens) - 1 for row in range(n)] for each in group]
    )
    with torch.no_grad():
        start = run.teacher(ids).logits[of_response].float().log_softmax(-1)
    student = run.student(ids).logits[of_response].float().log_softmax(-1)
    return kl_div(student, start, reduction="none", log_target=True).sum(-1).mean()


TRAINING = Training("reinforce", Reinforced, take_step)


def main(argv: Sequence[str] | None = None) -> None:
    """Train the shipped model by rewards while a policy compresses its cache."""
    TRAINING.main(argv, main.__doc__ or "")


if __name__ == "__main__":
    main()
