"""The learned scorer: its features against loops, its file, and what it may not see."""

import json
import math
import pickle
import sys
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import save

import kvsim
from kvsim.core.policy import Policy, Schedule, Scorer, Scores
from kvsim.errors import PolicyError
from kvsim.policies.features import PARTS, SIZES, features
from kvsim.policies.learned import Learned, Network
from kvsim.policies.model import model_of
from kvsim.testing import check_policy
from kvsim.testing.strategies import make_case
from traces import changed

CAUSAL = ("position", "attention", "keys", "values")


def network(groups=CAUSAL, hidden=6, seed=0, **changed):
    """A network with random weights."""
    random = torch.Generator().manual_seed(seed)
    n = sum(SIZES[group] for group in groups)
    sizes = [n, hidden, 1] if hidden else [n, 1]
    layers = tuple(
        (torch.randn(b, a, generator=random), torch.randn(b, generator=random))
        for a, b in pairwise(sizes)
    )
    spread = torch.rand(n, generator=random) + 0.5
    return Network(groups, torch.randn(n, generator=random), spread, layers, **changed)


@pytest.fixture
def file(tmp_path):
    """A file of a network with random weights."""
    path = tmp_path / "a.safetensors"
    path.write_bytes(network().to_bytes())
    return path


@dataclass(frozen=True)
class _Seen(Scorer):
    """Random scores; keeps the features and the positions of every event."""

    groups: tuple[str, ...]
    ahead: int
    vectors: torch.Tensor
    given: list = field(default_factory=list)

    columns: ClassVar = {"total": 0.0}
    clairvoyant: ClassVar = True

    def score(self, view):
        total = view["total"] + view.received()
        x = features(view, self.groups, total, self.ahead, self.vectors)
        self.given.append((view.row, view.pos.clone(), x.numpy()))
        values = (view.pos * 7919 % 101).to(view.keys.dtype)
        return Scores(values, {"total": total})


def softmax(logits):
    """Weights of plain numbers."""
    top = max(logits)
    weights = [math.exp(z - top) for z in logits]
    return [w / sum(weights) for w in weights]


def dot(a, b):
    """In float64."""
    return float(np.dot(np.asarray(a, np.float64), np.asarray(b, np.float64)))


def of_head(case, layer, head, visible, row, ahead, vectors):
    """Features of the entries that a head holds at the event after `row`; visible: by row."""
    group = case.q.shape[1] // case.k.shape[1]
    q, k, v = (x[layer].astype(np.float64) for x in (case.q, case.k, case.v))
    held = visible[row]
    scale = case.k.shape[-1] ** -0.5
    given = {}  # attention of every row so far over what it saw
    for r in range(row + 1):
        for g in range(group):
            query = q[head * group + g, r]
            seen = [p for p in visible[r] if p <= r]
            weights = softmax([dot(query, k[head, p]) * scale for p in seen])
            given[r, g] = dict(zip(seen, weights, strict=True))
    norms = {
        n: {p: math.sqrt(dot(x[head, p], x[head, p])) for p in held}
        for n, x in (("k", k), ("v", v))
    }
    query = np.mean(
        [q[head * group + g, r] for g in range(group) for r in range(max(0, row - 31), row + 1)],
        axis=0,
    )
    logits = {p: dot(query, k[head, p]) * scale for p in held}
    out = {}
    for p in held:
        age = row + 1 - p
        f = [math.log1p(age), age / (row + 1), math.log1p(p), float(p < 4)]
        # attention of the last rows over what is held now, not over what they saw
        now = {
            (r, g): dict(
                zip(
                    [x for x in held if x <= r],
                    softmax(
                        [dot(q[head * group + g, r], k[head, x]) * scale for x in held if x <= r]
                    ),
                    strict=True,
                )
            )
            for r in range(max(0, row - 127), row + 1)
            for g in range(group)
            if any(x <= r for x in held)
        }
        for part in PARTS:
            rows = [r for r in range(max(0, row + 1 - part), row + 1) if r >= p]
            mean = sum(now[r, g][p] for r in rows for g in range(group)) / (group * len(rows))
            f.append(math.log(mean + 1e-6))
        f.append(math.log(max(w.get(p, 0.0) for w in now.values()) + 1e-6))
        lifetime = sum(w.get(p, 0.0) for w in given.values()) / (group * age)
        f.append(math.log(lifetime + 1e-6))
        for n, x in (("k", k), ("v", v)):
            mean = sum(math.log(norms[n][e] + 1e-6) for e in held) / len(held)
            f.append(math.log(norms[n][p] + 1e-6) - mean)
            total = np.sum([x[head, e] / norms[n][e] for e in held], axis=0)
            f.append(dot(x[head, p], total) / norms[n][p] / math.sqrt(dot(total, total)))
            if n == "k":
                f.append(logits[p] - sum(logits.values()) / len(held))
        for x, vector in zip((k, v), vectors[layer, head].tolist(), strict=True):
            mean = sum(dot(x[head, e], vector) for e in held) / len(held)
            f.append(dot(x[head, p], vector) - mean)
        later = range(row + 1, min(row + 1 + ahead, case.n))
        weights = [
            softmax([dot(q[head * group + g, r], k[head, e]) * scale for e in range(r + 1)])[p]
            for r in later
            for g in range(group)
        ]
        f.append(math.log((sum(weights) / len(weights) if weights else 0.0) + 1e-6))
        out[p] = f
    return out


