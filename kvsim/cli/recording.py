"""`kvsim capture`, `kvsim info` and `kvsim verify`: traces made, described and checked."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsim.cli.sharing import check_outputs, final, publish, stage
from kvsim.cli.show import bar, echo_fields, echo_json, echo_table, echo_text, one_line, visible
from kvsim.cli.values import (
    Json,
    OptionError,
    Stop,
    TracePaths,
    TrustRemoteCode,
    local_path,
    locate,
    parse_device,
    parse_layers,
    quiet_transformers,
)
from kvsim.errors import TraceError, TraceNotFoundError
from kvsim.schema import is_url, plural
from kvsim.tiny import MODELS

if TYPE_CHECKING:
    from kvsim.recorder.options import Keywords


def capture(
    model: Annotated[
        str,
        typer.Option(help="'tiny' or 'tiny-deep', which ship, a local folder, or a hub id."),
    ],
    out: Annotated[
        str,
        typer.Option(
            help="The trace to write; with several prompts, the folder for one trace each. Also a "
            "URL of a store that can be written to."
        ),
    ],
    context: typer.Context,
    prompt: Annotated[str | None, typer.Option(help="The prompt.", metavar="TEXT")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            parser=local_path,
            metavar="FILE.jsonl",
            help="A JSON object per line with 'prompt' (text), 'messages' (a chat) or 'tokens' "
            "(ids), maybe 'id', 'system', 'answer', 'task', 'domain', 'level'.",
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Take only the first prompts of the file.")
    ] = None,
    system: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT", help="A system message before each prompt, which is then a chat."
        ),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Put text through the tokenizer's chat template, as a user's."),
    ] = False,
    max_new_tokens: Annotated[
        int, typer.Option(min=0, help="The longest response; 0 records the prompt alone.")
    ] = 512,
    temperature: Annotated[
        float, typer.Option(min=0, help="0 takes the most likely token, else tokens are drawn.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="The seed of the draws.")] = 0,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT", help="End the response after this text; may be given several times."
        ),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(
            metavar="N,A-B,...", help="Record these layers alone, such as 0,4-7,-1 (-1: the last)."
        ),
    ] = None,
    attention: Annotated[
        str | None,
        typer.Option(
            metavar="full|window:N",
            help="Store dense attention too, of all rows or of the last N; for short sequences.",
        ),
    ] = None,
    o_proj: Annotated[
        bool,
        typer.Option(
            "--o-proj", help="Store the output projections too, which some policies read."
        ),
    ] = False,
    residual: Annotated[
        bool,
        typer.Option(
            "--residual",
            help="Store the residual stream too, from which layers can be computed again.",
        ),
    ] = False,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="float32, bfloat16, float16 or auto (the checkpoint's own); "
            "default: float32 on a CPU, else auto."
        ),
    ] = None,
    store_dtype: Annotated[
        str | None,
        typer.Option(help="float16 stores in half the space; by default storage is exact."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu (the default) or cuda.")] = None,
    device_map: Annotated[
        str | None,
        typer.Option(
            metavar="auto|...",
            help="In place of --device: spread the layers over all devices, as transformers does; "
            "needs accelerate.",
        ),
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a trace that is there already.")
    ] = False,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Keep traces that are there already and are of the same capture, and record the "
            "others.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Record what a model's attention sees as it answers a prompt.

    Several prompts make one trace each. An interrupt keeps those that are complete, and of the one
    at hand what `kvsim trace recover` makes a trace of; --resume records the others.
    """
    if (prompt is None) == (prompts is None):
        raise OptionError(_which_prompt(model, both=prompt is not None))
    if limit is not None and prompts is None:
        raise OptionError("--limit counts the prompts of a file; give --prompts FILE.jsonl")
    if resume and is_url(out):
        raise OptionError("--resume looks for traces in a folder; expected a local --out")
    chosen = None if layers is None else parse_layers(layers)

    from kvsim.recorder import Options, Prompt, capture_many, load_model, read_prompts
    from kvsim.recorder import capture as record
    from kvsim.recorder.prompts import file_name
    from kvsim.recorder.resuming import offering_resume
    from kvsim.store import check_writable, describe

    path = stage(context, out)
    options: Keywords = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "seed": seed,
        "stop": stop or (),
        "system": system,
        "chat": chat,
        "layers": chosen,
        "attention": attention or False,
        "o_proj": o_proj,
        "residual": residual,
        "store_dtype": store_dtype,
        "overwrite": overwrite,
        "resume": resume,
        "progress": True,
    }
    Options.of(options)
    if prompts is None:
        wanted = [Prompt(path.stem, prompt or "")]
    else:
        wanted = read_prompts(prompts, limit=limit, note=partial(echo_text, err=True))
    alone = len(wanted) == 1 and (prompts is None or path.suffix == ".zarr")
    paths = [path] if alone else [path / file_name(one.id) for one in wanted]
    with offering_resume(applies=not (alone or overwrite or is_url(out))):
        check_outputs([one for one in paths if not (resume and one.exists())], path, out, overwrite)
    check_writable(paths[0].parent)
    if device_map is None:
        device = parse_device(device or "cpu")
    quiet_transformers()
    before = {path: _identity(path) for path in paths}
    try:
        decoder, tokenizer = load_model(
            model,
            dtype=dtype,
            device=device,
            device_map=device_map,
            trust_remote_code=trust_remote_code,
        )
        if alone:
            one = wanted[0]
            options["system"] = one.system or system
            said: dict[str, Any] = {"answer": one.answer, "labels": one.labels}
            traces = [record(decoder, tokenizer, one.content, out=path, **said, **options)]
        else:
            traces = capture_many(decoder, tokenizer, wanted, path, **options)
        facts = [
            {
                **describe(str(trace.path)),
                "path": final(at, path, out),
                "kept": before[at] is not None and before[at] == _identity(at),
            }
            for trace, at in zip(traces, paths, strict=True)
        ]
    except KeyboardInterrupt as interrupt:
        drafts = getattr(interrupt, "__notes__", [])  # what the writer says of its draft
        said_so = _interrupted(before, out, resume=resume)
        raise Stop("; ".join([said_so, *drafts]), 130) from None
    finally:
        publish(paths, path, out)
    _report(facts, as_json=as_json)


