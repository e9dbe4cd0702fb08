"""Write the generated parts of the documentation, between `<!-- generated: NAME -->` marks.

python docs/generate.py            rewrite what is out of date
python docs/generate.py --check    change nothing; exit with status 1 if something is out of date
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

_PART = re.compile(r"(<!-- generated: (?P<name>\S+) -->\n).*?(<!-- /generated -->)", re.DOTALL)


def policies() -> str:
    """The table of policies and their presets."""
    from kvsim.policies import CATALOGUE  # noqa: PLC0415 - loads torch, which --help need not

    lines = ["| policy | keeps | paper |", "| --- | --- | --- |"]
    for name, entry in CATALOGUE.items():
        lines.append(f"| `{name}` | {entry.summary} | {_link(entry.paper)}|")
        lines += [f"| `{name}@{p}` | {preset.summary} | |" for p, preset in entry.presets.items()]
    return "\n".join(lines)


def _link(paper: str) -> str:
    number = paper.removeprefix("arXiv ")
    return f"[{paper}](https://arxiv.org/abs/{number}) " if number != paper else paper


PARTS: Mapping[str, Callable[[], str]] = {"policies": policies}


def pages() -> list[Path]:
    """Every page of the documentation."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]


def generated(text: str) -> str:
    """The page with its generated parts written anew."""
    return _PART.sub(lambda found: f"{found[1]}{PARTS[found['name']]()}\n{found[3]}", text)


def main() -> int:
    """Rewrite the pages, or only say which are out of date."""
    check = "--check" in sys.argv[1:]
    texts = {page: page.read_text("utf-8") for page in pages()}
    stale = [page for page, text in texts.items() if generated(text) != text]
    for page in stale:
        if not check:
            page.write_text(generated(texts[page]), "utf-8")
        print(f"{'out of date' if check else 'written'}: {page.relative_to(ROOT)}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
