"""`kvsim live`: policies on the running model, over recorded prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsim.cli import shared
from kvsim.cli.options import takes
from kvsim.cli.replaying import begun, echo_plan, show_run
from kvsim.progress import progress_bar

if TYPE_CHECKING:
    from kvsim.core.trace import Trace


@takes(
    *("policies", "budgets", "interval", "compress", "max_new_tokens", "temperature", "seed"),
    *("top_k", "top_p", "batch", "metrics", "paged", "out", "overwrite"),
    metrics="everything of a running model",
)
def live(
    traces: Annotated[
        list[str], typer.Argument(metavar="TRACE", help="Recorded prompts and responses.")
    ],
    model: Annotated[
        str,
        typer.Option(
            help="The model that was recorded: 'tiny', 'tiny-deep', 'smollm2', a local folder, a "
            "GGUF file, or a hub id."
        ),
    ],
    options: dict[str, Any],
    settings: shared.Settings = None,
    device: shared.Device = "cpu",
    trust_remote_code: shared.TrustRemoteCode = False,
    plan: shared.Plan = False,
    as_json: shared.Json = False,
) -> None:
    """Run policies on the model itself, its cache compressed.

    The recorded response is fed to the model under each policy, and its predictions are compared
    with those of the full cache; with --max-new-tokens the model also writes a response of its own,
    which is compared with the right answer, and shown next to that of the full cache.
    """
    from kvsim.analysis.overview import LIVE_SUMMARY
    from kvsim.recorder import load_model
    from kvsim.recorder.loading import load_outline
    from kvsim.schema import object_at
    from kvsim.sweeps.closed_loop import plan_live

    def load(recorded: Sequence[Trace]) -> Any:
        """The model and its tokenizer in the precision of the recording."""
        shared.quiet_transformers()
        given: dict[str, Any] = {"dtype": object_at(recorded[0].meta, "model").get("dtype")}
        given |= {"trust_remote_code": trust_remote_code}
        if plan:
            return load_outline(model, on_cpu=device == "cpu", **given)
        return load_model(model, device=device, **given)

    given = shared.experiment(options, settings, [x for x in shared.KEYS if x != "memory"])
    planned = plan_live(load, traces=traces, **given)
    if plan:
        there = {**planned.parameters, "device": device}
        echo_plan(replace(planned, parameters=there), as_json=as_json)
        return
    with progress_bar("cells") as report:
        run = planned.finish(begun(planned), progress=report)
    shown, out = planned.options["metrics"] or LIVE_SUMMARY, planned.options["out"]
    show_run(run, planned.traces, shown, out, as_json=as_json)
