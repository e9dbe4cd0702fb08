"""Which rows of the prompt deeper layers go on with, once more and naively: ASL and its relatives.

Loops over layers, query heads, rows and entries, in float64, from the recorded q and k of each
layer; a layer that some rows do not reach computes with the rows that do. Written from the
definitions alone:

* ASL: Taniguchi et al., "Adaptive Layer Selection for Layer-Wise Token Pruning in LLM Inference",
  arXiv 2601.07667, with the numbers of the published code (TANIGUCHIREI/ASL);
* FastKV: Jo et al., arXiv 2502.01068 (dongwonjo/FastKV);
* GemFilter: Shi et al., arXiv 2409.17422;
* PyramidInfer: Yang et al., arXiv 2405.12532, as ASL's authors configure it.

Shapes: q [layer, qhead, pos, dim], k [layer, head, pos, dim]. The functions at the bottom are
small on purpose: tests replace one of them by a wrong one.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvsim.errors import BudgetError, PolicyError
from kvsim.testing.loops import Doubt
from kvsim.testing.loops import event as loops_event
from kvsim.testing.loops.event import Floats, Ints
from reference.event import pool

#: The parameters of every propagation.
PROPAGATIONS: dict[str, str] = {
    "asl": "tau window pool pool_kernel first_layer look_back kv_before",
    "asl_2pass": "tau window pool pool_kernel first_layer look_back",
    "fastkv": "layer rows window pool pool_kernel kv_before",
    "gemfilter": "layer pool_kernel",
    "pyramidinfer": "recent ratio sink least",
}


@dataclass(frozen=True)
class Descended(loops_event.Descended):
    """The rows of the prompt that each layer works on, and how they were chosen.

    dropped: the layers after which rows were dropped. variance, rho: ASL's, of every layer from the
    first that is tested, as if none had been selected; ranks: [layer][candidate], 1 for the best.
    """

    dropped: tuple[int, ...] = ()
    restarted: bool = False
    selected: int | None = None
    variance: Mapping[int, float] = field(default_factory=dict)
    rho: Mapping[int, float] = field(default_factory=dict)
    ranks: tuple[tuple[int, ...], ...] = ()


def propagate(
    name: str,
    params: Mapping[str, Any],
    q: Floats,
    k: Floats,
    *,
    prompt_len: int,
    budget: int,
    scale: float,
) -> Descended:
    """What a propagation by name does with a prompt; params are complete."""
    rule = _RULES[name.partition("@")[0]]
    return rule(params, q, k, prompt_len, budget, scale)


def asl(
    params: Mapping[str, Any], q: Floats, k: Floats, n: int, budget: int, scale: float
) -> Descended:
    """The first layer at which the ranks of the best have stopped to vary, and its best rows."""
    selected, chosen, found = _adaptive(params, q, k, n, budget, scale)
    full = params["kv_before"] == "full"
    if selected is None:
        return _through(len(q), n, uncut=range(len(q) if full else 0), **found)
    return _after(selected, chosen, len(q), n, uncut=range(selected + 1 if full else 0), **found)


def asl_2pass(
    params: Mapping[str, Any], q: Floats, k: Floats, n: int, budget: int, scale: float
) -> Descended:
    """The same rows, or the best of the last layer, and all layers anew on them."""
    selected, chosen, found = _adaptive(params, q, k, n, budget, scale)
    if n <= budget:
        return _through(len(q), n, **found)
    at = len(q) - 1 if selected is None else selected
    return _anew(at, chosen, len(q), selected=selected, **found)


def _adaptive(
    params: Mapping[str, Any], q: Floats, k: Floats, n: int, budget: int, scale: float
) -> tuple[int | None, list[int], dict[str, Any]]:
    """The selected layer, the rows that it chooses (the last layer where none is), and the rest."""
    window = int(params["window"])
    if n <= budget or n <= window:
        return None, list(range(n)), {}
    if budget < window:
        raise BudgetError(f"asl keeps a window of {window} rows, budget is {budget}")
    many = min(budget - window, n - window)
    totals = [
        total(votes(q[layer], k[layer], n, scale, window, params["pool"], params["pool_kernel"]))
        for layer in range(len(q))
    ]
    given = params["first_layer"]
    first = len(q) // 3 if given is None else int(given)

    def decide(scores: list[list[float]]) -> tuple[int | None, list[int], dict[str, Any]]:
        ranking = [ranks(of_layer) for of_layer in scores]
        variance, rho = curve(ranking, first, int(params["look_back"]), many)
        falls = [layer for layer in rho if is_below(rho[layer], float(params["tau"]))]
        selected = falls[0] if falls else None
        at = len(scores) - 1 if selected is None else selected
        chosen = with_window(best(ranking, at, int(params["look_back"]), many), n, window)
        return (
            selected,
            chosen,
            {"variance": variance, "rho": rho, "ranks": (*map(tuple, ranking),)},
        )

    selected, chosen, found = decide(totals)
    margins = _stability(lambda x: decide(x)[:2], totals)
    depends = range(0 if "kv_before" not in params else first + 1, len(q))
    return selected, chosen, {**found, "doubts": (*(Doubt(depends, m) for m in margins),)}


def votes(
    q: Floats, k: Floats, n: int, scale: float, window: int, kind: str | None, kernel: int
) -> list[list[float]]:
    """What the last `window` rows of a prompt of n pay to each row before them; of each query head.

    Summed over the window, the window's own columns cut off, then pooled: [qhead][position].
    """
    group = len(q) // len(k)
    found = []
    for i in range(len(q)):
        logits = scale * (q[i, n - window : n] @ k[i // group, :n].T)  # [row, position]
        paid = attention(logits, range(n - window, n), range(n))[:, : n - window].sum(0)
        found.append(pool(paid.tolist(), kind, int(kernel)))
    return found


def attention(logits: Floats, rows: range, positions: Sequence[int]) -> Floats:
    """Softmax of logits [row, position] over the positions up to each row's own."""
    later = np.asarray(positions) > np.asarray(rows)[:, None]
    logits = np.where(later, -np.inf, logits)
    weight = np.exp(logits - logits.max(1, keepdims=True))
    return np.asarray(weight / weight.sum(1, keepdims=True))


