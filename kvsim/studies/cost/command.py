"""`kvsim study cost`: memory, time and FLOPs of policies on a model, from its configuration."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsim.cli import shared
from kvsim.cli.shared import OptionError
from kvsim.cli.show import echo_json, echo_notes, echo_rows
from kvsim.core.record import binds
from kvsim.schema import plural, schedule

if TYPE_CHECKING:
    from kvsim.studies.cost.accounting import Cost
    from kvsim.studies.cost.model import Model

_RATIOS = (
    "Selects after: the layer after which rows are dropped. KV and peak: the cache after an event "
    "and before the next one. Prefill and token: time to the "
    "first token by FLOPs, and per output token by bytes read (weights and cache), relative to the "
    "full cache. Scoring: FLOPs of the policy, relative to a prefill and to a generated token."
)

_FIDELITY = (
    "Fidelity of sizes and FLOPs: exact, they follow from the configuration and the notes "
    "below. Prefill and token are a model of time, not a measurement."
)


def cost(
    policy: shared.PolicyNames,
    budget: Annotated[
        list[str], shared.several("N|P%[,...]", "Entries per KV head, or a share of the context.")
    ],
    model_config: Annotated[
        Path | None, shared.path_option("PATH", "A model's config.json, or a folder with one.")
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(
            metavar="TRACE",
            help="A recorded trace, such as 'sample': gives the model and the context where they "
            "are not given, and measures the selection layer of policies that have one.",
        ),
    ] = None,
    context: Annotated[
        list[str] | None,
        shared.several("N[,...]", "Tokens of the prompt; default: the trace, with its response."),
    ] = None,
    settings: shared.Settings = None,
    selection_layer: Annotated[
        float | None,
        typer.Option(
            help="Layer after which rows are dropped, for policies such as asl; may be a mean, "
            "such as 23.9."
        ),
    ] = None,
    as_json: shared.Json = False,
) -> None:
    """Print the cost of policies on a model: memory, time, FLOPs.

    And the assumptions. Closed form, from the model's configuration; nothing is run, except to
    measure the selection layer on a trace.
    """
    from kvsim.core.arguments import resolve_budget
    from kvsim.store.reader import open_trace
    from kvsim.studies.cost.accounting import estimate
    from kvsim.studies.cost.model import Model

    opened = None if trace is None else open_trace(trace)
    if model_config is not None:
        model = Model.from_config(model_config)
    elif opened is not None:
        model = Model.from_trace(opened)
    else:
        raise OptionError("no model is given; expected --model-config PATH or --trace TRACE")
    contexts = [] if opened is None else [opened.n_pos]
    if context:
        contexts = shared.parse_ranges(",".join(context), "--context", "numbers of tokens")
    if not contexts:
        raise OptionError("no context is given; expected --context N, or a --trace that has one")
    policies = shared.build_policies(policy, settings)
    prompts = {} if opened is None else {opened.n_pos: opened.prompt_len}
    options: dict[str, Any] = {"selection_layer": selection_layer, "trace": opened}
    costs = [
        estimate(model, each, resolve_budget(size, n), n, prompt=prompts.get(n), **options)
        for n in contexts
        for each in policies
        for size in (budget if binds(each) else budget[:1])
    ]
    if as_json:
        echo_json({"model": model.as_dict(), "costs": [cost.as_dict() for cost in costs]})
    else:
        _print(model, costs)


def _print(model: Model, costs: Sequence[Cost]) -> None:
    from kvsim.studies.cost.model import GIB

    full = {cost.context: cost.kv_full_bytes for cost in costs}
    unit, name = (GIB, "GiB") if max(full.values()) > GIB / 8 else (1 << 20, "MiB")
    typer.echo(
        f"{model.name}: {plural(model.n_layers, 'layer')}, "
        f"{plural(model.n_qheads, 'query head')}, {plural(model.n_heads, 'KV head')} of dimension "
        f"{model.dim}, {model.parameters:,} parameters, "
        f"{model.weight_bytes / unit:.2f} {name} at {model.number_bytes:g} bytes per number"
    )
    for context, size in full.items():
        typer.echo(f"Full cache at {context} tokens: {size / unit:.4g} {name}")
    typer.echo()
    rows = [
        {
            "policy": cost.policy.name,
            "evicts after": schedule(**vars(cost.policy.schedule)),
            "budget": str(cost.budget) if cost.bounded else "-",
            "context": str(cost.context),
            "selects\nafter": _selection(cost),
            f"KV\n{name}": f"{cost.kv_bytes / unit:.4g}",
            f"peak\n{name}": f"{cost.kv_peak_bytes / unit:.4g}",
            "of\nfull": f"{cost.kv_ratio:.1%}",
            "prefill": f"{cost.prefill_ratio:.3f}",
            "token": f"{cost.decode_ratio:.3f}",
            "scoring\nprefill": _share(cost.scoring_prompt_share),
            "scoring\ntoken": _share(cost.scoring_token_share),
        }
        for cost in costs
    ]
    echo_rows(rows, right=2)
    typer.echo(f"\n{_RATIOS}\n{_FIDELITY}")
    echo_notes(remark for cost in costs for remark in cost.assumptions)


def _selection(cost: Cost) -> str:
    layer = "none" if cost.selection_layer is None else f"{cost.selection_layer:.4g}"
    return "-" if cost.selection is None else f"{layer} ({cost.selection})"


def _share(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2%}"
