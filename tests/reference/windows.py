"""Policies by a window's attention: SnapKV's heirs, R-KV, G-KV, CAKE, RPC; `candidates` precede."""

import math
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np

from kvsim.testing.loops.event import Decision, Scored, first, last, softmax, union
from reference.classic import averaged, over_heads
from reference.event import Event, pool


def candidates(event: Event, head: int, rows: range) -> list[int]:
    """The live entries before the window."""
    return [p for p in event.live[head] if p < rows[0]]


def local(event: Event, head: int, rows: range) -> dict[int, float]:
    """Largest attention in the group, averaged over the window; candidates alone."""
    weights = [[event.attention(i, row) for row in rows] for i in event.qheads(head)]
    return {
        p: sum(max(of_head[j][p] for of_head in weights) for j in range(len(rows))) / len(rows)
        for p in candidates(event, head, rows)
    }


def pooled(score: dict[int, float], event: Event) -> dict[int, float]:
    """A score pooled over the slots of those that have one."""
    kind, kernel = event.params["pool"], int(event.params["pool_kernel"])
    return dict(zip(score, pool(list(score.values()), kind, kernel), strict=True))


def morphkv(event: Event) -> Scored:
    """The local score, pooled or not."""
    rows = event.window(int(event.params["window"]))
    values = [pooled(local(event, h, rows), event) for h in range(len(event.live))]
    return Scored(values, last(event, len(rows)))


def morphkv_original(event: Event) -> Scored:
    """Attention among the candidates alone, largest of the group; sum or maximum of the window."""
    rows = event.window(int(event.params["window"]))
    values = []
    for h in range(len(event.live)):
        old = candidates(event, h, rows)
        weights = [[event.attention_over(i, row, old) for row in rows] for i in event.qheads(h)]
        largest = {p: [max(w[j][p] for w in weights) for j in range(len(rows))] for p in old}
        peak = event.params["fusion"] == "max"
        values.append({p: max(a) if peak else sum(a) for p, a in largest.items()})
    return Scored(values, last(event, len(rows)))


def dropkv(event: Event) -> Scored:
    """How far the outputs of the window move if one entry is dropped, squared, then smoothed."""
    rows, kernel = event.window(int(event.params["window"])), int(event.params["pool_kernel"])
    values, noise = [], []
    for h, live in enumerate(event.live):
        lost, terms = dict.fromkeys(live, 0.0), dict.fromkeys(live, 0.0)
        for i in event.qheads(h):
            for row in rows:
                weight = event.attention(i, row)
                for p, a in weight.items():
                    others = {other: b for other, b in weight.items() if other != p}
                    rest, v = sum(others.values()), event.values[h, p]
                    y = sum(b / (rest or 1.0) * event.values[h, at] for at, b in others.items())
                    lost[p] += a**2 * float(((v - y) ** 2).sum()) / event.group
                    size = float(np.linalg.norm(v)) + float(np.linalg.norm(y))
                    terms[p] += 3 * (a * size / max(rest, 0.5)) ** 2 / event.group
        old = candidates(event, h, rows)
        for of_entry, to in ((lost, values), (terms, noise)):
            smooth = pool(list(of_entry.values()), "avg", kernel)
            by_position = dict(zip(live, smooth, strict=True))
            to.append({p: by_position[p] for p in old})
    return Scored(values, last(event, len(rows)), noise, rounded=True)


def variance(x: list[float]) -> float:
    """Unbiased; 0 of one number."""
    if len(x) < 2:
        return 0.0
    mean = sum(x) / len(x)
    return sum((a - mean) ** 2 for a in x) / (len(x) - 1)


def cake(event: Event) -> Scored:
    """Mean attention of the window plus gamma times how much it shifts, at the prefill event."""
    rows = event.window(int(event.params["window"]))
    gamma = float(event.params["gamma"]) if event.prefill else 0.0
    values, noise = [], []
    for h in range(len(event.live)):
        old = candidates(event, h, rows)
        score = dict.fromkeys(old, 0.0)
        terms = dict.fromkeys(old, 0.0)
        for i in event.qheads(h):
            weights = [event.attention(i, row) for row in rows]
            own = {}
            for p in old:
                column = [w[p] for w in weights]
                shift = variance(column)
                if event.params["dispersion"] == "std":
                    shift = math.sqrt(shift)
                own[p] = sum(column) / len(column) + gamma * shift
            for p, s in pooled(own, event).items():
                score[p] += s / event.group
                terms[p] += (1.0 + gamma) * s / event.group
        values.append(score)
        noise.append(terms)
    return Scored(values, last(event, len(rows)), noise)


