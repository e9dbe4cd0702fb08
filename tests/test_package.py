"""The package as its users meet it: public names, import cost, versions, declared dependencies."""

import ast
import graphlib
import importlib
import importlib.metadata
import inspect
import itertools
import pkgutil
import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

import kvsim
from kvsim.cli import main
from kvsim.errors import EXTRAS

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
SOURCES = sorted(Path(kvsim.__file__).parent.rglob("*.py"))
LARGE = ("matplotlib", "polars", "scipy", "torch", "transformers", "zarr")


def submodules():
    """The names of all modules of the package that can be imported here."""
    names = [m.name for m in pkgutil.walk_packages(kvsim.__path__, "kvsim.")]
    interop = "kvsim.studies.interop"
    optional = {f"{interop}.kvpress": "kvpress", f"{interop}.harness": "lm_eval"}
    return [name for name in names if name not in optional or find_spec(optional[name])]


def loaded_after(code):
    """The large libraries that a new interpreter has loaded after running `code`."""
    report = f"import sys; print(*[m for m in {LARGE!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"], capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()[-1].split()


def test_all_is_what_is_exported():
    """`__all__` is sorted, equals `dir`, and each name resolves to an object of that name."""
    assert kvsim.__all__ == sorted(kvsim.__all__)
    assert dir(kvsim) == kvsim.__all__
    for name in kvsim.__all__:
        value = getattr(kvsim, name)
        assert value is kvsim.__version__ or value.__name__ in (name, f"kvsim.{name}")


def test_functions_survive_the_import_of_every_submodule():
    """No submodule takes the name of a public function, whatever was imported before."""
    for name in submodules():
        importlib.import_module(name)

    modules = [name for name in kvsim.__all__ if inspect.ismodule(getattr(kvsim, name))]
    assert modules == ["plots"]
    direct = {m.name for m in pkgutil.iter_modules(kvsim.__path__)}
    assert direct & {*kvsim.__all__} == {"plots"}


def test_modules_say_what_they_are():
    """Every module opens with a docstring."""
    assert [name for name in submodules() if not importlib.import_module(name).__doc__] == []


def test_import_is_light():
    """`import kvsim` loads none of the large libraries."""
    assert loaded_after("import kvsim, kvsim.errors, kvsim.schema, kvsim.samples, kvsim.tiny") == []


@pytest.mark.parametrize("arguments", [["--help"], ["replay", "--help"]])
def test_help_is_light(arguments):
    """`kvsim --help` loads none of the large libraries."""
    code = f"""
import sys
from kvsim.cli import main
sys.argv = ["kvsim", *{arguments!r}]
try:
    main()
except SystemExit as end:
    assert end.code in (0, None), end.code
"""

    assert loaded_after(code) == []


def test_version_is_the_same_everywhere():
    """The constant, the installed metadata and the newest entry of the changelog agree."""
    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
    newest = re.search(r"(?m)^## \[(.+)\]", changelog)[1]

    assert importlib.metadata.version("kvsim") == kvsim.__version__
    assert newest == ("Unreleased" if ".dev" in kvsim.__version__ else kvsim.__version__)


def requirements(lines):
    """The project names of requirement lines, in their normal form."""
    return {re.match(r"[\w.-]+", line)[0].lower().replace("_", "-") for line in lines}


def test_imports_are_declared():
    """What kvsim imports is in pyproject.toml, and what pyproject.toml requires is imported."""
    project = PYPROJECT["project"]
    extras = project["optional-dependencies"]
    core = requirements(project["dependencies"])
    names = ("capture", "gguf", "hub", "kvpress", "lm-eval", "remote")
    optional = [line for name in names for line in extras[name]]
    declared = core | requirements(optional)
    imported = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add(node.module.partition(".")[0])
    called = {"yaml": "pyyaml"}  # of a module and its project
    outside = imported - set(sys.stdlib_module_names) - {"kvsim"}
    third_party = requirements(called.get(name, name) for name in outside)

    # kvsim.testing is for those who have the test extra
    assert third_party - {"hypothesis"} <= declared
    assert core <= third_party


def test_every_extra_is_explained():
    """Errors know the extra of each library; the page of commands says what each extra is for."""
    extras = PYPROJECT["project"]["optional-dependencies"]
    page = (ROOT / "docs" / "cli.md").read_text("utf-8")
    table = page.partition("## Extras\n")[2].partition("\n## ")[0]

    assert [name for name in extras if f"`{name}`" not in table] == []
    for name, libraries in EXTRAS.items():
        assert requirements(libraries) <= requirements(extras[name])
    users = extras.keys() - {"docs", "lint", "peers", "test"}
    assert users == EXTRAS.keys() - {"test"}
    for name in users:
        assert requirements(extras[name]) - {"kvsim"} == requirements(EXTRAS[name])


def test_a_missing_extra_is_one_line(monkeypatch, capsys):
    """Without transformers, Python and the command line say in one line what to install."""
    for name in ("kvsim.recorder.capturing", "kvsim.recorder.loading"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delitem(vars(kvsim), "capture", raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    expected = r"\w+ is not installed; this needs kvsim\[capture\]: pip install 'kvsim\[capture\]'"

    with pytest.raises(ImportError, match=expected) as error:
        _ = kvsim.capture
    with pytest.raises(SystemExit) as end:
        main(["capture", "--model", "tiny", "--prompt", "facts", "--out", "x.zarr"])

    assert isinstance(error.value, kvsim.KvsimError)
    assert end.value.code == 2
    assert re.fullmatch(f"error: {expected}\n", capsys.readouterr().err)


def test_no_circle_of_files():
    """No two files import each other: not by way of others, inside functions or by name."""
    folder = Path(kvsim.__file__).parent
    files = {
        ".".join(("kvsim", *path.relative_to(folder).with_suffix("").parts)).removesuffix(
            ".__init__"
        ): path
        for path in SOURCES
    }
    imports = {name: set() for name in files}
    for name, path in files.items():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                imports[name] |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{name} has a relative import"
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                imports[name] |= (inner & files.keys()) or {node.module}
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
                lazy = vars(importlib.import_module(name)).get("_HOME", {}).values()
                imports[name] |= {getattr(node.args[0], "value", None)} & files.keys()
                imports[name] |= {f"{name}.{module}" for module in lazy} & files.keys()
    imports["kvsim"].discard("kvsim")

    # raises CycleError, which lists the circle
    graphlib.TopologicalSorter(imports).prepare()


def test_no_file_outgrows_its_purpose():
    """A file of more than 450 lines serves two."""
    sizes = {str(path): len(path.read_text("utf-8").splitlines()) for path in SOURCES}

    assert {name: size for name, size in sizes.items() if size > 450} == {}


def test_constraints_cover_the_declared_dependencies():
    """Every declared dependency has an exact version in constraints.txt, without a location."""
    lines = [
        line
        for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines()
        if not line.startswith("#")
    ]
    project = PYPROJECT["project"]
    extras = itertools.chain(*project["optional-dependencies"].values())
    wanted = [*project["dependencies"], *extras]

    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    assert requirements(wanted) - {"kvsim"} <= requirements(lines)
