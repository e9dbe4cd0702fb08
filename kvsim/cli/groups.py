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

    def parameters(self) -> list[inspect.Parameter]:
        """The parameters that typer reads."""
        return [
            inspect.Parameter(
                each.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None if (form := shared.form_of(each)).text or unset else each.default,
                annotation=Annotated[
                    form.kind | None if unset else form.kind, shared.option_of(each, unset)
                ],
            )
            for each in self.options
            for unset in (self.unset.get(each.name, each.help.unset),)
        ]

    def taken(self, given: dict[str, Any]) -> dict[str, Any]:
        """Take the values of the options out of those of a command, converted."""
        return {
            each.name: shared.form_of(each).convert(given.pop(each.name)) for each in self.options
        }


def offered(*names: str, of: type = Experiment, **unset: str) -> Offered:
    """Return options of a declaration by name, in this order; without names, all of them.

    unset: what the command does without an option of this name, in words.
    """
    every = {each.name: each for each in declared(of)}
    return Offered(tuple(every[name] for name in names or every), unset)


#: When policies that are compared evict.
SCHEDULE = ("interval", "prefill", *PREFILL)


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command that takes the fields of its groups one by one, as options."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {}
    options: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        kind = hints[name]
        offer = next((note for note in get_args(kind) if isinstance(note, Offered)), None)
        if offer is not None:
            groups[name] = offer
            options += offer.parameters()
        elif is_dataclass(kind):
            groups[name] = kind
            of_fields = get_type_hints(kind, include_extras=True)
            for each in fields(kind):
                default = inspect.Parameter.empty if each.default is MISSING else each.default
                options.append(
                    inspect.Parameter(
                        each.name,
                        inspect.Parameter.KEYWORD_ONLY,
                        default=default,
                        annotation=of_fields[each.name],
                    )
                )
        else:
            options.append(parameter.replace(annotation=kind, kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def run(**given: Any) -> None:
        for name, group in groups.items():
            if isinstance(group, Offered):
                given[name] = group.taken(given)
            else:
                given[name] = group(**{each.name: given.pop(each.name) for each in fields(group)})
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
            from kvsim.recorder.models import load_outline

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