def cake_gkv(event: Event) -> Scored:
    """The local score plus gamma times the deviation of the group's largest attention."""
    rows = event.window(int(event.params["window"]))
    gamma = float(event.params["gamma"])
    values, noise = [], []
    for h in range(len(event.live)):
        weights = [[event.attention(i, row) for row in rows] for i in event.qheads(h)]
        score = {}
        for p in candidates(event, h, rows):
            column = [max(w[j][p] for w in weights) for j in range(len(rows))]
            shift = variance(column)
            if event.params["dispersion"] == "std":
                shift = math.sqrt(shift)
            score[p] = sum(column) / len(column) + gamma * shift
        values.append(pooled(score, event))
        noise.append({p: (1.0 + gamma) * s for p, s in values[-1].items()})
    return Scored(values, last(event, len(rows)), noise)


def cake_preference(event: Event) -> float:
    """What a layer asks for: entropy and shift of the window's attention on the candidates."""
    rows = event.window(int(event.params["window"]))
    entropy = shift = 0.0
    for h in range(len(event.live)):
        old = candidates(event, h, rows)
        for i in event.qheads(h):
            weights = [event.attention(i, row) for row in rows]
            for p in old:
                entropy -= sum(w[p] * math.log(w[p]) for w in weights if w[p] > 0)
                shift += variance([w[p] for w in weights])
    tau1, tau2 = float(event.params["tau1"]), float(event.params["tau2"])
    return float(entropy ** (1 / tau1) * shift ** (1 / tau2))


def redundancy(
    event: Event, head: int, among: list[int], *, epsilon: float, quirk: bool
) -> tuple[dict[int, float], list[Decision]]:
    """Mean cosine of keys, each row's last similar left out; quirk: the first if there is none."""
    threshold = float(event.params["threshold"])
    keys = event.keys[head][among]
    unit = keys / (np.linalg.norm(keys, axis=-1, keepdims=True) + epsilon)
    total = np.zeros(len(among))
    nearest = math.inf  # to the threshold
    for i, own in enumerate(unit):
        cosine = unit @ own
        cosine[i] = 0.0
        others = np.arange(len(among)) != i
        similar = np.flatnonzero(others & (cosine > threshold))
        last_similar = similar[-1] if len(similar) else 0
        # nothing before the last similar one matters
        gaps = abs(cosine - threshold)[last_similar:][others[last_similar:]]
        nearest = min([nearest, *gaps.tolist()])
        if len(similar) or quirk:
            cosine[last_similar] = 0.0
        total += cosine / len(among)
    return dict(zip(among, total.tolist(), strict=True)), [(max(nearest, 1e-300), 1.0)]


def _share(mean: dict[int, float]) -> dict[int, float]:
    """Softmax over all that have one."""
    return dict(zip(mean, softmax(np.array(list(mean.values()))).tolist(), strict=True))


def _mixed(
    attention: dict[int, float], repeated: dict[int, float], mix: float
) -> tuple[dict[int, float], dict[int, float]]:
    """mix * attention - (1 - mix) * redundancy of each entry, and the size of the terms."""
    score = {p: mix * s - (1 - mix) * repeated[p] for p, s in attention.items()}
    return score, {p: abs(mix * s) + (1 - mix) * repeated[p] for p, s in attention.items()}


def in_slots(event: Event, head: int, positions: Iterable[int]) -> list[int]:
    """Positions in the order in which the release holds them: what top-k left, then the others."""
    slot = event.memory[head] if event.memory else {}
    return sorted(positions, key=lambda p: (0, slot[p]) if p in slot else (1, p))


def leave(
    event: Event,
    head: int,
    score: dict[int, float],
    terms: dict[int, float],
    ahead: Iterable[int],
) -> list[Decision]:
    """Remember the slots of top-k: `ahead` in front, then the best first; what decided them."""
    if event.params["slot_order"] == "position":
        return []
    front = sorted(ahead)
    others = sorted((p for p in score if p not in front), key=lambda p: (-score[p], p))
    event.memory[head].clear()
    event.memory[head].update({p: float(i) for i, p in enumerate([*front, *others])})
    pairs = [(score[a] - score[b], max(terms[a], terms[b])) for a, b in pairwise(others)]
    return [(gap / size or 1e-300, size) for gap, size in pairs]


def rkv(event: Event) -> Scored:
    """The pooled local score against redundancy among all live keys (G-KV's R-KV)."""
    rows, heads = event.window(int(event.params["window"])), []
    for h, live in enumerate(event.live):
        redundant = redundancy(event, h, in_slots(event, h, live), epsilon=1e-6, quirk=False)
        own = local(event, h, rows)
        attention = {p: own[p] for p in in_slots(event, h, own)}
        heads.append(_weighed(event, h, attention, redundant))
    return _of_heads(last(event, len(rows)), heads)


