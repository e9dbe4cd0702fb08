"""Train a shipped model from scratch on two CPU cores.

    python -m apps.tiny.train --out DIR [--steps 6500] [--seed 0] [--threads 2] [--minutes 10]
    python -m apps.tiny.train --out DIR --resume [--threads 2] [--minutes 10]

Training begins with a curriculum: samples of growing size. A stage ends when the running mean of
token accuracy passes a threshold, or after its maximum number of steps. Then follows a mix of all
sizes, with linear decay of the learning rate.
Every schedule counts steps, not seconds, so the result depends on the seed and not on the load of
the machine. Some losses are for training only, with a decreasing weight. The result of the first of
two retrievals is not in the text, so a linear head on the input of the second layer must predict
it; and one head each is guided to attend to the result of the second retrieval, to the next item of
a list, and to the kind and the digit of a correction.

The log is JSON lines on standard output. ``DIR/state.pt`` is written every ``checkpoint`` steps and
after ``--minutes``, when the run stops. ``--resume`` continues from it with its settings, and ends
with the same weights as an uninterrupted run. At the end ``from_pretrained`` loads ``DIR``.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear
from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb

from apps.tiny.curriculum import IGNORE, STAGES, Batch, Stage, collate, draw_batch, draw_mix
from apps.tiny.model import (
    GROUP,
    HEAD_DIM,
    HIDDEN,
    SHAPES,
    VOCAB_SIZE,
    build,
    head_rows,
)
from apps.tiny.tokenizer import save_tokenizer
from kvsim.studies.language.tasks import TASKS, prompts

if TYPE_CHECKING:
    from transformers import Qwen2ForCausalLM

WEIGHTS = "model.safetensors"
BOS_AT = 0  # position of `<bos>`, where guided heads rest
REST = 0.3  # weight of the loss for resting, next to 1 for each guided retrieval


@dataclass(frozen=True)
class Settings:
    """Everything that determines the result of a run.

    Attributes:
        steps: total number of optimiser steps.
        seed: seed of the initialisation and of the samples.
        shape: the model, one of `model.SHAPES`.
        stages: the curriculum.
        stage_steps: largest number of steps spent on each stage.
        stage_accuracy: running mean of token accuracy that ends a stage early.
        stage_least: smallest number of steps spent on a stage.
        stage_tokens: size of a batch in the curriculum, in tokens.
        mix_tokens: size of a batch in the mix, in tokens.
        learning_rate: peak, after ``warm_up`` steps and before the decay.
        free_rate: share of that rate for layers that start without a role.
        warm_up: steps of linear warm-up.
        decay: share of the mix over which the learning rate falls linearly, at its end.
        extra: weight of the training-only losses; it decreases to a tenth during the mix.
        checkpoint: steps between two checkpoints.
        evaluate: steps between two measurements on development samples; 0 for none.
    """

    steps: int = 6500
    seed: int = 0
    shape: str = "tiny"
    stages: tuple[Stage, ...] = STAGES
    stage_steps: tuple[int, ...] = (800, 500, 600, 500)
    stage_accuracy: float = 0.97
    stage_least: int = 60
    stage_tokens: int = 2048
    mix_tokens: int = 4096
    learning_rate: float = 1.5e-3
    free_rate: float = 0.1
    warm_up: int = 100
    decay: float = 0.7
    extra: float = 0.3
    checkpoint: int = 250
    evaluate: int = 500


@dataclass
class Progress:
    """Progress of a run; with weights, optimiser and random state, all that a resume needs.

    ``passed`` has the step at which each stage ended, ``accuracy`` the running mean of token
    accuracy in the current stage, None before its first batch.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    passed: list[int] = field(default_factory=list)
    accuracy: float | None = None

    @property
    def stage(self) -> int:
        """Index of the current stage; the number of stages once the mix has begun."""
        return len(self.passed)

    @property
    def stage_start(self) -> int:
        """Step at which the current stage began."""
        return self.passed[-1] if self.passed else 0