def _which_prompt(model: str, *, both: bool) -> str:
    if both:
        return "both --prompt and --prompts are given; expected one of them"
    hint = (
        "; `kvsim prompts > prompts.jsonl` writes some that it understands"
        if model in MODELS
        else ""
    )
    return f"no prompt; give --prompt TEXT or --prompts FILE.jsonl{hint}"


def _identity(path: Path) -> int | None:
    """What tells a new folder at a path from the one that was there."""
    return path.stat().st_ino if path.exists() else None


def _interrupted(before: Mapping[Path, int | None], out: str, *, resume: bool) -> str:
    """What an interrupted capture has left."""
    left = {path: _identity(path) for path in before}
    done = [p for p, new in left.items() if new is not None and (resume or new != before[p])]
    if done:
        where = out if is_url(out) else done[0].parent
        goes_on = len(done) < len(before) and not is_url(out)
        more = "; --resume records the others" if goes_on else ""
        return (
            f"interrupted, {len(done)} of {len(before)} traces are complete and kept in {where}"
            f"{more}"
        )
    return "interrupted, no trace was written"


def _report(facts: Sequence[Mapping[str, Any]], *, as_json: bool) -> None:
    if as_json:
        echo_json({"traces": facts})
        return
    for one in facts:
        typer.echo(
            f"{one['path']}: {_tokens(one)}, {_layers(one)}, {_size(one['bytes'])}"
            f"{_answer(one['answer_check'])}{', kept' if one['kept'] else ''}"
        )
        for note in one["notes"]:
            echo_text(f"  note: {note}")
    kept = sum(one["kept"] for one in facts)
    if kept and len(facts) > 1:
        typer.echo(f"{kept} of {len(facts)} traces were there already and are kept.")
    cut = [one["generation"] for one in facts if _is_cut(one)]
    if cut:
        which = "The response" if len(facts) == 1 else f"{len(cut)} of {len(facts)} responses"
        typer.echo(
            f"{which} reached {cut[0]['max_new_tokens']} tokens without an end; a larger "
            "--max-new-tokens records more."
        )


