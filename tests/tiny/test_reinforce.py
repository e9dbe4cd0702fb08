"""Reinforcement learning of the shipped model under eviction, at a size of seconds."""

from dataclasses import replace

import pytest

from apps.tiny import reinforce

SMALL = reinforce.Reinforced(steps=2, prompts=1, group=4, new_tokens=24, checkpoint=1)


def test_a_resumed_run_ends_with_the_same_weights(tmp_path):
    """Stopped after a step and loaded again, it is bit for bit the run that was not stopped."""
    training = reinforce.TRAINING
    training.train(training.start(SMALL), tmp_path / "whole")
    training.train(training.start(SMALL), tmp_path / "parts", until=1)
    assert training.load(tmp_path / "parts" / "state.pt").step == 1
    reinforce.main(["--out", str(tmp_path / "parts"), "--resume"])
    one, other = (tmp_path / name / "model.safetensors" for name in ("whole", "parts"))
    assert one.read_bytes() == other.read_bytes()


@pytest.mark.deep
def test_rewards_of_the_same_prompts_rise():
    """Steps on one batch of prompts make its right words more likely."""
    settings = replace(SMALL, steps=8, prompts=2, group=8, new_tokens=40, learning_rate=3e-4)
    run = reinforce.TRAINING.start(settings)
    state = run.rng.getstate()
    rewards = []
    for _ in range(8):
        run.rng.setstate(state)
        values = reinforce.take_step(run)
        run.log.append(values)
        rewards.append(values["reward"])
    assert values["useful"] > 0
    assert sum(rewards[-3:]) > sum(rewards[:3])


@pytest.mark.parametrize("switch", [{"exact": True}, {"masked": False, "corrected": False}])
def test_other_rewards_and_passes_run(switch):
    """A reward for right responses alone, and training without the sparse mask."""
    values = reinforce.take_step(reinforce.TRAINING.start(replace(SMALL, **switch)))
    assert values["right"] <= values["reward"] or switch.get("exact")
    assert (values["reward"] == values["right"]) == switch.get("exact", False)


def test_switches_of_the_command_are_flags(tmp_path, capsys):
    """A switch takes no value, so that no text can pass for the other one."""
    with pytest.raises(SystemExit):
        reinforce.main(["--out", str(tmp_path), "--masked", "no"])
    assert "unrecognized arguments: no" in capsys.readouterr().err
