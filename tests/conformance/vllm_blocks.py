"""Answers of vLLM 0.32's block manager and attention, recorded for `tests/runner/test_vllm.py`.

Operations on four sequences: `begin AT OTHER N` (OTHER: whose blocks it shares, or None), `append
AT N`, `compact AT FIRST N` (the first FIRST entries stay, and the last, N in all), `end AT`.
`vllm_blocks.py` of version 0.1.0 has the recorder.
"""

from pathlib import Path

import torch

FILE = Path(__file__).with_name("vllm.json")
SEQUENCES, HEADS, GROUP, DIM, ROWS, SCALE, SOFTCAP = 4, 2, 2, 32, 3, 0.4, 3.0
SINKS = (0.5, -1.0, 2.0, 0.0)
ATTENDED = (16, 32)  # block sizes that vLLM's kernel reads


def waves(numbers, heads, rate):
    """Vectors [n, heads, dim] of entries or rows by their numbers, float32."""
    at = torch.arange(heads * DIM, dtype=torch.float64)
    angle = torch.as_tensor(numbers, dtype=torch.float64)[:, None] * rate * (1 + at / 7) + at
    return (1.5 * angle.sin()).float().view(-1, heads, DIM)


def keys(numbers):
    """The keys of entries, [n, heads, dim]."""
    return waves(numbers, HEADS, 0.13)


def values(numbers):
    """The values of entries, [n, heads, dim]."""
    return waves(numbers, HEADS, 0.29)


def queries():
    """The queries of the last rows, [row, query head, dim]."""
    return waves(range(ROWS), HEADS * GROUP, 0.41)
