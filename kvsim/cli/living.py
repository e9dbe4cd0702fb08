"""`kvsim live`: policies on the running model, over recorded prompts."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import typer

from kvsim.cli import shared, show
from kvsim.cli.forecasts import echo_plan
from kvsim.cli.groups import SCHEDULE, Chosen, Folder, Loading, Printed, grouped, offered
from kvsim.cli.replaying import begun, show_run


@grouped
def live(
    *,
    traces: Annotated[
        list[str], typer.Argument(metavar="TRACE...", help="Recorded prompts and responses.")
    ],
    loading: Loading,
    chosen: Chosen,
    budget: shared.Budgets,
    options: Annotated[
        dict[str, Any],
        offered(
            *(*SCHEDULE, "layers", "max_new_tokens", "temperature", "seed", "top_k", "top_p"),
            *("batch", "metrics", "paged", "block_tables"),
            metrics="everything of a running model",
        ),
    ],
    folder: Folder,
    show_text: shared.ShowText = False,
    printed: Printed,
) -> None:
    """Run policies on the model itself, its cache compressed.

    The recorded response is fed to the model under each policy, and its predictions are compared
    with those of the full cache; with --max-new-tokens the model also writes a response of its own,
    which is compared with the right answer, and shown next to that of the full cache.
    """
    folder.check()
    out = folder.out

    from kvsim.analysis.live.table import choose_live
    from kvsim.analysis.overview import LIVE_SUMMARY
    from kvsim.runner.checks import check_live
    from kvsim.sweeps.closed_loop import plan_live

    choose_live(options["metrics"])
    policies = chosen.built()
    for each in policies:
        check_live(each)
    recorded = shared.open_traces(traces)
    decoder, tokenizer = loading.loaded(recorded, weights=not printed.plan)
    terms = {"tokenizer": tokenizer, "events": folder.events, **options}
    planned, loops = plan_live(decoder, recorded, policies, budget, **terms)
    if printed.plan:
        there = {**planned.parameters, "device": loading.device}
        planned = replace(planned, parameters=there)
        echo_plan(planned, out, 1, overwrite=folder.overwrite, as_json=printed.as_json)
        return
    with show.bar("cells") as report:
        run = loops.finish(planned, begun(planned, folder), options["batch"], report)
    shown = options["metrics"] or LIVE_SUMMARY
    show_run(run, recorded, shown, out, as_json=printed.as_json, whole=show_text)
