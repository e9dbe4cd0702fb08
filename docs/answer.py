# ruff: noqa: INP001 - a script, not a module
"""One question, its answers under two policies, and what their caches held where one broke.

    python docs/answer.py FILE.gguf

Writes docs/figures/answer.png: a minute. `docs/answer.jsonl` has the answers that the model wrote
live (`docs/qwen_live.py` of kvsim 0.1.0). Each goes through the model again under its policy,
teacher-forced, which gives what the cache held. An answer breaks at the first number that neither
the question nor the answer with the full cache has.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from study import picture, read

import kvsim
from kvsim.policies.fit import fitted
from kvsim.recorder import load_model
from kvsim.runner.decoding import Decoding, RunningModel

HERE = Path(__file__).parent
ANSWERS, FIGURE = HERE / "answer.jsonl", HERE / "figures" / "answer.png"
POLICIES, BUDGET, INTERVAL = ("snapkv", "expected_attention"), 128, 32
COLUMNS, SIZE, CHARACTER, LINE = 70, 6.6, 0.0555, 0.125  # points, inches
RED, GREEN, LATER = "#c8102e", "#2e7d32", "#9a9a9a"


def final(response: str) -> str:
    """Return what the last box of a response has, without marks of LaTeX."""
    boxes = re.findall(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}", response)
    text = boxes[-1] if boxes else ""
    text = re.sub(r"\\(?:text|mathrm|textbf)\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\\[()\[\],;!]|[$*`\\]", "", text).rpartition("=")[2]
    return text.strip().rstrip(".").strip()


def encoded(content: Any, tokenizer: Any) -> list[int]:
    """Return the token ids of a prompt, of a chat by its template."""
    if isinstance(content, str):
        return list(tokenizer(content)["input_ids"])
    return list(tokenizer.apply_chat_template(content, add_generation_prompt=True)["input_ids"])


def break_of(response: str, *known: str) -> int | None:
    """Return where the first number begins that the known texts do not have; None without one."""
    number = r"\d+(?:\.\d+)?"
    numbers = {float(each) for text in known for each in re.findall(number, text)}
    new = (match for match in re.finditer(number, response) if float(match[0]) not in numbers)
    return next((match.start() for match in new), None)


def held(
    running: RunningModel, prompt: Sequence[int], response: Sequence[int], policy: str, budget: int
) -> NDArray[np.int32]:
    """Run a response under a policy; returns after which row each entry left, [layer, head, n]."""
    n = len(prompt) + len(response)
    terms = {"prompt_len": len(prompt), "n_pos": n, "interval": INTERVAL, "prefill": True}
    with Decoding(running, fitted(kvsim.policy(policy)), budget, **terms) as decoding:
        decoding.feed([*prompt, *response])
    return np.asarray(decoding.record().evicted_at)


def lines_of(pieces: Sequence[str]) -> list[tuple[int, int, str]]:
    """Return line, column and characters of each piece."""
    line, column, out = 0, 0, []
    for piece in pieces:
        text = piece.rstrip("\n")
        if column + len(text) > COLUMNS:
            line, column = line + 1, 0
        out.append((line, column, text))
        column += len(text)
        if piece != text:
            line, column = line + 1, 0
    return out


def panel(
    axis: Axes, pieces: Sequence[str], shares: Sequence[float], marks: Mapping[int, str]
) -> int:
    """Draw the text, and return its lines.

    shares: of the heads that hold a token, NaN for those written later. marks: colours of pieces.
    """
    placed = lines_of(pieces)
    for at, ((line, column, text), share) in enumerate(zip(placed, shares, strict=True)):
        later = bool(np.isnan(share))
        axis.text(
            column * CHARACTER,
            -line * LINE,
            text,
            color=marks.get(at, LATER if later else "black"),
            weight="bold" if at in marks else "normal",
            bbox=None if later else {"fc": (0.16, 0.47, 0.84, share), "ec": "none", "pad": 0.6},
            family="monospace",
            fontsize=SIZE,
            parse_math=False,
        )
    return placed[-1][0] + 1


def figure(model: Any, tokenizer: Any, rows: Sequence[dict[str, Any]]) -> Figure:
    """Return the figure of the answers to one question; see the module."""
    running, of = RunningModel(model), {row["policy"]: row for row in rows}
    full = of["full"]
    question, right = full["prompt"], full["answer"]
    chat = [{"role": "user", "content": question}] if tokenizer.chat_template else question
    prompt = encoded(chat, tokenizer)
    prompt_pieces = [tokenizer.decode([token]) for token in prompt]
    first = max(at for at in range(len(prompt_pieces)) if question in "".join(prompt_pieces[at:]))
    texts = {policy: of[policy]["response"] for policy in POLICIES}
    ids = {x: tokenizer(texts[x], add_special_tokens=False)["input_ids"] for x in POLICIES}
    pieces = {x: [tokenizer.decode([token]) for token in ids[x]] for x in POLICIES}
    wrong = {x: final(texts[x]) != right for x in POLICIES}
    breaks = {
        x: break_of(texts[x], question, full["response"]) if wrong[x] else None for x in texts
    }
    rows_until = [piece_at(pieces[x], start) for x, start in breaks.items() if start is not None]
    until = min([*rows_until, *map(len, ids.values())])
    canvas = Figure(figsize=(2 * COLUMNS * CHARACTER + 0.5, 1), dpi=200)
    axes, heights = canvas.subplots(1, 2), []
    for axis, policy in zip(axes, POLICIES, strict=True):
        row = len(prompt) + until
        evicted_at = held(running, prompt, ids[policy], policy, BUDGET)
        kept = (evicted_at[..., :row] >= row).mean((0, 1))
        shares = [*kept[first:], *[np.nan] * (len(ids[policy]) - until)]
        color, box = RED if wrong[policy] else GREEN, texts[policy].rfind("boxed{") + 6
        marked = [(box, box + len(final(texts[policy])))]
        if (start := breaks[policy]) is not None:
            marked.append((start, start + 2))
        marks = {
            len(prompt_pieces) - first + piece_at(pieces[policy], at): color
            for begin, end in marked
            for at in range(begin, end)
        }
        heights.append(panel(axis, [*prompt_pieces[first:], *pieces[policy]], shares, marks))
        axis.set_title(f"{policy}, {BUDGET} entries: {final(texts[policy])}", color=color, size=8)
    height = max(heights) * LINE
    for axis in axes:
        axis.set(xlim=(0, COLUMNS * CHARACTER), ylim=(-height, LINE))
        axis.set_axis_off()
    canvas.set_figheight(height + 0.45)
    canvas.subplots_adjust(0.02, 0.01, 0.99, 1 - 0.3 / (height + 0.45), 0.04)
    return canvas


def piece_at(pieces: Sequence[str], character: int) -> int:
    """Return the index of the piece that has this character of the whole text."""
    return int(np.searchsorted(np.cumsum([len(piece) for piece in pieces]), character, "right"))


def main() -> None:
    """Write the figure."""
    model, tokenizer = load_model(sys.argv[1])
    picture(figure(model, tokenizer, read(ANSWERS)), FIGURE)


if __name__ == "__main__":
    main()
