# ruff: noqa: INP001, T201 - a script, not a module, and it says what it did
"""Make the pictures of the dashboard in images/: every page.

    python docs/screenshots.py              all of them, in a few minutes
    python docs/screenshots.py PAGE ...     those of some pages, such as start (without a run)

It records twelve short prompts of the shipped model and replays four policies on them, as in
compare.md, and shows the results next to the sample trace of SmolLM2. It needs Chromium.
"""

from __future__ import annotations

import io
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from itertools import chain
from pathlib import Path
from typing import Any

from PIL import Image

from kvsim.samples import sample_trace

DOCS = Path(__file__).resolve().parent
sys.path.append(str(DOCS.parent / "tests"))
from browsing import PAGES, Tab, chromium, home, serve  # noqa: E402 - found by the line above

SIZE = {"width": 1440, "height": 900}
#: Bytes of all pictures, at most.
ALL = 450_000
#: The first page in a folder without a run.
START = "start"
#: An event of the page of a response, of the run with the KL of its tokens.
LINK_OF_RESPONSE = {
    "run": "runs/tokens",
    "trace": "traces/walk-1-paint-s0-000.zarr",
    "layer": 1,
    "head": 0,
    "result": "h2o, budget 64",
    "event": 132,
}
COMMANDS = """\
kvsim prompts --task walk,get --level 1 --n 12 --out many.jsonl
kvsim capture --model tiny --prompts many.jsonl --out traces
kvsim replay traces/walk*.zarr --policy h2o,tova --budget 64,96 --interval 16 --set fit=true --judge
 --metric response_kl_tokens --out runs/tokens
kvsim replay traces/*.zarr --policy streaming_llm,h2o,tova,snapkv --budget 64,96 --interval 16
 --set fit=true --judge --out runs/many
""".replace("\n ", " ")


def prepare(folder: Path) -> None:
    """Record, replay, and put the sample first in the list of traces."""
    for command in COMMANDS.splitlines():
        arguments = shlex.split(command)[1:]
        paths = [folder.glob(word) if "*" in word else [word] for word in arguments]
        code = "import sys; from kvsim.cli import main; main(sys.argv[1:])"
        line = [sys.executable, "-c", code, *map(str, chain.from_iterable(paths))]
        subprocess.run(line, cwd=folder, check=True)  # noqa: S603 - the commands above
    shutil.copytree(sample_trace("smollm2"), folder / "sample-smollm2.zarr")


def shoot(folder: Path, pages: list[str], **link: Any) -> None:
    """Show pages, and keep what is seen."""
    with serve(folder) as address, chromium(address) as context:
        tab = Tab(context.new_page())
        tab.page.emulate_media(color_scheme="light")
        tab.page.set_viewport_size(SIZE)
        for page in pages:
            name = f"images/dashboard-{page}-{SIZE['width']}-light.webp"
            tab.open(home(address), page.replace(START, PAGES[0]), **link)
            tab.check()
            if tab.overflow() > 0:
                raise SystemExit(f"{name}: the page is wider than the screen")
            image = Image.open(io.BytesIO(tab.page.screenshot()))
            image.convert("RGB").save(DOCS / name, quality=50, method=6)
            print(name, (DOCS / name).stat().st_size)


def main(pages: list[str]) -> None:
    """Make the pictures of these pages, or of all."""
    if other := set(pages) - {START, *PAGES}:
        raise SystemExit(f"no pages {sorted(other)}; expected some of {[START, *PAGES]}")
    with tempfile.TemporaryDirectory() as place:
        full, empty = Path(place, "results"), Path(place, "empty")
        full.mkdir()
        empty.mkdir()
        os.environ["HOME"] = place  # the pages show folders from there on, as a user's
        if START in pages:
            shoot(empty, [START])
        rest = [page for page in pages if page != START]
        if rest:
            prepare(full)
            shoot(full, [page for page in rest if page != "response"], layer=0, head=2)
        if "response" in rest:
            shoot(full, ["response"], **LINK_OF_RESPONSE)
    total = sum(path.stat().st_size for path in DOCS.glob("images/dashboard-*.webp"))
    print(total, "bytes")
    if total > ALL:
        raise SystemExit(f"the pictures have {total} bytes; expected at most {ALL}")


if __name__ == "__main__":
    main(sys.argv[1:] or [START, *PAGES])
