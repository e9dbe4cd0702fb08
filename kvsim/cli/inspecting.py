"""`kvsim info`, `verify` and `traces`: describe, check and list traces."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsim.cli import show
from kvsim.cli.runs import describe_run, echo_run
from kvsim.cli.shared import Json, OptionError, ShowText, Stop, TracePaths, path_argument, paths_of
from kvsim.errors import TraceError, TraceNotFoundError
from kvsim.schema import LABELS, is_url, plural, ranges, visible

if TYPE_CHECKING:
    from kvsim.store.index import Entry


def info(traces: TracePaths, show_text: ShowText = False, as_json: Json = False) -> None:
    """Describe traces: model, text, arrays, provenance. Of a run folder print its results again.

    The JSON document of several traces is an object with the list 'traces'.
    """
    from kvsim.analysis.folder import is_run
    from kvsim.store import describe

    paths = paths_of(traces)
    runs = {path: describe_run(path) for path in paths if is_run(path)}
    described = [runs[path][0] if path in runs else describe(path) for path in paths]
    if as_json:
        show.echo_json(show.document(described))
        return
    for place, (path, facts) in enumerate(zip(paths, described, strict=True)):
        if place:
            typer.echo()
        if path in runs:
            echo_run(*runs[path], whole=show_text)
        else:
            _echo_facts(facts)


def _values(facts: Mapping[str, Any]) -> str:
    """Say of values that have another size than keys, or are a part of them."""
    if "latent" in facts:
        return f" (latent attention: the last {facts['latent']} are the value)"
    return f", of values {facts['value_dim']}" if "value_dim" in facts else ""


def _echo_facts(facts: Mapping[str, Any]) -> None:
    model, logprobs, probe = (facts[x] for x in ("model", "response_logprobs", "probe"))
    fields = {
        "trace": f"{facts['path']} (format {facts['format']}, {size_text(facts['bytes'])})",
        "name": quoted(facts["name"]),
        "digest": facts["digest"],
        "model": " ".join(quoted(model[key]) for key in ("name", "type", "dtype") if key in model),
        "weights": _source(model.get("source")),
        "length": length_text(facts),
        "rows": _rows(facts.get("left_out")),
        "shape": f"{layers_text(facts)}, {plural(facts['qheads'], 'query head')}, "
        f"{plural(facts['heads'], 'KV head')}, dim {facts['dim']}{_values(facts)}"
        + ", at most: layers have several sizes"
        * ("sizes" in facts),
        "attention": _attention(facts),
        "labels": ", ".join(f"{name} {quoted(label)}" for name, label in facts["labels"].items()),
        **{
            f"{quoted(name)} at tokens": ", ".join(ranges(range(*span)) for span in spans)
            for name, spans in facts["spans"].items()
        },
        "prompt": quoted(facts["prompt"]),
        "response": quoted(facts["response"]),
        "log-likelihood": f"{fmean(logprobs):.4f} per token of the response, on average"
        if logprobs
        else "",
        "written by": quoted(facts["generation"].get("writer")),
        "agreement": _agreement(facts["agreement"]),
        "answers at tokens": ", ".join(
            ranges(range(*turn["answer"])) for turn in facts.get("turns", ())
        ),
        "answer": answers_text(facts).removeprefix("answer ") or "not checked",
        "capture check": _capture_check(facts["capture_check"]),
        "projections": _projections(facts["projections"]),
        "probe": f"{plural(probe['rows'], 'row')} that repeat the context, in "
        f"{plural(len(probe['chunks']), 'chunk')}"
        if probe
        else "",
        "recorded with": " ".join(f"{k} {v}" for k, v in facts["versions"].items()) or "unknown",
        **{f"note {i}": note for i, note in enumerate(facts["notes"], start=1)},
    }
    show.echo_fields({name: value for name, value in fields.items() if value not in ("", "null")})
    typer.echo()
    rows = []
    for name, array in facts["arrays"].items():
        shape, size = " x ".join(map(str, array["shape"])), array["bytes"]
        megabytes = "-" if size is None else f"{size / 1e6:.2f}"
        rows.append([name, shape, array["dtype"], array["source_dtype"] or "-", megabytes])
    show.echo_table(["array", "shape", "stored as", "in the model", "MB"], rows, right=4)


def _rows(left_out: Sequence[int] | None) -> str:
    if left_out is None:
        return ""
    start, stop = left_out
    return f"without queries, outputs and log-sum-exp of rows {start} to {stop - 1}"


def _source(source: object) -> str:
    if not isinstance(source, Mapping):
        return ""
    keys = ("file", "quantization", "package", "sha256")
    return " ".join(quoted(source[key]) for key in keys if key in source)


def _attention(facts: Mapping[str, Any]) -> str:
    """Return the parts of layers besides plain causal attention, or an empty text."""
    texts = []
    for kind in facts["attention"]:
        parts = [
            kind["window"] and f"a window of {kind['window']}",
            kind["softcap"] and f"a softcap of {kind['softcap']:g}",
            kind["sinks"] and "sinks",
            kind["rotary_dim"] == 0 and "no RoPE",
        ]
        layers, described = kind["layers"], ", ".join(filter(None, parts)) or "plain"
        texts.append(f"layers {', '.join(map(str, layers))}: {described}")
    return "" if len(texts) == 1 and texts[0].endswith(": plain") else "; ".join(texts)


def _agreement(found: Mapping[str, Any] | None) -> str:
    share, first = (found or {}).get("share"), (found or {}).get("first")
    if not isinstance(share, int | float):  # untrusted input
        return ""
    differing = f"; the first other one is at {first}" if isinstance(first, int) else ""
    return f"{share:.1%} of the response is what the model writes greedily{differing}"


def _capture_check(check: Mapping[str, Any] | None) -> str:
    errors = check.get("max_relative_error") if check else None
    if not errors:
        return "none"
    values = list(errors.values()) if isinstance(errors, dict) else errors
    numbers = isinstance(values, list) and all(isinstance(value, int | float) for value in values)
    if not numbers:  # untrusted input
        return "not readable"
    return (
        f"attention recomputed from q, k, v within {max(values):.1e} of the model's own (relative)"
    )


def _projections(facts: Mapping[str, Any] | None) -> str:
    if facts is None:
        return ""
    shape = " x ".join(map(str, facts["shape"]))
    if not facts["present"]:
        return f"{facts['folder']} ({shape}), which is not next to the trace; copy it there too"
    return f"{facts['folder']} next to the trace ({shape}, {size_text(facts['bytes'])})"


def is_cut(facts: Mapping[str, Any]) -> bool:
    """Return whether a response was requested and only its length ended it."""
    generation = facts["generation"]
    return bool(generation.get("stopped") == "length" and generation.get("max_new_tokens") != 0)


def length_text(facts: Mapping[str, Any]) -> str:
    """Return the number of tokens, and what ended the response."""
    prompt, total, context = (facts[name] for name in ("prompt_len", "tokens", "context_len"))
    ends = {
        "eos": ", ended by the model",
        "stop": ", ended by a stop string",
        "length": ", cut by --max-new-tokens" * is_cut(facts),
        "context": ", cut by the context",
        "given": ", given",
    }
    end = ends.get(str(facts["generation"].get("stopped")), "")
    context_text = "" if context is None else f" with a context of {context}"
    return f"{total} tokens (prompt {prompt}{context_text}, response {total - prompt}{end})"


def layers_text(facts: Mapping[str, Any]) -> str:
    """Return the number of layers, and their numbers if they are not all of the model's."""
    count, ids = plural(facts["layers"], "layer"), facts["layer_ids"]
    model = facts["model"].get("layers")
    if ids == list(range(len(ids))) and model in (None, len(ids)):
        return count
    of = f" of {model}" if isinstance(model, int) else ""
    return f"{facts['layers']}{of} layers ({ranges(ids)})"


