"""Hypothesis strategies: kvsim's own policies, with parameters that bind."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import reject, seed, settings
from hypothesis import strategies as st

import reference
from kvsim.core.policy import Policy, Schedule
from kvsim.errors import PolicyError
from kvsim.policies import policy as named
from kvsim.schema import NEVER
from kvsim.testing import loops
from kvsim.testing.loops import Outcome, event_rows
from kvsim.testing.strategies import Case, draw_budget, draw_schedule
from reference.rules import RULES, defaults, parse, smallest_budget


@dataclass(frozen=True)
class Setup:
    """A policy by name, its parameters, and how it is replayed."""

    policy: str
    params: Mapping[str, Any]
    budget: int
    interval: int | None
    prefill: bool | None

    @cached_property
    def built(self) -> Policy:
        """The policy of kvsim."""
        return named(self.policy, **self.params)

    @property
    def schedule(self) -> Schedule:
        """When it acts."""
        return self.built.schedule.override(self.interval, self.prefill)


def examples(usual: int) -> int:
    """How many to draw: the usual number, and fifty times as many under the nightly profile."""
    return usual if settings().max_examples <= 100 else 50 * usual


def seeded(name: str, check: Callable[[], None]) -> Callable[[], None]:
    """The property with examples of a seed, its own for every name, which may be counted.

    The nightly profile draws new ones, fifty times as many.
    """
    return check if settings().max_examples > 100 else seed(zlib.crc32(name.encode()))(check)


def naive(case: Case, setup: Setup, policy: str = "", **options: Any) -> Outcome:
    """The naive replay of a policy on a generated case; policy: another one with its settings."""
    return loops.replay(
        case,
        reference.rule(policy or setup.policy, setup.params),
        budget=setup.budget,
        interval=setup.interval,
        prefill=setup.prefill,
        **options,
    )


def _whole(least: int, most: int) -> Callable[[int], st.SearchStrategy[Any]]:
    numbers = st.integers(least, most)
    return lambda _: numbers


_SWITCH = (True, False)


def _one(*values: Any) -> Callable[[int], st.SearchStrategy[Any]]:
    choice = st.sampled_from(values)
    return lambda _: choice


#: What a parameter may be, given the longest window that is useful; the others keep their defaults.
_DRAWN: Mapping[str, Callable[[int], st.SearchStrategy[Any]]] = {
    "sink": lambda most: st.integers(0, min(6, most)),
    "recent": lambda most: st.integers(0, min(6, most)),
    "seed": _whole(0, 5),
    "window": lambda most: st.integers(1, most),
    "pool": _one("max", "avg", None),
    "pool_kernel": _one(1, 3, 5, 7),
    "lag": _whole(1, 6),
    "cross_scoring": _one(*_SWITCH),
    "n_future": _whole(1, 20),
    "covariance": _one(*_SWITCH),
    "value_norm": _one("v", "none", "wo_v"),
    "query_buffer": _whole(2, 12),
    "rope": _one("mean", "mixture"),
    "calibration": _one("prefix:1", "prefix:3", "prefix:8", "oracle"),
    "protect_prompt": _one(*_SWITCH),
    "offsets": _one("mean", "max"),
    "pruning": _one("per_layer_perhead", "per_head", "union"),
    "over_layers": _one("mean", "max"),
    "normalise": _one("query_heads", "kv_heads"),
    "population": _one("candidates", "all"),
    "by": _one("mass", "output"),
    "fusion": _one("max", "sum"),
    "decay": _one(0.0, 0.5, 0.8, 1.0),
    "redundancy": _one(*_SWITCH),
    "mix_lambda": _one(0.0, 0.3, 0.7, 1.0),
    "threshold": _one(0.2, 0.5),
    "gamma": _one(0.0, 3.0, 200.0),
    "dispersion": _one("var", "std"),
    "beta": _one(1.0, 3.0, 20.0),
    "compression": _whole(1, 4),
    "floor": _one(0.0, 0.2, 0.5, 1.0),
    "chunk": _whole(1, 6),
    "page": _whole(1, 6),
    "segment": _one(1, 3, 5, None),
    "leverage": _one("product", "mean", "key", "value"),
    "blending": _one(0.0, 0.5, 2.0),
    "heads": _one("all", "group"),
    "prompt": _one("entries", "pages", "heads"),
    "ends": _one(*_SWITCH),
    "alpha": _one(0.01, 0.1, 0.3),
    "aggregation": _one("norm_sum", "sum"),
    "anchor": _one("mean", "zeros", "ones", "alternating"),
    "crush": _whole(0, 2),
    "share": _one(0.1, 0.5, 1.0),
    "span": _whole(1, 3),
    "offset": _one("ladder", "modulo"),
    "passes": _one("each", "merged"),
    "across": _one("heads", "layers"),
    "reduction": _one("mean", "max"),
    "first_stage": _one(0.0, 0.5, 1.0),
    "segment_mass": _one(0.05, 0.1, 0.3, 2.0),
    "min_segment": _whole(1, 5),
    "max_segment": _whole(5, 12),
    "min_quota": _whole(0, 3),
    "credit": _one(*_SWITCH),
    "credit_decay": _one(0.0, 0.5, 0.9),
    "credit_mix": _one(0.0, 0.5, 1.0),
    "credit_of": _one("mass", "usage"),
    "cosine": _one("kernel", "raw"),
    "slot_order": _one("position", "topk"),
    "log": _one(*_SWITCH),
    "suffix_fill": _one("head_max", "global_max", "head_mean", "observed", "zero"),
    "mode": _one("strict", "reference"),
    "weights": _one("mass", "length", "equal"),
    "segmentation": _one("mass", "mass", "fixed"),
    "segment_length": _whole(1, 8),
}


def draw_parameters(draw: st.DrawFn, name: str, most: int) -> dict[str, Any]:
    """Parameters of a built-in policy, small enough to bind; a window of at most `most` rows."""
    drawn: dict[str, Any] = {}
    parts = [part.partition("@")[0] for part in name.split("+")]
    for key, default in defaults(name).items():
        plain = key.rpartition("scorer__")[2]
        if plain not in _DRAWN or (plain == "log" and {"criticalkv", "global"} & {*parts}):
            continue  # a wrapper refuses logarithms
        value = draw(_DRAWN[plain](most))
        if key == "threshold" and parts[0] == "dms":
            value = draw(st.sampled_from((0.02, 0.05, value)))
        if key == "reduction":
            value = draw(st.sampled_from((value, "rank" if parts[0] == "union" else "norms")))
        # half of the budget by default; and a preset that shares between heads is meant to
        drawn[key] = draw(st.sampled_from((None, value))) if default is None and value else value
    return drawn


_OFTEN = st.sampled_from((True,) * 11 + (False,))
_ONE_OF_SIX = st.sampled_from((False,) * 5 + (True,))
_SHORT = st.integers(1, 3)


@st.composite
def setups(
    draw: st.DrawFn, case: Case, names: Sequence[str] = tuple(RULES), *, evicts: bool = False
) -> Setup:
    """A built-in policy with parameters, schedule and a budget that it has a rule for.

    Most budgets are below what the last event finds, so that something is evicted; with `evicts`
    all of them where the case has room for that, a sixth below what the third last event finds.
    """
    name = draw(st.sampled_from(names)) if len(names) > 1 else names[0]
    own = parse(name).built.schedule
    interval, prefill = draw_schedule(draw, case.n, case.prompt_len)
    thrice = evicts and draw(_ONE_OF_SIX)
    if thrice:
        interval = draw(_SHORT)

    def last_row() -> int:
        rows = event_rows(
            case.n,
            case.prompt_len,
            interval=own.interval if interval is None else interval,
            prefill=own.prefill if prefill is None else prefill,
        )
        return max(rows[:-2] or rows if thrice else rows, default=0)

    if evicts and not last_row():  # no event, or one that finds a single entry
        interval, prefill = 1, True
    last = last_row()
    useful = max(1, min(10, last)) if draw(_OFTEN) else 10
    params = draw_parameters(draw, name, useful)
    try:
        least = smallest_budget(name, params, case.n - 1, prompt_len=case.prompt_len)
    except PolicyError:  # parts that do not go together
        reject()
    if "n_future" in params:  # moments need two samples behind the sinks
        sink = next(v for k, v in reversed(params.items()) if k.endswith("sink"))
        least = max(least, min(sink + 1, case.n))
    if evicts and least > last:
        interval, last = 1, case.n - 1
    return Setup(name, params, draw_budget(draw, least, last, above=not evicts), interval, prefill)


@st.composite
def evictions(draw: st.DrawFn, heads: int = 2, most: int = 40) -> npt.NDArray[np.int32]:
    """`evicted_at` [heads, T] of one layer: at each of a few rows any entry may leave."""
    total = draw(st.integers(1, most))
    rows = draw(st.lists(st.integers(0, total - 1), max_size=8, unique=True))
    choices = np.array([*sorted(rows), NEVER], np.int32)
    first = np.searchsorted(choices, np.arange(total))  # nothing leaves before it came
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    stays = draw(st.sampled_from((0.0, 0.2, 0.8)))
    at = rng.integers(first, len(choices), size=(heads, total))
    return choices[np.where(rng.random(at.shape) < stays, len(rows), at)]
