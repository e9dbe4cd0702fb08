# ruff: noqa: INP001 - a script, not a module
"""Right answers under eight policies, and one question with what two caches held where one broke.

    python docs/answer.py FILE.gguf

Writes docs/figures/answer.png: a minute. `docs/qwen-live.jsonl` says which answers are right and
`docs/answer.jsonl` has those that are shown, as the model wrote them live (`docs/qwen_live.py` of
kvsim 0.1.0). Each goes through the model again under its policy, teacher-forced, which gives what
the cache held. An answer breaks at the first number that neither the question nor the answer with
the full cache has. Between the line after that and its last line it is left out.
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
ANSWERS, LIVE = HERE / "answer.jsonl", HERE / "qwen-live.jsonl"
FIGURE = HERE / "figures" / "answer.png"
POLICIES, BUDGET, INTERVAL = ("snapkv", "expected_attention"), 128, 32
COLUMNS, SIZE, CHARACTER, LINE = 59, 8, 0.067, 0.155  # points, inches
BARS, WIDTH = 1.75, 8.3  # inches
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


def wilson(right: int, n: int) -> tuple[float, float]:
    """Return the 95 % interval of a share, Wilson's (1927, doi 10.1080/01621459.1927.10502953)."""
    z2 = 1.959964**2
    middle = (right + z2 / 2) / (n + z2)
    reach = (z2 * (right * (n - right) / n + z2 / 4)) ** 0.5 / (n + z2)
    return middle - reach, middle + reach


def bars(axis: Axes, rows: Sequence[dict[str, Any]]) -> None:
    """Draw the share of right answers of each policy with its interval; the best is on top."""
    right: dict[str, list[bool]] = {}
    for row in rows:
        if row["budget"] == BUDGET:
            right.setdefault(row["policy"], []).append(row["right"])
    names = sorted(right, key=lambda policy: sum(right[policy]))
    for at, name in enumerate(names):
        share = np.mean(right[name])
        ends = np.abs(np.subtract(wilson(sum(right[name]), len(right[name])), share))
        color = dict(zip(POLICIES, (RED, GREEN), strict=True)).get(name, "#4a4a4a")
        axis.errorbar(share, at, xerr=ends[:, None], fmt="o", ms=4, color=color, capsize=2)
    axis.set_yticks(range(len(names)), names, fontsize=SIZE)
    axis.set_xticks(np.arange(0, 1.01, 0.25), ["0 %", "25 %", "50 %", "75 %", "100 %"], size=SIZE)
    axis.set_xlim(0, 1)
    axis.grid(axis="x", color="#e6e6e6")
    axis.spines[["top", "right", "left"]].set_visible(False)
    count = {len(each) for each in right.values()}
    axis.set_title(f"right answers of {max(count)}, {BUDGET} entries, 95 % intervals", size=9)


def shortened(pieces: Sequence[str], start: int) -> list[str]:
    """Return the pieces without those between the line after `start` and the last line."""
    ends = [at for at, piece in enumerate(pieces) if "\n" in piece]
    first = next((at for at in ends if at >= start), len(pieces))
    last = max((at for at in ends if at < len(pieces) - 1), default=first)
    return [*pieces[: first + 1], "...\n", *pieces[last + 1 :]] if last > first else [*pieces]


def figure(
    model: Any, tokenizer: Any, rows: Sequence[dict[str, Any]], live: Sequence[dict[str, Any]]
) -> Figure:
    """Return the figure; rows: answers to one question, live: which answers are right."""
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
    canvas, heights = Figure(figsize=(WIDTH, 1), dpi=120), []
    axes = [canvas.add_axes((0.01 + 0.495 * at, 0, 0.485, 1)) for at in range(2)]
    for axis, policy in zip(axes, POLICIES, strict=True):
        row = len(prompt) + until
        evicted_at = held(running, prompt, ids[policy], policy, BUDGET)
        kept = (evicted_at[..., :row] >= row).mean((0, 1))
        shown = shortened(pieces[policy], until)
        shares = [*kept[first:], *[np.nan] * (len(shown) - until)]
        color, box = RED if wrong[policy] else GREEN, "".join(shown).rfind("boxed{") + 6
        marked = [(box, box + len(final(texts[policy])))]
        if (start := breaks[policy]) is not None:
            marked.append((start, start + 2))
        marks = {
            len(prompt_pieces) - first + piece_at(shown, at): color
            for begin, end in marked
            for at in range(begin, end)
        }
        heights.append(panel(axis, [*prompt_pieces[first:], *shown], shares, marks))
        axis.set_title(f"{policy}: {final(texts[policy])}", color=color, size=9)
    height = (max(heights) + 1) * LINE
    whole = height + BARS + 0.9
    canvas.set_figheight(whole)
    for axis in axes:
        axis.set(xlim=(0, 0.485 * WIDTH), ylim=(-height + LINE, LINE))
        axis.set_position((*axis.get_position().p0 * (1, 0), 0.485, height / whole))
        axis.set_axis_off()
    bars(canvas.add_axes((0.19, 1 - (BARS + 0.25) / whole, 0.75, BARS / whole)), live)
    return canvas


def piece_at(pieces: Sequence[str], character: int) -> int:
    """Return the index of the piece that has this character of the whole text."""
    return int(np.searchsorted(np.cumsum([len(piece) for piece in pieces]), character, "right"))


def main() -> None:
    """Write the figure."""
    model, tokenizer = load_model(sys.argv[1])
    live = [row for row in read(LIVE) if row["model"] == "qwen2.5-coder-1.5b-instruct"]
    picture(figure(model, tokenizer, read(ANSWERS), live), FIGURE)


if __name__ == "__main__":
    main()
