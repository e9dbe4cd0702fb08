"""Reading as plain loops in float64: which pages a row reads, its output, and the bytes.

Written from the definition and the papers. Pages are runs of consecutive resident entries of a KV
head, row r sees p iff p <= r <= evicted_at[p], and a row's page holds its own entry. Shapes: q
[qhead, row, dim], k and v [head, pos, dim] of one layer.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Pages = list[list[int]]


@dataclass(frozen=True)
class Layer:
    """One layer, what its heads evict, and its formula."""

    q: Floats
    k: Floats
    v: Floats
    evicted_at: npt.NDArray[np.int32]
    scale: float
    softcap: float | None = None
    sinks: Sequence[float] = ()
    prompt_len: int = 1

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return len(self.q) // len(self.k)

    def resident(self, head: int, row: int) -> list[int]:
        """Positions that a row can read, ascending."""
        return [p for p in range(row + 1) if self.evicted_at[head, p] >= row]

    def pages(self, head: int, row: int, size: int) -> Pages:
        """Runs of `size` resident entries; the last may be shorter."""
        live = self.resident(head, row)
        return [live[i : i + size] for i in range(0, len(live), size)]

    def logits(self, qhead: int, row: int, positions: Sequence[int]) -> Floats:
        """Logits of a query over positions."""
        z = self.scale * (self.k[qhead // self.group, list(positions)] @ self.q[qhead, row])
        return z if self.softcap is None else self.softcap * np.tanh(z / self.softcap)

    def attention(self, qhead: int, row: int, positions: Sequence[int]) -> Floats:
        """Softmax over positions, without sinks."""
        weight = self.logits(qhead, row, positions)
        weight = np.exp(weight - weight.max())
        return np.asarray(weight / weight.sum())


#: Scores of pages for a query head and a row.
Score = Callable[[Layer, int, int, Pages], list[float]]


def bounds(layer: Layer, qhead: int, row: int, pages: Pages) -> list[float]:
    """Quest, Algorithm 1: the sum over channels of max(q_i min_i, q_i max_i)."""
    query, out = layer.q[qhead, row], []
    for page in pages:
        keys = layer.k[qhead // layer.group, page]
        low, high = keys.min(0), keys.max(0)
        out.append(sum(max(a * b, a * c) for a, b, c in zip(query, low, high, strict=True)))
    return out


def exact(layer: Layer, qhead: int, row: int, pages: Pages) -> list[float]:
    """Attention over what is resident, of pages of one entry."""
    return layer.attention(qhead, row, [page[0] for page in pages]).tolist()


def labels(rows: int, count: int, bits: int) -> Score:
    """Double Sparsity: products of labels, whose channels have the largest mean |q k| of rows."""

    def rounded(x: Floats) -> Floats:
        if bits == 16:
            return x
        low, high = min(x), max(x)
        step = (high - low) / (2**bits - 1) or 1.0
        return np.array([low + step * round((number - low) / step) for number in x])

    def score(layer: Layer, qhead: int, row: int, pages: Pages) -> list[float]:
        head = qhead // layer.group
        size = np.zeros(layer.k.shape[-1])
        for other in range(head * layer.group, (head + 1) * layer.group):
            for at in range(rows):
                size += abs(layer.q[other, at] * layer.k[head, at])
        heavy = sorted(range(len(size)), key=lambda i: (-size[i], i))[:count]
        query = rounded(layer.q[qhead, row, heavy])
        return [float(query @ rounded(layer.k[head, page[0], heavy])) for page in pages]

    return score


def representatives(local: int, count: int) -> Score:
    """InfLLM: products with the mean of keys that the `local` rows behind them attended to most."""

    def score(layer: Layer, qhead: int, row: int, pages: Pages) -> list[float]:
        head, n = qhead // layer.group, layer.k.shape[1]
        qheads = range(head * layer.group, (head + 1) * layer.group)
        out = []
        for page in pages:
            votes = {
                p: sum(
                    float(layer.q[other, later] @ layer.k[head, p])
                    for later in range(p + 1, min(p + local, n - 1) + 1)
                    for other in qheads
                )
                for p in page
            }
            best = sorted(page, key=lambda p: (-votes[p], p))[:count]
            out.append(float(layer.q[qhead, row] @ layer.k[head, best].mean(0)))
        return out

    return score


def ends(page: int, sink: int, local: int) -> Callable[[Pages], set[int]]:
    """Whole pages with the first entries, and with the last of a cache, before the row's own."""

    def always(pages: Pages) -> set[int]:
        first = {i for i in range(len(pages)) if i * page < sink}
        return first | {i for i in range(len(pages)) if (len(pages) - 1 - i - 1) * page < local}

    return always


