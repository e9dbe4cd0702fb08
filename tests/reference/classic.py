"""Policies that look at positions, at what entries received, at keys alone, or at one window."""

import math
from itertools import pairwise

import numpy as np

from kvsim.testing.loops.event import Floats, Scored, first, last, softmax, unprotected
from reference.event import Event, pool


def random(event: Event) -> Scored:
    """A hash of seed, layer, row, head and position."""
    seed = int(event.params["seed"])
    return Scored(
        [
            {p: hash_score(seed, event.layer, event.row, h, p) for p in live}
            for h, live in enumerate(event.live)
        ],
        unprotected(event),
    )


def hash_score(seed: int, layer: int, row: int, head: int, pos: int) -> float:
    """The random policy's score in [0, 1): 53 bits of a chain of splitmix64."""
    h = splitmix64(seed)
    for x in (layer, row, head, pos):
        h = splitmix64(h ^ x)
    return float((h >> 11) / 2**53)


def splitmix64(z: int) -> int:
    """One output of SplitMix64 from state z."""
    wrap = 2**64 - 1
    z = (z + 0x9E3779B97F4A7C15) & wrap
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & wrap
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & wrap
    return z ^ (z >> 31)


def streaming_llm(event: Event) -> Scored:
    """The newest, and the first `sink`."""
    scores = [{p: float(p) for p in live} for live in event.live]
    return Scored(scores, first(event, int(event.params["sink"])))


def h2o(event: Event) -> Scored:
    """Attention received from every row so far; the last half of the budget is kept."""
    protected = []
    for live, budget in zip(event.live, event.budgets, strict=True):
        given = event.params["recent"]
        recent = budget // 2 if given is None else int(given)
        protected.append(set(live[len(live) - recent :]) if recent else set())
    return Scored([dict(received) for received in event.received], protected)


def observed_attention(event: Event) -> Scored:
    """Attention of the prompt's rows since it acted, or of one row, over how many slots follow."""
    scores: list[dict[int, float]] = []
    for h, live in enumerate(event.live):
        n = len(live)
        score, acted = dict.fromkeys(live, 0.0), event.column("acted")[h]
        since = int(max(acted.values(), default=-1)) + 1
        acted.update(dict.fromkeys(live, event.row))
        for i in event.qheads(h):
            for row in range(since, event.row + 1) if event.prefill else [event.row]:
                for p, a in event.attention(i, row).items():
                    score[p] += a / event.group
        scores.append({p: score[p] / (n - slot) for slot, p in enumerate(live)})
    return Scored(scores, unprotected(event))


def tova(event: Event) -> Scored:
    """Attention of the last row, averaged over all heads, the group, or all heads by slot."""
    protected = last(event, 1 if event.params["protect_last"] else 0)
    if not event.params["log"]:
        return Scored(averaged(event, [event.row]), protected)
    values = log_averaged(event)
    noise = [{p: max(1.0, -s) for p, s in of_head.items()} for of_head in values]
    return Scored(values, protected, noise)


def log_averaged(event: Event) -> list[dict[int, float]]:
    """The logarithm of what `averaged` returns of the last row, from logits: nothing is 0."""
    of_head = []
    for h, live in enumerate(event.live):
        logs = []
        for i in event.qheads(h):
            z = event.logits[i, event.row, live]
            logs.append((z - np.logaddexp.reduce(z)).tolist())
        of_head.append({p: [own[slot] for own in logs] for slot, p in enumerate(live)})
    if event.average != "group":
        slots = zip(*(own.values() for own in of_head), strict=True)
        together = [[x for own in slot for x in own] for slot in slots]
        of_head = [dict(zip(own, together, strict=True)) for own in of_head]
    return [
        {p: float(np.logaddexp.reduce(own)) - math.log(len(own)) for p, own in head.items()}
        for head in of_head
    ]


def averaged(event: Event, rows: list[int]) -> list[dict[int, float]]:
    """Attention summed over rows, averaged over the heads that `event.average` names."""
    share = []
    for h, live in enumerate(event.live):
        score = dict.fromkeys(live, 0.0)
        for i in event.qheads(h):
            for row in rows:
                for p, a in event.attention(i, row).items():
                    score[p] += a / event.group
        share.append(score)
    return share if event.average == "group" else over_heads(event, share)


def over_heads(event: Event, share: list[dict[int, float]]) -> list[dict[int, float]]:
    """The mean over KV heads of entries in one slot; with "slot" heads hold different entries."""
    held = [len(s) if event.average == "slot" else list(s) for s in share]
    if any(its != held[0] for its in held):
        raise ValueError("an average over all heads needs the same entries in every head")
    rows = zip(*(score.values() for score in share), strict=True)
    mean = [sum(slot) / len(share) for slot in rows]
    return [dict(zip(score, mean, strict=True)) for score in share]


