"""Options of commands, from their declarations and in groups.

A command with a parameter of a dataclass has the options of its fields in that place, and one of
`offered` names has the options that `kvsim.experiment` or a study declares:

    @grouped
    def replay(
        traces: shared.TracePaths,
        options: Annotated[dict[str, Any], offered("interval", "prefill")],
        folder: Folder,
    ) -> None: ...
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_args, get_type_hints

from kvsim.cli import shared
from kvsim.cli.shared import OptionError
from kvsim.core.options import Declared, declared
from kvsim.experiment import Experiment
from kvsim.schema import PREFILL

if TYPE_CHECKING:
    from kvsim.core.policy import Policy
    from kvsim.core.trace import Trace


class Offered(NamedTuple):
    """Options of a command: their declarations, and what it does without some of them."""

    options: tuple[Declared, ...]
    unset: dict[str, str]


def offered(*names: str, of: type = Experiment, **unset: str) -> Offered:
    """Return options of a declaration by name, in this order.

    unset: what the command does without an option of this name, in words.
    """
    every = {each.name: each for each in declared(of)}
    return Offered(tuple(every[name] for name in names), unset)


#: When policies that are compared evict.
SCHEDULE = ("interval", "prefill", *PREFILL)


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command that takes the fields of its groups one by one, as options."""
    groups: dict[str, tuple[Any, dict[str, Any]]] = {}  # what builds each, and its defaults
    options: list[inspect.Parameter] = []

    def add(name: str, kind: Any, default: Any) -> None:
        only = inspect.Parameter.KEYWORD_ONLY
        options.append(inspect.Parameter(name, only, default=default, annotation=kind))

    hints = get_type_hints(command, include_extras=True)
    for name, parameter in inspect.signature(command).parameters.items():
        kind = hints[name]
        offer = next((note for note in get_args(kind) if isinstance(note, Offered)), None)
        if offer is not None:
            groups[name] = dict, {}
            for each in offer.options:
                unset, taken = offer.unset.get(each.name, each.help.unset), shared.kind_of(each)
                text = taken != each.kind
                groups[name][1][each.name] = each.default if text else None
                taken = Annotated[taken | None if unset else taken, shared.option_of(each, unset)]
                add(each.name, taken, None if unset or text else each.default)
        elif is_dataclass(kind):
            of_fields = get_type_hints(kind, include_extras=True)
            groups[name] = kind, dict.fromkeys(of_fields)
            for field in fields(kind):
                needed = field.default is MISSING
                default = inspect.Parameter.empty if needed else field.default
                add(field.name, of_fields[field.name], default)
        else:
            add(name, kind, parameter.default)

    @functools.wraps(command)
    def run(**given: Any) -> None:
        for name, (build, defaults) in groups.items():
            taken = {each: given.pop(each) for each in defaults}
            unset = {each: x for each, x in defaults.items() if taken[each] is None}
            given[name] = build(**taken | unset)
        command(**given)

    run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in options}
    return run


@dataclass(frozen=True)
class Chosen:
    """Policies with their parameters."""

    policy: shared.PolicyNames
    settings: shared.Settings = None
    fit: Annotated[bool, shared.option("fit")] = False

    def built(self) -> list[Policy]:
        """The policies."""
        return shared.build_policies(self.policy, self.settings, fit=self.fit)


@dataclass(frozen=True)
class Printed:
    """What is printed, or planned alone."""

    plan: shared.Plan = False
    as_json: shared.Json = False


@dataclass(frozen=True)
class Judging:
    """The model that judges what replays decided."""

    judge: Annotated[bool, shared.option("judge")] = False
    model: shared.JudgingModel = None

    @property
    def by(self) -> bool | str:
        """The model by name, True for that of the traces, or False."""
        return self.model or self.judge


@dataclass(frozen=True)
class Loading:
    """The model that was recorded, and how it is loaded."""

    model: shared.RecordedModel
    device: shared.ModelDevice = "cpu"
    trust_remote_code: shared.TrustRemoteCode = False

    def loaded(self, recorded: Sequence[Trace], *, weights: bool = True) -> Any:
        """Load the model and its tokenizer in the precision of the recording."""
        from kvsim.cli.show import echo_error
        from kvsim.recorder import load_model
        from kvsim.schema import object_at

        shared.quiet_transformers()
        dtype = object_at(recorded[0].meta, "model").get("dtype") if recorded else None
        if not weights:
            from kvsim.recorder.loading import load_outline

            on_cpu, trusted = self.device == "cpu", self.trust_remote_code
            return load_outline(self.model, dtype=dtype, on_cpu=on_cpu, trust_remote_code=trusted)
        return load_model(
            self.model,
            dtype=dtype,
            device=self.device,
            trust_remote_code=self.trust_remote_code,
            note=echo_error,
        )


@dataclass(frozen=True)
class Folder:
    """The run folder, and what is measured for it."""

    events: Annotated[bool, shared.option("events")] = False
    out: Annotated[Path | None, shared.option("out", parser=shared.local_path)] = None
    overwrite: shared.Overwrite = False

    def check(self) -> None:
        """Raise OptionError for options without a run folder, OutputError where no run can be."""
        for flag, given in {"overwrite": self.overwrite, "events": self.events}.items():
            if given and self.out is None:
                raise OptionError(f"--{flag} is about the run in --out; give --out DIR as well")
        if self.out is not None:
            from kvsim.sweeps.folder import check_output

            check_output(self.out, overwrite=self.overwrite)
