"""`kvsim info`: describe, check and list traces, and print runs again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer

from kvsim.cli import show
from kvsim.cli.runs import describe_run, echo_run
from kvsim.cli.shared import Json, Stop, TracePaths, paths_of
from kvsim.errors import TraceError
from kvsim.progress import progress_bar
from kvsim.schema import LABELS, plural, ranges, visible

#: Most characters of a value.
_LONG = 220

#: Facts that other lines show.
_SHOWN = {"path", "format", "tokens", "prompt_len", "context_len", "layers", "layer_ids", "bytes"}
_SHOWN |= {"arrays", "files", "problems", "check"}


def info(
    traces: TracePaths,
    deep: Annotated[
        bool,
        typer.Option(
            "--deep",
            help="Also compare every chunk with its checksums, and attention recomputed from q, k "
            "and v with the model's; the exit status is 2 if a trace has a problem.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Describe traces: model, text, arrays, provenance. List the traces of a folder.

    Of a run folder print its results again. The JSON document of several traces is an object with
    the list 'traces'.
    """
    from kvsim.analysis.folder import is_run

    documents: list[Mapping[str, Any]] = []
    for given in traces:
        if is_run(given):
            document, table, shown = describe_run(given)
            documents.append(document)
            if not as_json:
                echo_run(document, table, shown)
            continue
        inside = _in_folder(given)
        part = [_facts(path, deep=deep) for path in inside or paths_of([given])]
        documents += part
        if len(traces) == len(part) == 1 and part[0].keys() == {"path", "problems"}:
            raise Stop(f"error: {show.one_line(part[0]['problems'][0])}", 2)
        if as_json:
            continue
        if inside:
            _echo_list(given, part)
        else:
            for facts in part:
                _echo_facts(facts)
    if as_json:
        show.echo_json(documents[0] if len(documents) == 1 else {"traces": documents})
    if bad := [facts for facts in documents if facts.get("problems")]:
        of = f"{len(bad)} of {plural(len(documents), 'trace')}: " if len(documents) > 1 else ""
        raise Stop(f"error: {of}{show.one_line(bad[0]['problems'][0])}", 2)


def _in_folder(given: str) -> list[Path]:
    """Return the traces in a folder."""
    from kvsim.store.opening import find

    path = Path(given)
    whole = not path.is_dir() or (path / "zarr.json").exists()
    return [] if whole else [*find(path, "trace").values()]


def _facts(path: Path | str, *, deep: bool) -> dict[str, Any]:
    """Return the description of a trace, and with `deep` its check; or problems."""
    from kvsim.store.verification import describe, verify

    try:
        facts = describe(path)
        if not deep:
            return facts
        with progress_bar("layers") as report:
            check = verify(path, deep=True, progress=lambda n, of: report(n, of, str(path)))
    except TraceError as error:
        return {"path": str(path), "problems": [str(error)]}
    return facts | {"check": {**asdict(check), "ok": check.ok}, "problems": [*check.problems]}


def _echo_problems(facts: Mapping[str, Any]) -> None:
    for problem in facts.get("problems", ()):
        found = problem.removeprefix(f"{facts['path']}: ")
        show.echo_text(f"{show.one_line(facts['path'])}: {show.one_line(found)}")


def _echo_list(folder: str, documents: Sequence[Mapping[str, Any]]) -> None:
    opened = [facts for facts in documents if "name" in facts]
    used = [label for label in LABELS if any(label in facts["labels"] for facts in opened)]
    rows = [
        {
            "trace": str(Path(facts["path"]).relative_to(folder)),
            "model": str(facts["model"].get("name", "-")),
            **{label: str(facts["labels"].get(label, "-")) for label in used},
            "answer": _RIGHT.get((facts["answer_check"] or {}).get("right"), "-"),
            "layers": layers_text(facts),
            "tokens": str(facts["tokens"]),
            "prompt": str(facts["prompt_len"]),
            "MB": f"{facts['bytes'] / 1e6:.1f}",
        }
        for facts in opened
    ]
    if rows:
        show.echo_rows(rows, right=list(rows[0]).index("tokens"))
        show.echo_text()
    for facts in documents:
        _echo_problems(facts)
    checked = ", complete and undamaged" * all("check" in facts for facts in documents)
    bad = sum(bool(facts.get("problems")) for facts in documents)
    state = f", {bad} damaged" if bad else checked
    show.echo_text(f"{plural(len(documents), 'trace')} in {folder}{state}")