@dataclass
class Run:
    """The parts of a run that change from step to step."""

    settings: Settings
    model: Qwen2ForCausalLM
    between_head: nn.Linear
    optimizer: torch.optim.AdamW
    rng: random.Random
    progress: Progress = field(default_factory=Progress)

    @property
    def mixing(self) -> bool:
        """Whether the curriculum is over."""
        return self.progress.stage == len(self.settings.stages)

    @property
    def left(self) -> float:
        """Share of the mix that is left, 1 to 0; 1 during the curriculum."""
        if not self.mixing:
            return 1.0
        mix = self.settings.steps - self.progress.stage_start
        return (self.settings.steps - self.progress.step) / max(1, mix)


def start(settings: Settings) -> Run:
    """Return a run at step 0."""
    model = build(settings.seed, settings.shape)
    between_head = nn.Linear(HIDDEN, VOCAB_SIZE)  # torch's generator was seeded by `build`
    shape = SHAPES[settings.shape]
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}  # by weight decay and share of rate
    for name, parameter in model.named_parameters():
        decay = 0.05 if parameter.ndim == 2 and "embed" not in name else 0.0
        layer = name.split(".")[2]
        free = layer.isdecimal() and shape.free(int(layer))
        groups.setdefault((decay, settings.free_rate if free else 1.0), []).append(parameter)
    groups.setdefault((0.0, 1.0), []).extend(between_head.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": parameters, "weight_decay": decay, "share": share}
            for (decay, share), parameters in groups.items()
        ],
        lr=settings.learning_rate,
        betas=(0.9, 0.98),
    )
    rng = random.Random(f"train {settings.seed}")
    return Run(settings, model, between_head, optimizer, rng)


def save(run: Run, path: Path) -> None:
    """Write a checkpoint; an interruption does not damage the previous one."""
    part = path.with_suffix(".part")
    torch.save(
        {
            "settings": asdict(run.settings),
            "progress": asdict(run.progress),
            "model": run.model.state_dict(),
            "between_head": run.between_head.state_dict(),
            "optimizer": run.optimizer.state_dict(),
            "rng": run.rng.getstate(),
        },
        part,
    )
    part.replace(path)


def load(path: Path) -> Run:
    """Load the run of a checkpoint."""
    state: dict[str, Any] = torch.load(path, weights_only=True)
    stages = tuple(Stage(**stage) for stage in state["settings"].pop("stages"))
    run = start(Settings(**state["settings"], stages=stages))
    run.model.load_state_dict(state["model"])
    run.between_head.load_state_dict(state["between_head"])
    run.optimizer.load_state_dict(state["optimizer"])
    run.rng.setstate(state["rng"])
    run.progress = Progress(**state["progress"])
    return run


