"""`kvsim learn` and `kvsim heads`: a scorer that imitates the optimum, plans of heads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsim.cli import shared, show
from kvsim.cli.groups import grouped, offered
from kvsim.errors import PolicyError
from kvsim.files import check_output, write_file
from kvsim.schema import plural
from kvsim.studies.learning.options import LearnOptions

if TYPE_CHECKING:
    from kvsim.studies.learning.learn import Learning


@dataclass(frozen=True)
class Compared:
    """What the scorer is compared with, and where."""

    test: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TRACE",
            help="Compare on these traces instead, such as those of another model or task; may be "
            "several, or a folder.",
        ),
    ] = None
    against: Annotated[
        list[str] | None,
        shared.several(
            "NAME[,...]", "Policies to compare with; default: h2o, tova, snapkv and random."
        ),
    ] = None


@grouped
def learn(
    traces: shared.TracePaths,
    budget: Annotated[
        list[str],
        shared.several(
            "N|P%[,...]", "Entries per KV head to learn for, or shares of the trace's length."
        ),
    ],
    out: Annotated[
        Path,
        shared.path_option(
            "FILE.safetensors", "The scorer to write; it replays as --policy learned:FILE."
        ),
    ],
    *,
    options: Annotated[
        dict[str, Any],
        offered(
            *("features", "hidden", "ahead", "interval", "rounds", "held_out", "metrics", "seed"),
            of=LearnOptions,
        ),
    ],
    compared: Compared,
    overwrite: shared.Overwrite = False,
    as_json: shared.Json = False,
) -> None:
    """Learn a scorer from traces, and compare it with policies on prompts held out.

    It learns which entries the optimum of retained attention keeps (docs/optimum.md), from what a
    policy can see of them, and replays as `--policy learned:FILE` with traces of any model.
    """
    from kvsim.studies.learning.learn import AGAINST, CAUSAL
    from kvsim.studies.learning.learn import learn as learned

    if options["features"] is None and options["ahead"] > 0:
        options["features"] = [*CAUSAL, "future"]
    with show.bar("steps") as report:
        learning = learned(
            shared.open_traces(traces),
            budget,
            out,
            test=None if compared.test is None else shared.open_traces(compared.test),
            against=compared.against or AGAINST,
            overwrite=overwrite,
            progress=report,
            **options,
        )
    if as_json:
        show.echo_json(_document(learning))
    else:
        _print(learning)


def _document(learning: Learning) -> dict[str, Any]:
    from kvsim.analysis.overview import summarise

    network, run = learning.network, learning.run
    document: dict[str, Any] = {
        "policy": learning.name,
        "sha256": network.digest,
        "features": network.groups,
        "ahead": network.ahead,
        "widths": [len(bias) for _, bias in network.layers],
        "interval": network.interval,
        "pairs": learning.pairs,
        "trained": learning.trained,
        "held_out": learning.held_out,
    }
    if run is not None:
        document |= show.verdict(run.table, learning.metrics)
        document["averages"] = show.cells(summarise(run.table, learning.metrics))
    return document


def _print(learning: Learning) -> None:
    from kvsim.analysis.overview import summarise

    network = learning.network
    sees = ", ".join(network.groups)
    show.echo_text(
        f"{learning.name}: learned from {plural(learning.pairs, 'pair')} of entries on "
        f"{plural(len(learning.trained), 'prompt')}; it sees {sees}."
    )
    if "future" in network.groups:
        show.echo_text(f"It looks {network.ahead} rows ahead: a bound, and no policy to deploy.")
    if learning.run is None:
        show.echo_text(
            "No prompts were held out, so nothing says what it is worth on others; give 4 traces "
            "or more, or --test."
        )
        return
    show.echo_text(
        f"Measured on {plural(len(learning.held_out), 'prompt')} that it has not seen.\n"
    )
    show.echo_verdict(show.verdict(learning.run.table, learning.metrics))
    show.echo_results(summarise(learning.run.table, learning.metrics))
    show.echo_failures(learning.run.failures)


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
    """Measure how much each head loses if it holds sinks and recent entries alone, or in all.

    The traces are of one model. The plan says of each KV head the error of its attention output,
    and replays as `--policy duo:FILE`: the heads that lose most hold everything. With `--policy
    lukv` it says which entries each head can lose for the least utility; traces then need output
    projections (`kvsim capture --o-proj`).
    """
    from kvsim.policies.lukv import SCORER
    from kvsim.studies.learning.heads import head_plan
    from kvsim.studies.learning.utility import utility_plan

    check_output(out, overwrite=overwrite)
    kind, _, scorer = policy.partition("+")
    if kind not in ("duo", "headkv", "lukv") or (scorer and kind != "lukv"):
        raise PolicyError(f"--policy is {policy!r}; expected duo, headkv, lukv or lukv+SCORER")
    of_traces = shared.open_traces(traces)
    if kind == "lukv":
        if budget is not None:
            raise PolicyError("a plan for lukv has no --budget; leave it out")
        plan = utility_plan(of_traces, scorer=scorer or SCORER, sink=sink)
        table, what = (
            plan.scores[49],
            "the share of its entries that each loses when half of all leave",
        )
    else:
        plan = head_plan(of_traces, budget or 64, sink=sink)
        table, what = plan.scores, f"the error of each if it streams {budget or 64} entries"
    write_file(out, plan.text(), overwrite=overwrite)
    if as_json:
        show.echo_json({"policy": f"{kind}:{out}", "sha256": plan.digest, "scores": plan.scores})
        return
    number = plural(len(table) * len(table[0]), "KV head")
    show.echo_text(f"{kind}:{out}: {number}, {what}:")
    show.echo_rows(
        [
            {"layer": str(at), **{f"head {head}": f"{x:.3f}" for head, x in enumerate(row)}}
            for at, row in enumerate(table)
        ],
        right=1,
    )
