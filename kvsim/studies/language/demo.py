"""`kvsim demo`: a comparison of policies on traces of two models, by commands of kvsim."""

from __future__ import annotations

import shutil
from contextlib import chdir
from pathlib import Path
from typing import Annotated

from kvsim.cli.shared import path_option
from kvsim.cli.show import echo_text
from kvsim.errors import OutputError
from kvsim.files import check_writable

#: `full` is the reference, `random` is chance. Events are the same for every policy, so that they
#: differ only in what they keep.
_CELLS = "streaming_llm,h2o,tova,snapkv,random --budget 64,128 --interval 32"

#: Text before each command, and the command, in the folder of the demo.
COMMANDS = {
    "prompts --task walk --out prompt.jsonl --n 1": "A prompt for tiny, which ships with kvsim.",
    "capture --model tiny --prompts prompt.jsonl --no-o-proj --out trace.zarr": (
        "The model reads it and writes its reasoning; a trace records its attention."
    ),
    f"replay trace.zarr --policy full,{_CELLS} --judge --out run": (
        "Policies evict entries of that trace; the model measures how its predictions change."
    ),
    f"plot retention_map trace.zarr --policy {_CELLS} --layer 1 --head 0 --out retention.png": (
        "Which positions each row can still see."
    ),
    "plot over_budgets run --out budgets.png": "Metrics over budgets.",
    f"replay sample-smollm2 --policy full,{_CELLS} --out smollm2-run": (
        "A trace of a real model, SmolLM2, which reads Python's documentation with a code hidden "
        "in it (the needle). Nothing but the end asks for it, after policies have evicted."
    ),
    f"plot retention_map sample-smollm2 --policy {_CELLS} --layer 0 --head 2 "
    "--out smollm2-retention.png": "Which positions each row of it can still see.",
    "plot over_budgets smollm2-run --out smollm2-budgets.png": "Metrics over budgets.",
}
_FILES = {command.rpartition("--out ")[2].split()[0] for command in COMMANDS}


def run(
    out: Annotated[
        Path,
        path_option(
            "DIR", "The folder for trace, run and figures; an earlier demo there is replaced."
        ),
    ] = Path("results/demo"),
) -> None:
    """Compare six policies on traces of two models.

    Shows and runs commands of kvsim: records the shipped model while it reasons, replays policies
    at two budgets, writes trace, run and figures. Then does the same comparison on the shipped
    trace of a real language model, SmolLM2.
    """
    from kvsim.cli import main

    found = {path.name for path in out.iterdir()} if out.is_dir() else set[str]()
    foreign = found - _FILES - {"demo.json"}
    if out.is_symlink() or foreign or (out.exists() and not found):
        raise OutputError(
            f"{out} has {', '.join(sorted(foreign)) or 'no demo'}, expected an earlier demo or "
            "nothing; give another --out or move that away, nothing was changed"
        )
    check_writable(out.parent)
    if found:
        shutil.rmtree(out)
    out.mkdir(parents=True)
    echo_text(f"$ cd {out}")
    with chdir(out):
        for command, purpose in COMMANDS.items():
            echo_text(f"\n{purpose}\n$ kvsim {command}")
            try:
                main(command.split())
            except SystemExit as end:
                if end.code:
                    raise
