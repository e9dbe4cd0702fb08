"""Training of the tiny model, at a size of seconds."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import AutoModelForCausalLM

from apps.tiny import evaluate, train
from apps.tiny.curriculum import GUIDED, IGNORE, SHARES, STAGES, collate, draw_mix
from apps.tiny.model import SHAPES, build
from kvsim.recorder.models import load_tokenizer
from kvsim.studies.language.tasks import TASKS, prompts
from kvsim.tiny.vocabulary import ID, VOCAB

if TYPE_CHECKING:
    import random
    from pathlib import Path

    from transformers import Qwen2ForCausalLM

SMALL = train.Settings(
    steps=8,
    stages=STAGES[:2],
    stage_steps=(3, 2),
    stage_tokens=256,
    mix_tokens=256,
    warm_up=2,
    checkpoint=2,
    evaluate=0,
)


@pytest.mark.parametrize("program", [train, evaluate])
def test_programs_run_from_a_checkout(program, capsys):
    """`python -m apps.tiny.NAME --help` says how the program is called."""
    with pytest.raises(SystemExit) as end:
        program.main(["--help"])

    assert end.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: python -m {program.__name__} ")


def weights(model: Qwen2ForCausalLM) -> torch.Tensor:
    """All parameters of ``model`` as one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def rng() -> random.Random:
    """A source of samples."""
    return train.start(SMALL).rng


def test_a_resumed_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    """Interrupted in the curriculum and again in the mix, a run loses nothing."""
    whole = train.start(SMALL)
    train.train(whole, tmp_path / "whole")
    part = tmp_path / "part"
    train.train(train.start(SMALL), part, until=3)  # the checkpoint is at step 2
    train.train(train.load(part / "state.pt"), part, until=7)
    last = train.load(part / "state.pt")
    assert last.progress.step == 6
    train.train(last, part)

    assert torch.equal(weights(whole.model), weights(last.model))
    assert replace(whole.progress, seconds=0) == replace(last.progress, seconds=0)


