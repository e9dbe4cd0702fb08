"""`kvsim info`: what a trace is, in words."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import typer

from kvsim.cli.show import document, echo_fields, echo_json, echo_table, visible
from kvsim.cli.values import Json, TracePaths, locate
from kvsim.schema import plural


def info(traces: TracePaths, as_json: Json = False) -> None:
    """Describe traces: model, text, arrays, provenance.

    The JSON document of several traces is an object with the list 'traces'.
    """
    from kvsim.store import describe

    described = [describe(locate(trace)) for trace in traces]
    if as_json:
        echo_json(document(described))
        return
    for place, facts in enumerate(described):
        if place:
            typer.echo()
        _echo_facts(facts)


def _echo_facts(facts: Mapping[str, Any]) -> None:
    model = facts["model"]
    fields = {
        "trace": f"{facts['path']} (format {facts['format']}, {size_text(facts['bytes'])})",
        "name": quoted(facts["name"]),
        "digest": facts["digest"],
        "model": " ".join(quoted(model[key]) for key in ("name", "type", "dtype") if key in model),
        "length": length_text(facts),
        "shape": f"{layers_text(facts)}, {plural(facts['qheads'], 'query head')}, "
        f"{plural(facts['heads'], 'KV head')}, dim {facts['dim']}",
        "attention": _attention(facts),
        "labels": ", ".join(f"{name} {quoted(label)}" for name, label in facts["labels"].items()),
        "prompt": quoted(facts["prompt"]),
        "response": quoted(facts["response"]),
        "answer": answer_text(facts["answer_check"]).removeprefix("answer ") or "not checked",
        "capture check": _capture_check(facts["capture_check"]),
        "recorded with": " ".join(f"{k} {v}" for k, v in facts["versions"].items()) or "unknown",
        **{f"note {i}": note for i, note in enumerate(facts["notes"], start=1)},
    }
    echo_fields({name: value for name, value in fields.items() if value not in ("", "null")})
    typer.echo()
    rows = []
    for name, array in facts["arrays"].items():
        shape, size = " x ".join(map(str, array["shape"])), array["bytes"]
        megabytes = "-" if size is None else f"{size / 1e6:.2f}"
        rows.append([name, shape, array["dtype"], array["source_dtype"] or "-", megabytes])
    echo_table(["array", "shape", "stored as", "in the model", "MB"], rows, right=4)


def _attention(facts: Mapping[str, Any]) -> str:
    """Return what layers compute besides plain causal attention, or an empty text."""
    texts = []
    for kind in facts["attention"]:
        parts = [
            kind["window"] and f"a window of {kind['window']}",
            kind["softcap"] and f"a softcap of {kind['softcap']:g}",
            kind["sinks"] and "sinks",
            kind["rotary_dim"] == 0 and "no RoPE",
        ]
        layers = ", ".join(map(str, kind["layers"]))
        texts.append(f"layers {layers}: {', '.join(filter(None, parts)) or 'plain'}")
    return "" if len(texts) == 1 and texts[0].endswith(": plain") else "; ".join(texts)


def _capture_check(check: Mapping[str, Any] | None) -> str:
    if not check or not check.get("max_relative_error"):
        return "none"
    errors = check["max_relative_error"]
    values = list(errors.values()) if isinstance(errors, dict) else errors
    numbers = isinstance(values, list) and all(isinstance(value, int | float) for value in values)
    if not numbers:  # untrusted input
        return "not readable"
    within = f"within {max(values):.1e} of the model's own (relative)"
    return f"attention recomputed from q, k, v {within}"


def is_cut(facts: Mapping[str, Any]) -> bool:
    """Return whether a response was requested and only its length ended it."""
    generation = facts["generation"]
    return bool(generation.get("stopped") == "length" and generation.get("max_new_tokens") != 0)


def length_text(facts: Mapping[str, Any]) -> str:
    """Return the number of tokens, and what ended the response."""
    prompt, total = facts["prompt_len"], facts["tokens"]
    ends = {
        "eos": ", ended by the model",
        "stop": ", ended by a stop string",
        "context": ", cut by the context",
        "interrupted": ", interrupted",
    }
    end = ends.get(str(facts["generation"].get("stopped")), "")
    if is_cut(facts):
        end = ", cut by --max-new-tokens"
    return f"{total} tokens (prompt {prompt}, response {total - prompt}{end})"


def layers_text(facts: Mapping[str, Any]) -> str:
    """Return the number of layers, and their numbers if they are not all of the model's."""
    count, ids = plural(facts["layers"], "layer"), facts["layer_ids"]
    model = facts["model"].get("layers")
    if ids == list(range(len(ids))) and model in (None, len(ids)):
        return count
    of = f" of {model}" if isinstance(model, int) else ""
    return f"{facts['layers']}{of} layers ({_ranges(ids)})"


def _ranges(numbers: Sequence[int]) -> str:
    """Return increasing numbers in the form of `--layers`: 0,4-7."""
    starts = [n for i, n in enumerate(numbers) if i == 0 or numbers[i - 1] != n - 1]
    ends = [n for i, n in enumerate(numbers) if i + 1 == len(numbers) or numbers[i + 1] != n + 1]
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def answer_text(check: Mapping[str, Any] | None) -> str:
    """Return the answer and whether it is right; empty if that is unknown."""
    if not check or check.get("right") is None:
        return ""
    if check.get("answer") is None:
        return "no answer in the response"
    verdict = "right" if check["right"] else "wrong"
    return f"answer {quoted(check.get('answer'))} {verdict}"


def quoted(text: object) -> str:
    """Return untrusted text in quotes, as one line without control characters."""
    return visible(json.dumps(text, ensure_ascii=False))


def size_text(n_bytes: int | None) -> str:
    """Return a size in MB."""
    return "size unknown" if n_bytes is None else f"{n_bytes / 1e6:.1f} MB"
