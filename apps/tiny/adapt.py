"""A training under eviction: a run that stops and continues, and its command.

`apps.tiny.distill` and `apps.tiny.reinforce` have a step each.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import nn
from transformers import AutoModelForCausalLM

import kvsim
from apps.tiny.tokenizer import save_tokenizer
from kvsim.core.policy import Policy
from kvsim.studies.language.tasks import TASKS, Sample, make
from kvsim.tiny import PATH
from kvsim.tiny.vocabulary import BOS, EOS, ID

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Settings:
    """Settings that determine the result of a run, whichever its step is.

    Attributes:
        steps: total number of optimiser steps.
        seed: seed of the samples.
        policy, params: what evicts, by name, and its parameters.
        budget: entries of each KV head after an event.
        interval: rows between events; the first follows the prompt.
        learning_rate: peak, after a warm-up of 5 % of the steps and before a decay by cosine.
        share: of the student in the weights that are written; the rest of each is the start's.
            Such means keep what both models can do (Wortsman et al. 2022, arXiv 2109.01903).
        checkpoint: steps between two checkpoints.
    """

    steps: int = 400
    seed: int = 0
    policy: str = "gkv"
    params: dict[str, Any] = field(default_factory=lambda: {"window": 8})
    budget: int = 64
    interval: int = 16
    learning_rate: float = 1e-4
    share: float = 0.75
    checkpoint: int = 10


S = TypeVar("S", bound=Settings)


@dataclass
class Run(Generic[S]):
    """The parts of a run that change from step to step, and the model that it began with.

    ``log`` has what each step returned; ``seconds`` are of the processor.
    """

    settings: S
    teacher: PreTrainedModel
    student: PreTrainedModel
    optimizer: torch.optim.AdamW
    rng: random.Random
    log: list[dict[str, float]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def step(self) -> int:
        """Steps that are done."""
        return len(self.log)

    @property
    def policy(self) -> Policy:
        """The policy that evicts, with its parameters."""
        return kvsim.policy(self.settings.policy, **self.settings.params)

    def update(self) -> None:
        """Take a step by the gradients, which are cut at norm 1, and clear them."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * rate(self.settings, self.step)
        nn.utils.clip_grad_norm_(self.student.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


@dataclass(frozen=True)
class Training(Generic[S]):
    """A way of training: its name, the class of its settings, and its step.

    take_step: takes an optimiser step, and returns what the log says of it.
    """

    name: str
    settings: type[S]
    take_step: Callable[[Run[S]], dict[str, float]]

    def start(self, settings: S) -> Run[S]:
        """Return a run at step 0."""
        teacher, student = (
            AutoModelForCausalLM.from_pretrained(
                getattr(settings, "start", "") or PATH, dtype=torch.float32
            ).eval()
            for _ in range(2)
        )
        teacher.requires_grad_(False)  # noqa: FBT003  of torch
        optimizer = torch.optim.AdamW(
            student.parameters(), lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.0
        )
        return Run(
            settings, teacher, student, optimizer, random.Random(f"{self.name} {settings.seed}")
        )

    def load(self, path: Path) -> Run[S]:
        """Load the run of a checkpoint."""
        state: dict[str, Any] = torch.load(path, weights_only=True)
        run = self.start(self.settings(**state["settings"]))
        run.student.load_state_dict(state["student"])
        run.optimizer.load_state_dict(state["optimizer"])
        run.rng.setstate(state["rng"])
        run.log, run.seconds = state["log"], state["seconds"]
        return run

    def train(
        self, run: Run[S], out: Path, until: int | None = None, minutes: float | None = None
    ) -> None:
        """Continue a run to its end, to step `until` or for some minutes; write to `out`."""
        settings, began = run.settings, time.monotonic()
        out.mkdir(parents=True, exist_ok=True)
        while run.step < min(settings.steps, until or settings.steps):
            if minutes is not None and time.monotonic() - began > 60 * minutes:
                save(run, out / "state.pt")
                return
            start = time.process_time()
            values = self.take_step(run)
            run.log.append(values)
            run.seconds += time.process_time() - start
            line = {"step": run.step, "seconds": round(run.seconds, 1)}
            print(json.dumps(line | values), flush=True)
            if run.step % settings.checkpoint == 0 or run.step == settings.steps:
                save(run, out / "state.pt")
        if run.step == settings.steps:
            averaged(run).save_pretrained(out)
            save_tokenizer(out)
            curves = {name: [each[name] for each in run.log] for name in run.log[0]}
            summary = {"seconds": round(run.seconds), "settings": asdict(settings), **curves}
            (out / "training.json").write_text(json.dumps(summary, indent=1) + "\n", "utf-8")

    def main(self, argv: Sequence[str] | None, description: str) -> None:
        """Run the command of this training."""
        defaults = self.settings()
        parser = argparse.ArgumentParser(
            prog=f"python -m apps.tiny.{self.name}", description=description
        )
        parser.add_argument("--out", type=Path, required=True, help="folder for checkpoint, model")
        steps = f"{defaults.steps} by default; with --resume, the decay ends there instead"
        parser.add_argument("--steps", type=int, help=steps)
        left_out = ("steps", "params", "interval", "checkpoint")
        names = [each.name for each in fields(defaults) if each.name not in left_out]
        for name in names:
            default = getattr(defaults, name)
            kind: dict[str, Any] = {"type": type(default)}
            if isinstance(default, bool):
                kind = {"action": argparse.BooleanOptionalAction}
            flag = f"--{name.replace('_', '-')}"
            parser.add_argument(flag, default=None, help=f"{default} by default", **kind)
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
            parser.error(
                f"--{first} was given with --resume, which has the settings of the checkpoint"
            )
        if given.get("policy", defaults.policy) != defaults.policy:
            given["params"] = {}
        run = self.load(state) if options.resume else self.start(self.settings(**given))
        if options.steps is not None:
            run.settings = replace(run.settings, steps=options.steps)
        self.train(run, options.out, minutes=options.minutes)


def draw(rng: random.Random) -> Sample:
    """Draw a sample of any task, of about 130 tokens with its response."""
    task = rng.choice(TASKS)
    return make(rng, task=task, facts=10, lines=3, kinds=5, filler=0.5)


def encode(sample: Sample) -> tuple[list[int], int]:
    """Return the tokens of prompt and right response, and how many are of the prompt."""
    prompt, response = sample.prompt.split(), sample.response.split()
    return [ID[word] for word in (BOS, *prompt, *response, EOS)], 1 + len(prompt)


def save(run: Run[Any], path: Path) -> None:
    """Write a checkpoint; an interruption does not damage the previous one."""
    part = path.with_suffix(".part")
    torch.save(
        {
            "settings": asdict(run.settings),
            "student": run.student.state_dict(),
            "optimizer": run.optimizer.state_dict(),
            "rng": run.rng.getstate(),
            "log": run.log,
            "seconds": run.seconds,
        },
        part,
    )
    part.replace(path)


def rate(settings: Settings, step: int) -> float:
    """Return the learning rate of a step, counted from 0, as a share of the peak."""
    warm_up = max(1, round(0.05 * settings.steps))
    if step < warm_up:
        return (step + 1) / warm_up
    done = (step - warm_up) / max(1, settings.steps - warm_up)
    return 0.5 + 0.5 * math.cos(math.pi * done)


def averaged(run: Run[Any]) -> PreTrainedModel:
    """Return the model that a run ends with: the mean of student and teacher, by `share`."""
    model, teacher = copy.deepcopy(run.student), run.teacher.state_dict()
    student = run.student.state_dict()
    share = run.settings.share
    model.load_state_dict(
        {name: torch.lerp(teacher[name], student[name], share) for name in student}
    )
    return model
