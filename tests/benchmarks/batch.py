"""Responses in batches of 1, 4 and 16: tokens per second, and tokens equal to those alone.

    python tests/benchmarks/batch.py                   # on a GPU if there is one: minutes
    python tests/benchmarks/batch.py --smallest        # small layers, seconds

Of unequal prompts, each under a policy in turn, each response is compared with that of the same
prompt alone. In float32 a token differs only where the two largest logits are as close as rounding;
in bfloat16 the tokens before the first other one are counted.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

import kvsim
from harness import options, random_model
from kvsim.recorder import load_model
from kvsim.recorder.batching import separate
from kvsim.runner.batch import respond, run_prompt
from kvsim.runner.decoding import Decoding, RunningModel, prefill

POLICIES = ("snapkv", "h2o", "streaming_llm", "adakv+snapkv", "tova", "gkv", "full")
#: Logits as close as this, relative to the largest, are a tie of float32.
TIES = 1e-4

#: Sizes of layers, tokens of the longest prompt and of a response, and sequences of batches.
LAYERS = {
    "Llama-3.1-8B, 8 layers": (
        {"hidden_size": 4096, "intermediate_size": 14336, "head_dim": 128}
        | {"num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 8},
        (512, 128, (1, 4, 16)),
    ),
    "small layers": (
        {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16},
        (48, 6, (1, 4)),
    ),
}


def lane(running: RunningModel, ids: Sequence[int], policy: str, new: int) -> tuple[Any, Any]:
    """A prompt that has run under a policy, and the logits behind it."""
    length = {"prompt_len": len(ids), "n_pos": len(ids) + new, "interval": 16, "prefill": True}
    budget = max(20, len(ids) // 3)
    with Decoding(running, kvsim.policy(policy).fitted(), budget, **length) as one:
        return one, run_prompt(one, ids, partial(prefill, running))


def alone(running: RunningModel, one: Decoding, logits: Any, new: int) -> tuple[list[int], list]:
    """The greedy response by the runner of one sequence, and how close its second tokens were."""
    tokens, gaps = [], []
    with one:
        while True:
            two = logits.float().topk(2).values.tolist()
            gaps.append((two[0] - two[1]) / max(abs(two[0]), 1e-9))
            tokens.append(int(logits.argmax()))
            if len(tokens) == new:
                return tokens, gaps
            logits = one.feed([tokens[-1]])[-1]


def measure(
    name: str, model: Any, prompt: int, new: int, batches: Sequence[int], device: str
) -> list[str]:
    """The lines of a model."""
    running = RunningModel(model)
    assert separate(model, prompt + new) is None, separate(model, prompt + new)
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.config.vocab_size
    prompts = [
        torch.randint(3, vocabulary, (prompt - at * prompt // 40,), generator=generator).tolist()
        for at in range(max(batches))
    ]
    names = [POLICIES[at % len(POLICIES)] for at in range(len(prompts))]
    expected, gaps, took = [], [], 0.0
    alone(running, *lane(running, prompts[0], names[0], 4), 4)  # kernels are loaded
    for ids, policy in zip(prompts, names, strict=True):
        one, logits = lane(running, ids, policy, new)
        synchronised(device)
        began = time.perf_counter()
        tokens, near = alone(running, one, logits, new)
        took += time.perf_counter() - began
        expected.append(tokens)
        gaps.append(near)
    rate = len(prompts) * new / took
    lines = [f"{name}, {str(model.dtype)[6:]}: one by one {rate:,.1f} tokens/s"]
    for count in batches:
        lanes, logits = zip(
            *(lane(running, prompts[at], names[at], new) for at in range(count)), strict=True
        )
        synchronised(device)
        began = time.perf_counter()
        written = respond(lanes, logits, [new] * count, stop=())
        seconds = time.perf_counter() - began
        same = [
            next((at for at in range(new) if one.tokens[at] != other[at]), new)
            for one, other in zip(written, expected, strict=False)
        ]
        for at, near in zip(same, gaps, strict=False):
            exact = model.dtype != torch.float32 or at == new or near[at] <= TIES
            assert exact, f"{name}: batch of {count}: token {at} differs, not by a tie: {near[at]}"
        rate_of = count * new / seconds
        equal = sum(at == new for at in same)
        line = f"  batch {count}: {rate_of:,.1f} tokens/s ({rate_of / rate:.1f} times), "
        line += f"{equal} of {count} responses equal, {sum(same)} of {count * new} tokens before "
        lines.append(line + "the first other one")
    if device == "cuda":
        lines.append(f"  most memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
    return lines


def synchronised(device: str) -> None:
    """Wait for all that was started."""
    if device == "cuda":
        torch.cuda.synchronize()


def run(device: str, layers: str) -> list[str]:
    """Measure random layers in float32 and bfloat16, and tiny."""
    sizes, (prompt, *rest) = LAYERS[layers]
    shared = random_model(vocab_size=1000, max_position_embeddings=4096, **sizes)
    model = copy.deepcopy(shared).to(device)
    lines = measure(layers, model, prompt, *rest, device)
    lines += measure(layers, model.to(torch.bfloat16), prompt, *rest, device)
    model, _ = load_model("tiny", device=device)
    return lines + measure("tiny", model, 2 * prompt // 3, *rest, device)


if __name__ == "__main__":
    smallest = options(__doc__).parse_args().smallest
    print(*run("cuda" if torch.cuda.is_available() else "cpu", [*LAYERS][smallest]), sep="\n")