def curve(
    ranking: Sequence[Sequence[int]], first: int, look_back: int, many: int
) -> tuple[dict[int, float], dict[int, float]]:
    """V and rho of the layers from `first` on, of ranks [layer][candidate]; one without an entry.

    V is the variance over the layers looked back at, averaged over every candidate that is among
    the best `many` of one of them.
    """
    variance = {}
    for layer in range(first, len(ranking)):
        seen = np.array([ranking[j] for j in looked_back(layer, first, look_back)])
        among = (seen <= many).any(0)  # one of the best in any of these layers
        each = spread(seen[:, among], layer, first)
        variance[layer] = float(each.mean()) if len(each) else 0.0
    start = variance.get(first, 0.0)
    return variance, {layer: v / start if start > 0 else 0.0 for layer, v in variance.items()}


def fastkv(
    params: Mapping[str, Any], q: Floats, k: Floats, n: int, budget: int, scale: float
) -> Descended:
    """After a fixed layer its best rows and the window, unless the prompt is short."""
    layer, window = fixed(params["layer"], len(q), {32: 15, 28: 14}, 0.5), int(params["window"])
    rows = params["rows"]
    if rows is None:
        rows = budget
    elif isinstance(rows, float):
        rows = int(n * rows)
    uncut = range(layer + 1 if params["kv_before"] == "full" else 0)
    if n < budget or n <= rows or n <= window:
        return _through(len(q), n, uncut=uncut)
    scores = total(
        votes(q[layer], k[layer], n, scale, window, params["pool"], params["pool_kernel"])
    )
    if rows < window:
        raise PolicyError(f"fastkv keeps a window of {window} rows, {rows} are to go on")
    many = rows - window
    ranking = ranks(scores)
    chosen = with_window(one_of_best(ranking, many), n, window)
    doubt = Doubt(range(layer + 1, len(q)), *_gap(scores, ranking, many))
    return _after(layer, chosen, len(q), n, uncut=uncut, doubts=(doubt,))