def _echo_facts(facts: Mapping[str, Any]) -> None:
    """Print the JSON document of a trace, a fact a line, and its arrays as a table."""
    if "name" in facts:
        check = facts.get("check")
        fields = {
            "trace": f"{facts['path']} (format {facts['format']}, {size_text(facts['bytes'])})",
            "length": length_text(facts),
            "layers": layers_text(facts),
            **{name: text_of(value) for name, value in facts.items() if name not in _SHOWN},
        }
        if check is not None and check["ok"]:
            fields["check"] = f"complete and undamaged, {text_of(check)}"
        show.echo_fields({name: text for name, text in fields.items() if text})
        typer.echo()
        rows = []
        for name, array in facts["arrays"].items():
            shape, size = " x ".join(map(str, array["shape"])), array["bytes"]
            megabytes = "-" if size is None else f"{size / 1e6:.2f}"
            rows.append([name, shape, array["dtype"], array["source_dtype"] or "-", megabytes])
        show.echo_table(["array", "shape", "stored as", "in the model", "MB"], rows, right=4)
        typer.echo()
    _echo_problems(facts)


def text_of(value: Any) -> str:
    """Return a JSON value as one line: numbers of a list by mean and largest; "" for no value."""
    if isinstance(value, str):
        return quoted(value if len(value) <= _LONG else f"{value[:_LONG]} ...") if value else ""
    if isinstance(value, Mapping):
        pairs = ((quoted(name)[1:-1], text_of(each)) for name, each in value.items())
        return ", ".join(f"{name} {text}" for name, text in pairs if text)
    if isinstance(value, list | tuple):
        kinds = {type(each) for each in value}
        if kinds and kinds <= {int}:
            return ranges(value) if len(value) > 8 else ", ".join(map(str, value))
        if kinds and kinds <= {int, float}:
            return f"{fmean(value):.4g} on average, at most {max(value):.4g}"
        return "; ".join(filter(None, map(text_of, value)))
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def length_text(facts: Mapping[str, Any]) -> str:
    """Return the number of tokens, and the end reason of the response."""
    prompt, total, context = (facts[name] for name in ("prompt_len", "tokens", "context_len"))
    ends = {
        "eos": ", ended by the model",
        "stop": ", ended by a stop string",
        "length": ", cut by --max-new-tokens" * bool(facts["generation"].get("max_new_tokens")),
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


#: Whether an answer is right, if known.
_RIGHT: Mapping[object, str] = {True: "right", False: "wrong"}


def answers_text(facts: Mapping[str, Any]) -> str:
    """Return the answer and whether it is right; of several turns, how many answers are right."""
    if "turns" in facts:
        right = [turn["right"] for turn in facts["turns"] if isinstance(turn["right"], bool)]
        return f"{sum(right)} of {plural(len(right), 'answer')} right" if right else ""
    check = facts["answer_check"]
    if not check or check.get("right") is None:
        return ""
    if check.get("answer") is None:
        return "no answer in the response"
    return f"answer {quoted(check['answer'])} {_RIGHT[bool(check['right'])]}"


def quoted(text: object) -> str:
    """Return untrusted text in quotes, as one line without control characters."""
    return visible(json.dumps(text, ensure_ascii=False))


def size_text(n_bytes: int | None) -> str:
    """Return a size in MB."""
    return "size unknown" if n_bytes is None else f"{n_bytes / 1e6:.1f} MB"
