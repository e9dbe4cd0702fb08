"""Adapt the shipped model to a cache that a policy compresses, by distillation, on one CPU core.

    python -m apps.tiny.distill --out DIR [--steps 400] [--policy gkv] [--budget 64] [--minutes 10]
    python -m apps.tiny.distill --out DIR --resume [--minutes 10]

The recipe is that of G-KV (appendix C): the teacher is the shipped model with its full cache; the
student, at first the same model, sees what the policy keeps of the student's own queries and keys;
the loss is KL(teacher ‖ student) of the tokens of the teacher's greedy response. The policy runs
anew on each sequence of each batch, so masks are never those of earlier weights. A share of the
sequences is without eviction, which keeps the student's answers with the full cache.

The log is JSON lines on standard output. ``DIR/state.pt`` is written every ``checkpoint`` steps and
after ``--minutes``, when the run stops; ``--resume`` continues from it with its settings, and ends
with the same weights as an uninterrupted run. ``--resume --steps N`` ends it earlier or later, and
the learning rate falls towards that end. At the end ``from_pretrained`` loads ``DIR``: the mean of
the student and the teacher, weight by weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from apps.tiny.adapt import Run, Settings, Training, draw, encode
from kvsim.runner.decoding import RunningModel
from kvsim.studies.interop.distillation import divergence, evicted
from kvsim.studies.interop.masks import Masks


@dataclass(frozen=True)
class Distilled(Settings):
    """The settings of a distillation.

    Attributes:
        batch: sequences of a step.
        full: share of the sequences that have no eviction.
    """

    batch: int = 32
    full: float = 0.5


def _sequence(run: Run[Distilled]) -> tuple[list[int], int, torch.Tensor]:
    """Draw tokens, the length of the prompt, and the teacher's logits of the response [R, V].

    The response is what the teacher itself writes with the full cache, greedily.
    """
    while True:
        ids, prompt_len = encode(draw(run.rng))
        with torch.no_grad():
            targets = run.teacher(torch.tensor([ids])).logits[0, prompt_len - 1 : -1]
        if targets.argmax(-1).tolist() == ids[prompt_len:]:
            return ids, prompt_len, targets


def take_step(run: Run[Distilled]) -> dict[str, float]:
    """Take one optimiser step; return the mean KL of a token, by what the student saw."""
    settings, policy = run.settings, run.policy
    running = RunningModel(run.student)  # of the present weights
    total, tokens = [0.0, 0.0], [0, 0]
    for index in range(settings.batch):
        ids, prompt_len, targets = _sequence(run)
        evicts = index >= round(settings.full * settings.batch)
        masks = None
        if evicts:
            record = evicted(
                running,
                ids,
                prompt_len,
                policy,
                settings.budget,
                interval=settings.interval,
                prefill=True,
            )
            masks = Masks.of(record)
        loss = divergence(run.student, ids, targets, masks).sum()
        (loss / settings.batch).backward()
        total[evicts] += loss.item()
        tokens[evicts] += len(targets)
    run.update()
    full, under = (round(x / max(1, y), 5) for x, y in zip(total, tokens, strict=True))
    return {"full_kl": full, "kl": under}


TRAINING = Training("distill", Distilled, take_step)


def main(argv: Sequence[str] | None = None) -> None:
    """Adapt the shipped model to a cache that a policy compresses."""
    TRAINING.main(argv, main.__doc__ or "")


if __name__ == "__main__":
    main()
