"""A learned scorer: a small network that says from what a View shows whether an entry is worth it.

`kvsim learn` trains it on recorded traces to tell the entries that the optimum keeps from those
that it gives up (docs/optimum.md); it replays as `learned:FILE`. The score of an entry is

    s = w2 . relu(W1 x + b1) + b2,    x = (features - mean) / spread,

or w . x + b without a hidden layer. One network serves every layer and head, so a file replays on
any model. `kvsim.policies.features` defines the features; with the group `future` the scorer is
clairvoyant, and with `projections` it belongs to one model, on whose traces alone it replays.

A file is safetensors: `mean` and `spread` [F], `weight.0` [hidden, F], `bias.0` [hidden], and so on
to a single output, and with `projections` also `vectors` [layer, head, 2, d] for key and value; its
header has a JSON text with the version, the groups, what it was trained on, the model if it belongs
to one, and the SHA-256 of all of that with the tensors. Nothing in it is executed.
"""

from __future__ import annotations

import hashlib
import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

from kvsim.core.lazy import Tensor, torch
from kvsim.core.parameters import integer
from kvsim.core.policy import Schedule, Scorer, Scores
from kvsim.core.trace import Trace
from kvsim.core.view import View
from kvsim.errors import PolicyError
from kvsim.policies.features import SIZES, WINDOW, features
from kvsim.policies.model import described, differ, is_model, model_of, note_digest
from kvsim.schema import NEVER

#: Of the file; another one is refused.
VERSION = 1


