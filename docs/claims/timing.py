"""Seconds of the processor per event, on random caches of many lengths."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch

import kvsim
from kvsim import Trace, policy
from kvsim.studies.claims.evidence import Seconds


def cost(lengths: Sequence[int], repeats: int = 9) -> Seconds:
    """Seconds of one event of four policies over random caches.

    Those of the processor: what else the machine does meanwhile does not count.
    """
    one = {"random": policy("random"), "tova": policy("tova", heads="group")}
    one |= {"expected_attention": policy("expected_attention"), "ams": policy("ams")}
    one |= {"gkv": policy("gkv"), "global_max": policy("global_max")}
    out = {label: np.zeros((repeats, len(lengths))) for label in one}
    for i, length in enumerate(lengths):
        made = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(1, heads, length, 64, generator=made) for heads in (16, 4, 4))
        rope = kvsim.Rope.default(64)
        for repeat in range(-1, repeats):
            for label, tried in one.items():
                # one that no replay has scored: replays of one trace share results
                trace = Trace.from_arrays(q, k, v, prompt_len=length, rope=rope)
                start = time.process_time()
                # the trace is a prompt alone, so that no other event fires
                kvsim.replay(trace, tried, length // 2, interval=length, prefill=True)
                if repeat >= 0:  # the first one warms up
                    out[label][repeat, i] = time.process_time() - start
    return Seconds(lengths, out)
