"""Policies that look at values, at what queries may come, or at the queries that did come."""

import math
from functools import lru_cache

import numpy as np

from kvsim.errors import PolicyError
from kvsim.testing.loops.event import Floats, Rotary, Scored, first, softmax, unprotected
from reference.event import Event, rotate, unrotate


@lru_cache(maxsize=8192)
def rotation(rope: Rotary, dim: int, pos: int) -> Floats:
    """[dim, dim]: the matrix that rotates a query to position `pos`, attention scaling included."""
    inv_freq, scaling = rope
    rotated = 2 * len(inv_freq)
    matrix = rotate(np.eye(dim), np.full(dim, pos), inv_freq)
    matrix[:, :rotated] *= scaling
    return matrix.T  # the rows above are the images of the unit vectors


@lru_cache(maxsize=256)
def mean_rotation(rope: Rotary, dim: int, start: int, count: int) -> Floats:
    """[dim, dim]: the mean of the matrices of positions start .. start + count - 1."""
    total = np.zeros((dim, dim))
    for pos in range(start, start + count):
        total += rotation(rope, dim, pos)
    return total / count


def samples(event: Event) -> tuple[list[int], int]:
    """The rows whose queries are sampled, and the position of the first future query."""
    sink = int(event.params["sink"])
    start = event.place([event.row])[0] + 1
    if event.prefill:
        rows = range(event.prompt_len)
    elif event.params["origin"] == "buffer":
        if event.interval is None:
            raise PolicyError("a buffer of queries needs an interval")
        rows = event.window(min(event.interval, int(event.params["query_buffer"]) + 1))
        return list(rows)[sink:], len(rows)
    else:
        rows = event.window(int(event.params["query_buffer"]))
    return [row for row in rows if row >= sink], start


def expected_attention(event: Event) -> Scored:
    """Attention that queries drawn from the samples' normal distribution would pay."""
    params = event.params
    sink, epsilon = int(params["sink"]), float(params["epsilon"])
    rows, start = samples(event)
    if len(rows) < 2:
        raise PolicyError(f"expected_attention has {len(rows)} queries to sample; it needs 2")
    drawn = event.unrotated(rows)  # [qhead, row, dim]
    dim = drawn.shape[-1]
    values, noise = [], []
    for h, live in enumerate(event.live):
        open_to = [p for p in live if p >= sink]
        score = dict.fromkeys(live, 0.0)  # the first entries are kept, and expect nothing
        logits = []
        rough = 1.0
        for i in event.qheads(h):
            mean = drawn[i].mean(axis=0)
            spread = np.zeros((dim, dim))
            if params["covariance"]:
                for query in drawn[i]:
                    spread += np.outer(query - mean, query - mean) / len(rows)
            logit = []
            for p in open_to:
                x, size = _expected(event, mean, spread, event.keys[h, p], start)
                logit.append(x)
                rough = max(rough, size)
            for p, a in zip(open_to, softmax(np.array(logit)).tolist(), strict=True):
                score[p] += a / event.group
            logits.append(logit)
        if params["log"]:
            logs = _logarithms(event, h, open_to, logits)
            values.append({p: logs.get(p, -math.inf) for p in live})
            noise.append({p: abs(logs.get(p, 0.0)) + rough for p in live})
            continue
        if params["value_norm"] != "none":
            for p in live:
                score[p] = (score[p] + epsilon) * _value_norm(event, h, p)
        values.append(score)
        noise.append({p: s * (1.0 + rough) for p, s in score.items()})
    return Scored(values, first(event, sink), noise)


def _expected(
    event: Event, mean: Floats, spread: Floats, key: Floats, start: int
) -> tuple[float, float]:
    """The log of the expected score of one key, and the size of its terms."""
    rope, s, count = event.rope, event.scale, int(event.params["n_future"])
    if event.params["rope"] == "mean":
        mean_matrix = mean_rotation(rope, len(key), start, count)
        line = s * float(key @ mean_matrix @ mean)
        square = s**2 / 2 * float(key @ mean_matrix @ spread @ mean_matrix.T @ key)
        return line + square, abs(line) + abs(square)
    each = []
    for pos in range(start, start + count):
        back = key @ rotation(rope, len(key), pos)
        each.append(s * float(back @ mean) + s**2 / 2 * float(back @ spread @ back))
    x = np.array(each)
    top = float(x.max())
    return top + float(np.log(np.exp(x - top).mean())), float(np.abs(x).max())


