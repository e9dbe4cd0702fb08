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

import argparse
import copy
import json
import math
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

import kvsim
from apps.tiny.tokenizer import save_tokenizer
from kvsim.core.policy import Policy
from kvsim.runner.decoding import RunningModel
from kvsim.studies.interop.distillation import divergence, evicted
from kvsim.studies.interop.masks import Masks
from kvsim.studies.language.tasks import TASKS, Sample, make
from kvsim.tiny import PATH
from kvsim.tiny.vocabulary import BOS, EOS, ID

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Settings:
    """Everything that determines the result of a run.

    Attributes:
        steps: total number of optimiser steps.
        seed: seed of the samples.
        policy, params: what evicts, by name, and its parameters.
        budget: entries of each KV head after an event.
        interval: rows between events; the first follows the prompt.
        batch: sequences of a step.
        full: share of the sequences that have no eviction.
        learning_rate: peak, after a warm-up of 5 % of the steps and before a decay by cosine.
        share: of the student in the weights that are written; the rest of each is the teacher's.
            Such means keep what both models can do (Wortsman et al. 2022, arXiv 2109.01903).
        checkpoint: steps between two checkpoints.
    """

    steps: int = 400
    seed: int = 0
    policy: str = "gkv"
    params: dict[str, Any] = field(default_factory=lambda: {"window": 8})
    budget: int = 64
    interval: int = 16
    batch: int = 32
    full: float = 0.5
    learning_rate: float = 1e-4
    share: float = 0.75
    checkpoint: int = 10


@dataclass
class Run:
    """The parts of a run that change from step to step, and the teacher.

    ``kl`` has for each step the mean divergence of a token under the policy, in nats; ``seconds``
    are of the processor.
    """

    settings: Settings
    teacher: PreTrainedModel
    student: PreTrainedModel
    optimizer: torch.optim.AdamW
    rng: random.Random
    kl: list[float] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def step(self) -> int:
        """Steps that are done."""
        return len(self.kl)

    @property
    def policy(self) -> Policy:
        """The policy that evicts, with its parameters."""
        return kvsim.policy(self.settings.policy, **self.settings.params)


def draw(rng: random.Random) -> Sample:
    """Draw a sample of any task, of about 130 tokens with its response."""
    task = rng.choice(TASKS)
    return make(rng, task=task, facts=10, lines=3, kinds=5, filler=0.5)


def encode(sample: Sample) -> tuple[list[int], int]:
    """Return the tokens of prompt and right response, and how many are of the prompt."""
    prompt, response = sample.prompt.split(), sample.response.split()
    return [ID[word] for word in (BOS, *prompt, *response, EOS)], 1 + len(prompt)


def start(settings: Settings) -> Run:
    """Return a run at step 0."""
    teacher, student = (
        AutoModelForCausalLM.from_pretrained(PATH, dtype=torch.float32).eval() for _ in range(2)
    )
    teacher.requires_grad_(False)  # noqa: FBT003  of torch
    optimizer = torch.optim.AdamW(
        student.parameters(), lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.0
    )
    return Run(settings, teacher, student, optimizer, random.Random(f"distill {settings.seed}"))


def save(run: Run, path: Path) -> None:
    """Write a checkpoint; an interruption does not damage the previous one."""
    part = path.with_suffix(".part")
    torch.save(
        {
            "settings": asdict(run.settings),
            "student": run.student.state_dict(),
            "optimizer": run.optimizer.state_dict(),
            "rng": run.rng.getstate(),
            "kl": run.kl,
            "seconds": run.seconds,
        },
        part,
    )
    part.replace(path)


def load(path: Path) -> Run:
    """Load the run of a checkpoint."""
    state: dict[str, Any] = torch.load(path, weights_only=True)
    run = start(Settings(**state["settings"]))
    run.student.load_state_dict(state["student"])
    run.optimizer.load_state_dict(state["optimizer"])
    run.rng.setstate(state["rng"])
    run.kl, run.seconds = state["kl"], state["seconds"]
    return run


