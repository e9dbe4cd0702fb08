"""What the papers say of policies, and whether it is so on the traces of a Table.

A claim is tested where the Table has the policies and metrics that it is about, at each budget that
was asked for. It holds where the 95 % interval of the paired difference over prompts lies on the
claimed side of zero in every case, does not hold where it lies on the other side in any case, and
otherwise cannot be said. That is an answer about these traces, not about the paper's models.

Numbers are those of the lists of claims in docs/results.md, where more of them are tested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from kvsim.metrics import METRICS
from kvsim.statistics import Interval, per_prompt

Floats = NDArray[np.float64]

HOLDS, NOT, OPEN = "holds", "does not hold", "cannot be said"


@dataclass(frozen=True)
class Claim:
    """One claim and its cases, each a number per prompt that is above 0 where the claim is right.

    number: such as Q1. paper: short name. says: the claim in words. tested: what the number is.
    """

    number: str
    paper: str
    says: str
    tested: str
    cases: Mapping[str, Interval]

    @property
    def verdict(self) -> str:
        """`HOLDS`, `NOT` or `OPEN`."""
        if any(one.high < 0 for one in self.cases.values()):
            return NOT
        return HOLDS if all(one.low > 0 for one in self.cases.values()) else OPEN


def claims(table: pl.DataFrame) -> list[Claim]:
    """Every claim that the Table has numbers for, in the order of the papers.

    Args:
        table: of `kvsim.measure` or a sweep.
    """
    values = _Values(per_prompt(table))
    found = [claim for test in (_ams, _gkv, _expected) for claim in test(values)]
    return [claim for claim in found if claim.cases]


@dataclass(frozen=True)
class _Values:
    """One value per prompt and result, and how policies differ in them."""

    frame: pl.DataFrame

    @property
    def policies(self) -> list[str]:
        return [name for name in self.frame["policy"].unique(maintain_order=True) if name]

    def variants(self, metric: str) -> list[str]:
        return self.frame.filter(metric=metric)["variant"].unique(maintain_order=True).to_list()

    def gap(
        self, more: str, less: str, metric: str, variants: Mapping[str, str] | None = None
    ) -> dict[str, Interval]:
        """`more` minus `less` at each budget; `variants` by what a case is called."""
        cases = {}
        for called, variant in (variants or {"": METRICS[metric].main}).items():
            of_metric = self.frame.filter(metric=metric, variant=variant)
            pairs = of_metric.filter(policy=more).join(
                of_metric.filter(policy=less), on=["asked", "trace"], maintain_order="left"
            )
            for (asked,), found in pairs.group_by("asked", maintain_order=True):
                gaps = (found["value"] - found["value_right"]).to_numpy().astype(np.float64)
                one = Interval.of(gaps)
                if one.n:
                    cases[", ".join(filter(None, (f"budget {asked}", called)))] = one
        return cases

    def beyond_chance(self, metric: str, keep: Callable[[str], bool]) -> dict[str, Interval]:
        """A property of the traces minus what chance gives, for each variant to keep."""
        cases = {}
        for variant in filter(keep, self.variants(metric)):
            found = self.frame.filter(metric=metric, variant=variant)
            one = Interval.of((found["value"] - found["chance"]).to_numpy().astype(np.float64))
            if one.n:
                cases[variant] = one
        return cases


#: What AMS says of a scorer (`name`) and the same under AMS (`made`): number, claim, what is
#: compared, which of the two has more of it, and the metric.
_SEGMENTS = (
    ("Q1", "Segments keep regions alive that {name} alone wipes out",
     "region wipe-out rate, over all lengths and thresholds", "name", "wipeout"),
    ("Q2", "With segments the retained set of {name} changes less from event to event",
     "retained-set IoU", "made", "retained_iou"),
    ("Q3", "With segments {name} keeps more of the middle of the text",
     "middle coverage", "made", "middle_coverage"),
    ("Q4", "With segments {name} drops shorter runs of text",
     "share of dropped positions in runs of 32 or more", "name", "burst_share"),
    ("Q8", "With segments {name} moves the attention output less",
     "output error", "name", "output_error"),
)  # fmt: skip


def _ams(values: _Values) -> Iterator[Claim]:
    known = set(values.policies)
    for name in values.policies:
        made = "ams" if name == "tova" else f"ams+{name}"
        if made not in known:
            continue
        for number, says, what, larger, metric in _SEGMENTS:
            more, less = (name, made) if larger == "name" else (made, name)
            grid = values.variants(metric) if number == "Q1" else ()
            yield Claim(
                number,
                "AMS",
                says.format(name=name),
                f"{what}: {more} minus {less}",
                values.gap(more, less, metric, {variant: variant for variant in grid}),
            )


def _gkv(values: _Values) -> Iterator[Claim]:
    yield Claim(
        "G2",
        "G-KV",
        "Keys that matter now mattered in one of the three windows before, beyond chance",
        "overlap of the top keys with the union of three earlier tops, minus chance",
        values.beyond_chance("window_overlap", lambda variant: variant.endswith("union")),
    )
    for whole, local in (("gkv", "rkv"), ("global_max", "snapkv@gkv"), ("global_max", "snapkv")):
        yield Claim(
            "G8",
            "G-KV",
            f"A score over all windows ({whole}) keeps more of what is attended to than {local}",
            f"retained mass: {whole} minus {local}",
            values.gap(whole, local, "retained_mass"),
        )


def _expected(values: _Values) -> Iterator[Claim]:
    made = "expected_attention"
    for name in ("snapkv", "tova", "streaming_llm", "knorm", "keydiff", "lagkv", "pyramidkv"):
        yield Claim(
            "E6",
            "Expected Attention",
            f"Expected queries move the attention output less than {name}",
            f"output error: {name} minus {made}",
            values.gap(name, made, "output_error"),
        )
    for name in values.policies:
        yield Claim(
            "E5",
            "Expected Attention",
            f"Budgets shared by heads (AdaKV) make {name} better",
            f"output error: {name} minus adakv+{name}",
            values.gap(name, f"adakv+{name}", "output_error"),
        )
