"""Training of the tiny model, at a size of seconds."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvsim.tiny import train
from kvsim.tiny.curriculum import IGNORE, LEVELS, collate, draw_batch, draw_mix
from kvsim.tiny.ledger import COLOURS, VOCAB, prompts
from kvsim.tiny.model import build

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator
    from pathlib import Path

    from transformers import Qwen2ForCausalLM

SMALL = train.Settings(
    steps=8,
    levels=LEVELS[:2],
    level_steps=(3, 2),
    level_tokens=256,
    mix_tokens=256,
    warm_up=2,
    checkpoint=2,
    evaluate=0,
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """One thread, so that sums are added in one order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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
    assert AutoTokenizer.from_pretrained(tmp_path)("facts")["input_ids"] == [1, 4]
    assert summary["progress"]["step"] == SMALL.steps
    assert summary["settings"]["seed"] == SMALL.seed


def test_levels_are_bounded_in_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A level that is never learnt ends at its bound, and the log says when."""
    train.train(train.start(SMALL), tmp_path)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    assert [(row["step"], row["passed_level"]) for row in rows] == [(3, 0), (5, 1)]
    assert rows[-1]["level"] == "mix"


def test_a_learnt_level_ends_early(tmp_path: Path) -> None:
    """A level ends as soon as the running accuracy passes the threshold."""
    easy = replace(SMALL, level_accuracy=-1.0, level_least=1)
    run = train.start(easy)
    train.train(run, tmp_path, until=3)

    assert run.progress.level_start == 2


def test_the_learning_rate_falls_to_its_floor(tmp_path: Path) -> None:
    """At the last step of the mix the learning rate is close to its floor."""
    run = train.start(replace(SMALL, steps=105))
    run.progress.passed, run.progress.step = [3, 5], 103
    train.train(run, tmp_path)

    assert run.optimizer.param_groups[0]["lr"] == pytest.approx(0.02 * SMALL.learning_rate)


def test_a_seed_stands_for_one_start() -> None:
    """The same seed gives the same weights, another seed others."""
    assert torch.equal(weights(build(1)), weights(build(1)))
    assert not torch.equal(weights(build(1)), weights(build(2)))


def test_the_start_looks_one_token_back() -> None:
    """Before any training, head 0 of layer 0 reads the previous token."""
    model = build(0)
    model.set_attn_implementation("eager")
    batch = collate(prompts(1, seed=1))
    with torch.no_grad():
        first = model(input_ids=batch.tokens, output_attentions=True).attentions[0][0, 0]

    assert first.diagonal(offset=-1)[8:].mean() > 0.9


def test_batches_mark_the_response_and_both_retrievals() -> None:
    """Labels cover the response and <eos>; each line marks its colour and the digit's position."""
    samples = prompts(2, seed=4, facts=8, lines=6)
    batch = collate(samples)
    for row, sample in enumerate(samples):
        words = [VOCAB[token] for token in batch.tokens[row]]
        labels = [VOCAB[label] for label in batch.labels[row] if label != IGNORE]
        marked = (batch.colours[row] != IGNORE).nonzero()[:, 0].tolist()

        assert labels == [*sample.response.split(), "<eos>"]
        assert len(marked) == sample.lines
        for pos in marked:
            digit = int(batch.digits[row, pos])
            assert words[digit] == words[pos + 1]
            assert words[digit - 1] == COLOURS[batch.colours[row, pos]]


def test_batches_stay_within_their_tokens() -> None:
    """A batch holds as many samples as fit after padding."""
    source = rng()
    for _ in range(20):
        batch = draw_batch(draw_mix(source), 2048)

        assert batch.tokens.numel() <= 2048
        assert len(batch.tokens) == 1 or batch.tokens.shape[1] <= 1024


def test_resuming_without_a_checkpoint_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--resume on an empty folder is bad usage, and the message says what to do."""
    with pytest.raises(SystemExit, match="2"):
        train.main(["--out", str(tmp_path), "--resume"])

    assert "start without --resume" in capsys.readouterr().err
