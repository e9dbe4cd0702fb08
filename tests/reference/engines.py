"""Rules as engines that serve models have them: sets that heads or layers share."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from kvsim.testing.loops.event import Decision, Scored, Sets, first, last, softmax, unprotected
from kvsim.testing.loops.event import union as both
from reference import classic
from reference.event import Event
from reference.expected import series, z_scores
from reference.layouts import union
from reference.windows import pooled


def random(event: Event) -> Scored:
    """The baseline's draw, of the response before the last entries."""
    held = first(event, event.prompt_len) if event.params["protect_prompt"] else unprotected(event)
    drawn = classic.random(event)
    return Scored(drawn.values, both(held, last(event, int(event.params["recent"]))))


def triattention(event: Event) -> Scored:
    """The largest z-score of a group, or the z-score of the largest, before layers share."""
    params = event.params
    held = first(event, event.prompt_len) if params["protect_prompt"] else unprotected(event)
    held = both(held, last(event, int(params["recent"])))
    values, noise = [], []
    for h, (live, group) in enumerate(zip(event.live, series(event), strict=True)):
        among, queries = [*range(len(live))], group
        if params["population"] == "candidates":
            among = [slot for slot, p in enumerate(live) if p not in held[h]]
        if params["normalise"] == "kv_heads":
            raw, rough = (np.max(x, axis=0).tolist() for x in zip(*group, strict=True))
            queries = [(raw, rough)]
        scored = [z_scores(raw, rough, among) for raw, rough in queries]
        best, terms = (np.max(x, axis=0).tolist() for x in zip(*scored, strict=True))
        values.append(dict(zip(live, best, strict=True)))
        noise.append(dict(zip(live, terms, strict=True)))
    return Scored(values, held, noise, rounded=True)


def shared(params: Mapping[str, Any], scored: list[Scored]) -> list[Scored]:
    """TriAttention's scores of all layers, as heads of the same place or all heads share them."""
    rule = {"across": "layers", "reduction": params["over_layers"]}
    if params["pruning"] == "union":
        return union(rule, scored)
    out = [Scored([], layer.protected, [], [], rounded=True) for layer in scored]
    for h in range(len(scored[0].values)):
        alone = [
            Scored([x.values[h]], [x.protected[h]], [x.noise[h]], rounded=True) for x in scored
        ]
        for layer, each in zip(out, union(rule, alone), strict=True):
            layer.values += each.values
            layer.noise += each.noise
            layer.decisions += each.decisions
    return out


def _votes(event: Event, rows: Iterable[int], among: list[int]) -> dict[int, float]:
    """The largest over all query heads of the mean over the rows of their softmax over `among`."""
    rows, best = list(rows), dict.fromkeys(among, 0.0)
    for i in range(len(event.logits)):
        mean = dict.fromkeys(among, 0.0)
        for row in rows:
            for p, a in event.attention_over(i, row, [p for p in among if p <= row]).items():
                mean[p] += a / len(rows)
        best = {p: max(best[p], mean[p]) for p in among}
    return best


def _of_layer(
    event: Event, score: dict[int, float], held: Sets, *more: Any, noise: Any = None
) -> Scored:
    """The same scores in each head; 0 for entries that do not compete."""
    values = [{p: score.get(p, 0.0) for p in live} for live in event.live]
    return Scored(values, held, noise and [noise] * len(values), *more, rounded=True)


def layer_h2o(event: Event) -> Scored:
    """Votes of each chunk's last rows, and of later rows the softmax of their largest logits."""
    live, prompt = event.live[0], event.prompt_len
    acc, acted = event.column("acc")[0], event.column("acted")[0]
    start = int(max(acted.values(), default=-1)) + 1
    added = dict.fromkeys(live, 0.0)
    chunk = event.chunk or prompt
    for end in (*range(chunk, prompt, chunk), prompt):
        rows = range(max((end - 1) // chunk * chunk, end - int(event.params["window"])), end)
        for p, a in _votes(event, rows, live).items() if end > start else ():
            added[p] += len(rows) * a
    for row in range(max(start, prompt), event.row + 1):
        visible = [p for p in live if p <= row]
        largest = event.logits[:, row, visible].max(axis=0)
        for p, a in zip(visible, softmax(largest).tolist(), strict=True):
            added[p] += a
    acc.update({p: acc.get(p, 0.0) + added[p] for p in live})
    acted.update(dict.fromkeys(live, event.row))
    recent = event.params["recent"]
    number = max(1, event.budgets[0] // 2) if recent is None else int(recent)
    return _of_layer(event, acc, last(event, number))


def _middle(event: Event) -> tuple[list[int], Sets]:
    """The entries between the first and the last ones, and these."""
    params = event.params
    held = both(first(event, int(params["sink"])), last(event, int(params["recent"])))
    return [p for p in event.live[0] if p not in held[0]], held


def layer_snapkv(event: Event) -> Scored:
    """Votes of the prompt's last rows, pooled; later the largest logit of the last row."""
    open_to, held = _middle(event)
    if event.prefill:
        score = _votes(event, event.window(int(event.params["window"])), open_to)
        score = pooled(score, event.at(params={**event.params, "pool": "max"}))
    else:
        score = {p: float(event.logits[:, event.row, p].max()) for p in open_to}
    return _of_layer(event, score, held)


def layer_rkv(event: Event) -> Scored:
    """Votes of the last rows less the redundancy of the keys of all heads, as one vector."""
    open_to, held = _middle(event)
    weight, threshold = (float(event.params[x]) for x in ("mix_lambda", "threshold"))
    vote = _votes(event, event.window(int(event.params["window"])), open_to)
    keys = [np.concatenate([head[p] for head in event.keys]) for p in open_to]
    unit = [key / max(float(np.linalg.norm(key)), 1e-6) for key in keys]
    nearest, mean = 1.0, []
    for i, own in enumerate(unit):
        cosine = [float(own @ other) if j != i else 0.0 for j, other in enumerate(unit)]
        nearest = min([nearest, *(abs(c - threshold) for j, c in enumerate(cosine) if j != i)])
        cosine = [c if c >= threshold else 0.0 for c in cosine]
        similar = [j for j in range(i + 1, len(unit)) if cosine[j] > 0]
        if similar:
            cosine[similar[-1]] = 0.0
        mean.append(sum(cosine) / len(unit))
    share = dict(zip(open_to, softmax(np.array(mean)).tolist(), strict=True))
    score = {p: weight * vote[p] - (1 - weight) * share[p] for p in open_to}
    noise = {p: weight * vote[p] + (1 - weight) * share[p] for p in open_to}
    taken: list[list[Decision]] = [[(max(nearest, 1e-300), 1.0)] for _ in event.live]
    return _of_layer(event, score, held, taken, noise=noise)
