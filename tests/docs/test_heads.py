"""docs/heads.py: the pictures of the model card."""

from __future__ import annotations

import heads
from apps.tiny import train
from apps.tiny.results import Results, digest
from kvsim.studies.language.tasks import TASKS


def test_what_was_not_measured_is_not_drawn(tmp_path):
    """The maps need the model alone; the other pictures appear with their measurements."""
    model = tmp_path / "model"
    train.export(train.start(train.Settings(steps=1)), model)
    out = tmp_path / "out"
    out.mkdir()
    asked = ["--results", str(tmp_path / "r"), "--out", str(out), "--model", str(model)]
    heads.main(asked)
    drawn = [path.name for path in out.iterdir()]
    shares = {"exact": dict.fromkeys(TASKS, 0.5), "right": {"digit": 0.75}}
    point = {"step": 500, "tokens": 10, "seconds": 1.0, "stage": 0, **shares}
    Results(tmp_path / "r", digest(model)).add(part="curve", seed=0, curve=[point])
    heads.main(asked)

    assert drawn == ["tiny-heads.png"]
    assert {path.name for path in out.iterdir()} == {"tiny-heads.png", "tiny-training.png"}
