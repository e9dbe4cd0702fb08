"""Learning from the optimum: what entries are worth, pairs, the fit, and the whole on traces."""

import functools
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import kvsim
from kvsim.cli import app
from kvsim.core.policy import Policy, Schedule, Scorer, Scores
from kvsim.errors import BudgetError, NeedsError, OutputError, PolicyError
from kvsim.policies.features import SIZES
from kvsim.policies.learned import Network
from kvsim.studies.learning.learn import learn
from kvsim.studies.learning.lessons import Lesson, Pairs, Teacher, worth
from kvsim.studies.learning.training import Projecting, fit
from kvsim.sweeps.held_out import split
from kvsim.testing.strategies import make_case

EVERY_4 = Schedule(interval=4)


def trace_of(seed, n=44, name=""):
    """A small trace whose keys attract attention unequally."""
    case = make_case("sink", layers=1, heads=2, group=2, n=n, prompt_len=16, seed=seed)
    facts = {"prompt_len": 16, "rope": case.rope, "name": name or f"t{seed}"}
    return kvsim.Trace.from_arrays(case.q, case.k, case.v, **facts)


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """A folder of six traces."""
    folder = tmp_path_factory.mktemp("traces")
    for seed in range(6):
        trace_of(seed).save(folder / f"t{seed}.zarr")
    return folder


class _Worth(Scorer):
    """The optimum's kept sets; keeps what entries are worth at each event."""

    clairvoyant = True
    signed = True
    given: list = []  # noqa: RUF012

    def score(self, view):
        of_all = view.once("worth", lambda: worth(view))
        event = view.setting.events.index(view.row)
        self.given.append((view.row, view.pos.clone(), of_all))
        return Scores(of_all[..., event].gather(-1, view.pos.clamp(min=0)))


def test_worth_is_what_an_entry_earns_less_what_its_place_costs():
    """The best stop of each entry by trying all, at prices that prove the oracle's kept sets."""
    trace, scorer = trace_of(1), _Worth()
    scorer.given.clear()
    record = kvsim.replay(trace, Policy("worth", scorer, schedule=EVERY_4), 7)
    optimum = kvsim.replay(trace, kvsim.policy("oracle", by="optimum"), 7, interval=4)
    rows = [row for row, _, _ in scorer.given]
    attention = trace_attention(trace)
    kept = {
        "worth": record.evicted_at[0],
        "optimum": optimum.evicted_at[0],
    }
    earned = {
        name: sum(
            attention[head, r, p]
            for head in range(2)
            for p in range(trace.n_pos)
            for r in range(trace.prompt_len, trace.n_pos)
            if p <= r <= of[head, p]
        )
        for name, of in kept.items()
    }
    # entries at the margin are worth 0, kept or not, so what is worth most is nearly the optimum
    assert 0.98 * earned["optimum"] < earned["worth"] <= earned["optimum"] * (1 + 1e-9)
    # of what the optimum holds at an event, it keeps what is worth more than 0 after it
    for row, pos, of_all in scorer.given:
        event = rows.index(row)
        for head in range(2):
            for p in pos[0, head].tolist():
                value = float(of_all[0, head, p, event])
                if abs(value) > 1e-6 and kept["optimum"][head, p] >= row:
                    assert (value > 0) == (kept["optimum"][head, p] > row)


def trace_attention(trace):
    """Full attention summed over the group, [H, row, entry], from the trace's q and k."""
    q, k = (trace.read(name, slice(0, 1))[0].double() for name in ("q", "k"))
    z = q.unflatten(0, (len(k), -1)) @ k.mT.unsqueeze(1) * trace.formulas[0].scale
    later = torch.ones(z.shape[-2:], dtype=torch.bool).triu(1)
    return z.masked_fill(later, -torch.inf).softmax(-1).sum(1).numpy()


