"""Training of the tiny model, at a size of seconds."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import AutoModelForCausalLM

from apps.tiny import train
from apps.tiny.curriculum import GUIDED, IGNORE, STAGES, collate
from apps.tiny.model import SHAPES, build
from kvsim.recorder.loading import load_tokenizer
from kvsim.studies.language.tasks import prompts
from kvsim.tiny.vocabulary import ID, VOCAB

if TYPE_CHECKING:
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


def weights(model: Qwen2ForCausalLM) -> torch.Tensor:
    """All parameters of ``model`` as one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


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
