"""Options of `tune`, each declared once (`kvsim.core.options`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from kvsim.core.options import Help
from kvsim.core.parameters import AtLeast, Below
from kvsim.experiment import Computing, Interval, Judging, Prefill


class TuneOptions(Interval, Prefill, Judging, Computing, total=False):
    """Keywords of `tune`."""

    search: Annotated[
        Sequence[str] | None,
        Help(
            "The parameters to search; default: all that have a range or choices, but for seeds.",
            "NAME[,NAME...]",
        ),
    ]
    trials: Annotated[
        int, AtLeast(1), Help("Settings to try, besides the default one.", default=50)
    ]
    held_out: Annotated[
        float,
        AtLeast(0),
        Below(1),
        Help(
            "Share of the prompts that the search does not see, 0 for none. With fewer than 4 "
            "prompts none are held out.",
            default=0.5,
        ),
    ]
    seed: Annotated[int, AtLeast(0), Help("The seed of the split and the search.", default=0)]
