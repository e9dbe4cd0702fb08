"""`kvsim live`: policies on the running model, over recorded or new prompts."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kvsim.cli import show, values
from kvsim.cli.replaying import folder_state, show_run
from kvsim.cli.values import OptionError, Stop

if TYPE_CHECKING:
    from kvsim.core.trace import Trace


def live(
    *,
    traces: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TRACE]...", help="Recorded prompts and responses."),
    ] = None,
    model: values.RecordedModel,
    prompts: Annotated[
        Path | None,
        values.path_option(
            "FILE.jsonl",
            "Record these prompts first, as `kvsim capture --prompts` does, and run them.",
        ),
    ] = None,
    record_to: Annotated[
        Path | None,
        values.path_option(
            "DIR", "Where --prompts are recorded, and kept; default: next to --out, if given."
        ),
    ] = None,
    policy: values.PolicyNames,
    budget: values.Budgets,
    interval: values.Interval = None,
    prefill: values.Prefill = None,
    compress: values.Compress = None,
    own_schedule: values.OwnSchedule = False,
    settings: values.Settings = None,
    fit: values.Fit = False,
    layer: Annotated[
        str | None,
        typer.Option(
            "--layers", metavar="N,A-B,...", help="Only these layers evict; default: all."
        ),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Tokens of the response that the model writes under each policy, 0 for none; "
            "default: none of recorded traces, 512 of --prompts.",
        ),
    ] = None,
    temperature: Annotated[
        float, typer.Option(min=0, help="0 takes the most likely token; above 0, tokens are drawn.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="The seed of the draws.")] = 0,
    metric: Annotated[
        list[str] | None,
        values.several(
            "NAME[,NAME...]",
            "What to measure, as `kvsim metrics` lists it; default: everything of a running model.",
        ),
    ] = None,
    paged: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Hold the cache in blocks of N entries, as serving engines do, and attend through "
            "block tables; what an event leaves is compacted, and blocks are freed.",
        ),
    ] = None,
    block_tables: Annotated[
        Literal["layer", "head"],
        typer.Option(
            help="With --paged: one block table for all heads of a layer, where heads with fewer "
            "entries are padded; or one for each head."
        ),
    ] = "layer",
    events: values.Events = False,
    device: values.ModelDevice = "cpu",
    trust_remote_code: values.TrustRemoteCode = False,
    out: values.RunFolder = None,
    resume: values.Resume = False,
    overwrite: values.Overwrite = False,
    show_text: values.ShowText = False,
    as_json: values.Json = False,
) -> None:
    """Run policies on the model itself, its cache compressed.

    The recorded response is fed to the model under each policy, and its predictions are compared
    with those of the full cache; with --prompts, or --max-new-tokens, the model also writes a
    response of its own, which is compared with the right answer, and shown next to that of the full
    cache.
    """
    if bool(traces) == (prompts is not None):
        raise OptionError("expected recorded traces, or --prompts FILE.jsonl, one of them")
    if record_to is not None and prompts is None:
        raise OptionError("--record-to says where --prompts are recorded; give --prompts as well")
    values.check_run_options(out, resume=resume, events=events, overwrite=overwrite)

    from kvsim.analysis.live.table import choose_live
    from kvsim.core.policy import Protection
    from kvsim.runner.checks import check_live
    from kvsim.sweeps.closed_loop import live as run_live
    from kvsim.sweeps.parts import replaced
    from kvsim.sweeps.run import LIVE_SUMMARY

    choose_live(metric)
    policies = values.build_policies(policy, settings, fit=fit)
    for each in policies:
        check_live(each)
    layers = values.parse_layers(layer)
    recorded = values.open_traces(traces or [])
    usual = 0 if prompts is None else 512
    new_tokens = usual if max_new_tokens is None else max_new_tokens
    try:
        with ExitStack() as stack, show.bar("cells") as report:
            decoder, tokenizer = load(model, recorded, device, trust_remote_code)
            if prompts is not None:
                if record_to is None and out is not None:
                    record_to = out.with_name(f"{out.name}-traces")
                at = record_to or Path(stack.enter_context(TemporaryDirectory(prefix="kvsim-")))
                repeats = any("probe_q" in each.scorer.needs for each in policies)
                probe = "repeat" if repeats else None
                recorded = _record(decoder, tokenizer, prompts, at, new_tokens, probe)
            if out is not None and overwrite:
                stack.enter_context(replaced(out))
            run = run_live(
                decoder,
                recorded,
                policies,
                budget,
                tokenizer=tokenizer,
                interval=interval,
                prefill=prefill,
                compress=compress,
                own_schedule=own_schedule,
                layers=layers,
                max_new_tokens=new_tokens,
                temperature=temperature,
                seed=seed,
                metrics=metric,
                events=events,
                paged=paged,
                block_tables=block_tables,
                out=out,
                resume=resume,
                progress=report,
            )
        shown = metric or LIVE_SUMMARY
        show_run(
            run, recorded, policies, Protection(), shown, out, as_json=as_json, whole=show_text
        )
    except KeyboardInterrupt:  # at any other moment than those that a sweep handles
        raise Stop(f"interrupted, {folder_state(out)}", 130) from None


def load(model: str, recorded: list[Trace], device: str, trust_remote_code: bool) -> Any:
    """Load the model in the precision of the recording."""
    from kvsim.recorder import load_model
    from kvsim.store.metadata import object_at

    values.quiet_transformers()
    dtype = object_at(recorded[0].meta, "model").get("dtype") if recorded else None
    return load_model(
        model,
        dtype=dtype,
        device=device,
        trust_remote_code=trust_remote_code,
        note=show.echo_error,
    )


def _record(
    model: Any, tokenizer: Any, prompts: Path, folder: Path, new_tokens: int, probe: str | None
) -> list[Trace]:
    """Record prompts with the full cache; those that are there already are kept."""
    from kvsim.recorder import capture_many, read_prompts

    requested = read_prompts(prompts, note=show.echo_error)
    longest = None if all(each.response is not None for each in requested) else new_tokens or None
    options: dict[str, Any] = {"resume": True, "max_new_tokens": longest, "progress": True}
    return capture_many(model, tokenizer, requested, folder, **options, probe=probe)
