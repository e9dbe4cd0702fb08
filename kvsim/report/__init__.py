"""`report`: run folders to one HTML page that needs nothing else, no network and no scripts.

What a page says: means over prompts with intervals, every policy beside the first one on the same
prompts, figures, the split by domain, level and stage where there is one, the claims of the papers
that these numbers can answer, and where all of it came from. Every text from a run is escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from kvsim.errors import OutputError, PolicyError
from kvsim.report.html import PAGE
from kvsim.report.runs import Saved, joined, read_run
from kvsim.report.sections import sections

__all__ = ["Saved", "joined", "page", "read_run", "write_report"]


def write_report(
    runs: Sequence[str | Path], out: str | Path, base: str | None = None, *, overwrite: bool = False
) -> Path:
    """Write the page of one run or of several together.

    Args:
        runs: folders that `kvsim replay --out` wrote.
        out: the file to write.
        base: what all other policies are compared with, by default the first one that evicts.
        overwrite: replace what is at `out`.

    Raises:
        OutputError: something is at `out`, or a run cannot be read.
        PolicyError: two runs have different values for the same policy, parameters, schedule and
            trace; the runs have no values, or not the policy `base`.
    """
    target = Path(out)
    saved = [read_run(one) for one in runs]
    if target.exists() and not overwrite:
        raise OutputError(
            f"{target} exists; give another --out or --overwrite, nothing was changed"
        )
    text = page(saved, base)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, "utf-8")
    return target


def page(runs: Sequence[Saved], base: str | None = None) -> str:
    """The HTML page of runs; see `write_report`."""
    table = joined(runs)
    if not table["value"].is_not_null().any():
        raise PolicyError("the runs have no values, so there is nothing to report")
    parts = sections(table, runs, base)
    title = ", ".join(run.path.name for run in runs)
    return PAGE.format(title=escape(title), body="\n".join(filter(None, parts)))
