"""Folding evicted entries into kept ones, one by one in loops, from the papers.

LOOK-M (arXiv 2406.18139) and D2O (arXiv 2406.13035). Nothing is shared
with kvsim's mergers.
"""

import math
from collections.abc import Callable

#: A token's key and value, channel by channel.
Pair = tuple[list[float], list[float]]
#: What a head remembers between events.
State = dict[str, float]
#: Given entries that leave and entries that stay, what these become, by their number.
Fold = Callable[[State, list[Pair], list[Pair]], dict[int, Pair]]


def lookm(merge: str) -> Fold:
    """Every entry merges into its nearest: the mean, of halves, or weighted by cosines."""

    def fold(_: State, gone: list[Pair], kept: list[Pair]) -> dict[int, Pair]:
        def mean(at: int, mine: list[tuple[Pair, float]]) -> Pair:
            parts = [kept[at]]
            for entry, u in mine:
                if merge == "pivotal":
                    parts.append(_sum([(0.5, entry), (0.5, kept[at])]))
                else:
                    parts.append(_sum([(u if merge == "weighted" else 1.0, entry)]))
            return _sum([(1 / len(parts), part) for part in parts])

        near = _nearest(gone, kept)
        return {
            at: mean(at, [(gone[i], u) for i, (of, u) in enumerate(near) if of == at])
            for at in {at for at, _ in near}
        }

    return fold


def d2o(decay: float, *, cosine: bool = False) -> Fold:
    """Entries at least as similar as the moving threshold merge, by softmax of cosines and 1.

    cosine: weights are these themselves, divided by the number of entries, as in the release.
    """

    def fold(state: State, gone: list[Pair], kept: list[Pair]) -> dict[int, Pair]:
        near = _nearest(gone, kept)
        if not near:
            return {}
        mean = math.fsum(u for _, u in near) / len(near)
        before = state.get("threshold")
        state["threshold"] = mean if before is None else decay * before + (1 - decay) * mean
        into: dict[int, list[tuple[float, Pair]]] = {}
        for entry, (at, u) in zip(gone, near, strict=True):
            if u >= state["threshold"] - 1e-6:
                own, weight = (1.0, u) if cosine else (math.e, math.exp(u))
                into.setdefault(at, [(own, kept[at])]).append((weight, entry))
        out = {}
        for at, parts in into.items():
            total = len(parts) if cosine else sum(weight for weight, _ in parts)
            out[at] = _sum([(weight / total, entry) for weight, entry in parts])
        return out

    return fold


def _nearest(gone: list[Pair], kept: list[Pair]) -> list[tuple[int, float]]:
    """For each entry the first kept one with the largest cosine of keys, and that cosine."""
    out = []
    for key, _ in gone if kept else ():
        cosines = [_cosine(key, other) for other, _ in kept]
        at = next(i for i, u in enumerate(cosines) if u >= max(cosines) - 1e-6)
        out.append((at, cosines[at]))
    return out


def _cosine(a: list[float], b: list[float]) -> float:
    sizes = math.hypot(*a) * math.hypot(*b)
    return sum(x * y for x, y in zip(a, b, strict=True)) / sizes if sizes else 0.0


def _sum(parts: list[tuple[float, Pair]]) -> Pair:
    """The weighted sum of entries."""
    key, value = (
        [math.fsum(weight * entry[which][i] for weight, entry in parts) for i in range(size)]
        for which, size in enumerate(map(len, parts[0][1]))
    )
    return key, value
