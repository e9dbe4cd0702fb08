"""The options of an experiment, each declared once.

Keywords of `kvsim.sweep`, `kvsim.live` and `kvsim.sweeps.replay_all`, keys of a configuration,
options of commands, controls of the dashboard and parameters in `run.json` follow from here
(`kvsim.core.options`). Importing this module loads none of the large libraries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict

from kvsim.core.options import Help
from kvsim.core.parameters import AtLeast, Between, Finite
from kvsim.schema import Compress

if TYPE_CHECKING:
    from kvsim.core.policy import PolicyLike, Protection
    from kvsim.store.opening import Traces
else:
    PolicyLike = Protection = Traces = Any


class OfCells(TypedDict, total=False):
    """What all cells have in common, replays and live runs."""

    interval: Annotated[
        int | str | Sequence[int | str] | None,
        Help(
            "Rows between events; of replays also several. All policies then have the same events, "
            "one of them after the prompt; own: each evicts when its paper says. Default: 32 for "
            "two or more policies, own for one.",
            "N|own[,...]",
        ),
    ]
    prefill: Annotated[
        bool | None,
        Help(
            "Whether an event follows the prompt; default: yes, unless policies keep their own "
            "schedule."
        ),
    ]
    compress: Annotated[
        Compress | None,
        Help(
            "What the event after the prompt compresses: with context it fires before the "
            "question, of traces that say where their context ends, and readers and codecs begin "
            "there; with questions one follows the question of every turn; default: prompt."
        ),
    ]
    prefill_chunk: Annotated[
        int | None,
        AtLeast(1),
        Help(
            "Compress the prompt after each chunk of so many rows, before the next one attends; "
            "default: once.",
            "ROWS",
        ),
    ]
    fit: Annotated[
        bool,
        Help(
            "Scale windows and segments that exceed half of the budget, by the budgets that the "
            "papers' values are meant for: POLICY@scaled.",
            default=False,
        ),
    ]
    layers: Annotated[
        int | Sequence[int] | None,
        Help("Evict in these layers of the traces alone; default: all.", "N,A-B,..."),
    ]
    metrics: Annotated[
        str | Sequence[str] | None,
        Help("What to measure, as `kvsim metrics` lists it.", "NAME[,NAME...]", flag="--metric"),
    ]
    events: Annotated[bool, Help("Write a row for every event to the results.", default=False)]


class Options(OfCells, total=False):
    """What replays of a grid have in common."""

    memory: Annotated[
        int | str | None,
        Help(
            "Memory of each process for a block of layers, such as 500MB or 2GB; larger traces "
            "are replayed block by block.",
            "SIZE",
            unset="2GiB",
        ),
    ]
    device: Annotated[str, Help("cpu, cuda, or auto for a GPU if there is one.", default="cpu")]
    judge: Annotated[
        bool | str,
        Help(
            "Apply what was decided to the model that was recorded, in one forward pass, and "
            "measure its predictions; they rank the policies.",
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


class Keys(Options, total=False):
    """The keys of a configuration."""

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
            "Policies, as `kvsim policies` lists them, or module:NAME for your own policy.",
            "NAME[,NAME...]",
            flag="--policy",
        ),
    ]
    budgets: Annotated[
        int | str | Sequence[int | str],
        Help(
            "Entries per KV head that stay after an event; a share of the trace's length (25%) or "
            "of the tokens so far (25%so-far); or bytes of all layers and heads (64MiB, at 16 bits "
            "a number; 64MiB@float32).",
            "N|P%|SIZE[,...]",
            flag="--budget",
        ),
    ]
    records: Annotated[bool, Help("Keep what each cell would have kept, too.", default=False)]


class Out(TypedDict, total=False):
    """The run folder."""

    out: Annotated[
        str | Path | None,
        Help(
            "The run folder: run.json, results.parquet and records.zarr. A run of the same call "
            "that is there is continued.",
            "DIR",
        ),
    ]


class Spread(Out, total=False):
    """Where a sweep is computed and kept."""

    jobs: Annotated[
        int | None,
        AtLeast(1),
        Help(
            "Processes here, with one thread each.",
            default=1,
            unset="one for small work, else one per processor",
        ),
    ]


class Writing(TypedDict, total=False):
    """The response that a model writes under each policy."""

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
    top_k: Annotated[int | None, AtLeast(1), Help("As that of a capture.", default=None)]
    top_p: Annotated[float | None, Between(0, 1), Help("As that of a capture.", default=None)]
    batch: Annotated[
        int,
        AtLeast(1),
        Help(
            "Write so many responses at once, of any prompts, policies and budgets; what a batch "
            "cannot hold is written one by one, with a note.",
            default=1,
        ),
    ]
    paged: Annotated[
        int | None,
        AtLeast(1),
        Help(
            "Hold the cache in blocks of N entries, as serving engines do, and attend through "
            "block tables; what an event leaves is compacted, and blocks are freed.",
            "N",
        ),
    ]
    block_tables: Annotated[
        Literal["layer", "head"],
        Help(
            "Of a cache in blocks: one block table for all heads of a layer, where heads with "
            "fewer entries are padded; or one for each head.",
            default="layer",
        ),
    ]


class SweepOptions(Keys, Spread, total=False):
    """Keywords of `kvsim.sweep`."""


class ReplayOptions(Options, Spread, total=False):
    """Keywords of `kvsim.sweeps.replay_all`."""


class LiveOptions(OfCells, Writing, Out, total=False):
    """Keywords of `kvsim.live`."""


class Experiment(SweepOptions, ReplayOptions, LiveOptions, total=False):
    """Every option."""
