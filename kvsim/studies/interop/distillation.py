"""Distillation under eviction: a model adapts to the sets that a policy keeps (G-KV, app. C).

The teacher is the model with its full cache. The student starts as the same model, and each of its
layers and KV heads sees what the policy keeps of it. The loss is equation 7, KL(teacher ‖ student)
of the tokens of the response at temperature 1.

    record = evicted(RunningModel(student), ids, prompt_len, policy, budget, interval=16)
    loss = divergence(student, ids, targets, Masks.of(record)).sum()
    loss.backward()
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import kl_div

from kvsim.core.policy import Policy
from kvsim.core.record import Record
from kvsim.runner.decoding import Decoding, RunningModel
from kvsim.studies.interop.masks import Masks, masking

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def evicted(
    running: RunningModel,
    ids: Sequence[int],
    prompt_len: int,
    policy: Policy,
    budget: int,
    *,
    interval: int | None = None,
    prefill: bool | None = None,
) -> Record:
    """Run prompt and response through a model while a policy evicts; return the evictions.

    The response is given, and each decision follows from the model's present weights and from
    earlier evictions, as in `kvsim.live`. interval, prefill: as for `kvsim.replay`. Raises as
    `kvsim.runner.decoding.Decoding`.
    """
    decoding = Decoding(
        running,
        policy,
        budget,
        prompt_len=prompt_len,
        n_pos=len(ids),
        interval=interval,
        prefill=prefill,
    )
    with decoding:
        decoding.feed(ids, logits=0)
    return decoding.record()


def divergence(
    model: PreTrainedModel, ids: Sequence[int], targets: Tensor, masks: Masks | None
) -> Tensor:
    """Compute KL(teacher ‖ student) of each of the last R tokens, in nats [R], with gradients.

    targets: the teacher's logits of these tokens, [R, V]. masks: visible entries of the rows of
    the student; None for all rows before. Gradients reach the student's queries, keys and values,
    and not the masks. Raises ValueError where targets has another shape.
    """
    tokens = torch.tensor([list(ids)], device=model.device)
    with nullcontext() if masks is None else masking(model, masks):
        logits = model(tokens).logits
    vocabulary = logits.shape[-1]
    if targets.ndim != 2 or targets.shape[1] != vocabulary or not 0 < len(targets) < len(ids):
        raise ValueError(
            f"targets has shape {tuple(targets.shape)}; expected [R, {vocabulary}], the logits of "
            f"the last R of {len(ids)} tokens, R from 1 to {len(ids) - 1}"
        )
    student = logits[0, -len(targets) - 1 : -1].float().log_softmax(-1)
    teacher = targets.float().log_softmax(-1)
    return kl_div(student, teacher, reduction="none", log_target=True).sum(-1)
