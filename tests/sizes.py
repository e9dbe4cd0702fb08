"""What must be read together, next to the aims: python tests/sizes.py.

Lines that an import brings, public members of contracts, files that name an axis outside its room,
commands and options, and lines in all. `tests/test_package.py` guards the first four.
"""

import dataclasses
import io
import re
import subprocess
import sys
import tokenize
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "kvsim"
_GENERATED = re.compile(r"<!-- generated: .*?<!-- /generated -->", re.DOTALL)
_LOADED = "import sys; print(*(m.__file__ for n, m in sys.modules.items() if n[:5] == 'kvsim'))"
_IN_MEMORY = """
import numpy as np
from kvsim.core.attention import Rope
from kvsim.core.trace import Trace
from kvsim.engine.replay import replay
from kvsim.policies.snapkv import SnapKV
arrays = np.random.default_rng(0).standard_normal((3, 2, 2, 96, 8))
replay(Trace.from_arrays(*arrays, prompt_len=64, rope=Rope([])), SnapKV(), 48)
"""

#: The lines of kvsim that a new interpreter loads, by what it runs, and the most there may be.
CLOSURES = {
    "a policy": ("import kvsim.policies.snapkv", 3_500),
    "its replay in memory": (_IN_MEMORY, 8_000),
    "the judge": ("import kvsim.runner.judging", 15_000),
}
#: The most public members of a contract.
CONTRACTS = {
    "pieces.Scorer": 10,
    "pieces.Allocator": 10,
    "propagation.Propagation": 10,
    "reading.SparseAttention": 12,
    "view.View": 25,
    "trace.Trace": 25,
    "policy.Policy": 25,
    "record.Record": 25,
}
#: The word that names an axis, the files where it lives, and the most others that may name it.
AXES = {
    "quantizers": (r"codec|quantizer", "core/(storing|merging)|policies/", 8),
    "layer-wise pruning": (r"propagat", "core/propagation|policies/|studies/layers", 8),
    "rows left out": (r"left_out", "core/left_out|recorder/|store/", 8),
    "probes": (r"probe", "core/probe|recorder/|policies/", 8),
    "latents": (r"latent", "core/header|recorder/|store/", 8),
}


def lines(path: Path) -> int:
    """Return the lines of a Python file, or of those of a folder."""
    paths = path.rglob("*.py") if path.is_dir() else [path]
    return sum(len(path.read_text("utf-8").splitlines()) for path in paths)


def closure(code: str) -> int:
    """Return the lines of the modules of kvsim that a new interpreter loads to run `code`."""
    run = [sys.executable, "-c", f"{code}\n{_LOADED}"]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    return sum(lines(Path(path)) for path in set(done.stdout.split()))


def members(contract: str) -> set[str]:
    """Return the public names of a class of `kvsim.core`, its fields included."""
    module, name = contract.split(".")
    kind = getattr(import_module(f"kvsim.core.{module}"), name)
    fields = {f.name for f in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
    return {name for name in fields | set(dir(kind)) if not name.startswith("_")}


def names(path: Path) -> set[str]:
    """Return the words of a file's code: names and short texts, no comments or docstrings."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text("utf-8")).readline)
    kinds = (tokenize.NAME, tokenize.STRING)
    return {x.string for x in tokens if x.type in kinds and " " not in x.string}


def outside(axis: str) -> list[str]:
    """Return the files that name an axis outside its room."""
    word, room, _ = AXES[axis]
    paths = {str(p.relative_to(PACKAGE)): p for p in sorted(PACKAGE.rglob("*.py"))}
    away = {file: path for file, path in paths.items() if not re.match(room, file)}
    return [f for f, p in away.items() if any(re.search(word, x, re.IGNORECASE) for x in names(p))]


def screen() -> dict[str, int]:
    """Return the number of commands, of options of `replay`, and of all options."""
    from typer.main import get_command

    from kvsim.cli import app

    commands = get_command(app()).commands
    shown = {name: command for name, command in commands.items() if not command.hidden}
    options = {
        name: sum(p.param_type_name == "option" and not p.hidden for p in command.params)
        for name, command in shown.items()
    }
    return {
        "commands": len(shown),
        "options of replay": options["replay"],
        "options of all commands": sum(options.values()),
    }


def words() -> int:
    """Return the words of the pages, without the parts that `docs/generate.py` writes."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    return sum(len(_GENERATED.sub("", page.read_text("utf-8")).split()) for page in pages)


def table() -> dict[str, tuple[int, int]]:
    """Return each size and its aim, 0 where it has none."""
    rows = {f"lines imported: {x}": (closure(code), aim) for x, (code, aim) in CLOSURES.items()}
    rows |= {f"members: {x}": (len(members(x)), aim) for x, aim in CONTRACTS.items()}
    rows |= {f"files outside: {x}": (len(outside(x)), aim) for x, (_, _, aim) in AXES.items()}
    rows |= {x: (n, 14 if n < 100 else 0) for x, n in screen().items()}
    raises = sum(path.read_text("utf-8").count(" raise ") for path in PACKAGE.rglob("*.py"))
    rows |= {"raise in kvsim/": (raises, 500), "lines: kvsim/": (lines(PACKAGE), 48_000)}
    rows |= {"lines: tests/": (lines(ROOT / "tests"), 45_000)}
    return rows | {"lines: docs/": (lines(ROOT / "docs"), 6_000), "words of pages": (words(), 0)}


if __name__ == "__main__":
    for name, (size, aim) in table().items():
        print(f"{name:40}{size:8,}" + (f"{aim:10,} at most" if aim else ""))
    for room in sorted(PACKAGE.iterdir()):
        if total := lines(room):
            print(f"  {room.name:38}{total:8,}")
