# ruff: noqa: INP001, T201 - a script, not a module, and it says what it found
"""Which tasks do Qwen2.5-Coder's small models solve with the full cache? The tables of their card.

    python docs/qwen_card.py measure FILE.gguf --name 0.5B [--n 30] [--task chain_sum ...]
    python docs/qwen_card.py measure FILE.gguf --name 0.5B --length 2048 4096 [--batch 1]
    python docs/qwen_card.py measure FILE.gguf --name 1.5B --task sheet --n 96 --new-tokens 1200
    python docs/qwen_card.py check FILE.gguf
    python docs/qwen_card.py write

The first forms append a line of JSON for each prompt that the results lack, after each batch: they
may be stopped and run again, and a later run with more prompts adds to them. Responses are greedy,
in bfloat16. `check` compares weights and 64 greedy tokens of two prompts with what transformers
loads from the file, and verifies their traces. The last form writes the tables of docs/qwen.md, and
measures nothing.

Tasks that need reasoning are those of reasoning-gym (0.1.25), in its own sizes, and answers are
checked by its scorers. Those with `--length` are kvsim's own on real text.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from study import append, filled, read, run_command
from transformers import AutoModelForCausalLM

import kvsim
from apps.tiny.card import table as markdown
from kvsim.recorder.models import load_model
from kvsim.recorder.prompts import token_count
from kvsim.store import verify
from kvsim.text.answers import is_right
from kvsim.text.tasks import sample
from smollm2_card import DEPTHS, cell

RESULTS = Path(__file__).with_name("qwen-results.jsonl")
PAGE = Path(__file__).with_name("qwen.md")
TASKS = (
    *("chain_sum", "basic_arithmetic", "simple_equations", "leg_counting", "letter_counting"),
    *("gcd", "word_sorting", "gsm_symbolic", "lcm", "fraction_simplification", "coin_flip", "aiw"),
    *("prime_factorization", "decimal_chain_sum", "complex_arithmetic", "simple_geometry"),
)
LONG = ("needle", "quote", "chat")
#: After the question: what the makers of these models, and of R1-Distill-Qwen, recommend.
FORM = "\n\nPlease reason step by step, and put your final answer within \\boxed{}."
#: Questions of `check`.
CHECKED = ("What is 12 + 35 - 7 + 18?", "How often is the letter r in strawberry?")
SEED = 1
#: Three questions in one prompt, for long answers: the task of such prompts, and of the questions.
SHEET = "sheet"
QUESTIONS = (
    *("chain_sum", "basic_arithmetic", "simple_equations", "lcm", "gcd", "complex_arithmetic"),
    *("simple_geometry", "gsm_symbolic"),
)
ON_A_SHEET = 3
OF_SHEET = (
    "Answer these three questions one after the other. Please reason step by step, and put the "
    "final answer of each within \\boxed{}."
)


def final(response: str) -> str:
    """Return what the last box of a response has, without marks of LaTeX."""
    return (boxes(response) or [""])[-1]


def boxes(response: str) -> list[str]:
    """Return what the boxes of a response have, without marks of LaTeX."""
    return [*map(_plain, re.findall(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}", response))]


def _plain(text: str) -> str:
    text = re.sub(r"\\(?:text|mathrm|textbf)\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\\[()\[\],;!]|[$*`\\]", "", text).rpartition("=")[2]
    return text.strip().rstrip(".").strip()


def reasoning(task: str, n: int) -> Iterator[dict[str, Any]]:
    """Yield `n` prompts of a task of reasoning-gym."""
    from reasoning_gym import create_dataset  # noqa: PLC0415  installed by hand

    data = create_dataset(task, seed=SEED, size=n)
    for index in range(n):
        entry = data[index]
        yield {
            "row": {"task": task, "index": index, "prompt": entry["question"] + FORM}
            | {"answer": str(entry["answer"])},
            "content": [{"role": "user", "content": entry["question"] + FORM}],
            "right": lambda text, entry=entry: _solves(data, final(text), entry),
        }


def sheets(n: int) -> Iterator[dict[str, Any]]:
    """Yield `n` prompts of three questions each, of different tasks; right are all answers."""
    from reasoning_gym import create_dataset  # noqa: PLC0415  installed by hand

    data = [create_dataset(task, seed=SEED + 1, size=ON_A_SHEET * n) for task in QUESTIONS]
    for index in range(n):
        places = range(ON_A_SHEET * index, ON_A_SHEET * (index + 1))
        of = [data[ON_A_SHEET * place % len(data)] for place in places]
        asked = [each[place] for each, place in zip(of, places, strict=True)]
        questions = [f"Question {i}: {entry['question']}" for i, entry in enumerate(asked, 1)]
        prompt = "\n\n".join([*questions, OF_SHEET])

        def right(text: str, of: Any = of, asked: Any = asked) -> bool:
            found = boxes(text)
            return len(found) == len(asked) and all(map(_solves, of, found, asked))

        yield {
            "row": {"task": SHEET, "index": index, "prompt": prompt}
            | {"answer": "; ".join(str(entry["answer"]) for entry in asked)},
            "content": [{"role": "user", "content": prompt}],
            "right": right,
        }


def _solves(data: Any, answer: str, entry: Any) -> bool:
    """Whether the scorer of a task gives an answer the full score."""
    try:
        return bool(data.score_answer(answer, entry) == 1)
    except ValueError:  # some raise at an answer in another form
        return False


def retrieval(task: str, length: int, n: int, tokenizer: Any) -> Iterator[dict[str, Any]]:
    """Yield `n` prompts of a task on real text of about so many tokens, over depths in turn."""
    for index in range(n):
        depth = DEPTHS[index % len(DEPTHS)]
        prompt = sample(
            SEED,
            index,
            lambda prompt: token_count(prompt, tokenizer),
            task=task,
            length=length,
            depth=depth,
        )
        yield {
            "row": {"task": task, "index": index, "length": length, "depth": depth}
            | {"answer": prompt.answer},
            "content": prompt.prompt,
            "right": lambda text, prompt=prompt: is_right(text, prompt.answer or ""),
        }


def encoded(content: Any, tokenizer: Any) -> list[int]:
    """Return the token ids of a prompt, of a chat by its template."""
    if isinstance(content, str):
        ids = tokenizer(content)["input_ids"]
    else:
        ids = tokenizer.apply_chat_template(content, add_generation_prompt=True)["input_ids"]
    return list(ids)


def responses(model: Any, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
    """Return greedy responses as token ids, without what follows their end, of one batch."""
    longest, end = max(map(len, prompts)), model.generation_config.eos_token_id
    padded = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    kept = [[int(longest - at <= len(x)) for at in range(longest)] for x in prompts]
    ids, mask = (torch.tensor(rows, device=model.device) for rows in (padded, kept))
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, pad_token_id=end
        )
    rows = out[:, longest:].tolist()
    return [row[: row.index(end) + 1] if end in row else row for row in rows]


def measure(args: argparse.Namespace) -> None:
    """Append a line for each prompt that the results lack, the first of each task first."""
    torch.set_num_threads(args.threads)
    model, tokenizer = load_model(args.file)
    model = model.to(args.device, torch.bfloat16)
    done = {_key(row) for row in read(args.out)}
    tasks = args.task or (LONG if args.length else TASKS)
    groups = [
        list(prompts)
        for task in tasks
        for prompts in (
            [retrieval(task, length, args.n, tokenizer) for length in args.length]
            or [sheets(args.n) if task == SHEET else reasoning(task, args.n)]
        )
    ]
    turns = [one for each in zip(*groups, strict=True) for one in each]
    missing = [one for one in turns if _key({"model": args.name, **one["row"]}) not in done]
    limit = 24 if args.length else args.new_tokens
    for start in range(0, len(missing), args.batch):
        batch = missing[start : start + args.batch]
        prompts = [encoded(one["content"], tokenizer) for one in batch]
        rows = []
        for one, ids, new in zip(batch, prompts, responses(model, prompts, limit), strict=True):
            text = tokenizer.decode(new, skip_special_tokens=True)
            answer = {
                "prompt_tokens": len(ids),
                "response": text,
                "response_tokens": len(new),
                "ended": new[-1] == model.generation_config.eos_token_id,
                "right": bool(one["right"](text.partition("\n")[0] if args.length else text)),
            }
            rows.append({"model": args.name, "seed": SEED, **one["row"], **answer})
        append(args.out, rows)


def check(args: argparse.Namespace) -> None:
    """Print whether weights and greedy tokens are those of transformers, and captures verified."""
    torch.set_num_threads(args.threads)
    model, tokenizer = load_model(args.file)
    chats = [[{"role": "user", "content": text + FORM}] for text in CHECKED]
    traces = []
    with TemporaryDirectory() as folder:
        for number, chat in enumerate(chats):
            path = Path(folder, f"{number}.zarr")
            traces.append(kvsim.capture(model, tokenizer, chat, max_new_tokens=64, out=path))
            found = verify(path, deep=True)
            print("verified" if found.ok else "DAMAGED", max(found.output_error), flush=True)
        recorded = [(trace.tokens.tolist(), trace.prompt_len) for trace in traces]
    own = model.state_dict()
    direct = AutoModelForCausalLM.from_pretrained(
        args.file.parent, gguf_file=args.file.name, dtype=torch.float32
    ).eval()
    differing = [name for name, x in direct.state_dict().items() if not torch.equal(x, own[name])]
    print(f"{len(own)} weights, of which {len(differing)} differ from transformers' own load")
    for tokens, start in recorded:
        with torch.inference_mode():
            ids = torch.tensor([tokens[:start]])
            new = direct.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=len(tokens) - start,
                do_sample=False,
                repetition_penalty=1.0,
            )
        same = new[0].tolist() == tokens
        print(f"{len(tokens) - start} greedy tokens {'equal' if same else 'DIFFERENT'}:")
        print(tokenizer.decode(tokens[start:]), flush=True)


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in ("model", "task", "length", "index"))


def reasoning_table(rows: Sequence[dict[str, Any]], models: Sequence[str]) -> str:
    """Return right answers and lengths of responses: a row per task."""
    heads = [f"{name} {column}" for name in models for column in ("right", "tokens")]
    lines = []
    for task in (*TASKS, SHEET):
        cells = []
        for name in models:
            found = [row for row in rows if (row["task"], row["model"]) == (task, name)]
            cells.append(cell([row["right"] for row in found]))
            counts = [row["response_tokens"] for row in found]
            cells.append(f"{min(counts)}, {median(counts):.0f}, {max(counts)}" if counts else "")
        lines.append([f"`{task}`", *cells])
    return markdown(["task", *heads], lines)


def retrieval_table(rows: Sequence[dict[str, Any]], models: Sequence[str]) -> str:
    """Return right answers: a row per task and length."""
    lines = []
    for task in LONG:
        for length in sorted({row["length"] for row in rows if row["task"] == task}):
            of = [row for row in rows if (row["task"], row["length"]) == (task, length)]
            cells = [cell([row["right"] for row in of if row["model"] == x]) for x in models]
            lines.append([f"`{task}`", str(length), *cells])
    return markdown(["task", "tokens", *models], lines)


def page(text: str, rows: Sequence[dict[str, Any]]) -> str:
    """Return the page with its generated parts."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    parts = {
        "reasoning": reasoning_table([row for row in rows if not row.get("length")], models),
        "retrieval": retrieval_table([row for row in rows if row.get("length")], models),
    }
    return filled(text, parts)


def write(_: argparse.Namespace) -> None:
    """Write the generated parts of the page."""
    PAGE.write_text(page(PAGE.read_text("utf-8"), read(RESULTS)), "utf-8")


CHECK = {
    "file": {"type": Path, "metavar": "FILE.gguf"},
    "--threads": {"type": int, "default": 2},
}
MEASURE = {
    **CHECK,
    "--name": {"required": True, "help": "of the model, in the tables: 0.5B"},
    "--out": {"type": Path, "default": RESULTS},
    "--n": {"type": int, "default": 30},
    "--length": {"type": int, "nargs": "+", "default": []},
    "--task": {"nargs": "+"},
    "--batch": {"type": int, "default": 40, "help": "prompts at once"},
    "--new-tokens": {"type": int, "default": 400, "help": "of an answer, at most"},
    "--device": {"default": "cpu"},
}

if __name__ == "__main__":
    commands = {"measure": measure, "check": check, "write": write}
    run_command(__doc__, commands, {"measure": MEASURE, "check": CHECK})
