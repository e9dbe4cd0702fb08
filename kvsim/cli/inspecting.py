"""`kvsim info`: describe, check and list traces, and print runs again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer

from kvsim.cli import show
from kvsim.cli.runs import describe_run, echo_run
from kvsim.cli.shared import Json, ShowText, Stop, TracePaths, paths_of
from kvsim.errors import TraceError
from kvsim.schema import LABELS, plural, ranges, visible


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
    show_text: ShowText = False,
    as_json: Json = False,
) -> None:
    """Describe traces: model, text, arrays, provenance. List the traces of a folder.

    Of a run folder print its results again. The JSON document of several traces is an object with
    the list 'traces'.
    """
    from kvsim.analysis.folder import is_run

    runs = {path: describe_run(path) for path in traces if is_run(path)}
    parts = {
        given: [runs[given][0]]
        if given in runs
        else [_facts(path, deep=deep) for path in _paths(given)]
        for given in traces
    }
    documents = [facts for part in parts.values() for facts in part]
    bad = [facts for facts in documents if facts.get("problems")]
    if bad == documents[:1] and len(documents) == 1 and "check" not in bad[0]:
        raise Stop(f"error: {show.one_line(bad[0]['problems'][0])}", 2)
    if as_json:
        show.echo_json(show.document(documents))
    else:
        for place, (given, part) in enumerate(parts.items()):
            show.echo_text() if place else None
            if given in runs:
                echo_run(*runs[given], whole=show_text)
            elif _is_folder(given):
                _echo_list(given, part)
            else:
                _echo_each(part)
    if bad:
        problem = show.one_line(bad[0]["problems"][0])
        of = f"{len(bad)} of {plural(len(documents), 'trace')}: " if len(documents) > 1 else ""
        raise Stop(f"error: {of}{problem}", 2)


def _is_folder(given: str) -> bool:
    """Whether a path is a folder with traces, and none itself."""
    from kvsim.store.index import find_traces

    path = Path(given)
    return path.is_dir() and not (path / "zarr.json").exists() and bool(find_traces(path))


def _paths(given: str) -> list[Path | str]:
    from kvsim.store.index import find_traces

    return [*find_traces(Path(given)).values()] if _is_folder(given) else paths_of([given])


def _facts(path: Path | str, *, deep: bool) -> dict[str, Any]:
    """Return what a trace says of itself, and with `deep` its check; or problems."""
    from kvsim.store import describe, verify

    try:
        facts = describe(path)
        if not deep:
            return facts
        with show.bar("layers") as report:
            check = verify(path, deep=True, progress=lambda n, of: report(n, of, str(path)))
    except TraceError as error:
        return {"path": str(path), "problems": [str(error)]}
    return facts | {"check": check.to_dict(), "problems": [*check.problems]}


def _echo_each(documents: Sequence[Mapping[str, Any]]) -> None:
    for place, facts in enumerate(documents):
        show.echo_text() if place else None
        if "name" in facts:
            _echo_facts(facts)
        _echo_problems(facts)


def _echo_problems(facts: Mapping[str, Any]) -> None:
    for problem in facts.get("problems", ()):
        found = problem.removeprefix(f"{facts['path']}: ")
        show.echo_text(f"{show.one_line(facts['path'])}: {show.one_line(found)}")


def _echo_list(folder: str, documents: Sequence[Mapping[str, Any]]) -> None:
    """Print a line for each trace of a folder."""
    opened = [facts for facts in documents if "name" in facts]
    used = [label for label in LABELS if any(label in facts["labels"] for facts in opened)]
    rows = [
        {
            "trace": str(Path(facts["path"]).relative_to(folder)),
            "model": str(facts["model"].get("name", "-")),
            **{label: str(facts["labels"].get(label, "-")) for label in used},
            "answer": _right((facts["answer_check"] or {}).get("right")),
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
        **_check(facts.get("check")),
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


def _right(right: object) -> str:
    return "right" if right is True else "wrong" if right is False else "-"


def _check(check: Mapping[str, Any] | None) -> dict[str, str]:
    """Lines on the check of a trace."""
    if check is None or check["problems"]:
        return {}
    output, lse = check["output_tolerance"], check["lse_tolerance"]
    return {
        "checked": f"complete and undamaged, {plural(check['files'], 'file')} read",
        "attention output": _error(check["output_error"], output, "relative"),
        "log-sum-exp": _error(check["lse_error"], lse, "absolute"),
    }


def _error(errors: Sequence[float], allowed: float, kind: str) -> str:
    if not errors:
        return "not recorded"
    return f"{kind} error at most {max(errors):.1e} (allowed {allowed:.0e})"