def snapkv(event: Event) -> Scored:
    """Mean attention of a window, pooled per query head, averaged over the group."""
    rows = event.window(int(event.params["window"]))
    kind, kernel = event.params["pool"], int(event.params["pool_kernel"])
    scores: list[dict[int, float]] = []
    for h, live in enumerate(event.live):
        candidates = [p for p in live if p < rows[0]]
        score = dict.fromkeys(candidates, 0.0)
        for i in event.qheads(h):
            mean = np.zeros(len(candidates))
            for row in rows:
                visible = [p for p in live if p <= row]  # the candidates are the first of them
                mean += softmax(event.logits[i, row, visible])[: len(candidates)] / len(rows)
            pooled = pool(mean.tolist(), kind, kernel)
            for p, s in zip(candidates, pooled, strict=True):
                score[p] += s / event.group
        scores.append(score)
    return Scored(scores, last(event, len(rows)))


def knorm(event: Event) -> Scored:
    """The negative length of the key."""
    return Scored(
        [
            {p: -float(np.linalg.norm(event.keys[h, p])) for p in live}
            for h, live in enumerate(event.live)
        ],
        unprotected(event),
    )


def keydiff(event: Event) -> Scored:
    """The negative cosine with the mean direction of the live keys."""
    values, noise = [], []
    for h, live in enumerate(event.live):
        anchor = np.zeros(event.keys.shape[-1])
        for p in live:
            key = event.keys[h, p]
            anchor += key / max(float(np.linalg.norm(key)), 1e-12) / len(live)
        size = max(float(np.linalg.norm(anchor)), 1e-8)
        score, terms = {}, {}
        for p in live:
            key = event.keys[h, p]
            length = max(float(np.linalg.norm(key)), 1e-8)
            score[p] = -float(key @ anchor) / (length * size)
            terms[p] = max(1.0, 1.0 / size)  # the anchor is a mean of unit vectors
        values.append(score)
        noise.append(terms)
    # of two keys, both are as far from their mean direction
    return Scored(values, unprotected(event), noise, rounded=True)


def lagkv(event: Event) -> Scored:
    """Spread over the channels, relative to the range of the next partition; keys and values."""
    sink, lag = int(event.params["sink"]), int(event.params["lag"])
    values, noise, decisions = [], [], []
    for h, live in enumerate(event.live):
        n = len(live)
        terms = dict.fromkeys(live, 0.0)
        taken: list[tuple[float, float]] = []
        if n < sink + 2 * lag:
            recent = {p: (slot - sink) / (n - sink) for slot, p in enumerate(live) if slot >= sink}
            score = {p: recent.get(p, 1.0) for p in live}
        else:
            score = dict.fromkeys(live, 1.0)
            parts = [live[s : s + lag] for s in range(sink, n - lag + 1, lag)]
            for part, reference in pairwise(parts):
                k, rough = _spread(event.keys[h][part], event.keys[h][reference])
                v, also = _spread(event.values[h][part], event.values[h][reference])
                mean = ((k + v) / 2).tolist()
                order = sorted(range(lag), key=lambda i: (mean[i], i))
                for rank, i in enumerate(order):
                    score[part[i]] = mean[i] if event.params["cross_scoring"] else rank / lag
                    if event.params["cross_scoring"]:
                        terms[part[i]] = mean[i] * max(rough, also)
                    elif rank:
                        gap = mean[i] - mean[order[rank - 1]]
                        taken.append((gap / (mean[i] * max(rough, also)), mean[i]))
        values.append(score)
        noise.append(terms)
        decisions.append(taken)
    exact = not event.params["cross_scoring"]
    return Scored(values, first(event, sink), noise, decisions, exact=exact)


def _spread(x: Floats, reference: Floats) -> tuple[Floats, float]:
    """Softmax over the entries of the deviation of their channels, x and reference [lag, dim].

    Each channel is moved to the range that it has in the reference; a channel that is constant
    there counts as 0. Also returned: how much rounding grows on the way.
    """
    low, high = reference.min(axis=0), reference.max(axis=0)
    moved = np.zeros_like(x)
    rough = 1.0
    for channel in range(x.shape[1]):
        if high[channel] > low[channel]:
            width = high[channel] - low[channel]
            moved[:, channel] = (x[:, channel] - low[channel]) / width
            rough = max(rough, float(np.abs([low[channel], high[channel]]).max() / width))
    deviation = moved.std(axis=1, ddof=1)
    return softmax(deviation), 1.0 + float(deviation.max()) * rough