@dataclass(frozen=True, eq=False)
class Network:
    """Weights of a learned scorer, and where they come from.

    groups: of features. ahead: rows that the group `future` looks ahead. mean, spread [F]; layers:
    weight [m, n] and bias [m] of each. interval: rows between the events that it was trained on.
    training: what else is to be known of that, as JSON holds it. vectors [layer, head, 2, d] of the
    group `projections`, and the model that they belong to, as of `model_of`.
    """

    groups: tuple[str, ...]
    mean: Tensor
    spread: Tensor
    layers: tuple[tuple[Tensor, Tensor], ...]
    ahead: int = 0
    interval: int = 128
    training: Mapping[str, Any] = field(default_factory=dict)
    vectors: Tensor | None = None
    model: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, x: Tensor) -> Tensor:
        """Scores [...] of features x [..., F]."""
        x = (x - self.mean.to(x)) / self.spread.to(x)
        *hidden, (weight, bias) = self.layers
        for inner, shift in hidden:
            x = (
                torch.addmm(shift.to(x), x.flatten(0, -2), inner.mT.to(x))
                .relu_()
                .view(*x.shape[:-1], -1)
            )
        return (x @ weight[0].to(x)) + bias.to(x)

    @property
    def digest(self) -> str:
        """SHA-256 of the tensors and of what the file says of them."""
        sha = hashlib.sha256(json.dumps(self._facts(), sort_keys=True).encode())
        for name, tensor in sorted(self._tensors().items()):
            sha.update(f"{name} {list(tensor.shape)} ".encode() + tensor.numpy().tobytes())
        return sha.hexdigest()

    def _facts(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "groups": list(self.groups),
            "ahead": self.ahead,
            "interval": self.interval,
            "training": dict(self.training),
            **({} if self.vectors is None else {"model": dict(self.model)}),
        }

    def _tensors(self) -> dict[str, Tensor]:
        of_layers = {
            f"{name}.{at}": tensor.contiguous()
            for at, layer in enumerate(self.layers)
            for name, tensor in zip(("weight", "bias"), layer, strict=True)
        }
        of_heads = {} if self.vectors is None else {"vectors": self.vectors.contiguous()}
        return {"mean": self.mean, "spread": self.spread, **of_layers, **of_heads}

    def to_bytes(self) -> bytes:
        """Return the content of the file."""
        from safetensors.torch import save  # noqa: PLC0415  not needed to list policies

        text = json.dumps({**self._facts(), "sha256": self.digest}, sort_keys=True)
        content: bytes = save(self._tensors(), {"kvsim": text})
        return content

    @classmethod
    def open(cls, path: Path) -> Network:
        """Read a file. Raises PolicyError for one of another kind or version, or a damaged one."""
        from safetensors import SafetensorError, safe_open  # noqa: PLC0415

        try:
            if not path.is_file():  # opening a pipe would block
                raise FileNotFoundError("no regular file")
            with safe_open(path, framework="pt") as file:
                facts = json.loads((file.metadata() or {})["kvsim"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError, KeyError, ValueError, RecursionError) as error:
            reason = "no learned scorer" if isinstance(error, KeyError) else error
            raise _refused(path, str(reason)) from error
        version = facts.get("version") if isinstance(facts, dict) else None
        if integer(version) != VERSION:
            raise _refused(path, f"its version is {version}, expected {VERSION}")
        try:
            network = cls._of(facts, tensors)
        except (KeyError, TypeError, ValueError) as error:
            shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in sorted(tensors.items()))
            raise _refused(path, f"its tensors are {shapes}: {error}") from error
        if network.digest != facts.get("sha256"):
            raise _refused(path, "its SHA-256 is not the one that it names, so it was changed")
        return network

    @classmethod
    def _of(cls, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Network:
        """Raises KeyError or ValueError where something is missing or does not go together."""
        depth = sum(name.startswith("weight.") for name in tensors)
        layers = tuple((tensors[f"weight.{at}"], tensors[f"bias.{at}"]) for at in range(depth))
        groups = tuple(facts["groups"])
        ahead, interval = (_rows(facts[name]) for name in ("ahead", "interval"))
        if unknown := [group for group in groups if group not in SIZES]:
            raise ValueError(f"groups {unknown}, expected some of {list(SIZES)}")
        if not interval or ("future" in groups) != (ahead > 0):
            raise ValueError(
                f"interval is {interval} and ahead {ahead}, expected at least 1, and rows to look "
                "ahead for the group future alone"
            )
        sizes = [sum(SIZES[group] for group in groups), *(len(weight) for weight, _ in layers)]
        expected: dict[str, tuple[int, ...]] = dict.fromkeys(("mean", "spread"), (sizes[0],))
        for at, (before, after) in enumerate(pairwise(sizes)):
            expected |= {f"weight.{at}": (after, before), f"bias.{at}": (after,)}
        model: dict[str, Any] = {}
        if "projections" in groups:
            model = facts["model"]
            if not model or not is_model(model):
                raise ValueError("its model is not valid")
            count, heads, dim = model["shape"]
            expected["vectors"] = count, heads, 2, dim
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if not layers or shapes != expected or sizes[-1] != 1:
            raise ValueError(f"expected {expected}, and one output")
        if any(x.dtype != torch.float32 or not bool(x.isfinite().all()) for x in tensors.values()):
            raise ValueError("expected finite numbers in float32")
        if not bool((tensors["spread"] > 0).all()):
            raise ValueError("spread is not above 0 throughout")
        training = facts["training"]
        if not isinstance(training, dict) or not isinstance(training.get("traces", {}), dict):
            raise TypeError("training is no object, or its traces are none")
        return cls(
            groups,
            tensors["mean"],
            tensors["spread"],
            layers,
            ahead,
            interval,
            training,
            tensors.get("vectors"),
            model,
        )


@dataclass(frozen=True)
class Learned(Scorer):
    """The network of a file that `kvsim learn` has written.

    digest: SHA-256 of the file's content; of the file that is there if none is given.
    """

    file: str
    digest: str = ""

    label: ClassVar[str] = "learned"
    signed: ClassVar[bool] = True
    rows: ClassVar[int] = WINDOW

    def __post_init__(self) -> None:
        super().__post_init__()
        note_digest(self, self._network.digest, "the file that was trained")

    @property
    def schedule(self) -> Schedule:
        """The one that it was trained on."""
        return Schedule(interval=self._network.interval)

    @property
    def columns(self) -> Mapping[str, float]:  # type: ignore[override]
        """The attention of a lifetime, where it is a feature."""
        return {"total": 0.0} if "attention" in self._network.groups else {}

    @cached_property
    def _network(self) -> Network:
        return Network.open(Path(self.file))

    @property
    def clairvoyant(self) -> bool:
        """With the group `future`."""
        return "future" in self._network.groups

    def check(self, trace: Trace, schedule: Schedule) -> None:
        """Vectors of heads fit the model that they were learned on."""
        model = self._network.model
        if not model:
            return
        if differ(model, model_of(trace)):
            raise PolicyError(
                f"learned: {self.file} has projections of {described(model)}, and {trace.name} is "
                f"of {described(model_of(trace))}; expected a trace of the same model, or a scorer "
                "learned without projections"
            )

    def remark(self, trace: Trace, schedule: Schedule) -> str:
        """On a trace that it was learned from."""
        learned = self._network.training.get("traces", {})
        if trace.path is None or trace.digest not in learned.values():
            return ""
        return "it was learned on this trace, so its result says nothing about other ones"

    def score(self, view: View) -> Scores:
        """The network's output; [L, H, n]."""
        network, columns = self._network, {}
        if self.columns:
            columns["total"] = view["total"] + view.received()
        total = columns.get("total", view.keys.new_zeros(()))
        x = features(view, network.groups, total, network.ahead, network.vectors)
        return Scores(network(x), columns)


def _rows(value: object) -> int:
    """Return a number of rows. Raises ValueError for anything else."""
    rows = integer(value)
    if rows is None or not 0 <= rows <= NEVER:
        raise ValueError(f"{reprlib.repr(value)} is no number of rows")
    return rows


def _refused(path: Path, reason: str) -> PolicyError:
    return PolicyError(f"learned: {path}: {reason}; give a file that `kvsim learn` has written")
