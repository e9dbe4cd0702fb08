"""docs/architecture.md names functions that exist, each once, below the function that calls it."""

import importlib
import inspect
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "architecture.md"

#: (indent, dotted name) of every step of the walk.
STEPS = [
    (len(match["indent"]), match["name"])
    for match in re.finditer(
        r"^(?P<indent> *)\* `(?P<name>kvsim\.[\w.]+)`", PAGE.read_text("utf-8"), re.MULTILINE
    )
]
NAMES = re.findall(r"`(kvsim\.\w[\w.]*\w)`", PAGE.read_text("utf-8"))


def resolve(name: str):
    """The module of a dotted name, and the object."""
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        path = ".".join(parts[:length])
        try:
            # not by attribute: `kvsim.engine.replay` is the module here, not the function
            module = importlib.import_module(path)
        except ModuleNotFoundError:
            continue
        thing = module
        for part in parts[length:]:
            # a module that nothing has imported yet is no attribute
            thing = getattr(thing, part, None) or importlib.import_module(name)
        return module, thing
    raise LookupError(name)


def callers() -> list[tuple[str, str]]:
    """(caller, called) of every step that stands below another, or behind its arrow."""
    pairs, above = [], []
    for indent, name in STEPS:
        above = [(at, step) for at, step in above if at < indent]
        if above:
            pairs.append((above[-1][1], name))
        above.append((indent, name))
    arrows = re.findall(r"(?=`(kvsim[\w.]+)` → `(kvsim[\w.]+)`)", PAGE.read_text("utf-8"))
    return [*dict.fromkeys([*pairs, *arrows])]


@pytest.mark.parametrize("name", sorted(set(NAMES)))
def test_what_the_page_names_exists(name):
    """Every dotted name can be imported."""
    if name == "kvsim.studies.interop.kvpress" and not find_spec("kvpress"):
        assert find_spec(name)
        return
    assert resolve(name)[1] is not None


def test_each_step_is_named_once():
    """A walk passes each function once."""
    names = [name for _, name in STEPS]

    assert len(names) >= 20
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize(("caller", "called"), callers())
def test_a_step_is_used_by_the_one_above_it(caller, called):
    """The module of the caller has the name of the function that the page puts below it."""
    _, thing = resolve(caller)
    used = inspect.getsource(inspect.getmodule(thing))

    assert re.search(rf"\b{called.rpartition('.')[2]}\b", used)