def _is_cut(facts: Mapping[str, Any]) -> bool:
    """Whether a response was asked for and ended for its length alone."""
    said = facts["generation"]
    return bool(said.get("stopped") == "length" and said.get("max_new_tokens") != 0)


def _tokens(facts: Mapping[str, Any]) -> str:
    prompt, total = facts["prompt_len"], facts["tokens"]
    ends = {
        "eos": ", ended by the model",
        "stop": ", ended by a stop string",
        "context": ", cut by the context",
        "interrupted": ", interrupted",
    }
    end = ends.get(str(facts["generation"].get("stopped")), "")
    if _is_cut(facts):
        end = ", cut by --max-new-tokens"
    return f"{total} tokens (prompt {prompt}, response {total - prompt}{end})"


def _layers(facts: Mapping[str, Any]) -> str:
    """How many layers, and which ones where they are not all of the model's."""
    found, ids = plural(facts["layers"], "layer"), facts["layer_ids"]
    model = facts["model"].get("layers")
    if ids == list(range(len(ids))) and model in (None, len(ids)):
        return found
    of = f" of {model}" if isinstance(model, int) else ""
    return f"{facts['layers']}{of} layers ({_ranges(ids)})"


def _ranges(numbers: Sequence[int]) -> str:
    """Increasing numbers as `--layers` takes them: 0,4-7."""
    starts = [n for i, n in enumerate(numbers) if i == 0 or numbers[i - 1] != n - 1]
    ends = [n for i, n in enumerate(numbers) if i + 1 == len(numbers) or numbers[i + 1] != n + 1]
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def _answer(check: Mapping[str, Any] | None) -> str:
    if not check or check.get("right") is None:
        return ""
    if check.get("answer") is None:
        return ", no answer in the response"
    verdict = "right" if check["right"] else "wrong"
    return f", answer {quoted(check.get('answer'))} {verdict}"


def quoted(text: object) -> str:
    """Text of a trace as one line that no terminal acts upon."""
    return visible(json.dumps(text, ensure_ascii=False))


def _size(n_bytes: int | None) -> str:
    return "size unknown" if n_bytes is None else f"{n_bytes / 1e6:.1f} MB"


def info(traces: TracePaths, as_json: Json = False) -> None:
    """Describe traces: model, text, arrays, provenance.

    The JSON document of several is an object with the list 'traces'.
    """
    from kvsim.store import describe

    described = [describe(locate(trace)) for trace in traces]
    if as_json:
        echo_json(_document(described))
        return
    for place, facts in enumerate(described):
        if place:
            typer.echo()
        _echo_facts(facts)


