"""`kvsim conform`: whether another implementation keeps the sets that a policy defines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvsim.cli import shared, show
from kvsim.cli.shared import OptionError, Stop


def conform(
    dump: Annotated[
        Path,
        shared.path_argument(
            "DUMP",
            "The kept sets of an implementation: a .npz file, see docs/conform.md.",
        ),
    ],
    policy: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="The definition, as `kvsim policies` lists it, or module:NAME for your own.",
        ),
    ],
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="N|P%",
            help="Entries per KV head that stay after an event, or a share of the length; default: "
            "the dump's.",
        ),
    ] = None,
    settings: shared.Settings = None,
    trace: Annotated[
        str | None,
        typer.Option(
            metavar="TRACE",
            help="Queries, keys and values, where the dump has none: a recorded trace.",
        ),
    ] = None,
    interval: Annotated[
        int | None,
        typer.Option(min=1, help="Rows between events; default: the dump's, or else the policy's."),
    ] = None,
    prefill: Annotated[
        bool | None,
        typer.Option(
            "--prefill/--no-prefill",
            help="Whether an event follows the prompt; default: the dump's, or else the policy's.",
        ),
    ] = None,
    tolerance: Annotated[
        float,
        typer.Option(min=0, help="Scores closer than this share of the layer's largest are tied."),
    ] = 1e-5,
    as_json: shared.Json = False,
) -> None:
    """Say where another implementation's kept sets part from a policy's definition, and why.

    The exit status is 1 if sets differ beyond ties.
    """
    from kvsim.studies.conformance.dump import read_dump
    from kvsim.studies.conformance.report import conform as compared

    content = read_dump(dump)
    policies = shared.build_policies([policy], settings)
    if len(policies) != 1:
        raise OptionError(f"--policy and --set name {len(policies)} policies; expected one")
    report = compared(
        content,
        policies[0],
        budget,
        trace=trace,
        interval=interval,
        prefill=prefill,
        tolerance=tolerance,
    )
    if as_json:
        show.echo_json(report.document())
    else:
        show.echo_text("\n".join(report.lines()))
    if not report.equal:
        apart = len(report.apart)
        raise Stop(f"error: {apart} of {report.compared} sets differ beyond ties", 1)
