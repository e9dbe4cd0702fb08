"""Options of `learn`, each declared once (`kvsim.core.options`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypedDict

from kvsim.core.options import Help
from kvsim.core.parameters import AtLeast, Below


class LearnOptions(TypedDict, total=False):
    """Keywords of `learn`."""

    features: Annotated[
        str | Sequence[str] | None,
        Help(
            "What it may see of an entry: position, attention, keys, values; default: all of "
            "these. projections of keys and values bind it to one model; future, with rows to "
            "look ahead, looks ahead.",
            "GROUP[,...]",
        ),
    ]
    hidden: Annotated[
        int, AtLeast(0), Help("Width of the hidden layer; 0 for a linear score.", default=32)
    ]
    ahead: Annotated[int, AtLeast(0), Help("Rows that the group future looks ahead.", default=0)]
    interval: Annotated[int, AtLeast(1), Help("Rows between events.", default=32)]
    rounds: Annotated[
        int,
        AtLeast(1),
        Help(
            "Replays of each prompt; after the first it keeps what was learned so far.", default=2
        ),
    ]
    pairs: Annotated[int, AtLeast(1), Help("Pairs of each head at each event.", default=32)]
    steps: Annotated[int, AtLeast(1), Help("Steps of the optimiser.", default=1500)]
    fixed: Annotated[
        bool,
        Help("Leave the hidden layer as it was drawn, and fit the last one alone.", default=False),
    ]
    held_out: Annotated[
        float,
        AtLeast(0),
        Below(1),
        Help(
            "Share of the prompts that it does not learn from, 0 for none. With fewer than 4 "
            "prompts none are held out.",
            default=0.3,
        ),
    ]
    metrics: Annotated[
        str | Sequence[str] | None,
        Help(
            "What to measure on the prompts held out; default: as `kvsim sweep`.",
            "NAME[,...]",
            flag="--metric",
        ),
    ]
    seed: Annotated[
        int, AtLeast(0), Help("The seed of the split, the pairs and the network.", default=0)
    ]
