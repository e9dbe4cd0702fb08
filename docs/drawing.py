# ruff: noqa: INP001, T201 - a script, not a module, and it says what it did
"""Make the pictures that pages show from figures/, by the commands on the pages.

    python docs/drawing.py          all of them, in a few minutes
    python docs/drawing.py PAGE     those that a page makes, such as layers

A block of a page that writes `figures/NAME.png` in the folder where it runs makes the picture that
pages show as `figures/NAME.png`. It is made small here: a palette, and a width that pages have.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from blocks import Block, blocks

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent

#: Bytes of a picture, bytes of all of them, and pixels of a picture's width, at most.
LARGEST, ALL, WIDTH = 50_000, 1_000_000, 1000
#: Pictures that a script of their own makes, and what it is.
OTHERS = {
    **dict.fromkeys(
        (
            f"figures/leaderboard-{board}.png"
            for board in (
                *("8k", "qwen-1.5b", "qwen-1.5b-8k", "qwen-1.5b-sheets", "smollm2", "tiny"),
                *("smollm2-answers", "smollm2-needles"),
            )
        ),
        "docs/leaderboard.py",
    ),
    "figures/answer.png": "docs/answer.py",
    "figures/access.png": "docs/leaderboard.py",
    "figures/iou_by.png": "docs/gallery.py",
    "figures/lift_bars.png": "docs/gallery.py",
    "figures/scoring.png": "docs/scoring.py",
    "figures/bits.png": "docs/bits.py",
    "figures/distillation.png": "apps/tiny/distill.py of kvsim 0.1.0",
    "figures/needle-tiny.png": "docs/needle.py",
    "figures/needle-smollm2.png": "docs/needle.py",
    "figures/needle.png": "the commands of record.md that need SmolLM2",
}
#: The commands of the page of figures.
COMMANDS = DOCS / "figures" / "commands.sh"
#: What a block says that is run here alone.
REASON = "docs/drawing.py"

_SHOWN = re.compile(r"!\[[^\]]*\]\((figures/[^)\s]+)\)")
_FILE = re.compile(r"\bfigures/[\w./-]+\.png\b")
# what a shell would do to a line of commands
_SHELL = re.compile(r"[|&;<>()$`*?#~]|^(?!kvsim )")


def texts() -> dict[str, str]:
    """The pages of docs/ by name."""
    return {page.stem: page.read_text("utf-8") for page in sorted(DOCS.glob("*.md"))}


def shown() -> set[str]:
    """Every picture of figures/ that a page shows, but for those of scripts of their own."""
    return {name for text in texts().values() for name in _SHOWN.findall(text)} - set(OTHERS)


def running(page: str) -> list[Block]:
    """The blocks of a page that run: for its readers, or here alone."""
    found = blocks(page, texts()[page])
    if page == "figures":
        found.append(Block(page, 1, "bash", REASON, COMMANDS.read_text("utf-8"), None))
    return [block for block in found if block.how == "run" or (block.how or "").startswith(REASON)]


def makers() -> dict[str, str]:
    """For each picture that is shown the page whose commands write it."""
    wanted, found = shown(), {}
    for page in texts():
        code = "\n".join(block.body for block in running(page))
        for name in wanted & set(_FILE.findall(code)):
            found.setdefault(name, page)
    return found


def problems() -> list[str]:
    """Errors of the pictures as they are; empty if there are none."""
    wanted, known = shown(), makers()
    there = {str(path.relative_to(DOCS)) for path in (DOCS / "figures").rglob("*.png")}
    sizes = {name: (DOCS / name).stat().st_size for name in wanted & there}
    total = sum(sizes.values())
    return [
        *(f"{name} is shown and no command on a page writes it" for name in wanted - set(known)),
        *(f"{name} is shown and not there" for name in wanted - there),
        *(f"{name} is there and not shown" for name in there - wanted - set(OTHERS)),
        *(f"{name} has {size} bytes" for name, size in sizes.items() if size > LARGEST),
        *([f"all pictures have {total} bytes"] if total > ALL else []),
    ]


def small(source: Path, target: Path) -> None:
    """Write a picture no wider than pages and in as many colours as its bytes allow."""
    image = Image.open(source).convert("RGB")
    if image.width > WIDTH:
        size = (WIDTH, round(image.height * WIDTH / image.width))
        image = image.resize(size, Image.Resampling.HAMMING)
    for apart in (8, 16, 24, 32, 48, 64, 96):
        out = io.BytesIO()
        _few(image, apart).save(out, "PNG", optimize=True)
        if out.tell() <= LARGEST:
            break
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(out.getvalue())


def _few(image: Image.Image, apart: int) -> Image.Image:
    """An image in its most frequent colours that are so far apart in a channel, at most 64.

    So areas keep their colours, which stand for numbers, and edges have a few shades.
    """
    codes = np.asarray(image) @ np.array([1 << 16, 1 << 8, 1])
    numbers, where, often = np.unique(codes, return_inverse=True, return_counts=True)
    known = np.stack([numbers >> 16, numbers >> 8 & 255, numbers & 255], axis=1)
    rest, chosen = known[np.argsort(-often, kind="stable")], []
    while len(rest) and len(chosen) < 64:
        chosen.append(rest[0])
        rest = rest[np.abs(rest - rest[0]).max(-1) > apart]
    palette = np.array(chosen)
    nearest = ((known[:, None] - palette) ** 2).sum(-1).argmin(1)
    out = Image.fromarray(nearest[where].reshape(image.size[::-1]).astype(np.uint8), "P")
    out.putpalette(palette.astype(np.uint8).tobytes())
    return out


def draw(pages: Iterable[str]) -> None:
    """Run what the pages run, each in a folder of its own, and take the pictures that are shown."""
    known = makers()
    for page in pages:
        wanted = sorted(name for name, maker in known.items() if maker == page)
        if not wanted:
            continue
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            names = {"__name__": "__main__"}
            for block in running(page):
                _run(block, names)
            for name in wanted:
                small(Path(name), DOCS / name)
                print(f"{name}: {(DOCS / name).stat().st_size} bytes, of {page}.md")


def _run(block: Block, names: dict[str, object]) -> None:
    """A block, as a reader would type it; commands of kvsim in this process, which loads once."""
    if block.file is not None:
        Path(block.file).write_text(block.body, "utf-8")
    elif block.language == "python":
        exec(compile(block.body, block.page, "exec"), names)  # noqa: S102 - the page is ours
    elif any(map(_SHELL.search, lines(block))):
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        command = ["bash", "-euo", "pipefail", "-c", block.body]
        subprocess.run(command, check=True, env={**os.environ, "PATH": path})  # noqa: S603 - ours
    else:
        for line in lines(block):
            kvsim(line)


def lines(block: Block) -> Iterator[str]:
    """The commands of a block of them."""
    return filter(None, map(str.strip, block.body.splitlines()))


def kvsim(line: str) -> None:
    """One command of kvsim in this process."""
    from kvsim.cli import main  # noqa: PLC0415 - drawing nothing needs none of it

    try:
        main(shlex.split(line)[1:])
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"{line}\nended with status {end.code}") from None


if __name__ == "__main__":
    draw(sys.argv[1:] or texts())
    print("\n".join(problems()) or "every picture that pages show is there")
