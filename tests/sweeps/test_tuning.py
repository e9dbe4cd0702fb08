"""The search for parameters: its space, its split, its gains, and `kvsim tune`."""

import json
import re
import sys
from typing import Annotated, Literal

import numpy as np
import optuna
import polars as pl
import pytest
import torch

import kvsim
from kvsim.core.parameters import Above, AtLeast, Below, Between, Odd, Parameter
from kvsim.errors import BudgetError, KvsimError, PolicyError
from kvsim.policies import declared, names
from kvsim.studies.language.tasks import prompts
from kvsim.studies.tuning.search import _Objective, tune
from kvsim.studies.tuning.space import dimension
from kvsim.sweeps.held_out import split

TERMS = {"interval": 8, "prefill": True}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Traces of five short prompts of tiny."""
    folder = tmp_path_factory.mktemp("traces")
    made = prompts(5, task="walk", facts=6, lines=6, kinds=3)
    for place, one in enumerate(made):
        path = folder / f"{place}.zarr"
        kvsim.capture("tiny", None, one.prompt, max_new_tokens=16, out=path)
    return [folder / f"{place}.zarr" for place in range(5)]


@pytest.fixture(scope="module")
def traces(paths):
    """The traces, open."""
    return [kvsim.open_trace(path) for path in paths]


@pytest.fixture(scope="module")
def tuning(traces):
    """The window of SnapKV and its pooling, searched on three of the prompts."""
    return tune(traces, "snapkv", 36, "output_error", trials=10, **TERMS)


def space_of(hint, default, entries=64):
    """The dimension of a parameter with an annotation."""
    return dimension("x", Parameter("x", hint, default), default, entries)


@pytest.mark.parametrize(
    ("hint", "default", "expected"),
    [
        (bool, True, ((False, True), 0, 0, "")),
        (Literal["a", "b"] | None, "a", (("a", "b", None), 0, 0, "")),
        (Annotated[float, Between(0, 1)], 0.9, ((), 0, 1, "")),
        (Annotated[int, AtLeast(1)], 8, ((), 1, 64, "up to the budget")),
        (Annotated[int, AtLeast(1)], 128, ((), 1, 128, "up to its default")),
        (Annotated[int, AtLeast(1), Odd()], 5, ((), 1, 63, "up to the budget")),
        (Annotated[int, Above(1)] | None, None, ((), 2, 64, "up to the budget")),
        (Annotated[float, AtLeast(0), Below(1)], 0.2, ((), 0, 0.999, "")),
        (float, 0.5, ((), 0, 5, "up to ten times its default, from 0")),
    ],
)
def test_the_range_is_the_declared_one(hint, default, expected):
    """Ends that are declared stand; the others come from budget or default, and words say so."""
    one = space_of(hint, default)

    assert (one.choices, one.low, one.high, one.assumed) == expected


@pytest.mark.parametrize("hint", [str, str | None, list[int], int | str])
def test_what_has_no_range_is_not_searched(hint):
    """Text, paths and unions with them are left out."""
    assert space_of(hint, None) is None


@pytest.mark.parametrize("name", names())
def test_every_value_of_the_space_is_allowed(name):
    """What is suggested for a policy of the catalogue is what its parameter's own check allows."""
    name = f"{name}+tova" if _takes_a_scorer(name) else name
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    space = {key: dimension(key, x, None, 64) for key, x in declared(name).items()}
    initial = {k: v for one in space.values() if one is not None for k, v in one.initial.items()}
    study.enqueue_trial(initial)

    for _ in range(20):
        trial = study.ask()
        for key, parameter in declared(name).items():
            if space[key] is not None:
                value = space[key].suggest(trial)
                assert parameter.value(value, name) == value


def _takes_a_scorer(name):
    try:
        declared(name)
    except PolicyError:
        return True
    return False