def _weighed(
    event: Event,
    h: int,
    attention: dict[int, float],
    redundant: tuple[dict[int, float], list[Decision]],
    protected: Iterable[int] = (),
) -> tuple[dict[int, float], dict[int, float], list[Decision]]:
    """Scores of a head by attention and redundancy, their terms, and the decisions on the way."""
    mean, taken = redundant
    weight = float(event.params["mix_lambda"])
    score, terms = _mixed(pooled(attention, event), _share(mean), weight)
    return score, terms, taken + leave(event, h, score, terms, protected)


def _of_heads(protected: Any, heads: list[Any]) -> Scored:
    values, noise, decisions = map(list, zip(*heads, strict=True))
    return Scored(values, protected, noise, decisions, rounded=True)


def rkv_original(event: Event) -> Scored:
    """Softmax of the group's largest logits among the candidates (R-KV's own code)."""
    rows, heads = event.window(int(event.params["window"])), []
    for h, live in enumerate(event.live):
        old = in_slots(event, h, candidates(event, h, rows))
        attention = dict.fromkeys(old, 0.0)
        for row in rows:
            largest = np.array(
                [max(event.logits[i, row, p] for i in event.qheads(h)) for p in old],
                dtype=np.float64,
            )
            for p, a in zip(old, softmax(largest).tolist(), strict=True):
                attention[p] += a / len(rows)
        redundant = redundancy(event, h, in_slots(event, h, live), epsilon=1e-8, quirk=True)
        heads.append(_weighed(event, h, attention, redundant))
    return _of_heads(last(event, len(rows)), heads)


def rkv_ams(event: Event) -> Scored:
    """Attention and redundancy among the candidates, averaged over the group (AMS's R-KV)."""
    rows, heads = event.window(int(event.params["window"])), []
    protected = union(first(event, int(event.params["sink"])), last(event, len(rows)))
    for h in range(len(event.live)):
        old = in_slots(event, h, candidates(event, h, rows))
        attention = dict.fromkeys(old, 0.0)
        for i in event.qheads(h):
            for row in rows:
                for p, a in event.attention_over(i, row, old).items():
                    attention[p] += a / event.group / len(rows)
        redundant = redundancy(event, h, old, epsilon=1e-8, quirk=True)
        heads.append(_weighed(event, h, attention, redundant, protected[h]))
    return _of_heads(protected, heads)


def normalised(
    score: dict[int, float], *, signed: bool = False, noise: dict[int, float] | None = None
) -> tuple[dict[int, float], dict[int, float], list[Decision]]:
    """S over its maximum, or (S - min) / (max - min); 0 where that is 0 / 0; noise; decisions."""
    terms = {p: abs(s) for p, s in score.items()} if noise is None else noise
    low = min(score.values(), default=0.0) if signed else 0.0
    size = max(score.values(), default=0.0) - low
    if size == 0:
        # in another order of summation it may be a little more than nothing
        some = max(terms.values(), default=0.0) > 0
        return dict.fromkeys(score, 0.0), {}, [(1e-300, 1.0)] if some and len(score) > 1 else []
    share = {p: (s - low) / size for p, s in score.items()}
    least = max(terms.values()) if signed else 0.0
    rough = {p: max(terms.get(p, 0.0), least) / size for p in score}
    return share, rough, [(size / max(size, least), size)]


def fused(
    share: dict[int, float], history: dict[int, float], fusion: str, decay: float
) -> dict[int, float]:
    """The global score: what an entry had before and what it gets now; newcomers have no before."""
    together = {}
    for p, s in share.items():
        if p not in history:
            together[p] = s
        elif fusion == "max":
            together[p] = max(decay * history[p], s)
        elif fusion == "mean":
            together[p] = decay * history[p] + (1 - decay) * s
        elif fusion == "sum":
            together[p] = decay * history[p] + s
        else:
            raise ValueError(f"fusion is {fusion!r}; expected 'max', 'mean' or 'sum'")
    return together


def remember(memory: dict[int, float], score: dict[int, float]) -> None:
    """What candidates carry to the next event; the others carry nothing."""
    memory.clear()
    memory.update(score)


