"""Print the sizes of the repository next to their aims: python tests/sizes.py."""

import ast
import re
import signal
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_GENERATED = re.compile(r"<!-- generated: .*?<!-- /generated -->", re.DOTALL)


def lines(folder: Path) -> int:
    """Return the lines of the Python files of a folder, or of a file."""
    paths = folder.rglob("*.py") if folder.is_dir() else [folder]
    return sum(len(path.read_text("utf-8").splitlines()) for path in paths)


def parts(folder: Path) -> tuple[int, int, int]:
    """Return lines, those of code (not blank, comment or docstring) and those of docstrings."""
    code = documented = 0
    for path in folder.rglob("*.py") if folder.is_dir() else [folder]:
        text = path.read_text("utf-8")
        docs = set[int]()
        for node in ast.walk(ast.parse(text)):
            body = getattr(node, "body", None)
            first = body[0] if isinstance(body, list) and body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                docs |= {*range(first.lineno, (first.end_lineno or 0) + 1)}
        documented += len(docs)
        rest = [x.strip() for n, x in enumerate(text.splitlines(), 1) if n not in docs]
        code += sum(bool(line) and not line.startswith("#") for line in rest)
    return lines(folder), code, documented


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
    print(f"\n{'room':30}{'lines':>8}{'code':>8}{'docstrings':>12}")
    for pattern in ("kvsim", "kvsim/*", "kvsim/studies/*", "tests", "tests/*"):
        for room in sorted(ROOT.glob(pattern)):
            total, code, documented = parts(room) if room.suffix in ("", ".py") else (0, 0, 0)
            if total:
                print(f"{room.relative_to(ROOT)!s:30}{total:8,}{code:8,}{documented:12,}")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it
    main()