def _logarithms(
    event: Event, head: int, positions: list[int], logits: list[list[float]]
) -> dict[int, float]:
    """The logarithm of each score, from the logits of the group's query heads."""
    epsilon = float(event.params["epsilon"])
    normal = [np.array(own) - np.logaddexp.reduce(own) for own in logits]
    found = {}
    for slot, p in enumerate(positions):
        x = float(np.logaddexp.reduce([own[slot] for own in normal])) - math.log(len(normal))
        if event.params["value_norm"] != "none":
            size = _value_norm(event, head, p)
            x = float(np.logaddexp(x, math.log(epsilon))) if epsilon > 0 else x
            x += math.log(size) if size > 0 else -math.inf
        found[p] = x
    return found


def _value_norm(event: Event, head: int, pos: int) -> float:
    """The length of a value, or that of its projections averaged over the group."""
    if event.params["value_norm"] == "v":
        return float(np.linalg.norm(event.values[head, pos]))
    lengths = [float(np.linalg.norm(event.projected(i, pos))) for i in event.qheads(head)]
    return sum(lengths) / len(lengths)


def critical(event: Event, inner: Scored, *, signed: bool) -> Scored:
    """The best of half the budget first; the rest by score times the projected value's size.

    The first stage lies in [1, 2], 1 + score / largest of the layer; the rest below, its score
    over twice the largest of the layer. A protected entry that has no score counts as the lowest.
    """
    epsilon, share = float(event.params["epsilon"]), float(event.params["first_stage"])
    scores, weighed, lengths = [], [], []
    for h, live in enumerate(event.live):
        low = min(inner.values[h].values(), default=0.0) if signed else 0.0
        score = {p: inner.values[h].get(p, low) - low for p in live}
        length = {p: _projected_size(event, h, p) for p in live}
        scores.append(score)
        lengths.append(length)
        weighed.append({p: (score[p] + epsilon) * length[p] for p in live})
    best = max(max(score.values()) for score in scores) or 1.0
    most = max(max(rest.values()) for rest in weighed) or 1.0
    values, noise, decisions = [], [], []
    for h, live in enumerate(event.live):
        held, score = inner.protected[h], scores[h]
        others = sorted((p for p in live if p not in held), key=lambda p: (-score[p], p))
        ahead = max(0, int(event.budgets[h] * share) - len(held))
        taken = list(inner.taken(h))
        if 0 < ahead < len(others):
            a, b = others[ahead - 1], others[ahead]
            size = max(inner.size(h, a), inner.size(h, b))
            margin = (score[a] - score[b]) / size if size > 0 else 0.0
            taken.append((margin, max(abs(inner.values[h][a]), abs(inner.values[h][b]))))
        leading = held | set(others[:ahead])
        value, terms = {}, {}
        for p in live:
            size = inner.size(h, p) if p in inner.values[h] else 0.0
            if p in leading:
                value[p], terms[p] = 1 + score[p] / best, 2.0 + size / best
            else:
                value[p] = weighed[h][p] / (2 * most)
                terms[p] = (size + score[p] + epsilon) * lengths[h][p] / (2 * most)
        values.append(value)
        noise.append(terms)
        decisions.append(taken)
    return Scored(values, inner.protected, noise, decisions, rounded=inner.rounded)


def _projected_size(event: Event, head: int, pos: int) -> float:
    """The L1 norm of a value's projections, averaged over the group."""
    sizes = [float(np.abs(event.projected(i, pos)).sum()) for i in event.qheads(head)]
    return sum(sizes) / len(sizes)


def _pairs(x: Floats, count: int) -> Floats:
    """[..., count] complex: dimension f with f + count."""
    return np.asarray(x[..., :count] + 1j * x[..., count : 2 * count])


