"""Trace-driven simulation of KV-cache eviction.

Record the attention of a decoder model once; then replay any eviction policy over the trace,
offline, and measure kept entries, lost attention and the error of the attention output::

    record = kvsim.replay("traces/run.zarr", "tova", budget="25%")
    table = kvsim.measure("traces/run.zarr", record, metrics="output_error")
    run = kvsim.sweep(traces="traces", policies=["tova", "snapkv"], budgets=[64, "25%"])
    kvsim.compare(run)

Traces are given as objects, paths, URLs or names of samples, policies as objects or by name.

The names below are imported on first use, so that ``import kvsim`` loads none of the large
libraries. Names that are not in ``__all__`` may move between releases.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from kvsim.errors import missing_extra

if TYPE_CHECKING:
    from kvsim import plots as plots
    from kvsim.analysis.comparison import compare as compare
    from kvsim.analysis.folder import read_run as read_run
    from kvsim.analysis.measuring import measure as measure
    from kvsim.analysis.summaries import averages as averages
    from kvsim.core.attention import Rope as Rope
    from kvsim.core.policy import Policy as Policy
    from kvsim.core.record import Record as Record
    from kvsim.core.trace import Trace as Trace
    from kvsim.engine.replay import replay as replay
    from kvsim.errors import KvsimError as KvsimError
    from kvsim.policies import policy as policy
    from kvsim.recorder import capture as capture
    from kvsim.runner.judgments import judge as judge
    from kvsim.samples import sample_trace as sample_trace
    from kvsim.store.reader import open_trace as open_trace
    from kvsim.store.writer import save_trace as save_trace
    from kvsim.studies.conformance.report import conform as conform
    from kvsim.sweeps.closed_loop import live as live
    from kvsim.sweeps.driver import sweep as sweep

__version__ = "0.2.0.dev0"

_HOME = {
    "KvsimError": "errors",
    "Policy": "core.policy",
    "Record": "core.record",
    "Rope": "core.attention",
    "Trace": "core.trace",
    "averages": "analysis.summaries",
    "capture": "recorder",
    "compare": "analysis.comparison",
    "conform": "studies.conformance.report",
    "judge": "runner.judgments",
    "live": "sweeps.closed_loop",
    "measure": "analysis.measuring",
    "open_trace": "store.reader",
    "policy": "policies",
    "read_run": "analysis.folder",
    "replay": "engine.replay",
    "sample_trace": "samples",
    "save_trace": "store.writer",
    "sweep": "sweeps.driver",
}

__all__ = sorted([*_HOME, "__version__", "plots"])  # noqa: PLE0605  a list of strings


def __getattr__(name: str) -> object:
    """The public name `name`, imported from its module on first use (PEP 562)."""
    if name == "plots":
        return import_module("kvsim.plots")
    if name not in _HOME:
        raise AttributeError(f"module 'kvsim' has no attribute {name!r}")
    try:
        value: object = getattr(import_module(f"kvsim.{_HOME[name]}"), name)
    except ModuleNotFoundError as error:
        extra = missing_extra(error)
        if extra is None:
            raise
        raise extra from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names."""
    return __all__
