"""Errors of kvsim. Each message says what was found, what was expected and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from os import PathLike
from pathlib import Path

from kvsim.schema import is_url


class KvsimError(Exception):
    """Base of every error that kvsim raises itself."""


class TraceError(KvsimError, ValueError):
    """A trace cannot be used: incomplete, damaged, of another format, wrong shapes or NaN."""


class TraceNotFoundError(TraceError, FileNotFoundError):
    """No trace at the path."""


class TraceExistsError(TraceError, FileExistsError):
    """A trace would overwrite an existing file or folder."""


class PositionError(KvsimError, IndexError):
    """A row, a position or a layer that a trace does not have."""


class CaptureError(KvsimError, RuntimeError):
    """A model or a prompt that cannot be recorded exactly."""


class PolicyError(KvsimError, ValueError):
    """An unknown policy, preset or parameter, or a parameter outside its range."""


class BudgetError(PolicyError):
    """A budget for which the policy has no rule."""


class NeedsError(PolicyError):
    """A policy or a metric needs an array that the trace lacks."""


class ScoreError(PolicyError, FloatingPointError):
    """Scores cannot rank the live entries: NaN, infinite, of another shape or type, or negative."""


class TextError(KvsimError, ValueError):
    """A prompt on real text that cannot be written: an unknown task, or a length out of range."""


class DumpError(KvsimError, ValueError):
    """A dump of kept sets that is damaged or incomplete."""


class ConfigError(KvsimError, ValueError):
    """A configuration of a sweep with an unknown key, or a value of another kind."""


class MemoryLimitError(KvsimError, MemoryError):
    """The memory budget is too small for a single layer."""


class OutputError(KvsimError, FileExistsError):
    """An output path exists already or cannot be written."""


class ExtraError(KvsimError, ImportError):
    """A library of an extra of the package is not installed."""


class PackageError(KvsimError, ImportError):
    """A package declares a policy, metric, figure or command that kvsim cannot load."""


#: Libraries that each extra installs and kvsim imports.
EXTRAS = {
    "capture": ("httpx", "huggingface_hub", "jinja2", "tokenizers", "transformers"),
    "gguf": ("gguf",),
    "dashboard": ("plotly", "streamlit"),
    "remote": ("fsspec",),
    "hub": ("datasets",),
    "kvpress": ("kvpress",),
    "lm-eval": ("accelerate", "lm_eval"),
    "test": ("hypothesis",),
}


def missing_extra(error: ModuleNotFoundError) -> ExtraError | None:
    """Return the error that names the extra of a module that was not found; None if none has it."""
    library = (error.name or "").partition(".")[0]
    for extra, libraries in EXTRAS.items():
        if library in libraries:
            install = f"pip install 'kvsim[{extra}]'"
            return ExtraError(f"{library} is not installed; this needs kvsim[{extra}]: {install}")
    return None


def local_path(path: object, error: type[KvsimError]) -> Path:
    """Return a path on this machine as a Path; raise `error` for a URL or an invalid path."""
    if is_url(path):
        raise error(f"the path is {path!r}, a URL; expected a path on this machine")
    if isinstance(path, str | PathLike) and "\0" not in str(path):
        return Path(path)
    raise error(f"the path is {path!r}; expected text or a Path without NUL characters")


def suggest(name: str, choices: Iterable[str]) -> str:
    """`; did you mean 'x'?` for names that begin so or have it as a word, else the closest one.

    In any case of letters; the empty string where nothing is close.
    """
    plain, names = name.lower(), {each.lower(): each for each in choices}
    longer = [x for x in names if plain and (x.startswith(plain) or plain in x.split("_"))]
    close = longer if 0 < len(longer) < 5 else difflib.get_close_matches(plain, names, n=1)
    return f"; did you mean {' or '.join(repr(names[x]) for x in close)}?" if close else ""


def error_line(error: BaseException) -> str:
    """Return the message of an error on one line, shortened; its class if it has none."""
    return " ".join(str(error).split())[:200] or type(error).__name__
