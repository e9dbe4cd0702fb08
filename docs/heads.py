# ruff: noqa: INP001 - a script, not a module
"""Draw the pictures of the model card: attention, what is retrieved, what is needed, training.

    python docs/heads.py --results docs/tiny-results.jsonl --out docs/images [--model PATH]

Only the attention of one sample is computed here; all else comes from what
`python -m apps.tiny.evaluate` has measured, and what it has not measured is not drawn.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from apps.tiny.heads import head_maps, head_masses, removed_heads, training_curves
from apps.tiny.probes import attention_maps
from apps.tiny.results import Results, digest
from kvsim.plots import save
from kvsim.studies.language.tasks import prompts
from kvsim.tiny import PATH

PICTURES = {
    "structure": ("tiny-retrieval.png", head_masses),
    "ablation": ("tiny-removed.png", removed_heads),
    "curve": ("tiny-training.png", training_curves),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw the pictures of the model card."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--results", type=Path, required=True, help="what evaluate measured")
    parser.add_argument("--out", type=Path, required=True, help="folder for the pictures")
    parser.add_argument("--model", type=Path, default=PATH, help="folder; default: the shipped one")
    options = parser.parse_args(arguments)
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    sample = prompts(1, 4000, task="wait", facts=10, lines=17, kinds=6, filler=0.0)[0]
    maps = head_maps(attention_maps(model, sample), prompt=1 + sample.prompt_words)
    save(maps, options.out / "tiny-heads.png", overwrite=True)
    rows = Results(options.results, digest(options.model)).rows()
    for part, (name, draw) in PICTURES.items():
        if any(row["part"] == part for row in rows):
            save(draw(rows), options.out / name, overwrite=True)


if __name__ == "__main__":
    main()