def test_the_split_is_disjoint_and_whole(traces):
    """Half of the prompts are held out, all are in one part, and few prompts are not split."""
    searched, back = split(traces, 0.5, 0)

    assert len(back) == 2
    assert {trace.name for trace in searched} | {trace.name for trace in back} == {*"01234"}
    assert not {trace.name for trace in searched} & {trace.name for trace in back}
    others = {tuple(trace.name for trace in split(traces, 0.5, seed)[1]) for seed in range(6)}
    assert len(others) > 1
    assert split(traces[:3], 0.5, 0) == (traces[:3], [])
    assert len(split(traces, 0.99, 0)[0]) == 1


def test_gains_are_those_of_single_replays(traces, tuning):
    """Means of the default and the tuned setting, the gain and its interval, as plain replays."""
    by_name = {trace.name: trace for trace in traces}
    for row, part in zip(tuning.gains.to_dicts(), (tuning.searched, tuning.held_out), strict=True):
        means = {}
        for setting, params in (("default", {}), ("tuned", tuning.parameters)):
            policy = kvsim.policy("snapkv", **params)
            tables = [
                kvsim.measure(
                    by_name[name],
                    kvsim.replay(by_name[name], policy, budget=36, **TERMS),
                    ["output_error"],
                ).filter(pl.col("variant") == "")
                for name in part
            ]
            means[setting] = np.array([table["value"].mean() for table in tables])
        gap = means["default"] - means["tuned"]
        assert row["n"] == len(part)
        assert row["default"] == pytest.approx(means["default"].mean())
        assert row["tuned"] == pytest.approx(means["tuned"].mean())
        assert row["gain"] == pytest.approx(gap.mean())
        assert (row["low"], row["high"]) == (None, None)  # of fewer than 6 prompts
    assert tuning.gains["fidelity"].to_list() == ["open", "open"]


def test_the_default_metric_is_the_best_evidence(traces, tmp_path):
    """response_kl with a judge, else the first metric that all traces have arrays for."""
    (one,) = prompts(1, task="get", facts=6, lines=6, kinds=3)
    options = {"max_new_tokens": 8, "sensitivity": False}
    kvsim.capture("tiny", None, one.prompt, o_proj=False, out=tmp_path / "x.zarr", **options)
    kvsim.capture("tiny", None, one.prompt, out=tmp_path / "y.zarr", **options)
    plain, projected = (kvsim.open_trace(tmp_path / name) for name in ("x.zarr", "y.zarr"))
    terms = {"trials": 1, **TERMS}
    judged = tune(traces[:2], "tova", 16, judge=True, **terms)
    records = [kvsim.replay(trace, "tova", 16, **TERMS) for trace in traces[:2]]
    kl = [
        kvsim.judge("tiny", trace, record).filter(metric="response_kl")["value"].mean()
        for trace, record in zip(traces[:2], records, strict=True)
    ]

    assert tune(traces[:2], "tova", 16, **terms).metric == "weighted_error"
    assert tune([projected, traces[0]], "tova", 16, **terms).metric == "layer_error"
    assert tune([plain, traces[0]], "tova", 16, **terms).metric == "output_error"
    assert judged.metric == "response_kl"
    assert judged.gains["fidelity"].to_list() == ["judged"]
    assert judged.gains["default"][0] == pytest.approx(np.mean(kl))


def test_the_best_trial_is_reported(tuning):
    """No trial that is done is better than the tuned setting on the searched prompts."""
    best = tuning.trials["value"].min()

    assert tuning.trials["state"].to_list() == ["done"] * 10
    assert tuning.gains["tuned"][0] == pytest.approx(best)
    assert json.loads(tuning.trials["params"][0]) == dict(kvsim.policy("snapkv").params)
    assert tuning.gains["gain"][0] > 0


def test_equal_arguments_find_equal_parameters(traces, tuning):
    """The trials of a seed are the same again, and those of another seed differ."""
    again = tune(traces, "snapkv", 36, "output_error", trials=10, **TERMS)
    other = tune(traces, "snapkv", 36, "output_error", trials=10, seed=1, **TERMS)

    assert again.trials.equals(tuning.trials)
    assert again.parameters == tuning.parameters
    assert not other.trials.equals(tuning.trials)