def test_training_changes_every_weight_and_writes_a_loadable_folder(tmp_path: Path) -> None:
    """A run ends with a folder that the ordinary loaders read, and says what it did."""
    run = train.start(SMALL)
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    train.train(run, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    summary = json.loads((tmp_path / "training.json").read_text())

    assert torch.equal(weights(loaded), weights(run.model))
    assert not [k for k, v in loaded.state_dict().items() if torch.equal(v, before[k])]
    assert load_tokenizer(tmp_path)("facts")["input_ids"] == [1, ID["facts"]]
    assert summary["progress"]["step"] == SMALL.steps
    assert summary["settings"]["seed"] == SMALL.seed


def test_stages_are_bounded_in_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A stage that is never learnt ends at its bound, and the log says when."""
    train.train(train.start(SMALL), tmp_path)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    assert [(row["step"], row["passed_stage"]) for row in rows] == [(3, 0), (5, 1)]
    assert rows[-1]["stage"] == "mix"


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_is_what_it_says(shape: str) -> None:
    """Layers and heads are those of the shape, two query heads to a KV head, below 8 MB."""
    config = (model := build(0, shape)).config

    assert config.num_hidden_layers == SHAPES[shape].layers
    assert config.num_attention_heads == SHAPES[shape].heads == 2 * config.num_key_value_heads
    assert 4 * weights(model).numel() < 8e6


@pytest.mark.parametrize("shape", SHAPES)
def test_the_start_looks_back_finds_kinds_and_rests(shape: str) -> None:
    """Before training a head reads the previous word, one finds kinds, and one rests on <bos>."""
    model = build(0, shape)
    model.set_attn_implementation("eager")
    (sample,) = prompts(1, seed=1, task="walk", level=1)
    with torch.no_grad():
        maps = model(input_ids=collate([sample]).tokens, output_attentions=True).attentions
    back = maps[min(SHAPES[shape].look_back)][0, 0].diagonal(offset=-1)
    kinds = [found for found in sample.retrievals if found.purpose == "digit"]
    found = [float(maps[SHAPES[shape].first][0, 0, 1 + one.at, 1 + one.path[0]]) for one in kinds]

    late, head = SHAPES[shape].guided["second"]
    rests = maps[late][0, head, 1 + sample.prompt_words :, 0].mean()  # on <bos>

    assert back[8:].mean() > 0.9
    assert sum(found) / len(found) > 10 / sample.tokens
    assert rests > 10 / sample.tokens


def test_batches_mark_the_response_and_what_heads_are_guided_to() -> None:
    """Labels cover the response and <eos>; marked positions hold the word that is due next."""
    samples = prompts(7, seed=4, facts=20, lines=26)
    batch = collate(samples)
    count = dict.fromkeys(GUIDED, 0)
    for row, sample in enumerate(samples):
        words = [VOCAB[token] for token in batch.tokens[row]]
        labels = [VOCAB[label] for label in batch.labels[row] if label != IGNORE]
        assert labels == [*sample.response.split(), "<eos>"]
        for role, found in batch.targets.items():
            for at in (found[row] != IGNORE).nonzero()[:, 0].tolist():
                count[role] += 1
                assert words[found[row, at]] == words[at + 1]
        due = {1 + one.at for one in sample.retrievals}
        response = set(range(sample.prompt_words, sample.tokens - 1))
        assert set(batch.idle[row].nonzero()[:, 0].tolist()) == response - due
        twice = [one for one in sample.retrievals if len(one.path) == 2]
        assert [1 + one.at for one in twice] == (batch.between[row] != IGNORE).nonzero()[
            :, 0
        ].tolist()
        for one in twice:
            assert VOCAB[batch.between[row, 1 + one.at]] == words[1 + one.path[0]]

    assert all(count.values())


def test_stages_grow_and_stay_within_their_sizes() -> None:
    """Every stage draws all tasks at sizes of its own, the later the larger."""
    source = rng()
    means = []
    for stage in STAGES:
        samples = [stage.draw(source) for _ in range(60)]
        lists = [sample for sample in samples if sample.task not in ("check", "needle")]
        assert len({sample.task for sample in samples}) >= 6
        assert all(stage.facts[0] <= sample.facts <= stage.facts[1] for sample in samples)
        assert all(sample.lines <= stage.lines[1] for sample in lists)
        means.append(sum(sample.tokens for sample in samples) / len(samples))

    assert means == sorted(means)


def test_the_mix_draws_every_task_within_the_context() -> None:
    """All tasks occur in the mix, which shares out whole percents, and no sample is too long."""
    source = rng()
    samples = [draw_mix(source)() for _ in range(300)]

    assert sum(SHARES.values()) == 100
    assert {sample.task for sample in samples} == set(TASKS) == set(SHARES)
    assert max(s.tokens for s in samples if s.task != "needle") <= 1700
    assert max(s.tokens for s in samples) <= 2400


def test_losses_of_guided_heads_fall_with_their_attention() -> None:
    """A step of training on one batch raises the attention of a guided head to its target."""
    run = train.start(replace(SMALL, warm_up=1))
    batch = collate(prompts(4, seed=4, task="get", facts=8, lines=8))
    said = []
    for _ in range(6):
        loss, found = train._losses(run, batch)
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        said.append(found)

    assert said[-1]["item_attention"] > said[0]["item_attention"]
    assert "kind_attention" not in said[0]


def test_development_is_measured_for_every_task(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log holds shares of exact chains of all tasks and of right words by purpose."""
    short = prompts(2, seed=5, task="wait", facts=6, lines=10)
    monkeypatch.setattr(train, "prompts", lambda *_, **__: short)
    train.train(train.start(replace(SMALL, evaluate=2)), tmp_path, until=2)
    (row,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    assert set(row["exact"]) == set(TASKS)
    assert {"correction", "digit", "successor", "report"} <= set(row["right"])


def test_a_run_stops_in_time_and_goes_on(tmp_path: Path) -> None:
    """After its minutes a run leaves a checkpoint at the step where it is, and resumes there."""
    run = train.start(SMALL)
    train.train(run, tmp_path, until=3)
    train.train(run, tmp_path, minutes=0.0)
    resumed = train.load(tmp_path / "state.pt")

    assert resumed.progress.step == 3
    assert not (tmp_path / "model.safetensors").exists()
    assert torch.equal(weights(resumed.model), weights(run.model))


def test_resuming_without_a_checkpoint_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--resume on an empty folder is bad usage, and the message says what to do."""
    with pytest.raises(SystemExit, match="2"):
        train.main(["--out", str(tmp_path), "--resume"])

    assert "start without --resume" in capsys.readouterr().err


def test_a_resumed_run_takes_no_other_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--resume with a setting that the checkpoint has is refused by its name."""
    (tmp_path / "state.pt").touch()
    with pytest.raises(SystemExit, match="2"):
        train.main(["--out", str(tmp_path), "--resume", "--seed", "3"])

    assert "--seed was given with --resume" in capsys.readouterr().err
