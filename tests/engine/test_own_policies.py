"""A policy of the user's own spoils nothing that other policies read, whichever way it writes."""

import ctypes
import re
from dataclasses import dataclass, fields, replace
from typing import Annotated, ClassVar, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

import kvsim
from kvsim.core.parameters import Between
from kvsim.core.pieces import Allocator, Plan, Scorer, Scores, Wrapper
from kvsim.core.policy import Policy
from kvsim.errors import PolicyError
from kvsim.sweeps import replay_all
from kvsim.testing import strategies

#: What a View returns that outlives the event, or that its other methods read.
READ = {
    "keys": lambda view: view.keys,
    "values": lambda view: view.values,
    "queries": lambda view: view.queries(4),
    "span": lambda view: view.span(0, 4),
    "attn": lambda view: view.attn(4),
    "pos": lambda view: view.pos,
    "live": lambda view: view.live,
    "count": lambda view: view.count,
    "since": lambda view: view.since,
    "column": lambda view: view["total"],
    "o_proj": lambda view: view.o_proj,
    "full": lambda view: view.full(0, 4)[0],
    "log-sum-exp": lambda view: view.full(0, 4)[1],
}


def _other(x: Tensor) -> Tensor:
    return ~x if x.dtype == torch.bool else x + 1


def _address(x: Tensor) -> None:
    memory = x.untyped_storage()
    ctypes.memset(memory.data_ptr(), 0 if x.dtype == torch.bool else 0x41, memory.nbytes())


#: Ways to overwrite a tensor; torch counts the first alone.
WRITE = {
    "copy_": lambda x: x.copy_(_other(x)),
    "numpy": lambda x: np.copyto(x.numpy(), _other(x).numpy()),
    "address": _address,
}


@dataclass(frozen=True)
class Writing(Scorer):
    """The length of a key; writes to what the view returns."""

    read: str = "keys"
    write: str = "copy_"

    label: ClassVar[str] = "writing"
    rows: ClassVar[int] = 4
    columns: ClassVar[dict[str, float]] = {"total": 0.0}
    clairvoyant: ClassVar[bool] = True

    def score(self, view):
        """Long keys stay."""
        scores = view.keys.norm(dim=-1)
        WRITE[self.write](READ[self.read](view))
        return scores


def make():
    """A trace in memory, with an output projection."""
    return strategies.make_case("normal", n=24, prompt_len=12, group=2).trace()


def spoiled(trace, before) -> list[str]:
    """Return what other policies read or keep that is not as before."""
    return [name for name, x in state(trace).items() if not torch.equal(x, before[name])]


def state(trace) -> dict[str, Tensor]:
    """What is read of a trace, and what policies of kvsim keep of it."""
    arrays = {name: trace.read(name).clone() for name in trace.source.shapes}
    out, lse = trace.full()
    kept = {
        name: torch.from_numpy(kvsim.replay(trace, kvsim.policy(name, **more), 8).evicted_at)
        for name, more in {"tova": {}, "snapkv": {"window": 4}, "h2o": {}, "knorm": {}}.items()
    }
    return arrays | kept | {"full": out.clone(), "full lse": lse.clone()}


@pytest.mark.parametrize(("write", "stored"), [(w, w == "numpy") for w in WRITE])
def test_a_write_fails_its_own_policy_alone(write, stored, tmp_path):
    """Each tensor of a View, written to in each way, is noticed, and nothing else changes."""
    trace = make()
    if stored:
        trace = kvsim.open_trace(trace.save(tmp_path / "run.zarr"))
    before = state(trace)
    unnoticed = []
    for read in READ:
        try:
            kvsim.replay(trace, Policy("mine", Writing(read, write)), 8)
        except PolicyError as error:
            if "mine: writes to" in str(error):
                continue
        unnoticed.append(read)
    assert (unnoticed, spoiled(trace, before)) == ([], [])


@pytest.mark.parametrize("read", ["keys", "attn"])
def test_writes_are_noticed_row_by_row(read):
    """Views of an event after every row are of a class of their own, and guarded as well."""

    @dataclass(frozen=True)
    class Mine(Writing):
        per_row: ClassVar[bool] = True
        rows: ClassVar[int] = 1
        columns: ClassVar[dict[str, float]] = {}

        def score(self, view):
            scores = view.attn(1, group="mean")[..., 0, :]
            if view.row > 14:
                WRITE["numpy"](view.attn(1) if read == "attn" else READ[read](view))
            return scores

    with pytest.raises(PolicyError, match=f"writes to '{read}' of its view at row 15"):
        kvsim.replay(make(), Policy("mine", Mine()), 8, interval=1)


