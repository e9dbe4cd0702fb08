"""Lessons of the optimum: pairs of entries of which the first is worth its place.

At the prices of the optimum (`kvsim.policies.optimum`), an entry p that is live after event m is
worth

    worth[p, m] = mass[p, m] - price[m] + max(0, worth[p, m + 1])

the attention that it still earns, less what its place costs, up to the best event to evict it. Of
what the optimum holds at an event, it keeps what is worth more than 0; at the margin entries are
worth 0, kept or not. Prices say what any entry is worth, also one that the optimum had evicted.

Replays of prompts give the pairs: of each head at each event, entries worth more than 0 with others
that are not. The first replay keeps what is worth most; others keep what a network says, because
its own kept sets are what it will see (Ross, Gordon and Bagnell 2011, arXiv 1011.0686).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvsim.core.policy import Policy, Schedule, Scorer, Scores
from kvsim.core.trace import Trace
from kvsim.core.view import View
from kvsim.engine import replay
from kvsim.policies.features import WINDOW, features
from kvsim.policies.future import best, future_mass
from kvsim.policies.learned import Network


class Pairs(NamedTuple):
    """Features [N, F] of entries to keep and of others of the same head, and what that is worth.

    gain [N]: the difference of their worth, in attention mass. head [N]: of all heads of the model,
    layer by layer.
    """

    keep: Tensor
    drop: Tensor
    gain: Tensor
    head: Tensor

    @classmethod
    def joined(cls, parts: Sequence[Pairs]) -> Pairs:
        """Return the pairs of several parts together."""
        return cls(*(torch.cat(each) for each in zip(*parts, strict=True)))


@dataclass(frozen=True)
class Lesson:
    """Setting of lessons: groups of features, rows that `future` looks ahead, pairs of a head.

    vectors: of the group `projections`. Without groups, features are the key and the value, from
    which vectors are learned.
    """

    groups: tuple[str, ...]
    ahead: int
    pairs: int
    vectors: Tensor | None = None

    def taught(
        self,
        trace: Trace,
        budget: int,
        schedule: Schedule,
        random: torch.Generator,
        network: Network | None = None,
    ) -> Pairs | None:
        """Return the pairs of a replay, which keeps what `network` says; None without an event.

        Without a network it keeps what is worth most. random draws the pairs.
        """
        teacher = Teacher(self, random, network)
        replay(trace, Policy("teacher", teacher, schedule=schedule), budget, memory=_MEMORY)
        return Pairs.joined(teacher.given) if teacher.given else None


# Layers that a replay holds together; the mass of all events is dense.
_MEMORY = 256 << 20


@dataclass(frozen=True, eq=False)
class Teacher(Scorer):
    """Gathers pairs from the events of a replay. It looks ahead."""

    lesson: Lesson
    random: torch.Generator
    network: Network | None = None
    given: list[Pairs] = field(default_factory=list)

    columns: ClassVar = {"total": 0.0}
    clairvoyant: ClassVar[bool] = True
    signed: ClassVar[bool] = True
    rows: ClassVar[int] = WINDOW

    def score(self, view: View) -> Scores:
        """Worth, or the network's scores; [L, H, n]."""
        lesson, total = self.lesson, view["total"]
        if "attention" in lesson.groups:
            total = total + view.received()
        if lesson.groups:
            x = features(view, lesson.groups, total, lesson.ahead, lesson.vectors)
        else:
            x = torch.cat([view.keys, view.values], -1)
        event = view.setting.events.index(view.row)
        of_all = view.once(self, lambda: worth(view))[..., event]
        of_entry = of_all.gather(-1, view.pos.clamp(min=0))
        self.given.extend(self._pairs(x, of_entry, view.live, view.layers))
        scores = of_entry if self.network is None else self.network(x)
        return Scores(scores.to(x.dtype), {"total": total})

    def _pairs(self, x: Tensor, of_entry: Tensor, live: Tensor, layers: Tensor) -> list[Pairs]:
        """Pairs of every head that has entries of both kinds."""
        heads = x.shape[1]
        x, of_entry, live = (each.flatten(0, 1) for each in (x, of_entry, live))
        keep, drop = (of_entry > 0) & live, (of_entry <= 0) & live
        both = keep.any(-1) & drop.any(-1)
        if not bool(both.any()):
            return []
        head = torch.arange(len(x))[both].unsqueeze(-1)
        count, random = self.lesson.pairs, self.random
        better, worse = (
            torch.multinomial(each[both].float(), count, replacement=True, generator=random)
            for each in (keep, drop)
        )
        gain = of_entry[head, better] - of_entry[head, worse]
        kept, dropped = (x[head, each].flatten(0, 1).float() for each in (better, worse))
        of_model = layers[head // heads] * heads + head % heads
        return [Pairs(kept, dropped, gain.flatten(), of_model.expand_as(gain).flatten())]


def worth(view: View) -> Tensor:
    """Worth of every entry after every event at the optimum's prices; float32 [L, H, T, M].

    Every head has the budget, and nothing is protected.
    """
    setting, source = view.setting, view.source
    layers, heads = view.pos.shape[:2]
    mass = future_mass(source, setting.events, setting.response).cpu().numpy()
    places = np.full((layers, heads, len(setting.events)), setting.budget)
    price = best(source, setting.events, places, start=setting.response).price
    worths = mass - price[:, :, None]
    for event in reversed(range(worths.shape[-1] - 1)):
        worths[..., event] += worths[..., event + 1].clip(min=0.0)
    return torch.from_numpy(worths).float()