def test_parameters_that_change_nothing_are_left_out(traces):
    """Where AMS cuts fixed segments, the mass of a segment is not among the parameters."""
    names = ["segment_mass", "segment_length"]
    fixed = {"segmentation": "fixed", "window": 4, "recent": 2}
    tuned = tune(traces, "ams", 16, search=names, fixed=fixed, trials=8, **TERMS)

    assert "segment_mass" not in tuned.parameters
    assert {*tuned.parameters} <= {"segment_length"}


def test_settings_that_do_not_go_together_are_counted(traces):
    """They fail as trials, the search goes on, and a remark counts them."""
    fixed = {"window": 4, "recent": 2}
    search = ["min_segment", "max_segment"]
    tuned = tune(traces[:3], "ams", 16, search=search, fixed=fixed, trials=8, **TERMS)
    failed = tuned.trials.filter(state="failed")

    assert 0 < failed.height < 8
    assert failed["value"].count() == 0
    assert all("expected at least min_segment" in error for error in failed["error"])
    assert any(f"{failed.height} of 8 trials failed" in remark for remark in tuned.remarks)


def test_few_prompts_are_not_split(traces):
    """All are searched on, and a remark says that over-fitting cannot be seen."""
    tuned = tune(traces[:3], "streaming_llm", 16, trials=2, **TERMS)

    assert tuned.gains["prompts"].to_list() == ["searched"]
    assert tuned.held_out == ()
    assert tuned.remarks[0].startswith("with 3 prompts over-fitting cannot be seen")


def test_a_default_that_held_out_prompts_refuse_costs_no_trial(tmp_path):
    """The default setting runs on the held-out prompts before the first trial."""
    torch.manual_seed(0)
    names = "abcd"
    _, (held_out,) = split(list(names), 0.25, 0)
    traces = [
        kvsim.Trace.from_arrays(
            *(torch.randn(2, heads, 20 if name == held_out else 80, 4) for heads in (2, 1, 1)),
            prompt_len=10,
            rope=kvsim.Rope.default(4),
            name=name,
        )
        for name in names
    ]
    reports = []

    with pytest.raises(BudgetError):
        tune(
            *(traces, "snapkv", "50%"),
            fixed={"window": 16},
            held_out=0.25,
            progress=lambda *args: reports.append(args),
            **TERMS,
        )

    assert [what for *_, what in reports] == ["the default setting"]


def test_an_interrupt_keeps_the_trials_that_are_done(traces):
    """Ctrl-C reports the best so far, on both parts of the prompts."""

    def stop(done, total, label):
        if done == 4:
            raise KeyboardInterrupt

    tuned = tune(traces, "streaming_llm", 16, trials=10, progress=stop, **TERMS)

    assert tuned.interrupted
    assert tuned.trials.height == 4
    assert tuned.gains.height == 2
    assert tuned.gains["tuned"][0] == pytest.approx(tuned.trials["value"].min())


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (
            ("tova", 16),
            {"search": ["head"]},
            "has no such parameter to search; did you mean 'heads'",
        ),
        (("knorm", 16), {}, "knorm has no parameters to search"),
        (("random", 16), {}, "random has no parameters to search"),
        (("tova", 16, "middle_coverage"), {}, "of no policy that it is better"),
        (("tova", 16, "response_kl"), {}, "a replay runs none"),
        (("tova", 16), {"trials": 0}, "trials is 0; expected an integer of at least 1"),
        (
            ("tova", 16),
            {"held_out": 1.0},
            "held_out is 1.0; expected a number of at least 0 and below 1",
        ),
        (("tova", 16, "needle_recall"), {}, "has values on 0 of"),
        (("streaming_llm@original", 16), {"judge": True}, "keys are rotated"),
    ],
)
def test_what_cannot_be_tuned_is_refused(traces, arguments, options, message):
    """Before any trial, with what is possible."""
    with pytest.raises(PolicyError, match=re.escape(message)):
        tune(traces, *arguments, **options)


def test_without_optuna_the_extra_is_named(traces, monkeypatch):
    """The error says what to install."""
    monkeypatch.setitem(sys.modules, "optuna", None)

    with pytest.raises(KvsimError, match=r"pip install 'kvsim\[tune\]'"):
        tune(traces, "tova", 16, trials=1)


