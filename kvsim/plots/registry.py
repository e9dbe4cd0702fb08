"""The figures by name, each declared by its function; finding them loads no matplotlib.

A figure is a function under `figure`, in a file of this folder, of a study or of a package. Its
name, the first line of its docstring and its arguments are read from the text of the file.
"""

from __future__ import annotations

import ast
from collections import ChainMap
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from kvsim.registry import Registry

Function = TypeVar("Function", bound=Callable[..., Any])

#: Replays of `kvsim plot` for an input: records, one record with its Plans, or one eviction at
#: each ratio. Inputs that are not listed need no policy.
REPLAYS: Final[dict[str, Literal["records", "plans", "once"]]] = {
    "record": "records",
    "records": "records",
    "plans": "plans",
    "evictions": "once",
}
#: Keywords that the command line can set, each with its option.
OPTIONS: Final = {name: name for name in ("layer", "head", "by")} | {
    "layers": "layer",
    "metrics": "metric",
}


def figure(**_: str | tuple[str, ...]) -> Callable[[Function], Function]:
    """Declare a function that returns a matplotlib Figure as a figure of `kvsim plot`.

    `declared_in` reads the keywords, which are literals. inputs: what its positional arguments are
    (`REPLAYS`, or traces), by default their names. source: the paper and figure that it follows, or
    "kvsim". requires: what a trace or a policy must have, for users.
    """
    return lambda function: function


@dataclass(frozen=True)
class Figure:
    """A declaration: the module of the function, arguments of `figure`, and its own arguments.

    summary: the first line of the docstring. options: keywords that the command line can set.
    """

    module: str
    summary: str
    inputs: tuple[str, ...]
    options: tuple[str, ...] = ()
    source: str = "kvsim"
    requires: str = ""

    @property
    def replay(self) -> Literal["records", "plans", "once"] | None:
        """Replays of policies for it; None where it shows no policies."""
        return next((REPLAYS[name] for name in self.inputs if name in REPLAYS), None)

    @property
    def runs(self) -> bool:
        """Whether it is drawn from a Table, such as that of runs."""
        return "table" in self.inputs

    @property
    def single(self) -> Literal["trace", "record"] | None:
        """Whether it shows one trace, or one record of it."""
        if {"record", "plans"} & {*self.inputs}:
            return "record"
        return "trace" if "trace" in self.inputs else None

    @property
    def flags(self) -> tuple[str, ...]:
        """Options of the command line for it, without dashes."""
        return tuple(OPTIONS[name] for name in self.options)

    @property
    def needs(self) -> str:
        """Required sources and policies on the command line, in words."""
        traces = "one trace" if self.single else "traces"
        policies = {
            None: "no policy",
            "once": "policies, no budget",
            "plans": "one policy, one budget",
            "records": "one policy, one budget" if self.single == "record" else "policies, budgets",
        }[self.replay]
        runs = "runs, one trace" if self.single else "runs"
        sources = runs if self.runs else f"{traces}, {policies}"
        return "; ".join(filter(None, (sources, self.requires)))


def declared_in(module: str, file: Path) -> dict[str, Figure]:
    """Return the figures of the file of a module, by name."""
    figures = {}
    functions = (x for x in ast.parse(file.read_bytes()).body if isinstance(x, ast.FunctionDef))
    for function in functions:
        calls = (x for x in function.decorator_list if isinstance(x, ast.Call))
        call = next((x for x in calls if ast.unparse(x.func).split(".")[-1] == "figure"), None)
        if call is None:
            continue
        given: dict[str, Any] = {str(x.arg): ast.literal_eval(x.value) for x in call.keywords}
        names = function.args.args
        required = names[: len(names) - len(function.args.defaults)]
        keywords = [*names[len(required) :], *function.args.kwonlyargs]
        given.setdefault("inputs", tuple(each.arg for each in required))
        figures[function.name] = Figure(
            module,
            summary=(ast.get_docstring(function) or "").partition("\n")[0],
            options=tuple(each.arg for each in keywords if each.arg in OPTIONS),
            **given,
        )
    return figures


class _Figures(Registry[Figure]):
    def _read(self, point: EntryPoint) -> Any:
        spec = find_spec(point.module) or import_module(point.module).__spec__
        figures = declared_in(point.module, Path(str(spec and spec.origin)))
        if point.attr not in figures:
            raise AttributeError(f"no function {point.attr} is under kvsim.plots.registry.figure")
        return figures[point.attr]


_FILES = sorted(Path(__file__).parent.glob("*.py"))
_OWN = [declared_in(f"{__package__}.{file.stem}", file) for file in _FILES]
FIGURES: Final = _Figures("figure", "kvsim.figures", (Figure,), dict(ChainMap(*reversed(_OWN))))
