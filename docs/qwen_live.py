# ruff: noqa: INP001, T201 - a script, not a module, and it says what it found
"""How many answers of Qwen2.5-Coder stay right under eviction? Live runs in batches, on a GPU too.

    python docs/qwen_live.py prepare PROMPTS.jsonl [--n 30] [--task chain_sum ...]
    python docs/qwen_live.py run FILE.gguf PROMPTS.jsonl OUT.jsonl [--device cuda] [--seconds 300]
    python docs/qwen_live.py score OUT.jsonl
    python docs/qwen_live.py write

`run` writes greedy answers with the full cache, then under each policy and budget to the prompts
that the full cache answers, and appends a line of JSON for each: it may be stopped and run again.
`score` adds what is right to docs/qwen-live.jsonl, `write` makes the table of docs/qwen.md of it.
`prepare` and `score` need reasoning-gym 0.1.25, `run` does not.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from study import append, filled, read, run_command

import kvsim
from apps.tiny.card import table as markdown
from kvsim.recorder.generation import stop_tokens
from kvsim.recorder.models import load_model
from kvsim.runner.batch import respond, run_prompt
from kvsim.runner.decoding import Decoding, RunningModel, prefill
from qwen_card import PAGE, TASKS, encoded, final, reasoning
from smollm2_card import cell

POLICIES = (
    *("streaming_llm", "snapkv", "h2o", "tova", "expected_attention", "keydiff", "rkv", "gkv"),
)
BUDGETS = (64, 128)
RESULTS = Path(__file__).with_name("qwen-live.jsonl")
#: What is stored of an answer, beside whether it is right.
STORED = ("model", "policy", "budget", "task", "index", "prompt_tokens", "tokens", "ended")
#: Rows between events; one follows the prompt.
INTERVAL = 32


def prepare(args: argparse.Namespace) -> None:
    """Write the prompts, the first of each task first."""
    turns = zip(*(reasoning(task, args.n) for task in args.task), strict=True)
    lines = [json.dumps(one["row"]) for each in turns for one in each]
    args.prompts.write_text("\n".join(lines) + "\n", "utf-8")


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return what a line is of."""
    return tuple(row[name] for name in ("model", "policy", "budget", "task", "index"))


class Writer:
    """Writes answers in batches until the time is over, and appends them to a file."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.end = args, time.perf_counter() + args.seconds
        model, self.tokenizer = load_model(args.file, device=args.device, dtype=args.dtype)
        self.running, self.stop = RunningModel(model), stop_tokens(model, self.tokenizer)
        self.prefix = lru_cache(maxsize=2)(lambda ids: prefill(self.running, ids))
        self.name = Path(args.file).stem
        self.done = {key(row) for row in read(args.out)}

    def cells(
        self, rows: Sequence[dict[str, Any]], policies: Sequence[str], budgets: Sequence[int]
    ) -> Iterator[dict[str, Any]]:
        """Yield what the file lacks, all of a prompt together."""
        for row in rows:
            for policy in policies:
                for budget in budgets:
                    cell = {**row, "model": self.name, "policy": policy, "budget": budget}
                    if key(cell) not in self.done:
                        yield cell

    def write(self, cells: Sequence[dict[str, Any]]) -> None:
        """Write the answers of cells, as long as another batch fits into the time."""
        took = 0.0
        for start in range(0, len(cells), self.args.batch):
            began = time.perf_counter()
            if began + took > self.end:
                print(f"time is over, {len(cells) - start} answers are left; run it again")
                return
            batch = cells[start : start + self.args.batch]
            append(self.args.out, self.batch(batch))
            took = time.perf_counter() - began
            print(f"{start + len(batch)} of {len(cells)} answers, {took:.1f} s", flush=True)

    def batch(self, cells: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield the lines of a batch."""
        new, lanes, logits = self.args.new_tokens, [], []
        for each in cells:
            text, policy = each["prompt"], kvsim.policy(each["policy"]).fitted()
            chat = [{"role": "user", "content": text}] if self.tokenizer.chat_template else text
            ids = tuple(encoded(chat, self.tokenizer))
            lengths = {"prompt_len": len(ids), "n_pos": len(ids) + new}
            terms = {"interval": INTERVAL, "prefill": True} if each["policy"] != "full" else {}
            with Decoding(self.running, policy, each["budget"], **lengths, **terms) as lane:
                lanes.append(lane)
                logits.append(run_prompt(lane, ids, self.prefix))
        written = respond(lanes, logits, [new] * len(lanes), stop=self.stop)
        for each, lane, answer in zip(cells, lanes, written, strict=True):
            response = self.tokenizer.decode(answer.tokens, skip_special_tokens=True)
            yield {name: each[name] for name in each if name != "prompt"} | {
                "prompt_tokens": lane.sketch.prompt_len,
                "tokens": len(answer.tokens),
                "ended": answer.ended is not None,
                "seconds": round(answer.seconds, 3),
                "batch": len(cells),
                "response": response,
            }


