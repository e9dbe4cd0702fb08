"""What recording costs: time beside the model alone, host memory, and bytes on disk.

    python tests/benchmarks/capture.py            # the shape of a 0.5B model: some minutes
    python tests/benchmarks/capture.py --smallest # seconds; what the test suite runs

A random model of the shape of Qwen2-0.5B answers a prompt with and without a capture of q, k, v and
attention output to disk, in turns, in one process; the ratio is of the fastest turns.

Host memory is the highest resident size while two processes do either once, with an allocator that
gives back what is freed: how much it keeps else differs by tens of megabytes from run to run. One
block is what the arrays of 256 positions take in all layers. The prompt ends one position before a
block does, which leaves the most to hold.

The least that a trace can take is q, k and v in the model's precision, uncompressed; beside it
stands what the same arrays and the attention output take.

With `--doc docs/performance.md` the report is put into that page.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

import kvsim
from kvsim.recorder.generation import generate
from kvsim.schema import CHUNK

sys.path.append(str(Path(__file__).parent))
from replay import put

BEGIN, END = "<!-- begin capture -->", "<!-- end capture -->"


@dataclass(frozen=True)
class Shape:
    """A model and a text: prompt and new tokens of a turn."""

    layers: int
    hidden: int
    intermediate: int
    qheads: int
    heads: int
    vocabulary: int
    prompt: int
    new: int
    turns: int

    @property
    def dim(self) -> int:
        """Dimensions of a head."""
        return self.hidden // self.qheads


AIM = Shape(
    layers=24,
    hidden=896,
    intermediate=4864,
    qheads=14,
    heads=2,
    vocabulary=151936,
    prompt=512,
    new=64,
    turns=3,
)
SMALLEST = Shape(
    layers=2,
    hidden=64,
    intermediate=128,
    qheads=4,
    heads=2,
    vocabulary=256,
    prompt=300,
    new=20,
    turns=1,
)


def build(shape: Shape) -> PreTrainedModel:
    """A random model in float32."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.qheads,
        num_key_value_heads=shape.heads,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
    )
    return Qwen2ForCausalLM(config).eval()


def turn(model: PreTrainedModel, shape: Shape, out: Path | None) -> tuple[float, float]:
    """Seconds of the prompt and of each new token; recorded to `out`, or the model alone."""
    ids = torch.randint(0, shape.vocabulary, (shape.prompt,)).tolist()
    marks = [time.perf_counter()]

    def mark(_done: int, _total: int) -> None:
        marks.append(time.perf_counter())

    if out is None:
        generate(
            model,
            ids,
            new_tokens=shape.new,
            temperature=0.0,
            seed=0,
            stop=frozenset(),
            completed=lambda _tokens, _start: False,
            sampled=lambda _token: None,
            before_last=lambda _n: None,
            progress=mark,
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
    (prompt, token), (prompt_too, token_too) = (
        [min(part) for part in zip(*turns, strict=True)] for turns in (alone, recorded)
    )
    worst = replace(shape, prompt=shape.prompt - shape.prompt % CHUNK - 1)
    more = peak(worst, recorded=True) - peak(worst, recorded=False)
    block = block_bytes(shape)
    least = shape.layers * shape.dim * 4 * (shape.qheads + 2 * shape.heads)
    arrays = array_bytes(shape)
    ratios = {
        "generation": token_too / token,
        "prompt": prompt_too / prompt,
        "memory in blocks": more / block,
        "bytes": stored / tokens / least,
    }
    lines = [
        f"threads {torch.get_num_threads()}, torch {torch.__version__}",
        f"{shape}",
        (
            f"a new token takes {token * 1e3:.1f} ms alone, {token_too * 1e3:.1f} ms recorded: "
            f"{ratios['generation']:.3f} times"
        ),
        (
            f"the prompt takes {prompt:.2f} s alone, {prompt_too:.2f} s recorded: "
            f"{ratios['prompt']:.3f} times"
        ),
        (
            f"host memory grows by {more / 2**20:.0f} MiB, {ratios['memory in blocks']:.2f} of one "
            f"block of all layers ({block / 2**20:.0f} MiB), at a prompt of {worst.prompt} tokens"
        ),
        (
            f"{stored / tokens:.0f} bytes on disk for a token, {ratios['bytes']:.2f} times q, k "
            f"and v alone ({least}), {stored / tokens / arrays:.2f} times all that is stored, "
            f"uncompressed ({arrays})"
        ),
    ]
    return ratios, lines


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smallest", action="store_true", help="seconds instead of minutes")
    parser.add_argument("--doc", type=Path, help="put the report into this page, between its marks")
    parser.add_argument("--once", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--recorded", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        once(Shape(**options.once), recorded=options.recorded)
        return
    _, lines = run(SMALLEST if options.smallest else AIM)
    print("\n".join(lines))
    if options.doc:
        put(options.doc, lines, BEGIN, END)


if __name__ == "__main__":
    main()