@pytest.mark.parametrize("name", ["h2o", "gkv"])
@pytest.mark.parametrize("interval", [1, 5])
def test_copies_change_no_decision(name, interval):
    """A policy of one's own that equals one of kvsim evicts the same."""
    policy = kvsim.policy(name, **{"window": 4} if name == "gkv" else {})
    mine = replace(policy, scorer=own(policy.scorer))
    trace = strategies.make_case("normal", n=40, prompt_len=25, group=2).trace()

    records = [kvsim.replay(trace, each, 16, interval=interval) for each in (policy, mine)]

    assert mine.foreign
    assert not policy.foreign
    assert (records[0].evicted_at == records[1].evicted_at).all()


def own(scorer):
    """The same scorer, of a class of the user's own."""
    kind = type("Own", (type(scorer),), {"__module__": __name__})
    return kind(**{field.name: getattr(scorer, field.name) for field in fields(scorer)})


@dataclass(frozen=True)
class Flat(Allocator):
    """The same number of entries in each head; of another kind than "right" with a mistake."""

    kind: Literal["right", "number", "indices", "floats", "tensor", "heads"] = "right"
    share: Annotated[float, Between(0, 1)] = 1.0

    def plan(self, view, scores, protected):
        """Return quotas of the kind."""
        budget = view.budget.expand_as(view.count)
        if self.kind == "number":
            return Plan(torch.full_like(view.count, view.budget))
        if self.kind == "indices":
            return Plan(scores.topk(2, -1).indices)
        if self.kind == "floats":
            return Plan(budget * 1.0)
        if self.kind == "heads":
            return Plan(budget[0])
        return budget if self.kind == "tensor" else Plan(budget)


class Plain(Flat):
    """One without parameters of its own is a class of an allocator as well."""


@dataclass(frozen=True)
class Doubled(Wrapper):
    """Twice the scores of the scorer inside."""

    def score(self, view):
        """Return them with the columns of the scorer."""
        inner = self.inner(view)
        return Scores(2 * inner.values, inner.columns)


def flat():
    """A function that returns an allocator, which no name can put around a scorer."""
    return Flat()


@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("{}:Flat+snapkv", "snapkv"),
        ("{}:Flat+snapkv@scaled", "snapkv@scaled"),
        ("{}:Plain+union+tova", "union+tova"),
        ("{}:Doubled+snapkv", "snapkv"),
        ("{0}:Flat+{0}:Doubled+snapkv+quest", "snapkv+quest"),
    ],
)
def test_classes_of_ones_own_stand_before_a_scorer(name, same):
    """An allocator or a wrapper, with its parameters, those of the scorer and scaled lengths."""
    trace = strategies.make_case("normal", layers=3, heads=2, n=40, prompt_len=25).trace()
    name, params = name.format(__name__), {} if "tova" in same else {"window": 4}
    records = [kvsim.replay(trace, kvsim.policy(x, **params), 8, interval=5) for x in (name, same)]

    assert (records[0].evicted_at == records[1].evicted_at).all()
    assert records[0].policy == name
    if "Flat" in name:
        assert kvsim.policy(name, share=0.5, **params).params["share"] == 0.5


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("{}:Flat", ":Flat' says how entries are chosen but not how they are scored"),
        ("{}:flat+snapkv", ":flat scores by itself and takes no scorer"),
        ("snapkv+{}:Flat", ": snapkv scores by itself and takes no scorer inside"),
        ("union+{}:Flat+tova", ":Flat is an allocator and union around it needs a scorer"),
    ],
)
def test_what_is_no_allocator_in_front_is_refused(name, message):
    """The error says what is true of the class or the function, and what can stand there."""
    with pytest.raises(PolicyError, match=message):
        kvsim.policy(name.format(__name__))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "number",
            r"test_own_policies\.py, line \d+; expected a Plan with quotas \[layer, KV head\]$",
        ),
        (
            "indices",
            r"returns quotas torch\.int64 \[\d, 2, 2\] .* integers \[\d, 2\] \[layer, KV head",
        ),
        ("floats", r"quotas torch\.float32 \[\d, 2\] at row 24; expected a .*Plan with integers"),
        ("heads", r"quotas torch\.int64 \[2\] at row 24; expected"),
        ("tensor", r"returns Tensor at row 24; expected a kvsim\.core\.policy\.Plan"),
    ],
)
def test_a_wrong_plan_is_named_as_the_allocators(kind, message):
    """Quotas of another type or shape, and an error in `plan`, are said of the plan, not scores."""
    trace = strategies.make_case("normal", layers=3, heads=2, n=40, prompt_len=25).trace()
    policy = kvsim.policy(f"{__name__}:Flat+knorm", kind=kind)
    (failure,) = replay_all([trace], [policy], [8], interval=5).failures
    assert re.search(message, failure.error)