def answer_text(check: Mapping[str, Any] | None) -> str:
    """Return the answer and whether it is right; empty if that is unknown."""
    if not check or check.get("right") is None:
        return ""
    if check.get("answer") is None:
        return "no answer in the response"
    return f"answer {quoted(check['answer'])} {'right' if check['right'] else 'wrong'}"


def answers_text(facts: Mapping[str, Any]) -> str:
    """Return as `answer_text`; of several turns, how many answers are right."""
    if "turns" not in facts:
        return answer_text(facts["answer_check"])
    right = [turn["right"] for turn in facts["turns"] if isinstance(turn["right"], bool)]
    return f"{sum(right)} of {plural(len(right), 'answer')} right" if right else ""


def quoted(text: object) -> str:
    """Return untrusted text in quotes, as one line without control characters."""
    return visible(json.dumps(text, ensure_ascii=False))


def size_text(n_bytes: int | None) -> str:
    """Return a size in MB."""
    return "size unknown" if n_bytes is None else f"{n_bytes / 1e6:.1f} MB"


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
    paths = paths_of(traces)
    single, verdict, reports = len(paths) == 1, "", []
    for path in paths:
        verdict, report = _checked(path, deep=deep)
        if verdict == "no trace" and single:
            raise Stop(f"error: {show.one_line(report['problems'][0])}", 2)
        reports.append(report)
        if not as_json:
            _echo_verdict(verdict, report, deep=deep, single=single)
    if as_json:
        show.echo_json(show.document(reports))
    bad = [report for report in reports if not report["ok"]]
    if not bad:
        return
    problems = [show.one_line(problem) for problem in bad[0]["problems"]]
    if not single:
        expected = "are not complete and undamaged, expected all to be; see the report"
        error = f"{len(bad)} of {len(reports)} traces {expected}"
    elif verdict == "damaged":
        count = f"{plural(len(problems), 'problem')}, expected none"
        error = f"{show.one_line(bad[0]['path'])} is damaged ({count}); record it again"
    else:
        error = problems[0]
    raise Stop(f"error: {error}", 2)


