"""Print the sizes of the repository next to their aims: python tests/sizes.py."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_GENERATED = re.compile(r"<!-- generated: .*?<!-- /generated -->", re.DOTALL)


def lines(folder: Path) -> int:
    """Return the lines of the Python files of a folder."""
    return sum(len(path.read_text("utf-8").splitlines()) for path in folder.rglob("*.py"))


def words() -> int:
    """Return the words of the pages, without the parts that `docs/generate.py` writes."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    return sum(len(_GENERATED.sub("", page.read_text("utf-8")).split()) for page in pages)


def sizes() -> dict[str, tuple[int, int]]:
    """Return each size and its aim, 0 where it has none."""
    package = ROOT / "kvsim"
    studies = {path.name: lines(path) for path in sorted((package / "studies").iterdir())}
    total, beside = lines(package), sum(studies.values())
    rows = {"kvsim/": (total, 44_000), "  spine": (total - beside, 30_000)}
    rows |= {"  studies": (beside, 0)}
    rows |= {f"    {name}": (size, 0) for name, size in studies.items() if size}
    return rows | {"tests/": (lines(ROOT / "tests"), 50_000), "words of pages": (words(), 90_000)}


def main() -> None:
    """Print a line for each size."""
    for name, (size, aim) in sizes().items():
        print(f"{name:20}{size:8,}" + (f"{aim:14,} at most" if aim else ""))


if __name__ == "__main__":
    main()