def run(args: argparse.Namespace) -> None:
    """Write answers with the full cache, then under policies where that one is right."""
    torch.set_num_threads(args.threads)
    args.out.touch()
    writer, rows = Writer(args), read(args.prompts)
    writer.write([*writer.cells(rows, ["full"], [1 << 20])])
    answered = {
        (row["task"], row["index"])
        for row in read(args.out)
        if row["policy"] == "full" and final(row["response"]) == row["answer"]
    }
    if args.all:
        answered = {(row["task"], row["index"]) for row in rows}
    chosen = [row for row in rows if (row["task"], row["index"]) in answered]
    print(f"the full cache answers {len(chosen)} of {len(rows)} prompts", flush=True)
    writer.write([*writer.cells(chosen, args.policy, args.budget)])


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return right answers by policy and budget, best at the largest budget first.

    Of the prompts that the full cache answers, and that all policies answered at all budgets.
    """
    of = {key(row)[1:]: row for row in rows if row["policy"] != "full"}
    policies, budgets = (sorted({each[at] for each in of}) for at in (0, 1))
    right = [key(row)[-2:] for row in rows if row["policy"] == "full" and row["right"]]
    cells = [(policy, budget) for policy in policies for budget in budgets]
    common = [prompt for prompt in right if all((*each, *prompt) in of for each in cells)]

    def answers(policy: str, budget: int) -> list[dict[str, Any]]:
        return [of[policy, budget, *prompt] for prompt in common]

    heads = [f"right at {budget}" for budget in budgets] + [f"tokens at {n}" for n in budgets]
    lines = []
    order = {x: -sum(row["right"] for row in answers(x, budgets[-1])) for x in policies}
    for policy in sorted(policies, key=order.__getitem__):
        each = [answers(policy, budget) for budget in budgets]
        shares = [cell([row["right"] for row in rows]) for rows in each]
        means = [f"{sum(row['tokens'] for row in rows) / len(rows):.0f}" for rows in each]
        lines.append([f"`{policy}`", *shares, *means])
    return markdown(["policy", *heads], lines)


def score(args: argparse.Namespace) -> None:
    """Store which answers of a file are right, by the scorers of reasoning-gym."""
    stored = read(RESULTS)
    scored = {key(row) for row in stored}
    rows = [row for row in read(args.out) if key(row) not in scored]
    for task in {row["task"] for row in rows}:
        of = [row for row in rows if row["task"] == task]
        prompts = [*reasoning(task, 1 + max(row["index"] for row in of))]
        for row in of:
            if prompts[row["index"]]["row"]["answer"] != row["answer"]:
                raise SystemExit(f"{task} {row['index']} is of another release of reasoning-gym")
            row["right"] = bool(prompts[row["index"]]["right"](row["response"]))
    stored += [{name: row[name] for name in (*STORED, "right")} for row in rows]
    RESULTS.write_text("".join(json.dumps(row) + "\n" for row in stored), "utf-8")


def page(text: str) -> str:
    """Return the page of the card with its table of policies."""
    return filled(text, {"live": table(read(RESULTS))})


def write(_: argparse.Namespace) -> None:
    """Write the table of the page."""
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")


PROMPTS = {"type": Path, "metavar": "PROMPTS.jsonl"}
OUT = {"type": Path, "metavar": "OUT.jsonl"}
ARGUMENTS = {
    "prepare": {
        "prompts": PROMPTS,
        "--n": {"type": int, "default": 30},
        "--task": {"nargs": "+", "default": TASKS},
    },
    "run": {
        "file": {"metavar": "FILE.gguf"},
        "prompts": PROMPTS,
        "out": OUT,
        "--device": {"default": "cpu"},
        "--dtype": {"default": "bfloat16"},
        "--seconds": {"type": float, "default": 300, "help": "no batch begins that ends later"},
        "--batch": {"type": int, "default": 64, "help": "answers at once"},
        "--new-tokens": {"type": int, "default": 400},
        "--policy": {"nargs": "+", "default": POLICIES},
        "--budget": {"type": int, "nargs": "+", "default": BUDGETS},
        "--all": {"action": "store_true", "help": "also what the full cache gets wrong"},
        "--threads": {"type": int, "default": 2},
    },
    "score": {"out": OUT},
}


def main() -> None:
    """Run one of the commands."""
    commands = {"prepare": prepare, "run": run, "score": score, "write": write}
    run_command(__doc__, commands, ARGUMENTS)


if __name__ == "__main__":
    main()
