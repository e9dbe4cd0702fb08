"""Print the sizes of the repository next to their aims: python tests/sizes.py."""

import re
import signal
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_GENERATED = re.compile(r"<!-- generated: .*?<!-- /generated -->", re.DOTALL)


def lines(folder: Path) -> int:
    """Return the lines of the Python files of a folder, or of a file."""
    paths = folder.rglob("*.py") if folder.is_dir() else [folder]
    return sum(len(path.read_text("utf-8").splitlines()) for path in paths)


def words() -> int:
    """Return the words of the pages, without the parts that `docs/generate.py` writes."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    return sum(len(_GENERATED.sub("", page.read_text("utf-8")).split()) for page in pages)


def sizes() -> dict[str, tuple[int, int]]:
    """Return each size and its aim, 0 where it has none."""
    package = ROOT / "kvsim"
    studies = sum(map(lines, (package / "studies").iterdir()))
    rows = {"kvsim/": (lines(package), 53_000), "  studies": (studies, 0)}
    rows |= {"tests/": (lines(ROOT / "tests"), 50_000)}
    rows |= {"docs/*.py": (lines(ROOT / "docs"), 6_000)}
    raises = sum(path.read_text("utf-8").count(" raise ") for path in package.rglob("*.py"))
    return rows | {"raise in kvsim/": (raises, 700), "words of pages": (words(), 90_000)}


def main() -> None:
    """Print a line for each size."""
    for name, (size, aim) in sizes().items():
        print(f"{name:20}{size:8,}" + (f"{aim:14,} at most" if aim else ""))
    print(f"\n{'room':30}{'lines':>8}")
    for pattern in ("kvsim/*", "kvsim/studies/*", "tests/*"):
        for room in sorted(ROOT.glob(pattern)):
            if room.suffix in ("", ".py") and (total := lines(room)):
                print(f"{room.relative_to(ROOT)!s:30}{total:8,}")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it
    main()
