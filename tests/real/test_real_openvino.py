"""Tokens that OpenVINO GenAI wrote, written again by kvsim on the same model.

openvino.json has them: openvino-genai 2026.4.1 on SmolLM2 as optimum-intel 2.2.0 exported it, in
float32 on a processor (`KV_CACHE_PRECISION` and `INFERENCE_PRECISION_HINT` f32), greedy. In three
of the 56 runs KVCrush has to choose among equal sums, as the heap of its C++ library does.
"""

import json
from pathlib import Path

import pytest
from conformance.released_rules import heaped

import kvsim
from kvsim.runner.decoding import Decoding, RunningModel

pytestmark = pytest.mark.real

ENGINE = json.loads(Path(__file__).with_name("openvino.json").read_text("utf-8"))
#: Case and prompt of the runs in which equal sums decide.
TIED = {(4, 4), (5, 4), (6, 5)}
#: Two of the runs, the default and equal sums under KVCrush; all of them take ten minutes.
RUNS = {(0, 0), (4, 4)}


@pytest.mark.parametrize(("case", "prompt"), sorted(RUNS))
def test_the_model_writes_the_tokens_of_the_engine(smollm2, case, prompt):
    """Under `openvino` with the engine's sizes; other rules write other tokens."""
    settings, ids = dict(ENGINE["cases"][case]), ENGINE["prompts"][prompt]
    expected = ENGINE["tokens"][case][prompt]
    n = len(ids) + len(expected)
    budget = settings.pop("budget")
    policy = kvsim.policy("openvino", **settings)
    policy = heaped(policy) if (case, prompt) in TIED else policy
    with Decoding(RunningModel(smollm2[0]), policy, budget, prompt_len=len(ids), n_pos=n) as live:
        tokens = [int(live.feed(ids)[-1].argmax())]
        while len(tokens) < len(expected):
            tokens.append(int(live.feed(tokens[-1:])[-1].argmax()))
        assert live.record().events
    assert tokens == expected
