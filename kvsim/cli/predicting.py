"""`kvsim predict`: from replay alone, how far the running model would diverge."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from kvsim.cli import show, values
from kvsim.cli.replaying import finish
from kvsim.cli.values import Stop
from kvsim.schema import plural, schedule

if TYPE_CHECKING:
    from kvsim.analysis.prediction import Calibration

_MEANING = """\
Live KL: divergence of the model's predictions from those with the full cache, in nats per token of
the recorded response, mean over traces. The interval covers at least 90 % of prompts and policies
that are new to the calibration, if they are like those that it was fitted on. Answer lost: share of
answers, right with the full cache, that were wrong in live runs with such a layer error."""


def predict(
    traces: values.TracePaths,
    policy: values.PolicyNames,
    budget: values.Budgets,
    interval: values.Interval = None,
    prefill: values.Prefill = None,
    compress: values.Compress = None,
    own_schedule: values.OwnSchedule = False,
    settings: values.Settings = None,
    fit: values.Fit = False,
    calibration: Annotated[
        Path | None,
        values.path_option(
            "FILE", "What `kvsim fidelity --calibration` wrote; default: what ships with kvsim."
        ),
    ] = None,
    device: values.Device = "cpu",
    as_json: values.Json = False,
) -> None:
    """Predict from replay how far the running model diverges.

    Replays policies at budgets over traces and estimates the KL divergence of a live run from the
    layer error, with an interval, and the risk that an answer is lost. Needs a calibration of the
    same model, and estimates nothing outside the layer errors that it was fitted on.
    """
    from kvsim.analysis import prediction
    from kvsim.sweeps.run import replay_all

    policies = values.build_policies(policy, settings, fit=fit)
    recorded = values.open_traces(traces)
    fitted = prediction.calibration_of(recorded, calibration)
    terms: dict[str, Any] = {"interval": interval, "prefill": prefill, "compress": compress}
    terms["own_schedule"] = own_schedule
    try:
        with show.bar("cells") as report:
            run = replay_all(
                *(recorded, policies, budget),
                metrics=["layer_error"],
                device=device,
                progress=report,
                **terms,
            )
    except KeyboardInterrupt:
        raise Stop("interrupted, nothing was written", 130) from None
    rows = prediction.predict(run.table, fitted).to_dicts()
    remarks = _remarks(fitted, rows, [trace.n_pos for trace in recorded])
    if as_json:
        document = {"calibration": fitted.document(), "cells": rows, "remarks": remarks}
        show.echo_json(run.describe() | document)
    else:
        _print(fitted, rows, remarks)
    finish(run, len(recorded) * len(policies) * len(budget), None)
    if rows and all(row["outside"] for row in rows):
        raise Stop("error: no cell is within the calibration, so nothing is predicted", 2)


def _print(fitted: Calibration, rows: list[dict[str, Any]], remarks: list[str]) -> None:
    show.echo_text(
        f"Calibration: {fitted.model}, {plural(fitted.prompts, 'prompt')} of {fitted.tokens[0]} to "
        f"{fitted.tokens[1]} tokens, {len(fitted.policies)} policies, budgets "
        f"{', '.join(fitted.budgets)}.\n"
    )
    headers = ["policy", "budget", "layer error", "live KL", "90 % interval", "answer lost"]
    lines = []
    for row in rows:
        line = [row["policy"], row["asked"], show.number(row["error"], ".3g"), _kl(row["kl"])]
        between = "-" if row["kl"] is None else f"{_kl(row['low'])} to {_kl(row['high'])}"
        risk = "-"
        if row["risk"] is not None:
            risk = f"{row['risk']:.0%} [{row['risk_low']:.0%}, {row['risk_high']:.0%}]"
        lines.append([*line, between, risk])
    show.echo_table(headers, lines, right=2)
    show.echo_text(f"\n{_MEANING}")
    for remark in remarks:
        show.echo_text(f"Note: {remark}.")


def _kl(value: float | None) -> str:
    from kvsim.analysis.prediction import FLOOR

    if value is None:
        return "-"
    return f"{value:.2g}" if value > FLOOR or not value else f"< {FLOOR:g}"


def _remarks(fitted: Calibration, rows: list[dict[str, Any]], tokens: list[int]) -> list[str]:
    """What differs from what the calibration was fitted on."""
    out = [
        f"{row['policy']}, budget {row['asked']}: {row['outside']}"
        for row in rows
        if row["outside"] is not None
    ]
    schedules = {(row["interval"], row["prefill"]) for row in rows}
    if schedules - {(fitted.interval, fitted.prefill)} and fitted.interval is not None:
        after = schedule(fitted.interval, prefill=bool(fitted.prefill))
        out.append(f"the calibration is of events after {after}, and these are others")
    if min(tokens) < fitted.tokens[0] or max(tokens) > fitted.tokens[1]:
        out.append(
            f"traces of {' to '.join(map(str, sorted({min(tokens), max(tokens)})))} tokens, other "
            "lengths than those of the calibration"
        )
    return out
