"""What a live run costs: time beside plain generation, and bytes of the cache.

    python tests/benchmarks/live.py            # SmolLM2: minutes
    python tests/benchmarks/live.py --smallest # seconds; what the test suite runs

After one prefill of a prompt, the model decodes some tokens with transformers' own cache, and live
under policies, in turns, in one process. The ratio is of the fastest turns, in seconds of CPU time;
the event at the end of the prompt counts, the prefill does not. Bytes are those of keys and values
after the last token, and at most.
"""

from dataclasses import dataclass
from pydoc_data import topics

import torch
from transformers import DynamicCache

import kvsim
from harness import cpu_seconds, report
from kvsim.recorder import load_model
from kvsim.recorder.cache import cache_option
from kvsim.runner.decoding import Decoding, Prefix, RunningModel, prefill


@dataclass(frozen=True)
class Shape:
    """A model and what it decodes: tokens of each prompt, new tokens, and turns."""

    model: str
    prompts: tuple[int, ...]
    new: int
    turns: int


AIM = Shape("smollm2", (64, 2048), 32, 3)
SMALLEST = Shape("tiny", (128,), 8, 1)

#: Policies with their budgets and intervals; None for the policy's own.
RUNS = (
    ("full", 128, None),
    ("streaming_llm", 128, 64),
    ("snapkv", 128, 64),
    ("tova", 128, 1),
    ("h2o", 128, 16),
    ("adakv+snapkv", 128, 64),
    ("expected_attention", 128, 64),
    ("ams", 128, 64),
)


def plain(run: RunningModel, prefix: Prefix, new: int) -> DynamicCache:
    """Decode greedily with transformers' own cache."""
    cache = DynamicCache(config=run.model.config)
    token = int(prefix.logits.argmax())
    with torch.inference_mode():
        for layer, (keys, values) in enumerate(zip(prefix.keys, prefix.values, strict=True)):
            cache.update(keys[None], values[None], layer)
        for _ in range(new):
            ids = torch.tensor([[token]])
            options = {**cache_option(run.model, cache), "use_cache": True}
            token = int(run.model(ids, **options).logits[0, -1].argmax())
    return cache


def live(
    run: RunningModel, prefix: Prefix, new: int, name: str, budget: int, interval: int | None
) -> Decoding:
    """Decode greedily under a policy."""
    n = len(prefix.tokens)
    policy = kvsim.policy(name)
    token = int(prefix.logits.argmax())
    decoding = Decoding(
        run, policy, budget, prompt_len=n, n_pos=n + new, interval=interval, prefill=True
    )
    with decoding:
        decoding.begin(prefix)
        for _ in range(new):
            token = int(decoding.feed([token])[-1].argmax())
    return decoding


def run(shape: Shape) -> tuple[dict[str, float], list[str]]:
    """Measure every policy after every prompt: the ratios, and a report."""
    torch.set_num_threads(1)
    model, tokenizer = load_model(shape.model)
    running = RunningModel(model)
    text = "\n".join(topics.topics.values())
    words = tokenizer(text[: 8 * max(shape.prompts)])["input_ids"]
    ratios: dict[str, float] = {}
    lines = [
        "| prompt | policy | budget | interval | ms per token | ratio | MB after | MB at most |",
        "| --: | --- | --: | --: | --: | --: | --: | --: |",
    ]
    for n in shape.prompts:
        prefix = prefill(running, words[:n])
        live(running, prefix, 2, "full", 1, None)  # what is made once per model
        base, times, results = [], {x: [] for x in RUNS}, {}
        for _ in range(shape.turns):
            spent, cache = cpu_seconds(lambda: plain(running, prefix, shape.new))  # noqa: B023  now
            base.append(spent)
            for x in RUNS:
                spent, results[x] = cpu_seconds(lambda: live(running, prefix, shape.new, *x))  # noqa: B023
                times[x].append(spent)
        size = sum(y.nbytes for part in cache.layers for y in (part.keys, part.values)) / 1e6
        token = 1000 * min(base) / shape.new
        lines.append(f"| {n} | plain | | | {token:.1f} | 1.00 | {size:.1f} | {size:.1f} |")
        for x in RUNS:
            name, budget, interval = x
            ratios[f"{name} {n}"] = ratio = min(times[x]) / min(base)
            after, most = results[x].cache_bytes / 1e6, results[x].peak_bytes / 1e6
            lines.append(
                f"| {n} | {name} | {budget} | {interval or ''} | {ratio * token:.1f} "
                f"| {ratio:.2f} | {after:.1f} | {most:.1f} |"
            )
    return ratios, lines


if __name__ == "__main__":
    report(__doc__, run, (AIM,), (SMALLEST,))
