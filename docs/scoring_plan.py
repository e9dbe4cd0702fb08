# ruff: noqa: INP001 - a module of a script, in docs/, which is no package
"""The plan of docs/scoring.py, committed before a value was measured.

Of one prompt, which is not in it, the seconds were measured before.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Two policies are equivalent if neither may be worse by more than this share of the other's KL.
MARGIN = 0.10
#: Without a score: random sets (the mean over seeds is one value), the most recent entries, the
#: entries that were attended to most recently, and the most recent ones behind four sinks.
RANDOM, WINDOW, LRU, STREAMING = "random", "window", "lru", "streaming_llm"
UNSCORED = (RANDOM, WINDOW, LRU, STREAMING)
SEEDS = (0, 1, 2)
SCORERS = (
    *("h2o", "tova", "snapkv", "dropkv", "rkv", "gkv", "triattention", "expected_attention"),
    *("capkv", "keydiff", "knorm", "lagkv"),
)
#: A scorer whose heads share a budget, of which the second paper speaks.
ALLOCATED = "adakv+snapkv"
#: Protected: nothing beyond the rows of a scorer's own window; as many of the first and of the last
#: entries as a tenth of the budget, at least four (arXiv 2605.18053); or the prompt, with as many
#: of the last, and the budget over the prompt (arXiv 2609.03430).
NOTHING, ENDS, PROMPT = "nothing", "ends", "prompt"
#: Budgets as shares: of prompt and response, or of the response if the prompt is protected.
SHARES = (0.125, 0.25, 0.5)
#: Tokens of a scorer's window, and of LagKV's partitions; the smallest budget.
WINDOW_ROWS, LEAST = 8, 12
#: Tokens of the answer to a question of several, at most.
TURN_TOKENS = 12


@dataclass(frozen=True)
class Workload:
    """Prompts of a kind on a model, and what is replayed over them.

    kind: names the function that makes a prompt. interval: rows between events, one of which
    follows the prompt. response: tokens of a given response, or the most of one that is generated.
    protections: without `PROMPT` where hardly more than the prompt is there to evict.
    """

    kind: str
    model: str = "smollm2"
    interval: int = 32
    response: int = 16
    protections: tuple[str, ...] = (NOTHING, ENDS)
    shares: tuple[float, ...] = SHARES
    scorers: tuple[str, ...] = SCORERS
    seeds: tuple[int, ...] = SEEDS
    prompts: int = 24

    @property
    def name(self) -> str:
        """The workload as `--workloads` calls it."""
        given = [] if self.model == "smollm2" else [self.model]
        return "-".join([*given, self.kind, *[str(self.interval)] * (self.interval == 8)])

    @property
    def policies(self) -> tuple[str, ...]:
        """The policies of tables, random first."""
        return (*UNSCORED, *self.scorers, ALLOCATED)


EVERY = (NOTHING, ENDS, PROMPT)
FEWER = ("h2o", "tova", "snapkv", "rkv", "triattention", "expected_attention", "capkv", "keydiff")
#: In the order in which they are measured.
WORKLOADS = {
    each.name: each
    for each in (
        Workload("needles"),
        Workload("answers", response=160, protections=EVERY),
        Workload("needles", "tiny", 16, response=32),
        Workload("answers", "tiny", 16, response=160, protections=EVERY),
        Workload("turns", response=TURN_TOKENS),
        Workload("documents", response=128, protections=EVERY),
        Workload(
            *("answers", "1.5b"),
            response=160,
            protections=EVERY,
            shares=SHARES[:2],
            scorers=FEWER,
            seeds=SEEDS[:2],
        ),
        Workload("sheets", response=320, protections=EVERY),
        Workload("answers", interval=8, response=160, protections=EVERY),
    )
}
SMALLEST = Workload(
    "answers", "tiny", 16, 160, EVERY, SHARES[1:2], ("snapkv", "keydiff"), SEEDS[:1], 1
)
#: What the papers claim, and how it is tested on a workload: each sentence by one test over its
#: prompts, at all budgets together, at 5 %. "Not worse" and "equivalent" are by `MARGIN`.
CLAIMS = {
    "R1": "With the prompt protected, random sets are as good as the strongest scorer "
    "(arXiv 2609.03430, abstract, 4.2): `random` is not worse than any scorer. Against it: one "
    "scorer is better than `random`, p times the number of scorers.",
    "R2": "Protecting the prompt closes most of the gap between scorers and random sets (5.1): the "
    "mean log ratio of `random` to the scorers is less than half of that with nothing protected. "
    "Against it: it is more than half.",
    "R3": "With the prompt protected, the most recent entries come near the best scorer (5.1): "
    "`window` is not worse than any scorer. Against it: as for R1.",
    "R4": "A fact that is stated once is what a score still finds, R-KV's above all (5.3): `rkv` "
    "is better than `random` with nothing protected, on needles and turns. Against it: worse. "
    "The paper's fact is in the response, behind a protected prompt.",
    "P1": "Without protection all policies collapse, and a tenth of the budget at both ends mends "
    "it (arXiv 2605.18053, abstract): each of `random`, `lru`, `h2o`, `snapkv` and `adakv+snapkv` "
    "is better with protected ends. Against it: one of them is worse, p times five.",
    "P2": "With protected ends, policies are equivalent to LRU when they evict every 32 rows "
    "(abstract): `random`, `streaming_llm`, `h2o`, `snapkv` and `adakv+snapkv` are. Against it: "
    "one differs from it by more than the margin, p times ten.",
    "P3": "Protection dominates, scores are secondary (abstract): what protecting the ends gains "
    "`lru` is more than any of these policies differs from it then. Against it: it is less than "
    "one differs, p times ten.",
    "P4": "When they evict every 8 rows, `h2o`, `snapkv` and `adakv+snapkv` are better than `lru` "
    "(abstract), with protected ends. Against it: one is worse, p times three.",
    "P5": "Budgets by head add to a score (abstract): `adakv+snapkv` is better than `snapkv` with "
    "protected ends. Against it: it is worse.",
}
