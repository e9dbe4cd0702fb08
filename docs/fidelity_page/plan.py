"""Plan of the runs: prompts that no earlier page has seen, policies, budgets, one schedule."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from kvsim import Policy
from results_page.plan import SMALL, Plan, Sizes
from results_page.policies import scaled

#: Policies of the closed loop, each of another kind.
NAMES = (
    *("random", "streaming_llm", "h2o", "tova", "snapkv", "knorm", "keydiff"),
    *("expected_attention", "gkv", "ams", "pyramidkv", "adakv+snapkv"),
)


@dataclass(frozen=True)
class Study:
    """Prompts of a model and the budgets at which policies run over them.

    prompts: a plan of the results page, with another seed. new_tokens: of responses that the model
    writes.
    """

    prompts: Plan
    budgets: tuple[int, ...]
    new_tokens: int

    @cached_property
    def policies(self) -> list[Policy]:
        """The policies, with parameters that fit the prompts."""
        return [scaled(self.prompts.sizes, name) for name in NAMES]


TINY = Study(Plan(prompts=100, seed=7), (96, 192, 288, 384), 320)
SMOLLM2 = Study(
    Plan(
        model="smollm2",
        prompts=40,
        seed=7,
        lengths=(512,),
        interval=32,
        prefill=True,
        presets=False,
        sizes=Sizes(SMALL.largest | {"window": 16}, SMALL.ams, SMALL.recent, 16),
    ),
    (64, 128, 192, 320),
    24,
)
STUDIES = {"tiny": TINY, "smollm2": SMOLLM2}