def test_the_command_prints_gains_and_options(run, paths, tmp_path):
    """A line for each part of the prompts, options that a replay takes, and a file with all."""
    options = ["--policy", "snapkv", "--budget", "36", "--interval", "8", "--trials", "6"]
    status, out, err = run("tune", *paths, *options)
    judged = run("tune", paths[0], *options, "--trials=1", "--judge", "--search=window")[1]
    assert "snapkv, budget 36: response_kl (" in judged
    assert (
        run("tune", paths[0], *options, "--trials=1", "--model=tiny")[1].count("response_kl") == 1
    )
    pasted = re.search(r"^Parameters: (.*)$", out, re.MULTILINE)[1].split()
    replay = ["--budget", "36", "--interval", "8", "--json", "--metric", "weighted_error"]
    out_file = ["--out", str(tmp_path / "tuned.json")]
    document = json.loads(run("tune", *paths, *options, *out_file, "--json")[1])
    of_replay = run("replay", *paths, "--policy", "snapkv", *pasted, *replay)[1]
    sizes = [row["n"] for row in document["gains"]]
    tuned = sum(row["tuned"] * row["n"] for row in document["gains"]) / sum(sizes)

    assert (status, err) == (0, "")
    assert re.search(r"^searched +3 ", out, re.MULTILINE)
    assert re.search(r"^held out +2 ", out, re.MULTILINE)
    assert "does not declare: window 1 to 36 (up to the budget), pool_kernel 1 to 35" in out
    assert document["options"] == " ".join(pasted)
    assert json.loads(of_replay)["cells"][0]["weighted_error"] == pytest.approx(tuned)
    written = json.loads((tmp_path / "tuned.json").read_text())
    assert written | document == written
    assert len(written["trials"]) == 6
    assert set(written["traces"]) == {*document["searched"], *document["held_out"]}
    assert written["versions"]["kvsim"] == kvsim.__version__
    assert (written["interval"], written["device"], written["fixed"]) == (8, "cpu", {})
    status, _, err = run("tune", *paths, *options, *out_file)
    assert (status, "give another --out" in err) == (2, True)


def test_bad_options_are_one_line(run, paths):
    """A name that is no parameter, and a policy that is none."""
    for options, message in (
        (["--policy", "tova", "--search", "windw"], "--search windw: tova has no such parameter"),
        (["--policy", "tov"], "unknown policy 'tov'; did you mean 'tova'"),
    ):
        status, out, err = run("tune", *paths, "--budget", "16", *options)
        assert (status, out) == (2, "")
        assert message in err
        assert err.count("\n") == 1


def test_reading_more_is_no_gain(traces, monkeypatch):
    """Settings of a reader or codec that hold or read more bytes than the default are left out."""
    name, fixed = "quest", {"page": 4}
    options = {"search": ["share", "dense_layers"], "fixed": fixed, "trials": 8, **TERMS}
    tuned = tune(traces[:3], name, 16, **options)

    dear = tuned.trials.filter(state="more bytes")
    assert dear.height
    assert any(f"{dear.height} of 8 trials hold or read more" in x for x in tuned.remarks)
    objective = _Objective(name, 16, "output_error", fixed, TERMS)
    bytes_of = [
        kvsim.sweep(
            traces=traces[:3], policies=[kvsim.policy(name, **fixed, **setting)], budgets=[16],
            intervals=8, metrics=["bytes_read"],
        ).table["value"].sum()
        for setting in ({}, tuned.parameters, json.loads(dear["params"][0]))
    ]  # fmt: skip
    assert bytes_of[1] <= 1.002 * bytes_of[0] < bytes_of[2]
    assert not objective.takes_more_bytes({}, traces[:3])
    monkeypatch.setattr(_Objective, "takes_more_bytes", lambda *_: False)
    free = tune(traces[:3], name, 16, **options)
    assert free.gains["tuned"][0] < tuned.gains["tuned"][0]
    assert not _Objective("tova", 16, "output_error", {}, TERMS)._costs
