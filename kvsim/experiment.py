"""The options of an experiment, each declared once.

Keywords of `kvsim.sweep`, `kvsim.live` and `kvsim.sweeps.replay_all`, keys of a configuration,
options of commands, controls of the dashboard and parameters in `run.json` follow from here
(`kvsim.core.options`). Importing this module loads none of the large libraries.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

from kvsim.core.options import Help
from kvsim.core.parameters import AtLeast, Between, Finite
from kvsim.schema import Compress

if TYPE_CHECKING:
    from kvsim.core.policy import PolicyLike, Protection
    from kvsim.store.opening import Traces
else:
    PolicyLike = Protection = Traces = Any


class Common(TypedDict, total=False):
    """Options of replays and of live runs."""

    interval: Annotated[
        int | str | Sequence[int | str] | None,
        Help(
            "Rows between events, the same for all policies, one event after the prompt; or "
            "paper: each as its paper says. Default: 32; for a single policy, paper.",
            "N|paper[,...]",
        ),
    ]
    prefill: Annotated[
        bool | None,
        Help("Whether an event follows the prompt; default: yes, with the interval paper its own."),
    ]
    compress: Annotated[
        Compress | None,
        Help(
            "What the event after the prompt compresses: prompt (default), context (before the "
            "question), both, questions (of all turns) or context+questions.",
            "WHAT",
        ),
    ]
    prefill_chunk: Annotated[
        int | None,
        AtLeast(1),
        Help("Compress the prompt after each chunk of so many rows; default: once."),
    ]
    fit: Annotated[
        bool,
        Help(
            "Scale windows and segments that exceed half of the budget, by the budgets that the "
            "papers' values are meant for: POLICY@scaled.",
            default=False,
        ),
    ]
    protect: Annotated[
        Protection | Mapping[str, int | bool],
        Help(
            "What every policy protects too: sink and recent, so many positions, and prompt, all "
            "of it or not.",
            default={},
        ),
    ]
    layers: Annotated[
        int | str | Sequence[int | str] | None,
        Help("Evict only in these layers of the traces, such as 0 or 4-7; default: all."),
    ]
    metrics: Annotated[
        str | Sequence[str] | None,
        Help(
            "What to measure (`kvsim metrics`), or all but those on request.",
            "NAME[,...]",
            flag="--metric",
        ),
    ]
    events: Annotated[bool, Help("Write a row for every event to the results.", default=False)]
    out: Annotated[
        str | Path | None,
        Help("Run folder; the same call continues its run.", "DIR"),
    ]
    overwrite: Annotated[bool, Help("Replace the run that is there.", default=False)]


class ReplayOptions(Common, total=False):
    """Keywords of `kvsim.sweeps.replay_all`."""

    memory: Annotated[
        int | str | None,
        Help(
            "Memory of each process for a block of layers, such as 500MB or 2GB (default: 2GiB); "
            "larger traces are replayed block by block."
        ),
    ]
    device: Annotated[str, Help("cpu, cuda, or auto for a GPU if there is one.", default="cpu")]
    judge: Annotated[
        bool | str,
        Help(
            "Run the recorded model, or MODEL, once under the kept sets, and rank policies by its "
            "predictions.",
            "[=MODEL]",
            default=False,
        ),
    ]
    records: Annotated[bool, Help("Save the kept sets of each cell, too.", default=False)]
    jobs: Annotated[
        int | None,
        AtLeast(1),
        Help("Processes.", "N", default=1, unset="as the work needs"),
    ]


class SweepOptions(ReplayOptions, total=False):
    """Keywords of `kvsim.sweep`, and keys of a configuration."""

    traces: Annotated[
        Traces,
        Help(
            "Recorded traces: their paths or URLs, folders of traces, or 'sample' and "
            "'sample-smollm2', which ship.",
            "TRACE",
        ),
    ]
    policies: Annotated[
        PolicyLike | Mapping[str, Any] | Sequence[PolicyLike | Mapping[str, Any]],
        Help(
            "Policies (`kvsim policies`), or module:NAME for your own.",
            "NAME[,...]",
            flag="--policy",
        ),
    ]
    budgets: Annotated[
        int | str | Sequence[int | str],
        Help(
            "Entries per KV head after an event; a share of the trace (25%) or of the tokens so "
            "far (25%so-far); or bytes (64MiB, at 16 bits a number, or 64MiB@float32).",
            "N|P%|SIZE[,...]",
            flag="--budget",
        ),
    ]


class LiveOptions(Common, total=False):
    """Keywords of `kvsim.live`."""

    max_new_tokens: Annotated[
        int,
        AtLeast(0),
        Help(
            "Tokens of the response that the model writes under each policy, 0 for none.",
            default=0,
        ),
    ]
    temperature: Annotated[
        float,
        Finite(),
        AtLeast(0),
        Help("0 takes the most likely token; above 0, tokens are drawn.", default=0.0),
    ]
    seed: Annotated[int, Help("The seed of the draws.", default=0)]
    top_k: Annotated[int | None, AtLeast(1), Help("As in kvsim capture.", default=None)]
    top_p: Annotated[float | None, Between(0, 1), Help("As in kvsim capture.", default=None)]
    batch: Annotated[
        int,
        AtLeast(1),
        Help(
            "Write so many responses at once, of any prompts, policies and budgets; sequences that "
            "cannot be batched are written one by one, with a note.",
            default=1,
            flag="--batch-size",
        ),
    ]
    paged: Annotated[
        int | None,
        AtLeast(1),
        Help(
            "Hold the cache in blocks of N entries, as serving engines do, and attend through "
            "block tables; an event compacts the kept entries and frees blocks.",
            "N",
        ),
    ]


class Experiment(SweepOptions, LiveOptions, total=False):
    """Every option."""


def numbers_in(text: str) -> list[int] | None:
    """Return numbers and ranges, as in 0,4-7,-1; None for another text."""
    numbers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(-\d{1,7})|(\d{1,7})(?:-(\d{1,7}))?", part.strip())
        ends = [] if match is None else [int(number) for number in match.groups() if number]
        if not ends or ends[-1] < ends[0]:
            return None
        numbers += range(ends[0], ends[-1] + 1)
    return numbers
