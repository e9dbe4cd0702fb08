"""Whether a model is the one that a trace was recorded from, and how far its states have moved."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvsim.core.trace import Trace
from kvsim.errors import CaptureError
from kvsim.recorder.models import NOTED, describe_model


def check_model(trace: Trace, model: PreTrainedModel) -> None:
    """Raise CaptureError unless configuration and precision are those of the recorded model."""
    recorded_model = trace.meta.get("model", {})
    given, expected = describe_model(model), recorded_model.get("config")
    if expected is None:
        return
    config = given["config"]
    keys = sorted((set(config) | set(expected)) - set(NOTED))
    differing = [key for key in keys if config.get(key) != expected.get(key)]
    if differing:
        raise CaptureError(
            f"the model {given['name']} differs from the recorded {recorded_model.get('name')} in "
            f"{', '.join(differing)} of its configuration; give the model that {trace.name} was "
            "recorded from"
        )
    if given["dtype"] != recorded_model.get("dtype", given["dtype"]):
        raise CaptureError(
            f"the model {given['name']} computes in {given['dtype']}, {trace.name} was recorded "
            f"in {recorded_model['dtype']}; load it in that precision"
        )


def relative_change(x: Tensor, full: Tensor) -> Tensor:
    """Return |x - full| / |full| over the last axis; 0 where both are 0."""
    gap, size = (torch.linalg.vector_norm(y, dim=-1) for y in (x - full, full))
    out: Tensor = torch.where(gap == 0, 0.0, gap / size)
    return out