def test_pairs_are_of_one_head_and_its_gain_is_what_the_choice_is_worth():
    """The entry to keep is worth more than 0, the other is not; equal generators, equal pairs."""
    lesson = Lesson(("position",), 0, 8)

    def taught(network=None):
        random = torch.Generator().manual_seed(0)
        return lesson.taught(trace_of(1), 7, EVERY_4, random, network)

    pairs, again = taught(), taught()
    assert all(torch.equal(a, b) for a, b in zip(pairs, again, strict=True))
    assert len(pairs.keep) == len(pairs.drop) == len(pairs.gain) > 100
    assert (pairs.gain > 0).all()
    assert lesson.taught(trace_of(1), 44, EVERY_4, torch.Generator()) is None
    # what it learned keeps other sets, and so meets other entries
    size = SIZES["position"]
    flat = ((torch.ones(1, size), torch.zeros(1)),)
    other = taught(Network(("position",), torch.zeros(size), torch.ones(size), flat))
    assert not torch.equal(other.keep, pairs.keep)


def test_a_teacher_without_attention_computes_none():
    """The column of a lifetime stays 0 where no feature reads it."""
    teacher = Teacher(Lesson(("position",), 0, 2), torch.Generator().manual_seed(0))
    policy = Policy("teacher", teacher, schedule=EVERY_4)
    record = kvsim.replay(trace_of(2), policy, 7, internals=True)
    assert record.internals
    assert teacher.given


def test_the_fit_ranks_as_the_pairs_do():
    """A linear rule is learned from its pairs, with the same result for the same seed."""
    random = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 1000, 3, generator=random)
    rule = torch.tensor([1.0, -2.0, 0.0])
    first = ((a - b) @ rule > 0).unsqueeze(-1)
    gain = ((a - b) @ rule).abs()
    pairs = Pairs(torch.where(first, a, b), torch.where(first, b, a), gain, gain.long())
    for hidden in ([], [8]):
        mean, spread, layers = fit(pairs, hidden, steps=300)
        again = fit(pairs, hidden, steps=300)[2]
        assert all(
            torch.equal(x, y)
            for one, two in zip(layers, again, strict=True)
            for x, y in zip(one, two, strict=True)
        )
        score = Network(("values", "future"), mean, spread, layers)
        right = (score(pairs.keep) > score(pairs.drop)).double() @ pairs.gain.double()
        assert right / pairs.gain.sum() > 0.97


def test_vectors_of_heads_are_those_of_least_squares():
    """Of each head's pairs alone, gain as weight, the ridge as more rows; numpy's solution."""
    random = np.random.default_rng(0)
    keep, drop = random.standard_normal((2, 60, 6))
    gain, head = random.random(60), random.integers(0, 2, 60)
    products = Projecting(3, 3)
    for part in (slice(40), slice(40, None)):
        products.add(Pairs(*(torch.from_numpy(x[part]) for x in (keep, drop, gain, head))))
    vectors = products.vectors()
    assert (vectors[2] == 0).all()  # a head without pairs
    for h in range(2):
        weight = np.sqrt(gain[head == h])
        for kind in range(2):
            x = (keep - drop)[head == h, 3 * kind : 3 * kind + 3] * weight[:, None]
            ridge = np.sqrt(0.1 * np.mean((x**2).sum(0))) * np.eye(3)
            rows, aim = np.vstack([x, ridge]), np.append(weight, np.zeros(3))
            expected = np.linalg.lstsq(rows, aim, rcond=None)[0]
            np.testing.assert_allclose(vectors[h, kind], expected, rtol=1e-5)


def test_pairs_know_their_head():
    """The entries of a pair have the keys and values of the head that it names."""
    trace = make_case("sink", layers=2, heads=2, group=2, n=44, prompt_len=16, seed=1).trace()
    random = torch.Generator().manual_seed(0)
    pairs = Lesson((), 0, 4).taught(trace, 7, EVERY_4, random)
    assert set(pairs.head.tolist()) == {0, 1, 2, 3}
    of_heads = torch.cat([trace.k, trace.v], -1).flatten(0, 1).float()  # [head, T, 2 d]
    for each in (pairs.keep, pairs.drop):
        same = (of_heads[pairs.head] == each.unsqueeze(1)).all(-1)
        assert same.any(-1).all()