def test_features_are_those_of_plain_loops():
    """Every feature of every live entry, at events after evictions, in float64 from its words."""
    case = make_case("sink", layers=2, heads=2, group=2, n=26, prompt_len=12, seed=3)
    vectors = torch.randn(2, 2, 2, case.k.shape[-1], generator=torch.Generator().manual_seed(0))
    scorer = _Seen((*CAUSAL, "projections", "future"), 3, vectors)
    record = kvsim.replay(case.trace(), Policy("seen", scorer, schedule=Schedule(interval=4)), 9)
    assert len(scorer.given) > 2
    for row, pos, x in scorer.given:
        for layer, head in np.ndindex(*pos.shape[:2]):
            gone = record.evicted_at[layer, head]
            visible = [[p for p in range(r + 1) if gone[p] >= r] for r in range(row + 1)]
            expected = of_head(case, layer, head, visible, row, 3, vectors)
            for slot, p in enumerate(pos[layer, head].tolist()):
                if p < 0:
                    assert (x[layer, head, slot] == 0).all()
                    continue
                np.testing.assert_allclose(x[layer, head, slot], expected[p], atol=1e-9)


def test_the_score_is_that_of_the_network_by_hand():
    """w2 . relu(W1 x + b1) + b2 of standardised features, and w . x + b without a hidden layer."""
    x = np.random.default_rng(0).standard_normal((3, sum(SIZES[g] for g in CAUSAL)))
    for hidden in (0, 6):
        made = network(hidden=hidden)
        (*inner, (w2, b2)) = ((w.double().numpy(), b.double().numpy()) for w, b in made.layers)
        expected = (x - made.mean.double().numpy()) / made.spread.double().numpy()
        for weight, bias in inner:
            expected = np.maximum(expected @ weight.T + bias, 0)
        np.testing.assert_allclose(made(torch.from_numpy(x)), (expected @ w2.T + b2)[:, 0])


@pytest.mark.parametrize("name", ["learned:{}", "ams+learned:{}"])
def test_it_satisfies_every_invariant_of_a_policy(name, file):
    """With random weights: causal, each head by itself, the same in blocks, and so on."""
    check_policy(name.format(file), max_examples=15, max_n=18)


def test_only_a_look_ahead_makes_it_clairvoyant(tmp_path):
    """The group `future` does, and the column of a lifetime goes with the group `attention`."""
    path = tmp_path / "b.safetensors"
    path.write_bytes(network(("position", "future"), ahead=4).to_bytes())
    assert Learned(str(path)).clairvoyant
    assert not Learned(str(path)).columns
    path.write_bytes(network().to_bytes())
    assert not Learned(str(path)).clairvoyant
    assert set(Learned(str(path)).columns) == {"total"}


def projecting(shape=(2, 2, 8), digest="", **weights):
    """A network that belongs to a model of a shape."""
    layers, heads, dim = shape
    model = {"name": "mine", "shape": list(shape), "digest": digest, **weights}
    vectors = torch.ones(layers, heads, 2, dim)
    return network(("position", "projections"), vectors=vectors, model=model)


@pytest.mark.parametrize(
    ("given", "model", "words"),
    [
        ({}, {}, None),
        ({"shape": (3, 2, 8)}, {}, "3 layers, 2 KV heads, 8 dimensions"),
        ({"digest": "a"}, {}, None),  # the trace says nothing of its model
        ({"digest": "a"}, {"name": "yours", "type": "qwen2"}, "is of yours [(]2 layers"),
        ({"weights": "a"}, {"name": "mine"}, None),  # nor of its weights
        ({"weights": "a"}, {"name": "mine", "weights": "b"}, "is of mine [(].*, weights b[)]"),
    ],
    ids=["same", "shape", "no model", "model", "no weights", "weights"],
)
def test_projections_replay_on_their_model_alone(given, model, words, tmp_path):
    """A trace of another shape or another model is refused in one line."""
    path = tmp_path / "p.safetensors"
    path.write_bytes(projecting(**given).to_bytes())
    case = make_case("sink", layers=2, heads=2, group=2, n=26, prompt_len=12, seed=3, dim=8)
    trace = case.trace()
    trace.meta.update(model=model)
    if words is None:
        assert kvsim.replay(trace, f"learned:{path}", 9).evicted_at.shape == (2, 2, 26)
        return
    with pytest.raises(PolicyError, match=rf"^learned: [^\n]*{words}[^\n]*same model[^\n]*$"):
        kvsim.replay(trace, f"learned:{path}", 9)


