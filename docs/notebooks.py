"""Run the notebooks of docs/notebooks in a kernel, and store their outputs in them.

python docs/notebooks.py            all
python docs/notebooks.py compare    those that are named

Needs the extra `docs`. tests/docs/test_notebooks.py says when stored outputs are no longer true.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent / "notebooks"


def execute(path: Path) -> None:
    """Run a notebook in an empty folder, and write it with its outputs."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        place = {"metadata": {"path": folder}}
        NotebookClient(notebook, timeout=300, kernel_name="python3", resources=place).execute()
    notebook.metadata.language_info = {"name": "python"}  # without the version of this Python
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # when each cell ran
        if cell.cell_type == "code":
            cell.outputs = [each for each in cell.outputs if not _passing(each)]
    nbformat.validate(notebook)
    path.write_text(nbformat.writes(notebook) + "\n", "utf-8")


def _passing(output: nbformat.NotebookNode) -> bool:
    """Whether an output is what a bar of progress leaves, or tqdm's word that it can draw none."""
    left = output.get("data", {}).get("text/plain") == ""
    return left or "TqdmWarning: IProgress not found" in output.get("text", "")


if __name__ == "__main__":
    for name in sys.argv[1:] or sorted(path.stem for path in FOLDER.glob("*.ipynb")):
        execute(FOLDER / f"{name}.ipynb")
