"""What recording costs: time beside the model alone, host memory, and bytes on disk.

    python tests/benchmarks/capture.py            # the shape of a 0.5B model: some minutes
    python tests/benchmarks/capture.py --smallest # seconds; what the test suite runs
    python tests/benchmarks/capture.py --model smollm2 # a language model on real text: minutes

A random model of the shape of Qwen2-0.5B answers a prompt with and without a capture of q, k, v and
attention output to disk, in turns, in one process; the ratio is of the fastest turns.

Host memory is the highest resident size while two processes do either once, with an allocator that
gives back what is freed: how much it keeps else differs by tens of megabytes from run to run. One
block is what the arrays of 256 positions take in all layers. The prompt ends one position before a
block does, which leaves the most to hold.

The least that a trace can take is q, k and v in the model's precision, uncompressed; beside it
stands what the same arrays and the attention output take.

With SmolLM2 the prompt is documentation that comes with Python, and host memory that of a prompt of
4,095 tokens.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from pydoc_data import topics

import torch
from transformers import PreTrainedModel

import kvsim
from harness import options, publish, random_model
from kvsim.recorder import load_model
from kvsim.recorder.choice import Choice
from kvsim.recorder.generation import generate
from kvsim.schema import CHUNK


@dataclass(frozen=True)
class Shape:
    """A model and a text, and a turn; model: a real one. longest: prompt for memory, if another."""

    layers: int
    hidden: int
    intermediate: int
    qheads: int
    heads: int
    vocabulary: int
    prompt: int
    new: int
    turns: int
    model: str | None = None
    longest: int | None = None

    @property
    def dim(self) -> int:
        """Dimensions of a head."""
        return self.hidden // self.qheads


AIM = Shape(24, 896, 4864, 14, 2, vocabulary=151936, prompt=512, new=64, turns=3)
SMALLEST = Shape(2, 64, 128, 4, 2, vocabulary=256, prompt=300, new=20, turns=1)
REAL = Shape(
    *(30, 576, 1536, 9, 3, 49152), prompt=512, new=64, turns=3, model="smollm2", longest=4096
)


def build(shape: Shape) -> PreTrainedModel:
    """The model in float32, a random one without a name; neither ends a response."""
    torch.manual_seed(0)
    if shape.model:
        model, _ = load_model(shape.model)
        model.config.eos_token_id = model.generation_config.eos_token_id = None
        return model
    heads = {"num_attention_heads": shape.qheads, "num_key_value_heads": shape.heads}
    sizes = {"hidden_size": shape.hidden, "intermediate_size": shape.intermediate}
    sizes |= {"num_hidden_layers": shape.layers, "vocab_size": shape.vocabulary}
    given = {"kind": "Qwen2", "max_position_embeddings": 32_768, "tie_word_embeddings": True}
    return random_model(**given, **heads, **sizes)


@cache
def prompt(shape: Shape) -> list[int]:
    """The ids of the prompt: of real text for a real model, else random."""
    if shape.model is None:
        return torch.randint(0, shape.vocabulary, (shape.prompt,)).tolist()
    text = "\n\n".join(topics.topics.values())
    ids = load_model(shape.model)[1](text[: 20 * shape.prompt])["input_ids"]
    return ids[: shape.prompt]


def turn(model: PreTrainedModel, shape: Shape, out: Path | None) -> tuple[float, float]:
    """Seconds of the prompt and of each new token; recorded to `out`, or the model alone."""
    ids = prompt(shape)
    marks = [time.perf_counter()]

    def mark(_done: int, _total: int) -> None:
        marks.append(time.perf_counter())

    if out is None:
        generate(
            model,
            ids,
            new_tokens=shape.new,
            choice=Choice(model, ()),
            stop=frozenset(),
            completed=lambda _tokens, _start: False,
            before_last=lambda _n: None,
            progress=mark,
            chunk=len(ids),
        )
    else:
        kvsim.capture(
            model, None, ids, max_new_tokens=shape.new, out=out, overwrite=True, progress=mark
        )
    return marks[1] - marks[0], (marks[-1] - marks[1]) / shape.new


def peak(shape: Shape, *, recorded: bool) -> int:
    """Highest resident size in bytes of a process that does one turn."""
    command = [sys.executable, __file__, "--once", json.dumps(asdict(shape))]
    if recorded:
        command.append("--recorded")
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=True,
        timeout=1200,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"},
    )
    return int(done.stdout.split()[-1])


def once(shape: Shape, *, recorded: bool) -> None:
    """One turn, and the highest resident size from its beginning on (as Linux counts it)."""
    model = build(shape)
    turn(model, replace(shape, prompt=2, new=1), None)
    Path("/proc/self/clear_refs").write_text("5", "ascii")  # making the model took more
    with tempfile.TemporaryDirectory() as folder:
        turn(model, shape, Path(folder, "a.zarr") if recorded else None)
    status = Path("/proc/self/status").read_text("ascii")
    print(int(status.partition("VmHWM:")[2].split()[0]) * 1024)


def block_bytes(shape: Shape) -> int:
    """What 256 positions of the arrays take in all layers: q, k, v, output and log-sum-exp."""
    return CHUNK * array_bytes(shape)


def array_bytes(shape: Shape) -> int:
    """What one position of the arrays takes in all layers."""
    return shape.layers * 4 * (shape.dim * (2 * shape.qheads + 2 * shape.heads) + shape.qheads)


def run(shape: Shape) -> tuple[dict[str, float], list[str]]:
    """Ratios by name, and the report line by line."""
    alone, recorded = [], []
    model = build(shape)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.zarr")
        turn(model, shape, None)
        for _ in range(shape.turns):
            alone.append(turn(model, shape, None))
            recorded.append(turn(model, shape, path))
        stored = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        tokens = kvsim.open_trace(path).n_pos
    del model
    (first, token), (first_too, token_too) = (
        [min(part) for part in zip(*turns, strict=True)] for turns in (alone, recorded)
    )
    longest = shape.longest or shape.prompt
    worst = replace(shape, prompt=longest - longest % CHUNK - 1)
    most, alone_most = (peak(worst, recorded=recorded) for recorded in (True, False))
    more = most - alone_most
    block = block_bytes(shape)
    least = shape.layers * shape.dim * 4 * (shape.qheads + 2 * shape.heads)
    arrays = array_bytes(shape)
    ratios = {
        "generation": token_too / token,
        "prompt": first_too / first,
        "memory in blocks": more / block,
        "bytes": stored / tokens / least,
    }
    lines = [
        f"threads {torch.get_num_threads()}, torch {torch.__version__}",
        f"{shape}",
        (
            f"a new token takes {token * 1e3:.1f} ms alone, {token_too * 1e3:.1f} ms recorded: "
            f"{ratios['generation']:.3f} times ({1 / token:.1f} and {1 / token_too:.1f} tokens/s)"
        ),
        (
            f"the prompt takes {first:.2f} s alone, {first_too:.2f} s recorded: "
            f"{ratios['prompt']:.3f} times ({shape.prompt / first:.0f} and "
            f"{shape.prompt / first_too:.0f} tokens/s)"
        ),
        (
            f"host memory grows by {more / 2**20:.0f} MiB, {ratios['memory in blocks']:.2f} of one "
            f"block of all layers ({block / 2**20:.0f} MiB), at a prompt of {worst.prompt} tokens: "
            f"at most {alone_most / 2**20:.0f} MiB alone, {most / 2**20:.0f} MiB recorded"
        ),
        (
            f"{stored / tokens:.0f} bytes on disk for a token, {ratios['bytes']:.2f} times q, k "
            f"and v alone ({least}), {stored / tokens / arrays:.2f} times all that is stored, "
            f"uncompressed ({arrays})"
        ),
    ]
    return ratios, lines


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--model", choices=["smollm2"], help="a real model on real text")
    parser.add_argument("--once", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--recorded", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.once:
        once(Shape(**given.once), recorded=given.recorded)
    else:
        aim = REAL if given.model else AIM
        _, lines = run(SMALLEST if given.smallest else aim)
        publish(lines, given.doc, "capture smollm2" if given.model else "capture")