def test_projections_belong_to_the_layers_of_their_traces():
    """As many other layers of the same model are another model to them."""
    case = make_case("sink", layers=2, heads=2, group=2, n=26, prompt_len=12, seed=3, dim=8)
    meta = {"model": {"name": "m"}}
    digests = [
        model_of(changed(case.trace(), layer_ids=ids, meta=meta))["digest"]
        for ids in (None, (0, 1), (1, 2), (2, 3))
    ]

    assert digests[0] == digests[1]
    assert len({*digests}) == 3


def rewritten(facts=None, tensors=None):
    """A valid file's parts with some replaced, as bytes."""
    made = network()
    text = {**made._facts(), "sha256": made.digest, **(facts or {})}
    content = {**made._tensors(), **(tensors or {})}
    content = {name: tensor for name, tensor in content.items() if tensor is not None}
    return save(content, {"kvsim": json.dumps(text)})


class Executing:
    """Ends the process of whoever unpickles it."""

    def __reduce__(self):
        return sys.exit, ("executed",)


REFUSED = {
    "nothing": (b"", "safetensors|header|empty|Error"),
    "text": (b"#!/bin/sh\nrm -rf x\n", "header|Error"),
    "a pickle": (pickle.dumps(Executing()), "header|Error"),
    "other tensors": (save({"a": torch.ones(2)}), "no learned scorer"),
    "a version": (rewritten({"version": 2}), "its version is 2, expected 1"),
    "a checksum": (rewritten({"sha256": "0" * 64}), "SHA-256 is not the one"),
    "a number": (rewritten(tensors={"bias.1": torch.ones(1)}), "SHA-256 is not the one"),
    "the training": (rewritten({"training": {"seed": 5}}), "SHA-256 is not the one"),
    "a shape": (rewritten(tensors={"bias.0": torch.ones(5)}), r"bias.0 \[5\]"),
    "a dtype": (rewritten(tensors={"mean": torch.ones(15, dtype=torch.float64)}), "float32"),
    "NaN": (rewritten(tensors={"mean": torch.full((15,), math.nan)}), "finite"),
    "a tensor less": (rewritten(tensors={"spread": None}), "its tensors are"),
    "a group": (rewritten({"groups": ["position", "smell"]}), "smell"),
    "projections without vectors": (
        save(
            {name: x for name, x in projecting()._tensors().items() if name != "vectors"},
            {"kvsim": json.dumps(projecting()._facts())},
        ),
        "its tensors are",
    ),
    "projections of no model": (
        rewritten({"groups": ["position", "projections"]}),
        "its tensors are",
    ),
    "training of a number": (rewritten({"training": 5}), "training is no object"),
    "no spread": (rewritten(tensors={"spread": torch.zeros(15)}), "spread is not above 0"),
    "brackets": (
        save({"a": torch.ones(2)}, {"kvsim": "[" * 100_000}),
        "recursion",
    ),
    "groups of a number": (rewritten({"groups": 3}), "its tensors are"),
}


@pytest.mark.parametrize(("content", "reason"), REFUSED.values(), ids=REFUSED)
def test_files_that_are_wrong_are_refused_in_a_line(content, reason, tmp_path):
    """The line names the file, what was read there, and what to give."""
    path = tmp_path / "c.safetensors"
    path.write_bytes(content)
    with pytest.raises(
        PolicyError, match=rf"^learned: [^\n]*c\.safetensors: [^\n]*({reason})[^\n]*$"
    ):
        kvsim.policy(f"learned:{path}")


def test_a_file_that_is_missing_and_a_digest_of_another_are_refused(file, tmp_path):
    """A record names the digest, so that another file cannot stand in for it unnoticed."""
    with pytest.raises(PolicyError, match=r"^learned: [^\n]*gone[^\n]*$"):
        kvsim.policy(f"learned:{tmp_path / 'gone.safetensors'}")
    digest = kvsim.policy(f"learned:{file}").params["digest"]
    kvsim.policy(f"learned:{file}", digest=digest)
    file.write_bytes(network(seed=1).to_bytes())
    with pytest.raises(PolicyError, match="give the file that was trained"):
        kvsim.policy(f"learned:{file}", digest=digest)


def test_it_acts_as_often_as_it_was_trained_to(tmp_path):
    """The file has the interval; an interval that is given replaces it."""
    path = tmp_path / "d.safetensors"
    path.write_bytes(replace(network(), interval=48).to_bytes())
    assert kvsim.policy(f"learned:{path}").schedule == Schedule(interval=48)
