"""`kvsim tune`: better parameters of a policy, and their gain on prompts held out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsim.cli import shared, show
from kvsim.cli.groups import Judging, grouped, offered
from kvsim.cli.shared import OptionError, Stop
from kvsim.core.arguments import setting
from kvsim.schema import plural
from kvsim.studies.tuning.options import TuneOptions

if TYPE_CHECKING:
    from kvsim.studies.tuning.search import Tuning


@grouped
def tune(
    traces: shared.TracePaths,
    policy: Annotated[
        str, typer.Option(metavar="NAME", help="The policy to tune, as `kvsim policies` lists it.")
    ],
    budget: Annotated[
        str,
        typer.Option(
            metavar="N|P%",
            help="Entries per KV head that stay after an event, or a share of the trace's length.",
        ),
    ],
    metric: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="What to improve: a metric with a better direction. Default: the best evidence: "
            "response_kl with --judge, else layer_error, or output_error where traces have no "
            "output projections.",
        ),
    ] = None,
    *,
    judging: Judging,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="[POLICY.]KEY=VALUE", help="A parameter that is not searched."
        ),
    ] = None,
    options: Annotated[
        dict[str, Any],
        offered(
            "search", "trials", "held_out", "seed", "interval", "prefill", "device", of=TuneOptions
        ),
    ],
    out: Annotated[
        Path | None,
        shared.path_option(
            "FILE.json",
            "Write the outcome with all trials, traces by their digests, and versions to a new "
            "file.",
        ),
    ] = None,
    as_json: shared.Json = False,
) -> None:
    """Search the parameters of a policy offline, and show the gain on prompts held out.

    Parameters are searched on some of the prompts, in the ranges that they declare. The gain on the
    others is what other prompts can be expected to have. Ctrl-C reports the best so far.
    """
    from kvsim.files import check_output, write_file
    from kvsim.studies.tuning.search import tune as tuned
    from kvsim.sweeps.outcome import provenance

    if out is not None:
        check_output(out, advice="give another --out")
    if options["search"] is not None:
        options["search"] = [key.replace("scorer.", "scorer__") for key in options["search"]]
    (given,) = shared.settings_of([policy], settings or ()).values()
    fixed = {key: value for key, (value, *_) in given.items()}
    if any(len(each) > 1 for each in given.values()):
        raise OptionError(
            "--set of `kvsim tune` takes one value of a parameter; leave it out to search it"
        )
    opened = shared.open_traces(traces)
    with show.bar("trials") as report:
        tuning = tuned(
            *(opened, policy, budget, metric),
            judge=judging.by,
            fixed=fixed,
            **options,
            progress=report,
        )
    found = " ".join(
        f"--set {setting(key, x)}" for key, x in {**fixed, **tuning.parameters}.items()
    )
    document = _document(tuning, found)
    if out is not None:
        terms = {"fixed": fixed, **{x: options[x] for x in ("interval", "prefill", "device")}}
        digests = {"traces": {trace.name: trace.digest for trace in opened}}
        text = json.dumps({**document, **terms, **digests, **provenance()}, indent=2)
        write_file(out, f"{text}\n")
    if as_json:
        show.echo_json(document)
    else:
        _print(tuning, found)
    if tuning.interrupted:
        raise Stop(f"interrupted after {plural(tuning.trials.height, 'trial')}", 130)


def _document(tuning: Tuning, options: str) -> dict[str, Any]:
    return {
        "policy": tuning.policy,
        "budget": tuning.budget,
        "metric": tuning.metric,
        "better": tuning.better,
        "seed": tuning.seed,
        "parameters": tuning.parameters,
        "options": options,
        "gains": tuning.gains.to_dicts(),
        "space": [vars(dimension) for dimension in tuning.space],
        "searched": tuning.searched,
        "held_out": tuning.held_out,
        "trials": show.cells(tuning.trials),
        "remarks": tuning.remarks,
        "interrupted": tuning.interrupted,
    }


def _print(tuning: Tuning, options: str) -> None:
    from kvsim.analysis.registry import METRICS

    form = show.metric_format(tuning.metric)
    signed = "+" + form.lstrip("+")
    unit = METRICS[tuning.metric].unit
    show.echo_text(
        f"{tuning.policy}, budget {tuning.budget}: {tuning.metric} ({unit}, {tuning.better} is "
        f"better), {plural(tuning.trials.height, 'trial')}, "
        f"{plural(len(tuning.space), 'parameter')} searched.\n"
    )
    rows = []
    for row in tuning.gains.iter_rows(named=True):
        interval = "-"
        if row["low"] is not None:
            interval = f"{row['low']:{signed}} to {row['high']:{signed}}"
        rows.append(
            {
                "prompts": row["prompts"],
                "n": str(row["n"]),
                "default": f"{row['default']:{form}}",
                "tuned": f"{row['tuned']:{form}}",
                "gain": f"{row['gain']:{signed}}",
                "95 % interval": interval,
                "p": show.number(row["p"], ".2g"),
                "fidelity": row["fidelity"],
            }
        )
    show.echo_rows(rows, right=1)
    outcome = f"Parameters: {options}" if tuning.parameters else "Nothing better than the default."
    show.echo_text(
        f"\n{outcome}\n\n"
        "gain: by how much the tuned parameters are better than the default ones, mean over "
        "prompts. On the prompts searched on it is partly luck; p: of the gain on prompts held "
        "out, from flips of its signs."
    )
    show.echo_notes(tuning.remarks)
