"""`kvsim live`: policies on the running model, over recorded or new prompts."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsim.cli import shared, show
from kvsim.cli.forecasts import echo_plan
from kvsim.cli.groups import SCHEDULE, Chosen, Folder, Loading, NewPrompts, grouped, offered
from kvsim.cli.replaying import begun, interrupted, show_run
from kvsim.cli.shared import OptionError

if TYPE_CHECKING:
    from kvsim.core.trace import Trace


@dataclass(frozen=True)
class Shown:
    """What is printed, or planned alone."""

    plan: shared.Plan = False
    show_text: shared.ShowText = False
    as_json: shared.Json = False


@grouped
def live(
    *,
    traces: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TRACE]...", help="Recorded prompts and responses."),
    ] = None,
    loading: Loading,
    new: NewPrompts,
    chosen: Chosen,
    budget: shared.Budgets,
    options: Annotated[
        dict[str, Any],
        offered(
            *(*SCHEDULE, "layers", "max_new_tokens", "temperature", "seed"),
            *("top_k", "top_p"),
            *("batch", "metrics", "paged", "block_tables"),
            max_new_tokens="none of recorded traces, 512 of --prompts",
            metrics="everything of a running model",
        ),
    ],
    folder: Folder,
    printed: Shown,
) -> None:
    """Run policies on the model itself, its cache compressed.

    The recorded response is fed to the model under each policy, and its predictions are compared
    with those of the full cache; with --prompts, or --max-new-tokens, the model also writes a
    response of its own, which is compared with the right answer, and shown next to that of the full
    cache.
    """
    prompts, record_to, out = new.prompts, new.record_to, folder.out
    if bool(traces) == (prompts is not None):
        raise OptionError("expected recorded traces, or --prompts FILE.jsonl, one of them")
    if record_to is not None and prompts is None:
        raise OptionError("--record-to says where --prompts are recorded; give --prompts as well")
    if printed.plan and prompts is not None:
        raise OptionError(
            "--plan is given with --prompts, expected recorded traces; `kvsim capture --plan` says "
            "what recording takes"
        )
    folder.check()

    from kvsim.analysis.live.table import choose_live
    from kvsim.analysis.overview import LIVE_SUMMARY
    from kvsim.runner.checks import check_live
    from kvsim.sweeps.closed_loop import plan_live

    choose_live(options["metrics"])
    policies = chosen.built()
    for each in policies:
        check_live(each)
    recorded = shared.open_traces(traces or [])
    new_tokens = options["max_new_tokens"]
    if new_tokens is None:
        options["max_new_tokens"] = 0 if prompts is None else 512
    if printed.plan:
        decoder, tokenizer = loading.loaded(recorded, weights=False)
        options |= {"tokenizer": tokenizer, "events": folder.events}
        planned, _ = plan_live(decoder, recorded, policies, budget, **options)
        there = {**planned.parameters, "device": loading.device}
        planned = replace(planned, parameters=there)
        echo_plan(planned, out, 1, overwrite=folder.overwrite, as_json=printed.as_json)
        return
    try:
        with ExitStack() as stack, show.bar("cells") as report:
            decoder, tokenizer = loading.loaded(recorded)
            if prompts is not None:
                if record_to is None and out is not None:
                    record_to = out.with_name(f"{out.name}-traces")
                at = record_to or Path(stack.enter_context(TemporaryDirectory(prefix="kvsim-")))
                repeats = any("probe_q" in each.scorer.needs for each in policies)
                probe = "repeat" if repeats else None
                how = {"probe": probe, "batch": options["batch"]}
                recorded = _record(decoder, tokenizer, prompts, at, new_tokens, how)
            terms = {"tokenizer": tokenizer, "events": folder.events, **options}
            planned, loops = plan_live(decoder, recorded, policies, budget, **terms)
            run = loops.finish(planned, begun(planned, folder), options["batch"], report)
    except KeyboardInterrupt:  # at any other moment than those that a sweep handles
        raise interrupted(out) from None
    shown = options["metrics"] or LIVE_SUMMARY
    show_run(run, recorded, shown, out, as_json=printed.as_json, whole=printed.show_text)


def _record(
    model: Any,
    tokenizer: Any,
    prompts: Path,
    folder: Path,
    new_tokens: int | None,
    how: Mapping[str, Any],
) -> list[Trace]:
    """Record prompts that are not there yet; new_tokens: at most, by default the prompts' own."""
    from kvsim.recorder import capture_many, read_prompts

    requested = read_prompts(prompts, note=show.echo_error)
    longest = None if all(each.response is not None for each in requested) else new_tokens or None
    options: dict[str, Any] = {"resume": True, "max_new_tokens": longest, "progress": True}
    return capture_many(model, tokenizer, requested, folder, **options, **how)