def _checked(path: Path | str, *, deep: bool) -> tuple[str, Mapping[str, Any]]:
    from kvsim.store import verify as check

    try:
        with show.bar("layers") as report:
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
    show.echo_text(f"{show.one_line(report['path'])}: {verdict}{more}")
    for problem in report["problems"]:
        show.echo_text(f"  {show.one_line(problem)}")
    if not report["ok"]:
        return
    if not single:
        return
    fields = {
        "  layers": str(len(report["layers"])),
        "  files read": str(report["files"]),
        "  digest": report["digest"],
    }
    if deep:
        output, lse = report["output_tolerance"], report["lse_tolerance"]
        fields |= {
            "  attention output": _error(report["output_error"], output, "relative"),
            "  log-sum-exp": _error(report["lse_error"], lse, "absolute"),
            "  dense attention": _error(report["attention_error"], lse, "absolute"),
        }
    show.echo_fields(fields)


def _error(errors: Sequence[float], allowed: float, kind: str) -> str:
    if not errors:
        return "not recorded"
    return f"{kind} error at most {max(errors):.1e} (allowed {allowed:.0e})"


def traces(
    folder: Annotated[Path, path_argument("DIR", "A folder with traces.")], as_json: Json = False
) -> None:
    """List the traces of a folder.

    Folders and packed files, four folders deep. Each is opened, which finds missing files; `kvsim
    verify` reads their content.
    """
    if not folder.is_dir():
        problem = "is a file" if folder.exists() else "does not exist"
        raise OptionError(f"{folder} {problem}; expected a folder of traces")
    if (folder / "zarr.json").is_file():
        raise OptionError(f"{folder} is a trace; use `kvsim info`, or give its parent folder")

    from kvsim.store.index import index, shared_projections

    entries = index(folder)
    named = Counter(
        (Path(entry.path).parent / entry.projections).as_posix()
        for entry in entries
        if entry.projections is not None
    )
    shared: list[dict[str, Any]] = [
        {"path": path, "bytes": size, "traces": named[path]}
        for path, size in shared_projections(folder).items()
    ]
    if as_json:
        listed = [asdict(entry) for entry in entries]
        show.echo_json({"folder": str(folder), "traces": listed, "projections": shared})
        return
    whole = [entry for entry in entries if entry.state == "whole"]
    if whole:
        _echo_traces(whole)
        typer.echo()
    for each in shared:
        of = plural(each["traces"], "trace") if each["traces"] else "no trace"
        show.echo_text(f"{each['path']}: output projections of {of}, {size_text(each['bytes'])}")
    for entry in entries:
        if entry.state == "broken":
            show.echo_text(f"cannot be opened: {show.one_line(entry.reason)}")
    show.echo_text(_totals(entries, str(folder)))


def _echo_traces(entries: Sequence[Entry]) -> None:
    used = [label for label in LABELS if any(label in entry.labels for entry in entries)]
    rows = [
        {
            "trace": entry.path,
            "model": entry.model or "-",
            **{label: str(entry.labels.get(label, "-")) for label in used},
            "answer": entry.answer or "-",
            "kvsim": entry.versions.get("kvsim", "-"),
            "tokens": str(entry.tokens),
            "prompt": str(entry.prompt_len),
            "layers": _layers(entry),
            "MB": f"{entry.bytes / 1e6:.1f}",
        }
        for entry in entries
    ]
    show.echo_rows(rows, right=list(rows[0]).index("tokens"))


def _layers(entry: Entry) -> str:
    if entry.layers is None:
        return "-"
    partial = entry.model_layers is not None and entry.model_layers != entry.layers
    return f"{entry.layers} of {entry.model_layers}" if partial else str(entry.layers)


def _totals(entries: Sequence[Entry], folder: str) -> str:
    whole = [entry for entry in entries if entry.state == "whole"]
    parts = [f"{plural(len(whole), 'trace') if whole else 'no trace'} in {folder}"]
    if whole:
        parts.append(f"{sum(entry.tokens or 0 for entry in whole)} tokens")
        parts.append(f"{sum(entry.bytes for entry in whole) / 1e6:.1f} MB")
    checked = [entry.answer for entry in whole if entry.answer is not None]
    if checked:
        parts.append(f"{checked.count('right')} of {len(checked)} answers right")
    broken = len(entries) - len(whole)
    return ", ".join([*parts, *([f"{broken} cannot be opened"] if broken else [])])