def rate(settings: Settings, step: int) -> float:
    """Return the learning rate of a step, counted from 0, as a share of the peak."""
    warm_up = max(1, round(0.05 * settings.steps))
    if step < warm_up:
        return (step + 1) / warm_up
    done = (step - warm_up) / max(1, settings.steps - warm_up)
    return 0.5 + 0.5 * math.cos(math.pi * done)


def _sequence(run: Run) -> tuple[list[int], int, torch.Tensor]:
    """Draw tokens, the length of the prompt, and the teacher's logits of the response [R, V].

    The response is what the teacher itself writes with the full cache, greedily.
    """
    while True:
        ids, prompt_len = encode(draw(run.rng))
        with torch.no_grad():
            targets = run.teacher(torch.tensor([ids])).logits[0, prompt_len - 1 : -1]
        if targets.argmax(-1).tolist() == ids[prompt_len:]:
            return ids, prompt_len, targets


def take_step(run: Run) -> dict[str, float]:
    """Take one optimiser step; return the mean KL of a token, by what the student saw."""
    began, settings, policy = time.process_time(), run.settings, run.policy
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
    for group in run.optimizer.param_groups:
        group["lr"] = settings.learning_rate * rate(settings, run.step)
    nn.utils.clip_grad_norm_(run.student.parameters(), 1.0)
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    full, under = (round(x / max(1, y), 5) for x, y in zip(total, tokens, strict=True))
    run.kl.append(under)
    run.seconds += time.process_time() - began
    return {"full_kl": full, "kl": under}


def averaged(run: Run) -> PreTrainedModel:
    """Return the model that a run ends with: the mean of student and teacher, by `share`."""
    model, teacher = copy.deepcopy(run.student), run.teacher.state_dict()
    student = run.student.state_dict()
    share = run.settings.share
    model.load_state_dict(
        {name: torch.lerp(teacher[name], student[name], share) for name in student}
    )
    return model


def train(run: Run, out: Path, until: int | None = None, minutes: float | None = None) -> None:
    """Continue a run to its end, to step `until` or for some minutes; write to `out`."""
    settings, began = run.settings, time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    while run.step < min(settings.steps, until or settings.steps):
        if minutes is not None and time.monotonic() - began > 60 * minutes:
            save(run, out / "state.pt")
            return
        values = take_step(run)
        line = {"step": run.step, "seconds": round(run.seconds, 1)}
        print(json.dumps(line | values), flush=True)
        if run.step % settings.checkpoint == 0 or run.step == settings.steps:
            save(run, out / "state.pt")
    if run.step == settings.steps:
        averaged(run).save_pretrained(out)
        save_tokenizer(out)
        summary = {"seconds": round(run.seconds), "settings": asdict(settings), "kl": run.kl}
        (out / "training.json").write_text(json.dumps(summary, indent=1) + "\n", "utf-8")


def main(argv: Sequence[str] | None = None) -> None:
    """Adapt the shipped model to a cache that a policy compresses."""
    defaults = Settings()
    parser = argparse.ArgumentParser(prog="python -m apps.tiny.distill", description=main.__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoint and model")
    steps = f"{defaults.steps} by default; with --resume, the decay ends there instead"
    parser.add_argument("--steps", type=int, help=steps)
    names = ("seed", "policy", "budget", "batch", "full", "learning_rate", "share")
    for name in names:
        default = getattr(defaults, name)
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=type(default), help=f"{default} by default"
        )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--minutes", type=float, help="stop with a checkpoint after this time")
    parser.add_argument(
        "--resume", action="store_true", help="continue from the checkpoint in --out"
    )
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    state = options.out / "state.pt"
    if options.resume and not state.exists():
        parser.error(f"no checkpoint {state}, expected one; start without --resume")
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    if options.resume and given:
        first = next(iter(given)).replace("_", "-")
        parser.error(f"--{first} was given with --resume, which has the settings of the checkpoint")
    if given.get("policy", defaults.policy) != defaults.policy:
        given["params"] = {}
    run = load(state) if options.resume else start(Settings(**given))
    if options.steps is not None:
        run.settings = replace(run.settings, steps=options.steps)
    train(run, options.out, minutes=options.minutes)


if __name__ == "__main__":
    main()