def _document(each: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """What JSON has for one trace, or for several."""
    return each[0] if len(each) == 1 else {"traces": each}


def _echo_facts(facts: Mapping[str, Any]) -> None:
    model = facts["model"]
    fields = {
        "trace": f"{facts['path']} (format {facts['format']}, {_size(facts['bytes'])})",
        "name": quoted(facts["name"]),
        "digest": facts["digest"],
        "model": " ".join(quoted(model[key]) for key in ("name", "type", "dtype") if key in model),
        "length": _tokens(facts),
        "shape": f"{_layers(facts)}, {plural(facts['qheads'], 'query head')}, "
        f"{plural(facts['heads'], 'KV head')}, dim {facts['dim']}",
        "attention": _attention(facts),
        "labels": ", ".join(f"{name} {quoted(said)}" for name, said in facts["labels"].items()),
        "prompt": quoted(facts["prompt"]),
        "response": quoted(facts["response"]),
        "answer": _answer(facts["answer_check"]).removeprefix(", ").removeprefix("answer ")
        or "not checked",
        "capture check": _capture_check(facts["capture_check"]),
        "recorded with": " ".join(f"{k} {v}" for k, v in facts["versions"].items()) or "unknown",
        **{f"note {i}": note for i, note in enumerate(facts["notes"], start=1)},
    }
    echo_fields({name: value for name, value in fields.items() if value not in ("", "null")})
    typer.echo()
    echo_table(
        ["array", "shape", "stored as", "in the model", "MB"],
        [
            [
                name,
                " x ".join(map(str, array["shape"])),
                array["dtype"],
                array["source_dtype"] or "-",
                "-" if array["bytes"] is None else f"{array['bytes'] / 1e6:.2f}",
            ]
            for name, array in facts["arrays"].items()
        ],
        right=4,
    )


def _attention(facts: Mapping[str, Any]) -> str:
    """What layers have beside plain causal attention; empty where they have nothing."""
    said = []
    for kind in facts["attention"]:
        more = {
            "window": kind["window"] and f"a window of {kind['window']}",
            "softcap": kind["softcap"] and f"a softcap of {kind['softcap']:g}",
            "sinks": kind["sinks"] and "sinks",
            "turned": kind["rotary_dim"] == 0 and "nothing turned",
        }
        found = ", ".join(part for part in more.values() if part)
        layers = ", ".join(map(str, kind["layers"]))
        said.append(f"layers {layers}: {found or 'plain'}")
    return "" if [one.endswith(": plain") for one in said] == [True] else "; ".join(said)


def _capture_check(check: Mapping[str, Any] | None) -> str:
    if not check or not check.get("max_relative_error"):
        return "none"
    errors = check["max_relative_error"]
    listed = list(errors.values()) if isinstance(errors, dict) else errors
    numbers = isinstance(listed, list) and all(isinstance(one, int | float) for one in listed)
    if not numbers:  # a foreign writer put something else
        return "not readable"
    worst = max(listed)
    return f"attention recomputed from q, k, v within {worst:.1e} of the model's own (relative)"


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
    """Check that traces are whole and undamaged.

    Reads every chunk and compares it with its checksums. The exit status is 2 if something is
    wrong with any of them. The JSON document of several is an object with the list 'traces'.
    """
    paths = [locate(trace) for trace in traces]
    verdicts, reports = [], []
    for path in paths:
        verdict, report = _checked(path, deep=deep)
        if verdict == "no trace" and len(paths) == 1:
            raise Stop(f"error: {one_line(report['problems'][0])}", 2)
        verdicts.append(verdict)
        reports.append(report)
        if not as_json:
            _echo_verdict(verdict, report, deep=deep, alone=len(paths) == 1)
    if as_json:
        echo_json(_document(reports))
    _stop_if_bad(verdicts, reports)


def _checked(path: Path | str, *, deep: bool) -> tuple[str, Mapping[str, Any]]:
    """What a trace is found to be, in words, and the report for JSON."""
    from kvsim.store import verify as check

    try:
        with bar("layers") as progress:
            found = check(
                path, deep=deep, progress=lambda done, total: progress(done, total, str(path))
            )
    except TraceError as error:
        # it does not even open: that is what the report says
        report = {"path": str(path), "ok": False, "problems": [str(error)]}
        if isinstance(error, TraceNotFoundError):
            return "no trace", report
        # what a server does not give may be whole behind it
        return "cannot be opened" if is_url(path) else "damaged", report
    return "whole and undamaged" if found.ok else "damaged", found.to_dict()


def _echo_verdict(verdict: str, report: Mapping[str, Any], *, deep: bool, alone: bool) -> None:
    """A line on one trace and its problems; what was found of one that is `alone`."""
    more = ", and its attention follows from q, k, v" if deep and report["ok"] else ""
    echo_text(f"{one_line(report['path'])}: {verdict}{more}")
    for problem in report["problems"]:
        echo_text(f"  {one_line(problem)}")
    if not (alone and report["ok"]):
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
    """End with status 2 unless every trace is as it should be."""
    bad = [one for one in reports if not one["ok"]]
    if not bad:
        return
    if len(reports) > 1:
        raise Stop(
            f"error: {len(bad)} of {len(reports)} are not whole and undamaged, expected all to be; "
            "the report says why",
            2,
        )
    if verdicts != ["damaged"]:
        raise Stop(f"error: {one_line(bad[0]['problems'][0])}", 2)
    count = len(bad[0]["problems"])
    problems = "1 problem" if count == 1 else f"{count} problems"
    path = one_line(bad[0]["path"])
    raise Stop(f"error: {path} is damaged ({problems} found, expected none); record it again", 2)


def _error(errors: Sequence[float], allowed: float, kind: str) -> str:
    if not errors:
        return "not recorded"
    return f"{kind} error at most {max(errors):.1e} (allowed {allowed:.0e})"
