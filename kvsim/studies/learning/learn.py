"""`learn`: from prompts to a scorer, and its comparison on other prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Unpack

import polars as pl
import torch

from kvsim.analysis.overview import SUMMARY
from kvsim.analysis.summaries import averages
from kvsim.analysis.table import available
from kvsim.core.arguments import listed, resolve_budget
from kvsim.core.options import given_options, takes_options
from kvsim.core.policy import PolicyLike, Schedule
from kvsim.core.threads import threads_for
from kvsim.core.trace import Trace
from kvsim.errors import OutputError, PolicyError, local_path, suggest
from kvsim.files import check_output, write_file
from kvsim.policies import as_policies
from kvsim.policies.features import SIZES
from kvsim.policies.learned import Network
from kvsim.policies.model import common_model
from kvsim.store.opening import Traces, as_traces
from kvsim.studies.learning.lessons import Lesson, Pairs
from kvsim.studies.learning.options import LearnOptions
from kvsim.studies.learning.training import Projecting, fit
from kvsim.sweeps.driver import replay_all
from kvsim.sweeps.held_out import split
from kvsim.sweeps.outcome import Run
from kvsim.sweeps.terms import measurable

#: Groups of features that a scorer of any model may use without looking ahead.
CAUSAL = tuple(group for group in SIZES if group not in ("projections", "future"))

#: Policies that a learned scorer is compared with.
AGAINST = ("h2o", "tova", "snapkv", "random")

#: Why learned vectors of heads take traces of one model.
_ONE_MODEL = "features: projections belong to one model: "

#: Called with (steps done, steps, current step).
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Learning:
    """The outcome of `learn`.

    name: of the policy, for `kvsim.policy`. run: its replays and those of the others on the prompts
    held out, None where there are none, with the metrics that are measured. trained, held_out:
    names of traces. pairs: how many it learned from.
    """

    name: str
    network: Network
    run: Run | None
    metrics: tuple[str, ...]
    trained: tuple[str, ...]
    held_out: tuple[str, ...]
    pairs: int

    @property
    def averages(self) -> pl.DataFrame | None:
        """Means over the prompts held out, as of `kvsim.averages`."""
        return None if self.run is None else averages(self.run)


@takes_options(LearnOptions)
def learn(
    traces: Traces,
    budgets: int | str | Iterable[int | str],
    out: str | Path,
    *,
    test: Traces | None = None,
    against: PolicyLike | Iterable[PolicyLike] = AGAINST,
    overwrite: bool = False,
    progress: Progress | None = None,
    **options: Unpack[LearnOptions],
) -> Learning:
    """Learn a scorer that imitates the optimum, and compare it with others on unseen prompts.

    Equal arguments give an equal file.

    Args:
        traces: of the prompts; they are split at random.
        budgets: entries per KV head to learn for, or shares of each trace such as `25%`.
        out: the file to write; its policy is `learned:FILE`.
        test: prompts to compare on instead, such as those of another model.
        against: policies to compare with.
        overwrite: replace the file.
        progress: called with (steps done, steps, current step).
        **options: the options of `LearnOptions`.

    Raises:
        PolicyError: an unknown group of features, numbers out of range, nothing to learn from, or
            `projections` from traces of several models.
        OutputError: there is a file, or it cannot be written.
    """
    chosen = given_options(LearnOptions, options, "learn", PolicyError)
    ahead, interval, seed = chosen["ahead"], chosen["interval"], chosen["seed"]
    groups = _groups(CAUSAL if chosen["features"] is None else chosen["features"], ahead)
    given = as_traces(traces)
    sizes: list[int | str] = listed(budgets)
    file, held_out = _target(out, overwrite=overwrite), chosen["held_out"]
    _check(given, sizes)
    trained, rest = split(given, held_out, seed) if test is None else (given, as_traces(test))
    rivals: list[PolicyLike] = [*as_policies(against)]
    measured = _measured(chosen["metrics"], rest)
    lesson = Lesson(groups, ahead, chosen["pairs"])
    schedule, random = Schedule(interval=interval), torch.Generator().manual_seed(seed)
    projecting = "projections" in groups
    model = common_model(trained, _ONE_MODEL) if projecting else {}
    rounds = chosen["rounds"]
    report, total = progress or (lambda *_: None), (rounds + projecting) * (len(trained) + 1)
    facts = {
        "traces": {trace.name: trace.digest for trace in trained},
        "budgets": [str(size) for size in sizes],
        "seed": seed,
    }
    done = 0

    def taught(lesson: Lesson, network: Network | None) -> Iterator[Pairs]:
        """Pairs of all prompts and budgets."""
        nonlocal done
        for trace in trained:
            report(done, total, trace.name)
            with threads_for([trace]):
                for size in sizes:
                    budget = resolve_budget(size, trace.n_pos)
                    each = lesson.taught(trace, budget, schedule, random, network)
                    if each is not None:
                        yield each
            done += 1
        report(done, total, "fitting")
        done += 1

    if projecting:
        layers, heads, dim = model["shape"]
        products = Projecting(layers * heads, dim)
        for each in taught(replace(lesson, groups=()), None):
            products.add(each)
        lesson = replace(lesson, vectors=products.vectors().unflatten(0, (layers, heads)))
    parts: list[Pairs] = []
    network: Network | None = None
    for _ in range(rounds):
        parts += taught(lesson, network)
        if not parts:
            raise PolicyError(
                f"no event evicts anything from {len(trained)} traces at budgets "
                f"{', '.join(map(str, sizes))}; expected longer traces or smaller budgets"
            )
        joined = Pairs.joined(parts)
        mean, spread, weights = fit(
            joined,
            [chosen["hidden"]] * (chosen["hidden"] > 0),
            **{name: chosen[name] for name in ("steps", "seed", "fixed")},
        )
        network = Network(
            *(groups, mean, spread, weights, ahead, interval, facts, lesson.vectors, model)
        )
    assert network is not None  # noqa: S101  there is a round
    write_file(file, network.to_bytes(), overwrite=overwrite)
    name = f"learned:{file}"
    run = None
    if rest:
        run = replay_all(rest, [name, *rivals], sizes, interval=interval, metrics=measured).whole()
    return Learning(
        name=name,
        network=network,
        run=run,
        metrics=measured,
        trained=tuple(trace.name for trace in trained),
        held_out=tuple(trace.name for trace in rest),
        pairs=len(joined.gain),
    )


def _target(out: str | Path, *, overwrite: bool) -> Path:
    file = local_path(out, OutputError)
    if "+" in str(file):
        raise PolicyError(
            f"out is {file}; expected a path without +, which stands between the parts of a policy"
        )
    check_output(file, overwrite=overwrite)
    return file


def _check(traces: Sequence[Trace], budgets: Sequence[int | str]) -> None:
    if not traces or not budgets:
        raise PolicyError(
            f"{len(traces)} traces and {len(budgets)} budgets; expected at least one of both"
        )


def _measured(metrics: str | Sequence[str] | None, traces: Sequence[Trace]) -> tuple[str, ...]:
    return tuple(measurable(available(SUMMARY, traces) if metrics is None else metrics, traces))


def _groups(given: str | Sequence[str], ahead: int) -> tuple[str, ...]:
    """Groups of features in the order of `SIZES`. Raises PolicyError for other names."""
    groups: list[str] = listed(given)
    for group in groups:
        if group not in SIZES:
            raise PolicyError(
                f"features: unknown group {group!r}{suggest(group, SIZES)}; expected some of "
                f"{', '.join(SIZES)}"
            )
    if not groups or ("future" in groups) != (ahead > 0):
        raise PolicyError(
            f"features are {', '.join(groups) or 'none'} and ahead is {ahead}; expected at least "
            "one group, and rows to look ahead for the group future alone"
        )
    return tuple(group for group in SIZES if group in groups)