def _log_attention(
    model: Qwen2ForCausalLM, layer: int, head: int, hidden: Tensor, targets: Tensor
) -> Tensor:
    """Compute the log of the attention of one head to the positions that it is guided to.

    Args:
        model: the model in training.
        layer: the head's layer.
        head: the query head.
        hidden: the layer's input, [sequence, pos, h].
        targets: the position to attend to, else IGNORE, [sequence, pos].

    Returns:
        One natural logarithm for each position that has a target, [target].
    """
    block: Any = model.model.layers[layer]
    normed = block.input_layernorm(hidden)
    query, key = (
        linear(normed, part.weight[rows], part.bias[rows])[:, None]
        for part, rows in (
            (block.self_attn.q_proj, head_rows(head)),
            (block.self_attn.k_proj, head_rows(head // GROUP)),
        )
    )  # [sequence, 1, pos, d]
    positions = torch.arange(hidden.shape[1])
    query, key = apply_rotary_pos_emb(query, key, *model.model.rotary_emb(normed, positions[None]))
    sequence, row = (targets != IGNORE).nonzero(as_tuple=True)
    logits = (query[:, 0] @ key[:, 0].transpose(1, 2))[sequence, row].float() / HEAD_DIM**0.5
    logits = logits.masked_fill(positions > row[:, None], -torch.inf)  # [target, pos]
    log_attention: Tensor = logits.log_softmax(-1).gather(1, targets[sequence, row][:, None])[:, 0]
    return log_attention


def _losses(run: Run, batch: Batch) -> tuple[Tensor, dict[str, float]]:
    """Compute the loss of one batch, and its values for the log."""
    heads = SHAPES[run.settings.shape].guided
    with torch.autocast("cpu", torch.bfloat16):
        output = run.model.model(input_ids=batch.tokens, output_hidden_states=True)
        inputs = output.hidden_states  # of each layer, and the last layer's output
        targets = batch.labels[:, 1:]
        scored = targets != IGNORE
        logits = run.model.lm_head(output.last_hidden_state[:, :-1][scored]).float()
        double = batch.between != IGNORE
        between_logits = run.between_head(inputs[heads["second"][0]][double]).float()
        guided: dict[str, Tensor] = {}
        resting: list[Tensor] = []
        for role, (layer, head) in heads.items():
            positions = batch.targets[role].masked_fill(batch.idle, BOS_AT)
            attention = _log_attention(run.model, layer, head, inputs[layer], positions)
            idle = batch.idle[positions != IGNORE]
            resting.append(attention[idle])
            if not idle.all():  # a batch need not have a list or a correction
                guided[role] = attention[~idle]
    token_loss = cross_entropy(logits, targets[scored])
    between_loss = cross_entropy(between_logits, batch.between[double])
    rested = torch.cat(resting)
    guided_loss = sum(-attention.mean() for attention in guided.values()) - REST * rested.mean()
    weight = run.settings.extra * max(0.1, run.left**2)
    loss = token_loss + weight * (between_loss + guided_loss)
    right = logits.argmax(-1) == targets[scored]
    return loss, {
        "loss": token_loss.item(),
        "accuracy": right.float().mean().item(),
        "second_accuracy": right[double[:, :-1][scored]].float().mean().item(),
        "between_loss": between_loss.item(),
        **{f"{role}_attention": log.exp().mean().item() for role, log in guided.items()},
        "rest_attention": rested.exp().mean().item(),
    }


def _draw(run: Run) -> tuple[Batch, bool]:
    """Draw the next batch; a quarter are of earlier stages. The flag says: the current stage."""
    settings, rng, stage = run.settings, run.rng, run.progress.stage
    if run.mixing:
        return draw_batch(draw_mix(rng), settings.mix_tokens), True
    if stage and rng.random() < 0.25:
        earlier = settings.stages[rng.randrange(stage)]
        return draw_batch(lambda: earlier.draw(rng), settings.stage_tokens), False
    return draw_batch(lambda: settings.stages[stage].draw(rng), settings.stage_tokens), True


def _step(run: Run) -> dict[str, float]:
    """Take one optimiser step, and return its values for the log."""
    settings, progress = run.settings, run.progress
    began = time.perf_counter()
    batch, current = _draw(run)
    rate = min(1, (progress.step + 1) / settings.warm_up) * max(
        0.02, min(1, run.left / settings.decay)
    )
    for group in run.optimizer.param_groups:
        group["lr"] = settings.learning_rate * rate * group["share"]
    loss, values = _losses(run, batch)
    loss.backward()
    nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    progress.step += 1
    progress.tokens += batch.tokens.numel()
    progress.seconds += time.perf_counter() - began
    if current:
        mean = progress.accuracy if progress.accuracy is not None else values["accuracy"]
        progress.accuracy = 0.95 * mean + 0.05 * values["accuracy"]
    return values


def _stage_up(run: Run) -> bool:
    """Begin the next stage if it is due, and return whether it began."""
    settings, progress = run.settings, run.progress
    if run.mixing:
        return False
    spent = progress.step - progress.stage_start
    passed = (progress.accuracy or 0.0) > settings.stage_accuracy and spent >= settings.stage_least
    if not passed and spent < settings.stage_steps[progress.stage]:
        return False
    progress.passed.append(progress.step)
    progress.accuracy = None
    return True


@torch.no_grad()
def _develop(model: Qwen2ForCausalLM) -> dict[str, dict[str, float]]:
    """Measure accuracy on development samples of level 3, teacher-forced.

    Returns:
        The share of exact chains for each task, and the share of right words for each purpose of
        a retrieval.
    """
    exact: dict[str, float] = {}
    purposes: dict[str, list[bool]] = {}
    for task in TASKS:
        samples = prompts(8, seed=5, task=task, level=3)
        batch = collate(samples)
        with torch.autocast("cpu", torch.bfloat16):
            predicted = model(input_ids=batch.tokens).logits[:, :-1].argmax(-1)
        right = predicted == batch.tokens[:, 1:]
        hits = 0
        for row, sample in enumerate(samples):
            chain = slice(sample.prompt_words, sample.prompt_words + sample.chain_words)
            hits += bool(right[row, chain].all())
            for retrieval in sample.retrievals:
                is_right = bool(right[row, 1 + retrieval.at])
                purposes.setdefault(retrieval.purpose, []).append(is_right)
        exact[task] = hits / len(samples)
    shares = {name: round(sum(hits) / len(hits), 4) for name, hits in purposes.items()}
    return {"exact": exact, "right": shares}


def _log(run: Run, **values: Any) -> None:
    progress = run.progress
    row: dict[str, Any] = {
        "step": progress.step,
        "tokens": progress.tokens,
        "seconds": round(progress.seconds, 1),
        "stage": "mix" if run.mixing else progress.stage,
    }
    values["running_accuracy"] = progress.accuracy
    row |= {k: round(v, 4) if isinstance(v, float) else v for k, v in values.items()}
    print(json.dumps(row), flush=True)


def train(run: Run, out: Path, until: int | None = None, minutes: float | None = None) -> None:
    """Continue ``run`` to its end, to step ``until`` or for some minutes; write to ``out``.

    Args:
        run: the run, at any step.
        out: folder for checkpoint and model.
        until: the step to stop at.
        minutes: stop with a checkpoint after this time.
    """
    settings, progress = run.settings, run.progress
    began = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    while progress.step < min(settings.steps, until or settings.steps):
        if minutes is not None and time.monotonic() - began > 60 * minutes:
            save(run, out / "state.pt")
            return
        values = _step(run)
        if _stage_up(run):
            _log(run, passed_stage=progress.stage - 1)
        if settings.evaluate and progress.step % settings.evaluate == 0:
            _log(run, **values, **_develop(run.model))
        elif progress.step % 50 == 0:
            _log(run, **values)
        if progress.step % settings.checkpoint == 0:
            save(run, out / "state.pt")
    if progress.step == settings.steps:
        export(run, out)


def export(run: Run, out: Path) -> None:
    """Write weights, configuration, tokenizer and a summary of the training to ``out``."""
    run.model.save_pretrained(out)
    stored = SHAPES[run.settings.shape].stored
    if stored != torch.float32:  # after the configuration, which has the dtype for computing
        weights = {name: value.to(stored) for name, value in load_file(out / WEIGHTS).items()}
        save_file(weights, out / WEIGHTS, metadata={"format": "pt"})
    save_tokenizer(out)
    summary = {"progress": asdict(run.progress), "settings": asdict(run.settings)}
    (out / "training.json").write_text(json.dumps(summary, indent=1) + "\n")


def main(argv: Sequence[str] | None = None) -> None:
    """Train a shipped model."""
    defaults = Settings()
    parser = argparse.ArgumentParser(prog="python -m apps.tiny.train", description=main.__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoint and model")
    for name in ("steps", "seed"):
        parser.add_argument(f"--{name}", type=int, help=f"{getattr(defaults, name)} by default")
    parser.add_argument("--shape", choices=SHAPES, help=f"{defaults.shape} by default")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--minutes", type=float, help="stop with a checkpoint after this time")
    parser.add_argument(
        "--resume", action="store_true", help="continue from the checkpoint in --out"
    )
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    state = options.out / "state.pt"
    if options.resume and not state.exists():
        parser.error(f"no checkpoint {state}, expected one; start without --resume")
    names = ("steps", "seed", "shape")
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    if options.resume and given:
        parser.error(
            f"--{next(iter(given))} was given with --resume, which has the settings of the "
            "checkpoint; leave it out"
        )
    settings = replace(defaults, **given)
    settings = replace(settings, learning_rate=SHAPES[settings.shape].learning_rate)
    run = load(state) if options.resume else start(settings)
    train(run, options.out, minutes=options.minutes)


if __name__ == "__main__":
    main()