def series(event: Event) -> list[list[tuple[list[float], list[float]]]]:
    """TriAttention's scores of live entries, and their terms, by query head of each KV head.

    The trigonometric series of the mean query at geometric distances, plus what phases lose.
    """
    rope = event.rope
    frequency, scaling = np.array(rope[0]), rope[1]
    drawn, positions = event.calibrated()
    query = _pairs(unrotate(drawn, positions, rope), len(frequency))  # [qhead, row, pair]
    peak = event.params["offsets"] == "max"
    now = event.place([event.row])[0]
    ahead = [np.exp(1j * frequency * (now + 1 + 2**power)) for power in range(17)]
    heads = []
    for h, live in enumerate(event.live):
        group = []
        for i in event.qheads(h):
            mean, length = query[i].mean(axis=0), np.abs(query[i]).mean(axis=0)
            turned = [mean * turn for turn in ahead]
            raw, rough = [], []
            for p in live:
                key = _pairs(event.keys[h, p], len(frequency))
                terms = [float((at * key.conj()).real.sum()) for at in turned]
                rest = float(((length - np.abs(mean)) * np.abs(key)).sum())
                raw.append(scaling * ((max(terms) if peak else sum(terms) / 17) + rest))
                rough.append(scaling * float(((length + np.abs(mean)) * np.abs(key)).sum()))
            group.append((raw, rough))
        heads.append(group)
    return heads


def z_scores(
    raw: list[float], rough: list[float], among: list[int]
) -> tuple[list[float], list[float]]:
    """Scores less their mean and over their deviation at these slots, and the terms likewise."""
    scored = [raw[slot] for slot in among]
    centre = float(np.mean(scored)) if scored else 0.0
    deviation = max(float(np.std(scored)), 1e-6) if scored else 1.0
    noise = [max(size, abs(centre)) / deviation for size in rough]
    return [(x - centre) / deviation for x in raw], noise


def triattention(event: Event) -> Scored:
    """The largest z-score of the group, over entries that may leave."""
    held = unprotected(event)
    if event.params["protect_prompt"]:
        held = first(event, event.prompt_len)
    values, noise = [], []
    for h, (live, group) in enumerate(zip(event.live, series(event), strict=True)):
        open_to = [slot for slot, p in enumerate(live) if p not in held[h]]
        scored = [z_scores(raw, rough, open_to) for raw, rough in group]
        best, terms = (np.max(x, axis=0).tolist() for x in zip(*scored, strict=True))
        values.append(dict(zip(live, best, strict=True)))
        noise.append(dict(zip(live, terms, strict=True)))
    return Scored(values, held, noise, rounded=True)


def qfilter(event: Event) -> Scored:
    """The key's part along the main direction of the queries, averaged over the group."""
    drawn, _ = event.calibrated()
    values, noise, decisions = [], [], []
    for h, live in enumerate(event.live):
        filtered = np.zeros(event.keys.shape[-1])
        rough = 1.0
        taken: list[tuple[float, float]] = []
        for i in event.qheads(h):
            _, singular, right = np.linalg.svd(drawn[i], full_matrices=False)
            along = float(drawn[i].mean(axis=0) @ right[0])
            filtered += (right[0] if along >= 0 else -right[0]) / event.group
            size = float(np.linalg.norm(drawn[i], axis=-1).mean())
            taken.append((max(abs(along) / size, 1e-300) if size > 0 else 1e-300, 1.0))
            if len(singular) > 1:
                gap = 1 - float(singular[1] / singular[0]) if singular[0] > 0 else 0.0
                rough = max(rough, 1 / max(gap, 1e-300))
        values.append({p: float(event.keys[h, p] @ filtered) for p in live})
        noise.append({p: rough * float(np.linalg.norm(event.keys[h, p])) for p in live})
        decisions.append(taken)
    return Scored(values, unprotected(event), noise, decisions)


def oracle(event: Event) -> Scored:
    """What entries get from all later rows of full attention, or add to their outputs."""
    n = event.logits.shape[1]
    values, noise = [], []
    for h, live in enumerate(event.live):
        score = dict.fromkeys(live, 0.0)
        terms = dict.fromkeys(live, 0.0)
        for i in event.qheads(h):
            for row in range(event.row + 1, n):
                weight = softmax(event.logits[i, row, : row + 1])
                if event.params["by"] == "mass":
                    for p in live:
                        score[p] += float(weight[p])
                    continue
                value = event.values[h, : row + 1]
                output = weight @ value
                size = float(np.linalg.norm(output))
                if size == 0:
                    continue
                for p in live:
                    rest = max(1 - float(weight[p]), 1e-6)
                    far = float(np.linalg.norm(value[p] - output))
                    score[p] += float(weight[p]) / rest * far / size
                    about = float(np.linalg.norm(value[p])) + size + far / rest
                    terms[p] += float(weight[p]) / rest * about / size
        values.append(score)
        noise.append(terms)
    return Scored(values, unprotected(event), noise)