def test_projections_are_learned_and_bind_to_the_model(paths, tmp_path):
    """The file has vectors of all heads; traces of another shape are refused, also for learning."""
    out = tmp_path / "s.safetensors"
    options = {"features": ["position", "projections"], "interval": 4, "steps": 20, "rounds": 1}
    learning = learn(paths, 8, out, against="random", metrics="retained_mass", **options)
    again = Network.open(out)
    assert torch.equal(again.vectors, learning.network.vectors)
    assert again.vectors.shape[:3] == (1, 2, 2)
    assert again.model["shape"] == [1, 2, again.vectors.shape[-1]]
    assert (again.vectors != 0).any(-1).all()
    wide = make_case("sink", layers=2, heads=2, group=2, n=44, prompt_len=16, seed=0).trace()
    with pytest.raises(PolicyError, match=r"^features: projections belong to one model[^\n]*$"):
        learn([trace_of(1), wide], 8, tmp_path / "t.safetensors", **options)
    with pytest.raises(PolicyError, match="same model"):
        kvsim.replay(wide, learning.name, 8)


def test_random_features_stay_as_they_were_drawn():
    """With `fixed` the hidden layer is that of the seed, and only the last one is fitted."""
    random = torch.Generator().manual_seed(0)
    keep, drop = torch.rand(2, 64, 2, generator=random)
    pairs = Pairs(keep + 1, drop, torch.ones(64), torch.zeros(64))
    few, many = (fit(pairs, [5], steps=steps, fixed=True)[2] for steps in (1, 40))
    assert torch.equal(few[0][0], many[0][0])
    assert not torch.equal(few[1][0], many[1][0])
    assert not torch.equal(fit(pairs, [5], steps=40)[2][0][0], many[0][0])


def test_the_split_is_disjoint_and_whole():
    """Half of the prompts are held out, all are in one part, and few prompts are not split."""
    learned_from, back = split("01234", 0.5, 0)

    assert len(back) == 2
    assert sorted([*learned_from, *back]) == [*"01234"]
    assert len({tuple(split("01234", 0.5, seed)[1]) for seed in range(6)}) > 1
    assert split([*"012"], 0.5, 0) == ([*"012"], [])
    assert len(split("01234", 0.99, 0)[0]) == 1


def test_learning_beats_chance_on_prompts_held_out(paths, tmp_path):
    """From traces in a folder to a file whose policy retains more than random sets do."""
    out = tmp_path / "s.safetensors"
    options = {"interval": 4, "steps": 120, "pairs": 8, "metrics": "retained_mass"}
    learning = learn(paths, 8, out, against=["random", "tova"], **options)
    assert learning.name == f"learned:{out}"
    assert len(learning.trained) == 4
    assert len(learning.held_out) == 2
    assert not set(learning.trained) & set(learning.held_out)
    mean = dict(learning.averages.select("policy", "mean").iter_rows())
    assert mean[learning.name] > mean["random"]
    facts = learning.network.training
    assert facts["budgets"] == ["8"]
    assert set(facts["traces"]) == set(learning.trained)
    # equal arguments, equal file; another seed, another split and network
    first = out.read_bytes()
    learn(paths, 8, out, against="random", overwrite=True, **options)
    assert out.read_bytes() == first
    learn(paths, 8, out, against="random", overwrite=True, seed=1, **options)
    assert out.read_bytes() != first


def test_a_result_on_a_trace_that_it_was_learned_from_says_so(paths, tmp_path):
    """A remark of the record, also inside of a wrapper; none on a prompt held out."""
    out = tmp_path / "s.safetensors"
    learning = learn(paths, 8, out, interval=4, steps=2, rounds=1, against="random")
    for name, expected in ((learning.trained[0], True), (learning.held_out[0], False)):
        trace = kvsim.open_trace(paths / f"{name}.zarr")
        for policy in (learning.name, f"global+{learning.name}"):
            remark = kvsim.replay(trace, policy, 8, interval=4).remark
            assert ("learned on this trace" in remark) == expected


