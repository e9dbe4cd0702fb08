"""`kvsim verify`: whether traces are complete and undamaged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kvsim.cli.show import bar, document, echo_fields, echo_json, echo_text, one_line
from kvsim.cli.values import Json, Stop, TracePaths, locate
from kvsim.errors import TraceError, TraceNotFoundError
from kvsim.schema import is_url, plural


def verify(
    traces: TracePaths,
    deep: Annotated[
        bool,
        typer.Option(
            "--deep",
            help="Recompute attention from q, k and v too, and compare it with the model's.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Check that traces are complete and undamaged.

    Reads every chunk and compares it with its checksums. The exit status is 2 if a trace has a
    problem. The JSON document of several traces is an object with the list 'traces'.
    """
    single, verdicts, reports = len(traces) == 1, [], []
    for path in map(locate, traces):
        verdict, report = _checked(path, deep=deep)
        if verdict == "no trace" and single:
            raise Stop(f"error: {one_line(report['problems'][0])}", 2)
        verdicts.append(verdict)
        reports.append(report)
        if not as_json:
            _echo_verdict(verdict, report, deep=deep, single=single)
    if as_json:
        echo_json(document(reports))
    _stop_if_bad(verdicts, reports)


def _checked(path: Path | str, *, deep: bool) -> tuple[str, Mapping[str, Any]]:
    """Return the verdict on a trace in words, and the report for JSON."""
    from kvsim.store import verify as check

    try:
        with bar("layers") as report:
            result = check(path, deep=deep, progress=lambda n, of: report(n, of, str(path)))
    except TraceError as error:
        # behind a server that refuses it, a trace may be undamaged
        verdict = "cannot be opened" if is_url(path) else "damaged"
        if isinstance(error, TraceNotFoundError):
            verdict = "no trace"
        return verdict, {"path": str(path), "ok": False, "problems": [str(error)]}
    return "complete and undamaged" if result.ok else "damaged", result.to_dict()


def _echo_verdict(verdict: str, report: Mapping[str, Any], *, deep: bool, single: bool) -> None:
    """Print a line on a trace and its problems; details if it is the only trace."""
    more = ", and its attention follows from q, k, v" if deep and report["ok"] else ""
    echo_text(f"{one_line(report['path'])}: {verdict}{more}")
    for problem in report["problems"]:
        echo_text(f"  {one_line(problem)}")
    if not (single and report["ok"]):
        return
    fields = {
        "  layers": str(len(report["layers"])),
        "  chunks read": str(report["chunks"]),
        "  digest": report["digest"],
    }
    if deep:
        output, lse = report["output_tolerance"], report["lse_tolerance"]
        fields |= {
            "  attention output": _error(report["output_error"], output, "relative"),
            "  log-sum-exp": _error(report["lse_error"], lse, "absolute"),
            "  dense attention": _error(report["attention_error"], lse, "absolute"),
        }
    echo_fields(fields)


def _stop_if_bad(verdicts: Sequence[str], reports: Sequence[Mapping[str, Any]]) -> None:
    """End with status 2 unless every trace is complete and undamaged."""
    bad = [report for report in reports if not report["ok"]]
    if not bad:
        return
    if len(reports) > 1:
        count = f"{len(bad)} of {len(reports)} traces"
        expected = "are not complete and undamaged, expected all to be; see the report"
        raise Stop(f"error: {count} {expected}", 2)
    if verdicts != ["damaged"]:
        raise Stop(f"error: {one_line(bad[0]['problems'][0])}", 2)
    problems = plural(len(bad[0]["problems"]), "problem")
    path = one_line(bad[0]["path"])
    raise Stop(f"error: {path} is damaged ({problems}, expected none); record it again", 2)


def _error(errors: Sequence[float], allowed: float, kind: str) -> str:
    if not errors:
        return "not recorded"
    return f"{kind} error at most {max(errors):.1e} (allowed {allowed:.0e})"
