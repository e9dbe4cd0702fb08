"""Storing entries in fewer bits, row by row in loops: when each entry is rounded, and to what.

Written from the papers and the releases: KIVI's rule is that of `models/llama_kivi.py` and
`quant/new_pack.py` in jy-yuan/KIVI. Nothing is shared with kvsim's quantizers.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvsim.schema import NEVER
from kvsim.testing.loops.event import Event, Floats, Ints
from reference.merging import Fold, State

#: A token's numbers, channel by channel.
Token = list[float]


@dataclass(frozen=True)
class Store:
    """When entries are rounded and how: of keys, then of values.

    due: given how many exact entries a head holds after a row, how many of the oldest are rounded.
    rounds: the numbers of these tokens after the round trip. bits: of a token of some channels.
    prunes: which channels of keys become 0, given the queries of rows up to now and the keys that
    are held. once: nothing is rounded after later rows. merges: what entries become when others
    leave. layers: the store of each layer, where they differ.
    """

    due: tuple[Callable[[int], int], Callable[[int], int]]
    rounds: tuple[Callable[[list[Token]], list[Token]], Callable[[list[Token]], list[Token]]]
    bits: tuple[Callable[[int], float], Callable[[int], float]]
    prunes: Callable[[list[list[Token]], list[Token]], list[int]] | None = None
    once: bool = False
    merges: Fold | None = None
    layers: tuple["Store", ...] = ()

    def of(self, layer: int) -> "Store":
        """The store of a layer."""
        return self.layers[layer] if self.layers else self


def split(keys: Store, values: Store) -> Store:
    """Keys as one store has them, values as another."""
    both = ((getattr(keys, x)[0], getattr(values, x)[1]) for x in ("due", "rounds", "bits"))
    return Store(*both)


def exact(due: tuple[Callable[[int], int], Callable[[int], int]]) -> Store:
    """Nothing changes, and a number has 16 bits."""
    same: Callable[[list[Token]], list[Token]] = lambda tokens: tokens  # noqa: E731
    whole: Callable[[int], float] = lambda dim: 16 * dim  # noqa: E731
    return Store(due, (same, same), (whole, whole))


def merging(fold: Fold) -> Store:
    """Nothing is rounded; entries that stay change when others leave."""
    none: Callable[[int], int] = lambda _: 0  # noqa: E731
    return replace(exact((none, none)), merges=fold)


def think(share: float, window: int, recent: int) -> Store:
    """The channels whose outer products of queries and keys are smallest, the last ones first."""

    def prunes(queries: list[list[Token]], keys: list[Token]) -> list[int]:
        def frobenius(i: int) -> float:
            rows = [q[i] for of_head in queries for q in of_head[-window:]]
            return sum((a * k[i]) ** 2 for a in rows for k in keys)

        dim = len(keys[0])
        order = sorted(range(dim), key=lambda i: (frobenius(i), -i))
        return order[: int(share * dim)]

    due: Callable[[int], int] = lambda exact: max(0, exact - recent)  # noqa: E731
    return Store(
        due=(due, due),
        rounds=(lambda tokens: tokens, lambda tokens: tokens),
        bits=(lambda dim: 16 * (dim - int(share * dim)), lambda dim: 16 * dim),
        prunes=prunes,
        once=True,
    )


def kivi(bits: int, group: int, window: int) -> Store:
    """Keys: whenever `window` are exact they all go. Values: what lies before the last `window`."""

    def keys(tokens: list[Token]) -> list[Token]:
        out: list[Token] = [[] for _ in tokens]
        for start in range(0, len(tokens), group):
            span = range(start, start + group)
            for channel in range(len(tokens[0])):
                numbers = limited([tokens[i][channel] for i in span], bits)
                for i, number in zip(span, numbers, strict=True):
                    out[i].append(number)
        return out

    def values(tokens: list[Token]) -> list[Token]:
        width = min(group, len(tokens[0]))
        return [
            [x for at in range(0, len(t), width) for x in limited(t[at : at + width], bits)]
            for t in tokens
        ]

    return Store(
        due=(lambda exact: exact - exact % window, lambda exact: max(0, exact - window)),
        rounds=(keys, values),
        # a smallest value and a step, 16 bits each, for `group` numbers
        bits=(
            lambda dim: dim * bits + dim * 2 * 16 / group,
            lambda dim: dim * bits + dim / min(group, dim) * 2 * 16,
        ),
    )


def integers(bits: int, window: int) -> Store:
    """Every token by itself, symmetric around 0, one scale of 16 bits."""

    def rounds(tokens: list[Token]) -> list[Token]:
        out = []
        for token in tokens:
            scale = max(map(abs, token)) / (2 ** (bits - 1) - 1)
            out.append([round(x / scale) * scale if scale else 0.0 for x in token])
        return out

    return _by_token(rounds, lambda dim: dim * bits + 16, window)


#: Bits of the significand, the implicit one included; the smallest normal exponent; the largest.
FORMATS = {
    "e4m3": (4, -6, 448.0, 8),
    "e5m2": (3, -14, 57344.0, 8),
    "fp16": (11, -14, 65504.0, 16),
    "bf16": (8, -126, (2 - 2**-7) * 2.0**127, 16),
}


def floats(form: str, window: int) -> Store:
    """The nearest number of a format, of two as near the even one; the largest beyond it."""
    rounds = lambda tokens: [[short(x, form) for x in token] for token in tokens]  # noqa: E731
    return _by_token(rounds, lambda dim: dim * FORMATS[form][3], window)


def short(x: float, form: str) -> float:
    """The nearest number of a format."""
    digits, smallest, largest, _ = FORMATS[form]
    x = float(np.float32(x))  # traces have no wider numbers; torch rounds to float32 first
    if abs(x) > largest:
        return math.copysign(largest, x)
    exponent = max(math.frexp(x)[1] - 1, smallest)
    unit = 2.0 ** (exponent - digits + 1)
    return round(x / unit) * unit


def nvfp4(window: int) -> Store:
    """Blocks of 16 channels: the nearest of 15 numbers times a scale that is an e4m3 number."""
    magnitudes = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

    def code(x: float) -> float:
        best = min(abs(abs(x) - m) for m in magnitudes)
        near = [i for i, m in enumerate(magnitudes) if abs(abs(x) - m) == best]
        return math.copysign(magnitudes[next((i for i in near if i % 2 == 0), near[0])], x)

    def rounds(tokens: list[Token]) -> list[Token]:
        out = []
        for token in tokens:
            numbers: Token = []
            for at in range(0, len(token), 16):
                block = token[at : at + 16]
                scale = short(max(map(abs, block)) / 6, "e4m3")
                numbers += [code(x / scale) * scale if scale else 0.0 for x in block]
            out.append(numbers)
        return out

    return _by_token(rounds, lambda dim: dim * 4 + 8 * -(-dim // 16), window)


def llama_cpp(bits: int) -> Store:
    """Blocks of 32 channels in float32, one number at a time: q8_0 or q4_0 of ggml-quants.c."""
    one = np.float32

    def block(numbers: Token) -> Token:
        x = [one(number) for number in numbers]
        largest = max(x, key=abs)  # the first of equals
        d = abs(largest) / one(127) if bits == 8 else largest / one(-8)
        scale = float(np.float16(d))
        codes = []
        for number in x if scale else ():  # 1 / d may be infinite where it is 0
            scaled = number * (one(1) / d)
            if bits == 8:  # C's roundf: the nearest integer, halves away from 0
                size = math.floor(abs(float(scaled)) + 0.5)
                codes.append(math.copysign(size, scaled))
            else:
                codes.append(min(15, math.trunc(float(scaled + one(8.5)))) - 8)
        return [float(code * scale) for code in codes] or [0.0] * len(x)

    def rounds(tokens: list[Token]) -> list[Token]:
        return [[x for at in range(0, len(t), 32) for x in block(t[at : at + 32])] for t in tokens]

    return _by_token(rounds, lambda dim: dim * bits + 16 * -(-dim // 32), 0)


def kvquant(bits: int, group: int, outliers: float) -> Store:
    """Limits without the numbers farthest from the median, which stay as they are."""

    def vector(numbers: Token) -> Token:
        median = sorted(numbers)[(len(numbers) - 1) // 2]
        order = sorted(range(len(numbers)), key=lambda i: (-abs(numbers[i] - median), i))
        inner = sorted(order[round(outliers * len(numbers)) :])
        rounded = dict(zip(inner, limited([numbers[i] for i in inner], bits), strict=True))
        return [rounded.get(i, x) for i, x in enumerate(numbers)]

    def keys(tokens: list[Token]) -> list[Token]:
        out: list[Token] = []
        for start in range(0, len(tokens), group):
            channels = [vector(list(x)) for x in zip(*tokens[start : start + group], strict=True)]
            out += [list(token) for token in zip(*channels, strict=True)]
        return out

    def stored(n: int) -> float:
        return n * bits + 2 * 16 + round(outliers * n) * (16 + 16)

    return Store(
        due=(lambda exact: exact - exact % group, lambda exact: exact),
        rounds=(keys, lambda tokens: [vector(token) for token in tokens]),
        bits=(lambda dim: dim * stored(group) / group, stored),
    )


def turboquant(
    bits: int,
    window: int,
    seed: int,
    *,
    prod: bool = False,
    hadamard: bool = False,
    unit: bool = False,
    uniform: bool = False,
) -> Store:
    """Algorithms 1 and 2 of TurboQuant: codes of the rotated unit vector, and signs of the rest."""

    def algorithm_1(x: Floats, bits: int) -> Floats:
        dim = len(x)
        rotation = walsh(dim) if hadamard else rotated(gaussians(dim, seed, 0))
        levels = lloyd_max(dim, bits)
        code = np.array([min(levels, key=lambda c: (abs(y - c), c)) for y in rotation @ x])
        return np.asarray(rotation.T @ (code / np.linalg.norm(code) if unit else code))

    def token(numbers: Token, residual: bool) -> Token:
        length = float(np.linalg.norm(numbers))
        if length == 0:
            return numbers
        x = np.array(numbers) / length
        if not residual:
            return (length * algorithm_1(x, bits)).tolist()
        first = algorithm_1(x, bits - 1)
        rest = x - first
        s = gaussians(len(x), seed, 1)
        signs = np.array([1.0 if y >= 0 else -1.0 for y in s @ rest])
        qjl = math.sqrt(math.pi / 2) / len(x) * np.linalg.norm(rest) * (s.T @ signs)
        return (length * (first + qjl)).tolist()

    due: Callable[[int], int] = lambda exact: max(0, exact - window)  # noqa: E731
    return Store(
        due=(due, due),
        rounds=(
            lambda tokens: [token(x, prod) for x in tokens],
            lambda tokens: [
                limited(x, bits) if uniform else token(x, residual=False) for x in tokens
            ],
        ),
        bits=(
            lambda dim: dim * bits + (32 if prod else 16),
            lambda dim: dim * bits + (32 if uniform else 16),
        ),
    )


def gaussians(dim: int, seed: int, which: int) -> Floats:
    """The matrix that a seed stands for: 0 for the rotation, 1 for the signs."""
    return np.random.default_rng([seed, dim, which]).standard_normal((dim, dim))


def rotated(matrix: Floats) -> Floats:
    """Gram-Schmidt: orthonormal columns."""
    columns: list[Floats] = []
    for column in matrix.T:
        rest = column
        for _ in range(2):
            rest = rest - sum(((c @ rest) * c for c in columns), np.zeros(len(column)))
        columns.append(rest / np.linalg.norm(rest))
    return np.array(columns).T


def walsh(dim: int) -> Floats:
    """Entry (i, j) is negative where i and j share an odd number of bits."""
    sign = [[(-1.0) ** (i & j).bit_count() for j in range(dim)] for i in range(dim)]
    return np.array(sign) / math.sqrt(dim)


@cache
def lloyd_max(dim: int, bits: int) -> list[float]:
    """Levels that are the means of their cells, by Gauss-Legendre sums over each cell."""
    nodes, weights = np.polynomial.legendre.leggauss(60)

    def mean(low: float, high: float) -> float:
        # x = sin(t), whose density is cos(t)^(d - 2)
        a, b = math.asin(low), math.asin(high)
        t = (a + b) / 2 + (b - a) / 2 * nodes
        density = weights * np.cos(t) ** (dim - 2)
        return float((density * np.sin(t)).sum() / density.sum())

    levels = [(2 * i + 1) / 2**bits - 1 for i in range(2**bits)]
    for _ in range(3000):
        edges = [-1.0, *((a + b) / 2 for a, b in pairwise(levels)), 1.0]
        before, levels = levels, [mean(a, b) for a, b in pairwise(edges)]
        if max(abs(a - b) for a, b in zip(before, levels, strict=True)) < 1e-13:
            break
    return levels


def _by_token(
    rounds: Callable[[list[Token]], list[Token]], bits: Callable[[int], float], window: int
) -> Store:
    """Keys and values alike, one by one behind a window."""
    due: Callable[[int], int] = lambda exact: max(0, exact - window)  # noqa: E731
    return Store((due, due), (rounds, rounds), (bits, bits))


def limited(numbers: Token, bits: int) -> Token:
    """The nearest of 2^bits levels between the smallest and the largest of the numbers."""
    low = min(numbers)
    step = (max(numbers) - low) / (2**bits - 1)
    return [low + step * round((x - low) / step) if step else low for x in numbers]


@dataclass
class Stored:
    """Keys and values of layers as they are stored after some row.

    queries [layer, qhead, row, dim]. keys, values [layer, head, pos, dim]: rounded where they are,
    else exact. after [2, layer, head, pos]: the row after which, NEVER before that. first: after no
    earlier row.
    """

    store: Store
    queries: Floats
    keys: Floats
    values: Floats
    first: int
    after: Ints = field(init=False)
    states: dict[tuple[int, int], tuple[State, set[int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.keys, self.values = self.keys.copy(), self.values.copy()
        self.after = np.full((2, *self.keys.shape[:3]), NEVER, np.int32)

    def round(self, layer: int, head: int, row: int, live: Sequence[int]) -> None:
        """After row `row`, and the event after it: the oldest exact entries leave the window."""
        store = self.store.of(layer)
        if store.merges is not None:
            state, left = self.states.setdefault((layer, head), ({}, set()))
            keys, values = self.keys[layer, head], self.values[layer, head]
            gone = [p for p in range(row + 1) if p not in live and p not in left]
            left.update(gone)
            pairs = [[(keys[p].tolist(), values[p].tolist()) for p in of] for of in (gone, live)]
            for at, new in store.merges(state, *pairs).items():
                keys[live[at]], values[live[at]] = new
                self.after[:, layer, head, live[at]] = row
            return
        if row < self.first or (store.once and row > self.first):
            return
        pruned: list[int] = []
        if store.prunes is not None and live:
            group = self.queries.shape[1] // self.keys.shape[1]
            queries = self.queries[layer, head * group : (head + 1) * group, : row + 1]
            pruned = store.prunes(queries.tolist(), self.keys[layer, head, live].tolist())
        for which, numbers in enumerate((self.keys, self.values)):
            after = self.after[which, layer, head]
            exact = [p for p in live if after[p] == NEVER]
            gone = exact[: store.due[which](len(exact))]
            if gone:
                tokens = [numbers[layer, head, p].tolist() for p in gone]
                for p, token in zip(gone, store.rounds[which](tokens), strict=True):
                    numbers[layer, head, p] = token
                    numbers[layer, head, p, [] if which else pruned] = 0
                    after[p] = row

    def event(self, event: Event) -> None:
        """The same for a layer of the naive replay; later scores see the rounded keys."""
        for head, live in enumerate(event.live):
            before = self.after[0, event.layer, head].copy()
            self.round(event.layer, head, event.row, live)
            event.keys[head] = self.keys[event.layer, head]
            event.values[head] = self.values[event.layer, head]
            for p in np.flatnonzero(self.after[0, event.layer, head] != before):
                for i in event.qheads(head):
                    event.logits[i, :, p] = event.scale * (event.queries[i] @ event.keys[head, p])


@dataclass(frozen=True)
class Measured:
    """Rows of a trace under a quantizer: error and mass [layer, qhead, row], bits [layer, row].

    held: bits of what is resident when a row attends, its own entry included.
    """

    stored: Stored
    error: Floats
    mass: Floats
    held: Floats


def measured(
    store: Store,
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    evicted_at: npt.ArrayLike,
    *,
    first: int,
    logit: Callable[[float], float],
    sinks: Sequence[float] = (),
) -> Measured:
    """Every row attends to what is resident, as it is stored then.

    logit: of a product of query and key. sinks: of each query head, if it has some.
    """
    queries, keys, values = (np.asarray(x, np.float64) for x in (q, k, v))
    last = np.asarray(evicted_at)
    layers, heads, n, dim = keys.shape
    group = queries.shape[1] // heads
    stored = Stored(store, queries, keys, values, first)
    error, mass = (np.zeros((layers, heads * group, n)) for _ in range(2))
    held = np.zeros((layers, n))
    for layer in range(layers):
        for head in range(heads):
            for row in range(n):
                seen = [p for p in range(row + 1) if last[layer, head, p] >= row]
                after = stored.after[:, layer, head]
                for which in range(2):
                    short = sum(after[which, p] < row for p in seen)
                    held[layer, row] += 16 * dim * (len(seen) - short)
                    held[layer, row] += store.of(layer).bits[which](dim) * short
                for i in range(head * group, (head + 1) * group):
                    query = queries[layer, i, row]
                    sink = [sinks[i]] if len(sinks) else []
                    full = _weights(keys[layer, head, : row + 1] @ query, logit, sink)
                    weights = _weights(stored.keys[layer, head, seen] @ query, logit, sink)
                    exact = full @ values[layer, head, : row + 1]
                    moved = weights @ stored.values[layer, head, seen] - exact
                    size = np.linalg.norm(exact)
                    lost = np.linalg.norm(moved)
                    error[layer, i, row] = lost / size if lost else 0.0
                    mass[layer, i, row] = full[seen].sum() + (1 - full.sum())
                stored.round(layer, head, row, [p for p in seen if last[layer, head, p] > row])
    return Measured(stored, error, mass, held)


def _weights(products: Floats, logit: Callable[[float], float], sink: Sequence[float]) -> Floats:
    """Softmax weights of the entries; a sink takes its share."""
    z = np.array([*map(logit, products.tolist()), *sink])
    weight = np.exp(z - z.max())
    return np.asarray((weight / weight.sum())[: len(products)])
