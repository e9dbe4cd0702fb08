"""Options of commands and of functions, as they are declared."""

import inspect
import typing

import pytest

import kvsim
from kvsim.cli import replaying
from kvsim.core.options import declared
from kvsim.errors import KvsimError
from kvsim.experiment import Experiment, LiveOptions, ReplayOptions, SweepOptions
from kvsim.sweeps import replay_all

PUBLIC = [each for name in kvsim.__all__ if inspect.isfunction(each := getattr(kvsim, name))]


@pytest.mark.parametrize("function", [*PUBLIC, replay_all], ids=lambda f: f.__name__)
def test_no_public_function_has_more_than_twelve_parameters_of_its_own(function):
    """Options that a declaration has are its `**options`, and not its own."""
    code = inspect.unwrap(function, stop=lambda f: not hasattr(f, "__wrapped__")).__code__

    assert code.co_argcount + code.co_kwonlyargcount <= 12


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (kvsim.sweep, SweepOptions),
        (kvsim.live, LiveOptions),
        (replay_all, ReplayOptions),
    ],
    ids=lambda x: x.__name__,
)
def test_python_has_the_declared_options(function, options):
    """Signature and docstring show each with its default and help; another one is refused."""
    shown = inspect.signature(function).parameters
    text = " ".join(inspect.getdoc(function).split())

    for option in declared(options):
        assert shown[option.name].default == option.default
        assert f"{option.name}: {option.help.text}" in text
    needed = [x for x in shown.values() if x.default is x.empty and x.name != "options"]
    with pytest.raises((TypeError, KvsimError), match="intervall"):
        function(*(["sample"] * len(needed)), intervall=3)


@pytest.mark.parametrize("command", [replaying.replay, replaying.live], ids=lambda x: x.__name__)
def test_the_command_line_has_the_declared_options(command):
    """Help, bounds and defaults of options are those of the declaration."""
    known = {option.name: option for option in declared(Experiment)}
    shown = inspect.signature(command).parameters
    common = [name for name in shown if name in known and name not in ("device", "traces")]

    assert len(common) >= 7
    for name in common:
        info = typing.get_args(shown[name].annotation)[1]
        assert info.help.startswith(known[name].help.text)
        assert info.min == known[name].least
        assert shown[name].default in (known[name].default, None, inspect.Parameter.empty)
