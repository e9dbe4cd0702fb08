"""The dumps of docs/dumps: what implementations with known defects keep, on a small random model.

kvpress 0.5.5 wrote them through kvsim's recorder. The G-KV release has no licence, so dumps with
its two defects were built from replays. tests/studies/conformance/test_dumps.py judges them.
"""

from pathlib import Path

import torch

from kvsim.recorder.forward import cache_option

FOLDER = Path(__file__).parents[2] / "docs" / "dumps"

_SNAPKV = {"window": 4, "pool_kernel": 1}
#: the definition that a dump is compared with, its parameters, and the deviations named
DUMPS = {
    "knorm": ("knorm", {}, []),
    "streaming": ("streaming_llm", {}, ["top-k-order"]),
    "snapkv": ("snapkv@kvpress", _SNAPKV, ["window-rotated"]),
    "snapkv-pooled": ("snapkv@kvpress", {"window": 4}, ["window-rotated, top-k-order"]),
    "snapkv-eager": ("snapkv@kvpress", _SNAPKV, ["window-of-one"]),
    "expected-attention": (
        "expected_attention",
        {"query_buffer": 8},
        ["expected_attention@kvpress"],
    ),
    "ratio": ("knorm", {}, ["one-fewer"]),
    "adakv": ("adakv@kvpress+expected_attention@kvpress", {"epsilon": 0.01}, ["evicted-return"]),
    "gkv-release": ("gkv", {"window": 4}, ["event-late"]),
    "gkv-release-streaming": ("streaming_llm", {}, ["sinks-on-top"]),
}


def decode(model, tokens, cache, prompt):
    """Run given tokens, the first of them as a prompt and the others one by one."""
    ids = torch.tensor([tokens])
    with torch.no_grad():
        model(ids[:, :prompt], **cache_option(model, cache))
        for row in range(prompt, ids.shape[1]):
            at = torch.tensor([row])
            model(
                ids[:, row : row + 1],
                position_ids=at[None],
                cache_position=at,
                **cache_option(model, cache),
            )
