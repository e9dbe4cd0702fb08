"""Recording a model: `capture` runs it over a prompt and keeps what its attention saw.

    hooks       listen at the attention kernel while a ``with`` block lasts
    projections the output projections, on request
    residual    the residual stream, on request
    blocks      cut kernel calls into blocks of 256 positions, check them, hand them to a sink
    generation  prefill and response, greedy or sampled
    models      load a model, read its rotary embedding, describe it
    hub         whether the hub answers
    options     what a capture can be asked for
    prompts     text, chat or token ids; the answer check
    jsonl       files of prompts
    resuming    whether a trace that is there is the one that would be recorded

No family of models is known by name. A model is recorded only if attention recomputed from its
q, k, v by the formula that its kernel was asked for equals what the kernel returned, and if its
keys turn by one of its rotary embeddings, in every row of every layer.
"""

from kvsim.recorder.capturing import capture, capture_many
from kvsim.recorder.hooks import KernelCall, listening
from kvsim.recorder.jsonl import read_prompts
from kvsim.recorder.models import load_model, read_ropes
from kvsim.recorder.options import Options
from kvsim.recorder.progress import progress_bar
from kvsim.recorder.prompts import Prompt

__all__ = [
    "KernelCall",
    "Options",
    "Prompt",
    "capture",
    "capture_many",
    "listening",
    "load_model",
    "progress_bar",
    "read_prompts",
    "read_ropes",
]
