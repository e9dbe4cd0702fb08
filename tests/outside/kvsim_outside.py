"""A package of a user: a policy, a metric, a figure and a command, declared in pyproject.toml."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import typer

import kvsim
from kvsim.analysis.definition import Cells, Metric
from kvsim.core.parameters import AtLeast
from kvsim.core.policy import Schedule, Scorer
from kvsim.plots.registry import figure
from kvsim.policies.entry import Entry


@dataclass(frozen=True)
class Alternate(Scorer):
    """Keep every `step`-th position, of these the most recent ones."""

    step: Annotated[int, AtLeast(1)] = 2

    def score(self, view):
        """Return the position, behind all others where it is no multiple [layer, head, entry]."""
        return (view.pos + (view.pos % self.step == 0) * 1_000_000).float()


ALTERNATE = Entry("every second position, the most recent ones", Alternate, Schedule(interval=32))


def odd_positions(subject):
    """Yield the share of odd positions among kept ones, by layer group, head and event."""
    for layers, evicted_at in subject.layer_groups:
        rows = np.unique(evicted_at[evicted_at < subject.trace.n_pos])
        pos = np.arange(evicted_at.shape[-1])
        kept = (pos <= rows[:, None]) & (evicted_at[:, None] > rows[:, None])  # [m, event, pos]
        share = kept[..., 1::2].sum(-1) / kept.sum(-1).clip(1)
        yield Cells(layers, share, "head", chance=np.full(share.shape, 0.5), events=rows)


ODD_SHARE = Metric(
    *("share of odd positions among kept ones", "sets", "share", None, "outside", odd_positions),
    after="wipeout",
)


@figure()
def odd_bars(table):
    """Draw the mean of `odd_share` by policy."""
    from matplotlib.figure import Figure

    means = kvsim.averages(table.filter(metric="odd_share"))
    drawing = Figure()
    drawing.subplots().bar(means["policy"], means["mean"])
    return drawing


def odd(n: int) -> None:
    """Say how many positions of `N` are odd."""
    typer.echo(f"{n // 2} of {n}")
