"""`kvsim recompute`: the prefill of policies that drop rows, with a model's weights."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsim.cli import shared
from kvsim.cli.groups import Loading, grouped
from kvsim.cli.show import (
    bar,
    echo_json,
    echo_notes,
    echo_rows,
    echo_text,
    one_line,
    selection_dict,
)
from kvsim.schema import plural

if TYPE_CHECKING:
    from kvsim.runner import Recomputed

_WHAT = (
    "\nrows behind: tokens of the last layer. residual: |h' - h| / |h| behind the last layer, mean "
    "over\nits rows. KL, token: the first token, next to that of the full prefill.\n"
    "Fidelity semi: layers behind the selection are computed from the recorded residual stream "
    "with the model's weights, which is what a live prefill computes; decoding is not part of it."
)


@grouped
def recompute(
    trace: Annotated[
        str, typer.Argument(metavar="TRACE", help="A trace recorded with --residual.")
    ],
    policy: shared.PolicyNames,
    budget: shared.Budgets,
    loading: Loading,
    settings: shared.Settings = None,
    memory: shared.Memory = None,
    *,
    as_json: shared.Json = False,
) -> None:
    """Compute the layers behind a selection again.

    As a prefill that drops rows would, with the model's weights. Prints how far the residual
    stream and the first token move from those of the full prefill.
    """
    limit = shared.parse_memory(memory)

    from kvsim.core.arguments import resolve_budget
    from kvsim.runner import recompute as prefill
    from kvsim.store import open_trace

    opened = open_trace(trace)
    policies = shared.build_policies(policy, settings)
    sizes = [resolve_budget(size, opened.n_pos) for size in budget]
    opened.read("residual", slice(0, 0))  # before a model is loaded
    decoder, _ = loading.loaded([opened])
    prefills: list[Recomputed] = []
    with bar("prefills") as report:
        for each, size in product(policies, sizes):
            report(len(prefills), len(policies) * len(sizes), f"{each.name}, budget {size}")
            prefills.append(prefill(opened, each, size, decoder, memory=limit))
    if as_json:
        echo_json({"trace": opened.name, "prefills": list(map(_document, prefills))})
        return
    echo_text(
        f"{one_line(opened.name)}: prompt of {opened.prompt_len} tokens, "
        f"{plural(opened.n_layers, 'layer')}\n"
    )
    echo_rows(list(map(_row, prefills)), right=3)
    echo_text(_WHAT)
    echo_notes(each.record.remark for each in prefills)


def _row(prefill: Recomputed) -> dict[str, str]:
    selection, errors = prefill.record.selection, prefill.residual_error
    layer = None if selection is None else selection.layer
    return {
        "policy": prefill.record.policy,
        "budget": str(prefill.record.budget),
        "selected after": "nowhere" if layer is None else f"layer {layer}",
        "rows behind": "" if selection is None else str(selection.counts[-1]),
        "residual": f"{float(errors[max(errors)].mean()):.3f}" if errors else "-",
        "KL (nats)": f"{prefill.kl:.4f}",
        "token": "same" if prefill.same_token else "other",
    }


def _document(prefill: Recomputed) -> dict[str, Any]:
    record = prefill.record
    table = prefill.table().select("metric", "layer", "qhead", "value", "unit", "fidelity")
    return {
        "policy": record.policy,
        "params": dict(record.params),
        "budget": record.budget,
        "selection": selection_dict(record),
        "check": prefill.check,
        "remark": record.remark,
        "results": table.to_dicts(),
    }