def test_prompts_to_test_on_may_be_others(paths, tmp_path):
    """Then all given ones are learned from; shares of the length are budgets of each trace."""
    test = [trace_of(9, n=36)]
    out = tmp_path / "s.safetensors"
    done = learn(paths, "20%", out, test=test, interval=4, steps=20, rounds=1, against="random")
    assert (len(done.trained), done.held_out) == (6, ("t9",))


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"features": "attn"}, PolicyError, "unknown group 'attn'"),
        ({"features": ()}, PolicyError, "features are none"),
        ({"features": ("position", "future")}, PolicyError, "ahead is 0"),
        ({"ahead": 3}, PolicyError, "ahead is 3"),
        ({"budgets": 1000}, PolicyError, "no event evicts anything"),
        ({"budgets": []}, PolicyError, "0 budgets"),
        ({"budgets": "x%"}, BudgetError, "x%"),
        ({"out": "a+b.safetensors"}, PolicyError, "path without [+]"),
        ({"out": "s3://bucket/s.safetensors"}, OutputError, "a URL; expected a path on this"),
        ({"held_out": 1}, PolicyError, "held_out is 1"),
        ({"rounds": 0}, PolicyError, "rounds"),
        ({"against": "tovaa"}, PolicyError, "unknown policy 'tovaa'"),
        ({"metrics": "output_eror"}, PolicyError, "output_eror"),
        ({"metrics": "layer_error"}, NeedsError, "o_proj"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_before_anything_is_learned(
    changed, error, words, paths, tmp_path
):
    """One line, and no file is left."""
    given = {
        "traces": paths,
        "budgets": 8,
        "out": tmp_path / "s.safetensors",
        "interval": 4,
        "steps": 2,
    }
    with pytest.raises(error, match=rf"^[^\n]*{words}[^\n]*$"):
        learn(**{**given, **changed})
    assert not (tmp_path / "s.safetensors").exists()


def test_a_file_that_is_there_is_kept(paths, tmp_path):
    """Unless it is to be replaced."""
    out = tmp_path / "s.safetensors"
    out.write_text("mine")
    with pytest.raises(OutputError, match=r"s\.safetensors"):
        learn(paths, 8, out)
    assert out.read_text() == "mine"


def test_the_command_learns_and_says_what_it_is_worth(monkeypatch, paths, tmp_path):
    """Text opens with the verdict on prompts held out; JSON has the same numbers."""
    # how well all of its steps learn is tested above
    monkeypatch.setattr("kvsim.studies.learning.learn.learn", functools.partial(learn, steps=200))
    out = tmp_path / "s.safetensors"
    command = ["learn", str(paths), "--budget", "8", "--out", str(out), "--interval", "4"]
    command += ["--rounds", "1", "--against", "random,tova", "--metric", "output_error"]
    text = CliRunner().invoke(app(), command)
    assert text.exit_code == 0, text.output
    assert "on 4 prompts; it sees position, attention, keys, values." in text.stdout
    assert "Measured on 2 prompts that it has not seen." in text.stdout
    assert "has the lowest mean output_error" in text.stdout
    done = CliRunner().invoke(app(), [*command, "--overwrite", "--json", "--ahead", "2"])
    document = json.loads(done.stdout)
    assert document["features"][-1] == "future"
    assert document["widths"] == [32, 1]
    assert {row["policy"] for row in document["averages"]} == {f"learned:{out}", "random", "tova"}
    few = CliRunner().invoke(app(), [*command, "--overwrite", "--held-out", "0"])
    assert "No prompts were held out" in few.stdout
    assert np.isfinite(document["averages"][0]["output_error"])
    assert replace(Network.open(out), training={}).interval == 4
