"""Options that stand together in several commands, each group declared once.

A command with a parameter of one of these types has the options of its fields in that place:

    @grouped
    def replay(traces: shared.TracePaths, schedule: Schedule, folder: Folder) -> None: ...
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer

from kvsim.cli import shared
from kvsim.cli.shared import OptionError

if TYPE_CHECKING:
    from kvsim.core.policy import Policy, Protection
    from kvsim.core.trace import Trace


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command that takes the fields of its groups one by one, as options."""
    hints = get_type_hints(command, include_extras=True)
    groups = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    options: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name not in groups:
            options.append(
                parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
            )
            continue
        of_fields = get_type_hints(groups[name], include_extras=True)
        for each in fields(groups[name]):
            default = inspect.Parameter.empty if each.default is MISSING else each.default
            options.append(
                inspect.Parameter(
                    each.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=default,
                    annotation=of_fields[each.name],
                )
            )

    @functools.wraps(command)
    def run(**given: Any) -> None:
        for name, group in groups.items():
            of_group: Any = group
            given[name] = of_group(**{each.name: given.pop(each.name) for each in fields(group)})
        command(**given)

    run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in options}
    return run


@dataclass(frozen=True)
class Chosen:
    """Policies with their parameters."""

    policy: shared.PolicyNames
    settings: shared.Settings = None
    fit: shared.Fit = False

    def built(self, protect: Protection | None = None) -> list[Policy]:
        """The policies, which all protect what is given."""
        return shared.build_policies(self.policy, self.settings, protect, fit=self.fit)


@dataclass(frozen=True)
class Schedule:
    """When policies evict; the names are those of `replay_all` and `live`."""

    interval: shared.Interval = None
    prefill: shared.Prefill = None
    compress: shared.Compress = None
    own_schedule: shared.OwnSchedule = False


@dataclass(frozen=True)
class Protected:
    """What every policy protects."""

    sink: Annotated[
        int,
        typer.Option(
            min=0, help="First positions that every policy protects; not with asl and its like."
        ),
    ] = 0
    recent: Annotated[
        int, typer.Option(min=0, help="Last positions that every policy protects.")
    ] = 0
    protect_prompt: Annotated[
        bool, typer.Option("--protect-prompt", help="Every policy protects the prompt.")
    ] = False


@dataclass(frozen=True)
class Judging:
    """The model that judges what replays decided."""

    judge: shared.Judge = False
    model: shared.JudgingModel = None

    @property
    def by(self) -> bool | str:
        """The model by name, True for that of the traces, or False."""
        return self.model or self.judge


@dataclass(frozen=True)
class Computing:
    """What replays run on."""

    memory: shared.Memory = None
    device: shared.Device = "cpu"
    jobs: shared.Jobs = None


@dataclass(frozen=True)
class Writing:
    """The response that a model writes under each policy."""

    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Tokens of the response that the model writes under each policy, 0 for none; "
            "default: none of recorded traces, 512 of --prompts.",
        ),
    ] = None
    temperature: Annotated[
        float, typer.Option(min=0, help="0 takes the most likely token; above 0, tokens are drawn.")
    ] = 0.0
    seed: Annotated[int, typer.Option(help="The seed of the draws.")] = 0


@dataclass(frozen=True)
class Paged:
    """A cache in blocks; the names are those of `live`."""

    paged: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Hold the cache in blocks of N entries, as serving engines do, and attend through "
            "block tables; what an event leaves is compacted, and blocks are freed.",
        ),
    ] = None
    block_tables: Annotated[
        Literal["layer", "head"],
        typer.Option(
            help="With --paged: one block table for all heads of a layer, where heads with fewer "
            "entries are padded; or one for each head."
        ),
    ] = "layer"


@dataclass(frozen=True)
class NewPrompts:
    """Prompts that are recorded before they are run."""

    prompts: Annotated[
        Path | None,
        shared.path_option(
            "FILE.jsonl",
            "Record these prompts first, as `kvsim capture --prompts` does, and run them.",
        ),
    ] = None
    record_to: Annotated[
        Path | None,
        shared.path_option(
            "DIR", "Where --prompts are recorded, and kept; default: next to --out, if given."
        ),
    ] = None


@dataclass(frozen=True)
class Loading:
    """The model that was recorded, and how it is loaded."""

    model: shared.RecordedModel
    device: shared.ModelDevice = "cpu"
    trust_remote_code: shared.TrustRemoteCode = False

    def loaded(self, recorded: Sequence[Trace]) -> Any:
        """Load the model and its tokenizer in the precision of the recording."""
        from kvsim.cli.show import echo_error
        from kvsim.recorder import load_model
        from kvsim.store.metadata import object_at

        shared.quiet_transformers()
        dtype = object_at(recorded[0].meta, "model").get("dtype") if recorded else None
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

    events: shared.Events = False
    out: shared.RunFolder = None
    resume: shared.Resume = False
    overwrite: shared.Overwrite = False

    def check(self) -> None:
        """Raise OptionError where an option is about a run folder and there is none.

        Raises OutputError where no run can be written to the folder, or continued in it.
        """
        if self.overwrite and self.resume:
            raise OptionError(
                "--overwrite replaces the run that --resume continues; give one of them"
            )
        flags = {"overwrite": self.overwrite, "resume": self.resume, "events": self.events}
        for flag, given in flags.items():
            if given and self.out is None:
                raise OptionError(f"--{flag} is about the run in --out; give --out DIR as well")
        if self.out is not None and not self.overwrite:
            from kvsim.sweeps.parts import check_output

            check_output(self.out, resume=self.resume)

    def replacing(self) -> AbstractContextManager[None]:
        """Let a run be written in the place of the one in the folder, if that was requested."""
        from kvsim.sweeps.parts import replaced

        return replaced(self.out) if self.out is not None and self.overwrite else nullcontext()
