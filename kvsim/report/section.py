"""A section of the report that a study or a package of a user brings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from kvsim.analysis.subject import Analysis


@dataclass(frozen=True)
class Section:
    """A section of a page.

    write: returns it as HTML, from a `kvsim.report.study.Study` (of "traces") or the Table of all
    runs and traces (of "results"); empty where it has nothing to say. after: the section of traces
    that it follows. collect: what it needs of each trace, which `Study.collected` has.
    """

    write: Callable[[Any], str]
    of: Literal["traces", "results"] = "traces"
    after: str = ""
    collect: Callable[[Analysis], Any] | None = None