def estimated(channels: int) -> Score:
    """RocketKV: logits of a page's entries from the largest channels of the group's queries."""

    def score(layer: Layer, qhead: int, row: int, pages: Pages) -> list[float]:
        head = qhead // layer.group
        group = layer.q[head * layer.group : (head + 1) * layer.group, row]
        query, total = layer.q[qhead, row], group.sum(0)
        size = np.abs(group).sum(0)
        used = sorted(range(len(size)), key=lambda c: (-size[c], c))[:channels]
        share = sum(abs(query[c]) for c in used) / sum(abs(query)) if any(query) else 1.0
        out = []
        for page in pages:
            keys = layer.k[head, page]
            z = sum(query[c] * (max if total[c] > 0 else min)(keys[:, c]) for c in used)
            out.append(z * layer.scale / math.sqrt(share or 1.0))
        return out

    return score


def coded(subspaces: int, bits: int, iterations: int, sink: int) -> Score:
    """PQCache: logits of keys whose parts are the nearest means of k-means over the prompt's."""

    def nearest(x: Floats, centroids: list[Floats]) -> int:
        distance = [sum((a - b) ** 2 for a, b in zip(x, c, strict=True)) for c in centroids]
        return distance.index(min(distance))

    def learned(points: list[Floats]) -> list[Floats]:
        size = min(2**bits, len(points))
        centroids = [points[i * len(points) // size] for i in range(size)]
        for _ in range(iterations):
            code = [nearest(x, centroids) for x in points]
            for c in set(code):
                members = [x for x, of in zip(points, code, strict=True) if of == c]
                centroids[c] = sum(members[1:], members[0]) / len(members)
        return centroids

    books: dict[tuple[int, int, int], list[Floats]] = {}

    def score(layer: Layer, qhead: int, row: int, pages: Pages) -> list[float]:
        head = qhead // layer.group
        size = layer.k.shape[-1] // subspaces
        parts = [slice(i * size, (i + 1) * size) for i in range(subspaces)]
        for i, part in enumerate(parts):
            if (id(layer), head, i) not in books:
                held = layer.resident(head, layer.prompt_len)[:-1]
                held = held[min(sink, len(held) - 1) :]
                books[id(layer), head, i] = learned([layer.k[head, p, part] for p in held])
        out = []
        for (p,) in pages:
            z = 0.0
            for i, part in enumerate(parts):
                book = books[id(layer), head, i]
                z += layer.q[qhead, row, part] @ book[nearest(layer.k[head, p, part], book)]
            out.append(z * layer.scale)
        return out

    return score


def unskipped(size: int, threshold: float, scale: float | None) -> Score:
    """BLASST: how far a block's largest logit lies above ln(threshold) below the largest so far."""

    def margin(layer: Layer, qhead: int, row: int, pages: Pages) -> list[float]:
        if scale is None:
            least = math.log(threshold)
        else:
            least = min(0.0, math.log(scale / (len(pages) * size)))
        running, out = -math.inf, []
        for page in pages:
            largest = max(layer.logits(qhead, row, page))
            running = max(running, largest)
            out.append(largest - running - least)
        return out

    return margin


@dataclass(frozen=True)
class Sampled:
    """MagicPIG: SimHash of what is neither first nor last, less its mean when the first row reads.

    Scores are at least 0 where enough of the tables agree; weights are 1 / u, of which `logs` has
    the logarithms.
    """

    bits: int
    tables: int
    collisions: int
    epsilon: float
    sink: int
    local: int
    seed: int

    def middle(self, layer: Layer, head: int, row: int) -> list[int]:
        """Positions of the entries that are hashed."""
        live = layer.resident(head, row)
        return live[self.sink : max(self.sink, len(live) - 1 - self.local)]

    def key(self, layer: Layer, head: int, p: int) -> Floats:
        """A key less the mean."""
        first = layer.k[head, self.middle(layer, head, layer.prompt_len)]
        return np.asarray(layer.k[head, p] - (first.mean(0) if len(first) else 0.0))

    def __call__(self, layer: Layer, qhead: int, row: int, pages: Pages) -> list[float]:
        """In how many tables each page, of one entry, shares the bucket, less those needed."""
        head, planes = qhead // layer.group, np.random.default_rng([self.seed, 0])
        tables = planes.standard_normal((self.tables, layer.k.shape[-1], self.bits))
        middle, out = self.middle(layer, head, row), []
        for (p,) in pages:
            shared = 0
            for table in tables:
                of_query = [float(x) > 0 for x in layer.q[qhead, row] @ table]
                shared += of_query == [float(x) > 0 for x in self.key(layer, head, p) @ table]
            out.append(shared + 0.5 - self.collisions if p in middle else math.inf)
        return out

    def logs(self, layer: Layer, qhead: int, row: int) -> dict[int, float]:
        """-ln u by position; u by the sum over tables that share the bucket."""
        head, out = qhead // layer.group, {}
        for p in self.middle(layer, head, row):
            query, key = layer.q[qhead, row], self.key(layer, head, p)
            size = float(np.linalg.norm(query) * np.linalg.norm(key))
            cos = float(query @ key) / size if size else 0.0
            share = (1 - math.acos(max(-1.0, min(1.0, cos))) / math.pi) ** self.bits
            u = sum(
                math.comb(self.tables, j) * share**j * (1 - share) ** (self.tables - j)
                for j in range(self.collisions, self.tables + 1)
            )
            out[p] = -math.log(max(u + self.epsilon, 1e-300))
        return out


def softmax_between(
    always: Callable[[Pages], set[int]],
) -> Callable[[list[float], Pages], list[float]]:
    """Softmax over pages that are not always read; 0 of the others."""

    def vote(scores: list[float], pages: Pages) -> list[float]:
        fixed = always(pages)
        free = [z for i, z in enumerate(scores) if i not in fixed]
        total = sum(math.exp(z - max(free)) for z in free)
        return [
            0.0 if i in fixed else math.exp(z - max(free)) / total for i, z in enumerate(scores)
        ]

    return vote


def attention_of_entries(scores: list[float], pages: Pages) -> list[float]:
    """Softmax over entries that have the logit of their page; that of one entry for each page."""
    of_entries = [
        math.exp(z - max(scores)) for z, page in zip(scores, pages, strict=True) for _ in page
    ]
    return [math.exp(z - max(scores)) / sum(of_entries) for z in scores]


def rocket_split(prompt: int, budget: int) -> int:
    """The token budget t of RocketKV whose first stage leaves `budget` entries, by search."""

    def stays(tokens: float) -> float:
        c = prompt / tokens
        return prompt / c ** min(0.2 + 0.06 * math.log2(c), 0.8)

    low, high = 1e-9, float(prompt)
    for _ in range(200):  # more tokens, more stay
        middle = math.sqrt(low * high)
        low, high = (middle, high) if stays(middle) < budget else (low, middle)
    return max(1, round(low))


@dataclass(frozen=True)
class Rule:
    """Sparse attention: scores of pages, entries of a page, and how many pages are read.

    p: the share of the attention that is read, instead of a number of pages. threshold: pages are
    read whose score is at least 0 for a query head. always: pages that are read in addition, of a
    KV head. bits: of a page's summary that are stored, and read for a row. keys: all are read.
    weights: logarithms by position, 0 of others.
    """

    score: Score
    page: int
    heads: str
    count: int = 0
    p: float | None = None
    threshold: bool = False
    keys: bool = False
    weights: Callable[[Layer, int, int], dict[int, float]] = lambda *_: {}
    always: Callable[[Pages], set[int]] = lambda _: set()
    bits: tuple[float, float] = (0.0, 0.0)
    #: how scores of query heads become those that their mean is taken of
    vote: Callable[[list[float], Pages], list[float]] = lambda scores, _: scores

    def sharing(self, layer: Layer, qhead: int) -> list[int]:
        """The query heads that read what this one reads."""
        if self.heads == "query":
            return [qhead]
        first = qhead // layer.group * layer.group
        of_kv = list(range(first, first + layer.group))
        return of_kv if self.heads == "kv" else list(range(len(layer.q)))

    def scores(self, layer: Layer, qhead: int, row: int) -> list[float]:
        """Mean scores of pages; the largest where a threshold decides."""
        every = []
        for other in self.sharing(layer, qhead):
            pages = layer.pages(other // layer.group, row, self.page)
            one = self.score(layer, other, row, pages)
            every.append(one if self.heads == "query" else self.vote(one, pages))
        if self.threshold:
            return [max(of_page) for of_page in zip(*every, strict=True)]
        return [sum(of_page) / len(every) for of_page in zip(*every, strict=True)]

    def differs(
        self, layer: Layer, qhead: int, row: int, chosen: set[int], tolerance: float
    ) -> str:
        """What is wrong with the pages that a row reads; empty if nothing, up to rounding."""
        scores = self.scores(layer, qhead, row)
        pages = layer.pages(qhead // layer.group, row, self.page)
        order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
        fixed = self.always(pages)
        if self.threshold:
            expected = {i for i, score in enumerate(scores) if score >= 0} | fixed
            if all(abs(scores[i]) < tolerance for i in chosen ^ expected):
                return ""
        elif self.p is None:
            free = [i for i in order if i not in fixed]
            expected = {*free[: self.count], *fixed}
        else:
            count, mass = 0, 0.0
            while count < len(order) and mass < self.p - tolerance:
                mass += scores[order[count]]
                count += 1
            expected = set(order[:count])
            if abs(sum(scores[i] for i in chosen) - self.p) < tolerance:  # one more or less
                expected = set(order[: len(chosen)])
        if chosen == expected:
            return ""
        size = max(map(abs, scores))
        doubt = [scores[i] for i in chosen ^ expected]
        if len(chosen) == len(expected) and max(doubt) - min(doubt) <= tolerance * size:
            return ""
        return f"row {row}, query head {qhead}: {sorted(chosen)}, expected {sorted(expected)}"


def rule_of(name: str, params: Mapping[str, Any], budget: int) -> Rule:
    """The rule of sparse attention by name."""
    values = {"share": 1.0, "heads": "query", "p": 0.95, "page": 16, **params}
    entries, dim = int(values["share"] * budget), values["dim"]
    if name.startswith("quest"):
        least = 3 if name == "quest@release" else 1
        page = values["page"]
        both = 2 * 16.0 * dim  # two 16-bit numbers per channel
        count = max(least, entries // page)
        return Rule(bounds, page, values["heads"], count, bits=(both, both))
    if name == "double_sparsity":
        rows, count = int(values["calibration"].partition(":")[2]), int(values["channels"] * dim)
        stored = 16.0 * count if values["bits"] == 16 else count * values["bits"] + 32.0
        score = labels(rows, count, values["bits"])
        return Rule(score, 1, values["heads"], max(1, entries), bits=(stored, stored))
    if name == "infllm":
        page, sink = values["page"], values["sink"]
        local = values["local"] or max(1, entries * 2 // 3)
        return Rule(
            representatives(local, values["representatives"]),
            page,
            values["heads"],
            max(1, (entries - sink - local) // page),
            always=ends(page, sink, local),
            bits=(16.0 * dim, 16.0 * dim),
        )
    if name == "pqcache":
        sink = values["sink"]
        local = values["local"] or max(1, (entries - sink) // 2)
        always = ends(1, sink, local)
        code = float(values["subspaces"] * values["bits"])
        return Rule(
            coded(values["subspaces"], values["bits"], values["iterations"], sink),
            1,
            values["heads"],
            max(1, entries - sink - local),
            always=always,
            bits=(code, code),
            vote=softmax_between(always),
        )
    if name == "rocketkv":
        tokens, page, channels = (values[key] for key in ("tokens", "page", "channels"))
        prompt = values["prompt"]
        if tokens is None:
            tokens = rocket_split(prompt, budget) if budget < prompt else 10**6
        ratio = max(1.0, min(budget, prompt) / tokens)
        page = page or (math.ceil(ratio**0.5) if math.ceil(ratio**0.5) <= ratio else 1)
        channels = min(dim, channels or max(1, int(dim * page / ratio)))
        return Rule(
            estimated(channels),
            page,
            "kv",
            max(1, round(tokens / 2) // page),
            # all is read without an estimate; a page of one entry is its own smallest and largest
            bits=(0.0, 0.0)
            if tokens == 10**6
            else (2 * 16.0 * dim if page > 1 else 0.0, 16.0 * channels),
            vote=attention_of_entries,
        )
    if name == "magicpig":
        names = ("bits", "tables", "collisions", "epsilon", "sink", "local", "seed")
        sampled = Sampled(**{key: values[key] for key in names})
        code = float(values["bits"] * values["tables"])
        bits = code, code
        rule = Rule(sampled, 1, "query", threshold=True, weights=sampled.logs, bits=bits)
    elif name == "skip_softmax":
        score = unskipped(values["page"], values["threshold"], values["scale"])
        rule = Rule(score, values["page"], values["heads"], threshold=True, keys=True)
    else:
        assert name in ("topk", "topp")
        p = values["p"] if name == "topp" else None
        rule = Rule(exact, 1, values["heads"], max(1, entries), p=p)
    return rule


def unpacked(bits: npt.NDArray[np.uint8], pages: int) -> set[int]:
    """Which of so many pages a row's bytes mark; the highest bit of a byte is the first page."""
    marked = {
        8 * at + i for at, byte in enumerate(bits.tolist()) for i in range(8) if byte >> (7 - i) & 1
    }
    return {page for page in marked if page < pages}


def outputs(
    layer: Layer, qhead: int, row: int, read: Sequence[int], logs: Mapping[int, float]
) -> tuple[float, float]:
    """Relative error of a row's output over what it reads, and its share of full attention."""
    value = layer.v[qhead // layer.group]

    def over(positions: Sequence[int], logs: Mapping[int, float]) -> tuple[Floats, float]:
        given = np.array([logs.get(p, 0.0) for p in positions])
        weight = np.exp(layer.logits(qhead, row, positions) + given)
        total = weight.sum() + (math.exp(layer.sinks[qhead]) if layer.sinks else 0.0)
        return weight @ value[list(positions)] / total, float(total)

    full, whole = over(range(row + 1), {})
    _, mass = over(sorted(read), {})
    part, _ = over(sorted(read), logs)
    length = float(np.linalg.norm(full))
    return float(np.linalg.norm(part - full)) / length if length else 0.0, mass / whole


def bits_of(
    layer: Layer, read: Mapping[tuple[int, int], set[int]], rule: Rule
) -> tuple[float, float]:
    """Bits resident and read, mean over rows after the prompt, sum over heads.

    read: positions by (query head, row). Numbers take 16 bits. Query heads of one KV head read an
    entry once.
    """
    dim, rows = layer.k.shape[-1], range(layer.prompt_len, layer.k.shape[1])
    held = taken = 0.0
    for row in rows:
        for head in range(len(layer.k)):
            live = layer.resident(head, row)
            pages = len(layer.pages(head, row, rule.page))
            qheads = range(head * layer.group, (head + 1) * layer.group)
            together: set[int] = set().union(*(read[qhead, row] for qhead in qheads))
            keys = live if rule.keys else together
            held += 2 * 16 * dim * len(live) + rule.bits[0] * pages
            taken += 16 * dim * (len(keys) + len(together)) + rule.bits[1] * pages
    return held / len(rows), taken / len(rows)
