"""Scores by what keys and values span: CurDKV, CapKV and Compactor; and FINCH's window."""

import math
from itertools import pairwise

import numpy as np

from kvsim.testing.loops.event import Floats, Scored, first, last, softmax, union
from reference.event import Event, pool, unrotate
from reference.expected import mean_rotation
from reference.windows import candidates


def curdkv(event: Event) -> Scored:
    """Squared lengths of key and value, relative to those of the segment."""
    segment, kind = event.params["segment"], event.params["leverage"]
    values = []
    for h, live in enumerate(event.live):
        size = len(live) if segment is None else int(segment)
        score = {}
        for start in range(0, len(live), size):
            part = live[start : start + size]
            both = []
            for x in (event.keys[h], event.values[h]):
                squares = [float(x[p] @ x[p]) for p in part]
                total = 1.0 if segment is None else sum(squares) or 1.0
                both.append([square / total for square in squares])
            for p, key, value in zip(part, *both, strict=True):
                mean = (key + value) / 2
                score[p] = {"product": key * value, "mean": mean, "key": key, "value": value}[kind]
        total = sum(score.values()) or 1.0
        values.append({p: s / total for p, s in score.items()})
    return Scored(values, first(event, int(event.params["sink"])))


def capkv(event: Event) -> Scored:
    """What a value adds to the log-determinant, weighted by its key's cosine with the query."""
    sink, tau = int(event.params["sink"]), float(event.params["tau"])
    start = event.place([event.row])[0] + 1
    rows = range(event.prompt_len) if event.prefill else event.window(256)
    drawn = event.unrotated([row for row in rows if row >= sink])
    dim, size = drawn.shape[-1], event.values.shape[-1]
    rotation = mean_rotation(event.rope, dim, start, int(event.params["n_future"]))
    values, noise = [], []
    for h, live in enumerate(event.live):
        open_to = [p for p in live if p >= sink]
        score, terms = dict.fromkeys(live, 0.0), dict.fromkeys(live, 0.0)
        for i in event.qheads(h):
            query = drawn[i].mean(axis=0)
            anchor = rotation @ query
            lost = float(np.abs(drawn[i]).mean()) / max(float(np.abs(anchor).mean()), 1e-12)
            cosines = [_cosine(anchor, event.keys[h, p]) for p in open_to]
            weights = [math.exp(tau * (c - max(cosines))) for c in cosines]
            capacity = np.eye(size)
            for p, w in zip(open_to, weights, strict=True):
                capacity += (w + 1e-6) * np.outer(event.values[h, p], event.values[h, p])
            for p, w in zip(open_to, weights, strict=True):
                v = event.values[h, p]
                s = w * float(v @ np.linalg.solve(capacity, v)) / event.group
                score[p] += s
                terms[p] += s * (1 + tau * (1 + lost)) + 1e-9
        values.append(score)
        noise.append(terms)
    return Scored(values, first(event, sink), noise, rounded=True)


def _cosine(a: Floats, b: Floats) -> float:
    lengths = [max(float(np.linalg.norm(x)), 1e-12) for x in (a, b)]
    return float(a @ b) / (lengths[0] * lengths[1])


def compactor(event: Event) -> Scored:
    """Standardised leverage and attention within chunks, taken once of each event's new rows."""
    params = event.params
    heads, parts = range(len(event.live)), params["parts"]
    new = [p for p in event.live[0] if p not in event.memory[0]]
    rough = event.column("roughness of new entries")
    stands_out, received, size = [], [], []
    for h in heads:
        keys = unrotate(event.keys[h][new], event.place(new), event.rope)
        x = keys - keys.mean(axis=0)
        gram = x.T @ x + 0.01 * np.eye(x.shape[1])
        stands_out.append([float(row @ np.linalg.solve(gram, row)) for row in x])
        size.append(float(np.abs(keys).max()) ** 2 / 0.01)
        received.append(_received(event, h, new, int(params["chunk"])))
    blending = float(params["blending"]) if parts == "both" else 1.0
    total = np.zeros((len(heads), len(new)))
    terms = 1.0
    if parts != "leverage":
        scores, deviation = _standardised(received)
        total += scores
        terms += float(np.max(received)) / deviation
    if parts != "attention":
        scores, deviation = _standardised(stands_out)
        total += blending * scores
        terms += blending * (1 + math.log1p(max(size))) / deviation
    for h in heads:
        event.memory[h].update(zip(new, total[h].tolist(), strict=True))
        rough[h].update(dict.fromkeys(new, terms))
    protected = union(first(event, int(params["sink"])), last(event, int(params["recent"])))
    values = [{p: event.memory[h][p] for p in event.live[h]} for h in heads]
    noise = [{p: rough[h][p] for p in event.live[h]} for h in heads]
    return Scored(values, protected, noise, rounded=True)


def _received(event: Event, head: int, new: list[int], chunk: int) -> list[float]:
    """Attention from all rows of the chunk, times the length of the value, over neighbours."""
    got = []
    for start, stop in pairwise([*range(0, len(new), chunk), len(new)]):
        part = new[start:stop]
        column = np.full(len(part), 1 - len(part) / chunk)
        for i in event.qheads(head):
            for row in part:
                z = event.keys[head][part] @ event.queries[i, row]
                column += softmax(z) / event.group
        got += [
            a * float(np.linalg.norm(event.values[head, p]))
            for a, p in zip(column, part, strict=True)
        ]
    return pool(got, "avg", 3)


def _standardised(scores: list[list[float]]) -> tuple[Floats, float]:
    x = np.array(scores)
    deviation = float(np.std(x, ddof=1)) if x.size > 1 else 0.0
    return (x - x.mean()) / max(deviation, 1e-6), max(deviation, 1e-6)


def finch(event: Event) -> Scored:
    """Attention of a window, each row times the number of entries before its own."""
    rows = event.window(int(event.params["window"]))
    values = []
    for h, live in enumerate(event.live):
        score = dict.fromkeys(candidates(event, h, rows), 0.0)
        for i in event.qheads(h):
            for row in rows:
                weights, before = event.attention(i, row), sum(p < row for p in live)
                for p in score:
                    score[p] += before * weights.get(p, 0.0) / len(rows) / event.group
        values.append(score)
    return Scored(values, last(event, len(rows)))