def gemfilter(
    params: Mapping[str, Any], q: Floats, k: Floats, n: int, budget: int, scale: float
) -> Descended:
    """The rows whose keys the last query has the largest products with, and all layers anew."""
    del scale  # raw products
    layer = fixed(params["layer"], len(q), {32: 13, 28: 14}, 14 / 32)
    if n <= budget:
        return _through(len(q), n)
    group = q.shape[1] // k.shape[1]
    products = np.zeros(n)
    terms = 0.0
    for i in range(q.shape[1]):
        of_channels = k[layer, i // group, :n] * q[layer, i, n - 1]
        products += of_channels.sum(-1)
        terms += float(np.abs(of_channels).sum(-1).max())
    scores = pool(products.tolist(), "avg", int(params["pool_kernel"]))
    ranking = ranks(scores)
    chosen = sorted(one_of_best(ranking, budget))
    doubt = Doubt(range(len(q)), *_gap(scores, ranking, budget, terms))
    return _anew(layer, chosen, len(q), doubts=(doubt,))


def fixed(given: int | None, n_layers: int, known: Mapping[int, int], share: float) -> int:
    """The layer that was given, that of a known depth, or the last of a share of all layers."""
    if given is not None:
        return int(given)
    return known.get(n_layers, max(0, round(share * n_layers) - 1))


def pyramidinfer(
    params: Mapping[str, Any], q: Floats, k: Floats, n: int, budget: int, scale: float
) -> Descended:
    """After every layer some of the context: all that is alive before the last 1 + R rows."""
    del budget  # it does not bind
    recent = int(float(params["recent"]) * n)
    start = n - 1 - recent
    rows = list(range(n))
    alive, dropped, doubts = [], [], []
    for layer in range(len(q)):
        alive.append(tuple(rows))
        context = [p for p in rows if p < start]
        many = int(len(context) * remaining(layer, len(q), float(params["ratio"])))
        if many <= min(int(params["least"]), start) or many >= len(context):
            continue
        received = _received(q[layer], k[layer], rows, start, n, scale)
        scores = [received[p] for p in context]
        forced = min(int(params["sink"]), many)
        ranking = ranks(scores[forced:])
        rest = one_of_best(ranking, many - forced)
        kept = context[:forced] + [context[forced + slot] for slot in sorted(rest)]
        rows = [*kept, *(p for p in rows if p >= start)]
        deeper = range(layer + 1, len(q))
        doubts.append(Doubt(deeper, *_gap(scores[forced:], ranking, many - forced)))
        if deeper:
            dropped.append(layer)
    return Descended(tuple(alive), dropped=tuple(dropped), doubts=tuple(doubts))


def remaining(layer: int, n_layers: int, ratio: float) -> float:
    """The share of the context that goes on after a layer: all after the first, then a cosine."""
    if layer == 0:
        return 1.0
    return (1 - ratio) * (math.cos(math.pi * layer / n_layers) + 1) / 2 + ratio


def _received(
    q: Floats, k: Floats, rows: list[int], start: int, n: int, scale: float
) -> dict[int, float]:
    """Attention among the rows alive, of those from `start` on, the newer with the more weight."""
    group = len(q) // len(k)
    weights = np.linspace(1.0, 1.2, n - start)
    received = np.zeros(len(rows))
    for i in range(len(q)):
        logits = scale * (q[i, start:n] @ k[i // group, rows].T)
        received += weights @ attention(logits, range(start, n), rows) / len(q) / len(weights)
    return dict(zip(rows, received.tolist(), strict=True))


def total(scores: Sequence[Sequence[float]]) -> list[float]:
    """The sum over all query heads."""
    return [sum(column) for column in zip(*scores, strict=True)]


def ranks(scores: Sequence[float]) -> list[int]:
    """1 for the largest; of equal ones the lower position comes first."""
    order = np.argsort([-score for score in scores], kind="stable")
    found = np.empty(len(scores), int)
    found[order] = range(1, len(scores) + 1)
    return found.tolist()


def looked_back(layer: int, first: int, look_back: int) -> range:
    """The layers whose ranks are compared: as many for every layer as the first tested one has."""
    return range(layer - min(look_back, first + 1) + 1, layer + 1)


def one_of_best(ranking: Sequence[int], many: int) -> set[int]:
    """The candidates of rank 1 to `many`."""
    return {p for p, rank in enumerate(ranking) if rank <= many}


def best(ranking: Sequence[Sequence[int]], layer: int, look_back: int, many: int) -> set[int]:
    """What the selected layer chooses: by its own ranks alone."""
    del look_back
    return one_of_best(ranking[layer], many)


def spread(of_tokens: Ints, layer: int, first: int) -> Floats:
    """The variance of each token's ranks [layer, token], over all of them and not one less."""
    del layer, first
    mean = of_tokens.sum(0) / len(of_tokens)
    return np.asarray(((of_tokens - mean) ** 2).sum(0) / len(of_tokens))


def is_below(rho: float, tau: float) -> bool:
    """Strictly."""
    return rho < tau


def with_window(chosen: set[int], n: int, window: int) -> list[int]:
    """The chosen rows in order, and the last rows of the prompt."""
    return sorted(chosen | set(range(n - window, n)))


def first_without(selected: int) -> int:
    """The first layer that dropped rows do not reach: the selected one still works on all."""
    return selected + 1


def _through(n_layers: int, n: int, **found: Any) -> Descended:
    """Every row goes through every layer."""
    return Descended((tuple(range(n)),) * n_layers, **found)


def _after(layer: int, chosen: list[int], n_layers: int, n: int, **found: Any) -> Descended:
    """All rows up to a layer, the chosen ones behind it."""
    start = min(first_without(layer), n_layers)
    alive = (tuple(range(n)),) * start + (tuple(chosen),) * (n_layers - start)
    dropped = (layer,) if start < n_layers and len(chosen) < n else ()
    return Descended(alive, dropped=dropped, selected=layer, **found)


def _anew(layer: int, chosen: list[int], n_layers: int, **found: Any) -> Descended:
    """The chosen rows in every layer."""
    found = {"selected": layer, **found}
    return Descended((tuple(chosen),) * n_layers, dropped=(layer,), restarted=True, **found)


def _gap(
    scores: Sequence[float], ranking: Sequence[int], many: int, terms: float = 0.0
) -> tuple[float, float]:
    """Margin and size of the cut between rank `many` and the next."""
    if not 0 < many < len(scores):
        return math.inf, math.inf
    last, out = scores[ranking.index(many)], scores[ranking.index(many + 1)]
    size = max(abs(last), abs(out))
    largest = max(size, terms)
    return ((last - out) / largest if largest > 0 else 0.0), size


def _stability(
    decide: Callable[[list[list[float]]], Any], scores: list[list[float]]
) -> list[float]:
    """Margins: a hundredth of a change of the scores that was found to change what is decided.

    Ranks matter to the variance one by one, so the gap at a single cut says too little. Equal
    scores change together; 0.0 is added where the least change that sets them apart matters.
    """
    found, rng = decide(scores), np.random.default_rng(0)

    same = [np.unique(of_layer, return_inverse=True)[1] for of_layer in scores]

    def turns(change: float, *, apart: bool) -> bool:
        near = []
        for of_layer, equal in zip(scores, same, strict=True):
            by = rng.uniform(-1, 1, size=len(of_layer))
            factor = 1 + change * (by if apart else by[equal])
            near.append((np.array(of_layer) * factor).tolist())
        return bool(decide(near) != found)

    tied = [0.0] if any(turns(1e-14, apart=True) for _ in range(2)) else []
    for power in range(-14, -2, 2):
        if any(turns(10.0**power, apart=False) for _ in range(2)):
            return [*tied, 10.0 ** (power - 2)]
    return tied


_RULES: dict[str, Callable[..., Descended]] = {
    "asl": asl,
    "asl_2pass": asl_2pass,
    "fastkv": fastkv,
    "gemfilter": gemfilter,
    "pyramidinfer": pyramidinfer,
}
