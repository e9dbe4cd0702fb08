"""Options of commands that stand in groups."""

import ast
from pathlib import Path

import pytest

import kvsim

FILES = [*Path(kvsim.__file__).parent.rglob("cli/*.py")]
FILES += Path(kvsim.__file__).parent.glob("studies/*/command.py")


@pytest.mark.parametrize("file", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_no_function_of_a_command_has_more_than_twelve_parameters(file):
    """Options that belong together are a group (`kvsim.cli.groups`), and count as one."""
    functions = [
        node
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef)
    ]
    long = [node.name for node in functions if len(node.args.args) + len(node.args.kwonlyargs) > 12]
    assert long == []
