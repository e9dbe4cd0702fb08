# ruff: noqa: INP001 - a script, not a module
"""K8V4 or K4V8? Judged KL over bytes held, by bits of keys and of values: bits.md.

python docs/bits.py --file FILE.gguf    measure prompts without a piece; of Qwen2.5-Coder-0.5B
python docs/bits.py --smallest --pieces DIR --out DIR    a prompt of tiny; what a test runs
"""

from __future__ import annotations

import argparse
from functools import cache
from itertools import product
from pathlib import Path

import matplotlib as mpl
import numpy as np
import polars as pl
import torch
from matplotlib.figure import Figure
from scipy.special import stdtrit
from scoring_plan import Workload
from scoring_prompts import prompt_of
from study import ROOT, markdown, picture

import kvsim
from kvsim.analysis.live.table import measure_live
from kvsim.analysis.output.bytes import cache_bytes
from kvsim.recorder import capture, load_model
from kvsim.runner.judging import Judge
from kvsim.runner.model import RunningModel

RESULTS = ROOT / "docs" / "bits-results.parquet"
#: The first prompts of the workload `needles` of docs/scoring_plan.py: 512 tokens, 16 written.
PROMPTS, RESPONSE = 12, 16
MODELS = {"smollm2": "SmolLM2-135M", "0.5b": "Qwen2.5-Coder-0.5B", "tiny": "tiny"}
TITLES = {"int8": "int", "kivi": "kivi", "q8_0": "q8_0, q4_0", "q8_0@rotated": "rotated"}
COLOURS = {16: "#999999", 8: "#0072b2", 4: "#009e73", 2: "#d55e00"}  # of the bits of keys
MARKERS = {16: "D", 8: "o", 4: "s", 2: "v"}  # of those of values
STYLE = {"font.size": 8, "axes.titlesize": 8, "axes.grid": True, "grid.color": "0.9"}
#: Pairs of bits; llama.cpp has no 2.
CELLS = [
    (x, *b) for x in TITLES for b in [*product(COLOURS, MARKERS)][1:] if 2 not in b or x[0] != "q"
]
_model = cache(load_model)


def measure(model: str, number: int, file: Path | None) -> pl.DataFrame:
    """Bytes held as a share of the full cache, and judged KL in nats per token, of a prompt."""
    torch.set_num_threads(1)
    loaded, tokenizer = _model(file if model == "0.5b" and file else model)
    prompt = prompt_of(Workload("needles", model), number, tokenizer)
    trace = capture(loaded, tokenizer, prompt, max_new_tokens=RESPONSE, sensitivity=False)
    window = {"kivi": {"window": 32}}  # as in access.md
    policies = [kvsim.policy(x, k_bits=k, v_bits=v, **window.get(x, {})) for x, k, v in CELLS]
    records = [kvsim.replay(trace, policy, trace.n_pos) for policy in ("full", *policies)]
    whole, *held = (float(resident.sum()) for resident, _ in cache_bytes(trace, records))
    outcomes = Judge(RunningModel(loaded), trace).outcomes(records[1:])
    pairs = zip(records[1:], outcomes, strict=True)
    judged = [measure_live(trace, [x], [y], ["response_kl"])["value"].mean() for x, y in pairs]
    table = pl.DataFrame(CELLS, ["quantizer", "k_bits", "v_bits"], orient="row")
    facts = {"model": model, "number": number, "digest": trace.digest[7:23], "tokens": trace.n_pos}
    facts |= {"held": pl.Series(held) / whole, "kl": pl.Series(judged)}
    return table.with_columns(**{name: pl.lit(fact) for name, fact in facts.items()})


def part() -> str:
    """The table of the page: mean KL, and the mean ratio with its t-interval."""
    pairs, lines = ((8, 4), (4, 8)), []
    keys, stored = ("model", "quantizer"), pl.read_parquet(RESULTS)
    for (model, name), rows in stored.group_by(*keys, maintain_order=True):
        of = [rows.filter(k_bits=k, v_bits=v).sort("number")["kl"].to_numpy() for k, v in pairs]
        cells = [f"{MODELS[str(model)]}, {TITLES[str(name)]}", *(f"{x.mean():.2g}" for x in of)]
        logs = np.log(of[1] / of[0])
        reach = stdtrit(len(logs) - 1, 0.975) * logs.std(ddof=1) / len(logs) ** 0.5
        ends = (float(f"{np.exp(logs.mean() + x):.2g}") for x in (0, -reach, reach))
        lines.append([*cells, "{:,g} [{:,g}, {:,g}]".format(*ends)])
    return markdown(["", *(f"K{k}V{v}" for k, v in pairs), "geometric ratio"], lines)


def figure(stored: pl.DataFrame, path: Path) -> None:
    """Draw mean KL over bytes held: colours for the bits of keys, markers for those of values."""
    models = stored["model"].unique(maintain_order=True).to_list()
    drawn = Figure(figsize=(8.3, 0.7 + 2.2 * len(models)), layout="constrained")
    grid = drawn.subplots(len(models), len(TITLES), squeeze=False, sharex=True, sharey="row")
    for (model, name, k, v), rows in stored.group_by("model", "quantizer", "k_bits", "v_bits"):
        ax = grid[models.index(model), [*TITLES].index(name)]
        ax.plot(rows["held"].mean(), rows["kl"].mean(), MARKERS[v], color=COLOURS[k], ms=5)
        ax.set(yscale="log", axisbelow=True, title=TITLES[name])
        grid[models.index(model), 0].set_ylabel(f"judged KL, nats\n{MODELS[model]}")
    for bits, colour in COLOURS.items():
        grid[0, 0].plot([], [], "s", color=colour, label=f"K{bits}")
        grid[0, 0].plot([], [], MARKERS[bits], color="0.4", label=f"V{bits}")
    drawn.legend(loc="outside upper center", ncols=8)
    drawn.supxlabel("bytes held, share of the full cache at 16 bits", fontsize=8)
    picture(drawn, path, dpi=100)


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--file", type=Path, metavar="FILE.gguf", help="Qwen2.5-Coder-0.5B")
    parser.add_argument("--pieces", type=Path, metavar="DIR", default=ROOT / "traces" / "bits")
    parser.add_argument("--out", type=Path, metavar="DIR", default=RESULTS.parent)
    parser.add_argument("--smallest", action="store_true", help="one prompt of tiny")
    args = parser.parse_args(arguments)
    args.pieces.mkdir(parents=True, exist_ok=True)
    steps = [*product(("smollm2", "0.5b") if args.file else ("smollm2",), range(PROMPTS))]
    for model, number in [("tiny", 0)] if args.smallest else steps:
        piece = args.pieces / f"{model}-{number:02}.parquet"
        if not piece.exists():
            measure(model, number, args.file).write_parquet(piece)
    tables = [pl.read_parquet(piece) for piece in sorted(args.pieces.glob("*.parquet"))]
    stored = pl.concat(tables, how="diagonal").sort("model", descending=True, maintain_order=True)
    stored.write_parquet(args.out / RESULTS.name, compression="zstd")
    with mpl.rc_context(STYLE):
        figure(stored, args.out / "figures" / "bits.png")


if __name__ == "__main__":
    main()
