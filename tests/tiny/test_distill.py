"""Distillation of the shipped model under eviction, at a size of seconds."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from apps.tiny import adapt, distill
from kvsim.recorder import load_model
from kvsim.studies.language.ledger import check

SMALL = distill.Distilled(steps=2, batch=2, full=0.5, checkpoint=1)


def weights(run: adapt.Run[distill.Distilled]) -> torch.Tensor:
    """All parameters of the student as one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in run.student.parameters()])


def test_a_resumed_run_ends_with_the_same_weights(tmp_path):
    """Stopped after a step and loaded again, it is bit for bit the run that was not stopped."""
    whole = distill.TRAINING.start(SMALL)
    distill.TRAINING.train(whole, tmp_path / "whole")
    distill.TRAINING.train(distill.TRAINING.start(SMALL), tmp_path / "parts", until=1)
    resumed = distill.TRAINING.load(tmp_path / "parts" / "state.pt")
    assert resumed.step == 1
    assert not torch.equal(weights(resumed), weights(whole))
    distill.main(["--out", str(tmp_path / "parts"), "--resume"])
    one, other = (tmp_path / name / "model.safetensors" for name in ("whole", "parts"))
    assert one.read_bytes() == other.read_bytes()
    shipped, written = distill.TRAINING.start(SMALL), load_file(one)
    for name, value in whole.student.state_dict().items():
        if name in written:
            expected = 0.25 * shipped.student.state_dict()[name] + 0.75 * value
            torch.testing.assert_close(written[name], expected)
    assert not torch.equal(weights(shipped), weights(whole))
    teacher = torch.cat([parameter.flatten() for parameter in whole.teacher.parameters()])
    assert torch.equal(teacher, weights(shipped))


def test_the_loss_of_a_batch_falls():
    """Steps on the same sequences bring the student nearer to the teacher under the policy."""
    run = distill.TRAINING.start(replace(SMALL, steps=4, batch=2, full=0.0, learning_rate=3e-4))
    batch = run.rng.getstate()
    values = []
    for _ in range(4):
        run.rng.setstate(batch)
        values.append(distill.take_step(run)["kl"])
    assert values[0] > 0.01
    assert values[-1] < 0.8 * values[0]


def test_sequences_are_prompts_with_their_right_response():
    """Tokens are those of the tokenizer of the model, and the response is right."""
    sample = adapt.draw(distill.TRAINING.start(SMALL).rng)
    ids, prompt_len = adapt.encode(sample)
    _, tokenizer = load_model("tiny")
    assert ids[:prompt_len] == tokenizer(sample.prompt)["input_ids"]
    text = tokenizer.decode(ids[prompt_len:], skip_special_tokens=True)
    assert check(sample.prompt, text).exact
    assert ids[-1] == tokenizer.eos_token_id


def test_a_run_without_a_checkpoint_cannot_be_resumed(tmp_path, capsys):
    """`--resume` in an empty folder is one line that says what to do."""
    with pytest.raises(SystemExit):
        distill.main(["--out", str(tmp_path), "--resume"])
    assert "start without --resume" in capsys.readouterr().err


def test_a_resumed_run_takes_no_other_settings(tmp_path, capsys):
    """`--resume` with a setting that the checkpoint has is refused by its name."""
    (tmp_path / "state.pt").touch()
    with pytest.raises(SystemExit):
        distill.main(["--out", str(tmp_path), "--resume", "--learning-rate", "0.1"])
    assert "--learning-rate was given with --resume" in capsys.readouterr().err