def gkv(event: Event) -> Scored:
    """The local score fused with its history, against redundancy."""
    params = event.params
    rows = event.window(int(params["window"]))
    mix = float(params["mix_lambda"])
    values, noise, decisions = [], [], []
    for h, live in enumerate(event.live):
        share, _, taken = normalised(local(event, h, rows))
        score = fused(share, event.memory[h], params["fusion"], float(params["decay"]))
        remember(event.memory[h], score)
        score = pooled(score, event)
        terms = dict(score)
        if params["redundancy"] and mix < 1 and score:
            raw = params["cosine"] == "raw"
            mean, more = redundancy(event, h, live, epsilon=1e-8 if raw else 1e-6, quirk=raw)
            largest = max(mean[p] for p in score)
            repeated = {p: math.exp(mean[p] - largest) for p in score}
            score, terms = _mixed(score, repeated, mix)
            taken += more
        values.append(score)
        noise.append(terms)
        decisions.append(taken)
    protected, mixed = last(event, len(rows)), bool(params["redundancy"]) and mix < 1
    return Scored(values, protected, noise, decisions, rounded=mixed)


def global_score(event: Event, inner: Scored, *, signed: bool) -> Scored:
    """Any scorer's candidates, normalised and fused with their history."""
    values, noise, decisions = [], [], []
    for h, live in enumerate(event.live):
        score = {p: inner.values[h][p] for p in live if p not in inner.protected[h]}
        share, rough, taken = normalised(
            score, signed=signed, noise={p: inner.size(h, p) for p in score}
        )
        score = fused(share, event.memory[h], event.params["fusion"], float(event.params["decay"]))
        rough = {p: max(x, event.doubt[h].get(p, 0.0)) for p, x in rough.items()}
        remember(event.memory[h], score)
        remember(event.doubt[h], rough)
        values.append(score)
        noise.append(rough)
        decisions.append(inner.taken(h) + taken)
    return Scored(values, inner.protected, noise, decisions, rounded=inner.rounded)


def raas(event: Event) -> Scored:
    """The latest row that attended to an entry enough, at first its own; then the position."""
    params, since = event.params, event.column("rows of raas")
    least, share = float(event.params["alpha"]), event.params["share"]
    values, decisions = [], []
    for h, live in enumerate(event.live):
        stamps, taken = event.memory[h], []
        for p in live:
            stamps.setdefault(p, float(p))
        after = since[h].get(-1, -1.0)  # no position: kept from event to event
        for row in event.window(int(params["query_buffer"])):
            if row <= after:
                continue
            weight = dict.fromkeys((p for p in live if p <= row), 0.0)
            for i in event.qheads(h):
                for p, a in event.attention(i, row).items():
                    weight[p] += a / event.group
            if share is not None:
                ranked = sorted(weight.values(), reverse=True)
                number = math.ceil(len(ranked) * float(share))
                least = ranked[number - 1] if number else math.inf
                if 0 < number < len(ranked):
                    gap = ranked[number - 1] - ranked[number]
                    taken.append((gap / least if least > 0 else 0.0, least))
            else:
                taken += [(abs(a - least) / max(a, least), max(a, least)) for a in weight.values()]
            for p, a in weight.items():
                if a >= least:
                    stamps[p] = max(stamps[p], float(row))
        since[h][-1] = float(event.row)
        values.append({p: stamps[p] + weight[p] / 2 for p in live})
        decisions.append([(margin or 1e-300, size) for margin, size in taken])
    protected = first(event, event.prompt_len if params["protect_prompt"] else 0)
    return Scored(values, protected, decisions=decisions)


def rpc(event: Event) -> Scored:
    """Attention of the window on the generated text alone, summed, averaged over all heads."""
    rows = event.window(int(event.params["window"]))
    kernel = int(event.params["pool_kernel"])
    protected = union(first(event, event.prompt_len), last(event, len(rows)))
    share = []
    for h in range(len(event.live)):
        old = [p for p in candidates(event, h, rows) if p >= event.prompt_len]
        score = dict.fromkeys(old, 0.0)
        for i in event.qheads(h):
            for row in rows:
                for p, a in event.attention_over(i, row, old).items():
                    score[p] += a / event.group
        share.append(score)
    if event.average != "group":
        share = over_heads(event, share)
    values = [
        dict(zip(score, pool(list(score.values()), "avg", kernel), strict=True)) for score in share
    ]
    return Scored(values, protected)


def rpc_ams(event: Event) -> Scored:
    """Attention of the window on everything, summed, averaged over the group (AMS's RPC)."""
    rows = event.window(int(event.params["window"]))
    kernel = int(event.params["pool_kernel"])
    score = averaged(event.at(average="group"), list(rows))
    values = [dict(zip(s, pool(list(s.values()), "avg", kernel), strict=True)) for s in score]
    protected = union(first(event, int(event.params["sink"])), last(event, len(rows)))
    return Scored(values, protected)
