"""Plans of a page: the model, its prompts, budgets, schedule and sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

#: The largest values that policies made for thousands of tokens take on short traces.
_SMALL = {"window": 8, "lag": 8, "chunk": 8}
#: AMS likewise. Its window and recent entries are not those of the scorer inside.
_SMALL_AMS = {"min_segment": 4, "max_segment": 32, "window": 16, "recent": 8, "min_quota": 1}


@dataclass(frozen=True)
class Sizes:
    """The parameters of policies that go with the lengths of the traces.

    largest, ams: the largest value of a parameter, of all policies, and of AMS itself; what is not
    named keeps the policy's default. recent: what AMS protects. segment: tokens of a fixed
    segment. windows: other windows of AMS. across: the window of policies that drop rows.
    """

    largest: Mapping[str, int] = field(default_factory=dict)
    ams: Mapping[str, int] = field(default_factory=dict)
    recent: int = 32
    segment: int = 128
    windows: tuple[int, ...] = (32, 64, 256)
    across: int | None = None


#: The paper's fixed segment of 128 in the ratio of its window.
SMALL = Sizes(_SMALL, _SMALL_AMS, _SMALL_AMS["recent"], 16, (4, 8, 32), _SMALL["window"])

#: Tasks of the prompts on real text, in turn: of texts the response is given, too.
REAL = ("text", "needle", "text", "quote", "text", "chat", "text", "fewshot")


@dataclass(frozen=True)
class Plan:
    """The model, its prompts, and how they are replayed.

    interval, prefill: the one schedule of every policy. presets: a row for each preset too. regret:
    how many of the first prompts regret is measured on, all by default. only: of a page on long
    prompts or long answers, the policies; without regret, claims and calibration. called: what
    `--model` calls such a page. once: the only event is after the prompt. solved: the model in
    docs/qwen-results.jsonl whose right answers are recorded, of at least `least` tokens. sheets:
    those to several questions in one prompt. beside: the plan on whose page the values are, if they
    have none of their own. file: the GGUF file of the model. device: what computes.
    """

    model: str = "tiny"
    prompts: int = 24
    seed: int = 1
    level: int | None = 2  #: of difficulty, for tiny; without one the sizes below
    facts: int = 12
    lines: int = 12
    lengths: tuple[int, ...] = ()  #: in tokens, in turn, for other models
    calibration: int = 0  #: tokens of the text that calibrates, for other models
    budgets: tuple[int, ...] = (32, 48, 64, 96)
    tried: tuple[int, ...] = ()  #: budgets of variants that claims need; all by default
    interval: int = 16
    prefill: bool = False
    presets: bool = True
    regret: int | None = None
    only: tuple[str, ...] = ()
    tasks: tuple[str, ...] = REAL
    response: int | None = None  #: tokens of a text that are the response; a quarter by default
    called: str = ""
    once: bool = False
    solved: str = ""
    least: int = 200
    sheets: bool = False
    beside: str = ""
    file: Path | None = field(default=None, compare=False)
    device: str = field(default="cpu", compare=False)
    sizes: Sizes = field(default=SMALL, hash=False)
    cost: tuple[int, ...] = (1024, 2048, 4096, 8192)

    @property
    def claimed(self) -> bool:
        """Whether what the papers claim is tested; on one event only with variants."""
        return not self.beside and (not self.once or bool(self.tried))

    @property
    def name(self) -> str:
        """What `--model` of docs/results.py calls it."""
        return self.called or self.model

    @property
    def values(self) -> str:
        """The file of its values."""
        return "results.parquet" if self.name == "tiny" else f"results-{self.name}.parquet"

    def __str__(self) -> str:
        usual = vars(Plan())
        known = (name for name in usual if name not in ("file", "device"))
        given = (f"{x}={vars(self)[x]!r}" for x in known if vars(self)[x] != usual[x])
        return f"Plan({', '.join(given)})"


FULL = Plan()
#: Measuring a long prompt takes three times as long as a short one.
_LENGTHS = tuple(1024 if at in (1, 6, 10, 13, 16, 19) else 512 for at in range(20))
SMOLLM2 = Plan(
    model="smollm2",
    prompts=46,
    lengths=_LENGTHS,
    calibration=2048,
    budgets=(128, 256, 512),
    tried=(256,),
    interval=32,
    prefill=True,
    presets=False,
    regret=10,
    sizes=Sizes(),
)
#: A quarter of AMS' own sizes, for budgets of a quarter of its paper's.
QUARTER = Sizes(ams={"min_segment": 4, "max_segment": 64, "window": 32, "recent": 8})
#: All positions of SmolLM2, under policies of papers; `kvzip` needs as many positions again.
LONG = Plan(
    model="smollm2",
    prompts=6,
    lengths=(8192,),
    budgets=(256, 512, 1024),
    prefill=True,
    only=(
        *("full", "random", "streaming_llm", "h2o", "tova", "snapkv", "pyramidkv", "adakv+snapkv"),
        *("expected_attention", "keydiff", "gkv", "ams", "cake"),
    ),
    tasks=("text", "needle"),
    response=64,
    called="8k",
    once=True,
    sizes=Sizes(),
    cost=(),
)
#: Answers that need reasoning, and are right with the full cache.
QWEN = Plan(
    model="Qwen2.5-Coder-1.5B-Instruct",
    prompts=40,
    budgets=(64, 128),
    interval=32,
    prefill=True,
    only=(*LONG.only, "rkv", "ams+expected_attention"),
    called="qwen-1.5b",
    solved="1.5B",
    sizes=QUARTER,
    cost=(),
)
#: The first of these answers, given to smaller models: whether these predict the ranking.
QWEN_SMALL = replace(
    QWEN, model="Qwen2.5-Coder-0.5B-Instruct", prompts=12, called="qwen-0.5b", beside=QWEN.called
)
QWEN_SMOLLM2 = replace(QWEN_SMALL, model="smollm2", called="qwen-smollm2")
#: Long answers, to three questions each: budgets and sizes of the papers. Those of at least 620
#: tokens hold, with their prompts, twice the largest budget.
QWEN_SHEETS = replace(
    QWEN,
    prompts=7,
    budgets=(128, 256, 384),
    called="qwen-1.5b-sheets",
    least=620,
    sheets=True,
    sizes=Sizes(),
)
QWEN_LONG = replace(
    LONG,
    model=QWEN.model,
    prompts=12,
    lengths=(8192, *(4096,) * 4),
    tried=(512,),
    only=(*LONG.only, "knorm", "adakv+expected_attention"),
    called="qwen-1.5b-8k",
)
PLANS = {
    "tiny": FULL,
    "smollm2": SMOLLM2,
    **{
        plan.called: plan for plan in (LONG, QWEN, QWEN_SMALL, QWEN_SMOLLM2, QWEN_SHEETS, QWEN_LONG)
    },
}
_FEW = ("full", "random", "snapkv", "tova")
_LEAST = Plan(prompts=2, level=None, budgets=(32,), prefill=True, only=_FEW, cost=())
#: The least that makes a page: a look at it, and the test of the one on tiny.
SMALLEST = {
    "tiny": Plan(prompts=2, level=None, budgets=(32,), cost=(128, 256)),
    "smollm2": replace(
        SMOLLM2,
        prompts=2,
        lengths=(320,),
        calibration=320,
        budgets=(128,),
        tried=(128,),
        cost=(128, 256),
    ),
    "8k": replace(_LEAST, only=LONG.only, called="8k", once=True),
    **{
        plan.called: replace(
            _LEAST,
            called=plan.called,
            once=plan.once,
            beside=plan.beside,
            tried=plan.tried and _LEAST.budgets,
        )
        for plan in (QWEN, QWEN_SMALL, QWEN_SMOLLM2, QWEN_SHEETS, QWEN_LONG)
    },
}
