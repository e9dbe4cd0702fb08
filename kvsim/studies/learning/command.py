"""`kvsim heads`: plans of heads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvsim.cli import shared, show
from kvsim.errors import PolicyError
from kvsim.files import check_output, write_file
from kvsim.schema import plural


def heads(
    traces: shared.TracePaths,
    out: Annotated[
        Path,
        shared.path_option(
            "FILE.json", "The plan to write; it replays as --policy duo:FILE, or as lukv:FILE."
        ),
    ],
    policy: Annotated[
        str,
        typer.Option(
            metavar="duo|headkv|lukv[+SCORER]", help="What the plan is for: duo and headkv share."
        ),
    ] = "duo",
    budget: Annotated[
        int | None,
        typer.Option(min=1, help="Entries of a head that streams, sinks included; default: 64."),
    ] = None,
    sink: Annotated[int, typer.Option(min=0, help="First entries that each head keeps.")] = 4,
    overwrite: shared.Overwrite = False,
    as_json: shared.Json = False,
) -> None:
    """Measure the loss of each head with only sinks and recent entries, or by utility.

    The traces are of one model. The plan has the error of each KV head's attention output, and
    replays as `--policy duo:FILE`: the heads that lose most hold everything. With `--policy lukv`
    it has the shares of entries that each head can lose for the least utility; traces then need
    output projections (`kvsim capture --o-proj`).
    """
    from kvsim.policies.lukv import SCORER
    from kvsim.studies.learning.plans import head_plan, utility_plan

    check_output(out, overwrite=overwrite)
    kind, _, scorer = policy.partition("+")
    if kind not in ("duo", "headkv", "lukv") or (scorer and kind != "lukv"):
        raise PolicyError(f"--policy is {policy!r}; expected duo, headkv, lukv or lukv+SCORER")
    of_traces = shared.open_traces(traces)
    if kind == "lukv":
        if budget is not None:
            raise PolicyError("a plan for lukv has no --budget; leave it out")
        plan = utility_plan(of_traces, scorer=scorer or SCORER, sink=sink)
        table, what = plan.scores[49], "the share that each loses when half of all entries leave"
    else:
        plan = head_plan(of_traces, budget or 64, sink=sink)
        table, what = plan.scores, f"the error of each if it streams {budget or 64} entries"
    write_file(out, plan.text(), overwrite=overwrite)
    if as_json:
        show.echo_json({"policy": f"{kind}:{out}", "sha256": plan.digest, "scores": plan.scores})
        return
    number = plural(len(table) * len(table[0]), "KV head")
    show.echo_text(f"{kind}:{out}: {number}, {what}:")
    names = [f"head {head}" for head in range(len(table[0]))]
    rows = [[str(at), *(f"{x:.3f}" for x in row)] for at, row in enumerate(table)]
    show.echo_table(["layer", *names], rows, right=1)
