"""Write the generated parts of the documentation, between `<!-- generated: NAME -->` marks.

python docs/generate.py              rewrite what is out of date
python docs/generate.py --figures    draw the pictures of the pages too (docs/drawing.py)
python docs/generate.py --check      change nothing; exit with status 1 if something is out of date
"""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import re
import sys
from collections.abc import Callable, Mapping
from itertools import starmap
from pathlib import Path
from typing import Any

import bits
import conformance_page
import needle
import typer
import validity

import drawing
import rules
from kvsim.cli import app

ROOT = Path(__file__).resolve().parent.parent

_PART = re.compile(r"(<!-- generated: (?P<name>\S+) -->\n).*?(<!-- /generated -->)", re.DOTALL)


#: What metrics of each kind are computed from.
_READ = {
    "sets": "the entries that a policy keeps, and its decisions",
    "rows": "how evictions change the attention of rows after the prompt, as means over these",
    "trace": "the trace, without any policy",
    "live": "the running model (`kvsim live`, `--judge`)",
}


def metrics() -> str:
    """Return a table of the metrics for each kind of what they read."""
    from kvsim.analysis.live.metrics import KL_TOKENS  # noqa: PLC0415 - loads torch; --help doesn't
    from kvsim.analysis.registry import METRICS  # noqa: PLC0415

    parts = []
    for kind, read in _READ.items():
        of_kind = {name: entry for name, entry in METRICS.items() if entry.kind == kind}
        asked = [x for x, y in of_kind.items() if not y.default or y.beside]
        named = ", ".join(f"`{name}`" for name in (asked if kind != "live" else [KL_TOKENS]))
        by_name = f" Only with `--metric`: {named}." if named else ""
        head = ["| metric | value | unit | source |", "| --- " * 4 + "|"]
        parts += [f"## {kind.capitalize()}", f"Computed from {read}.{by_name}"]
        parts += ["\n".join([*head, *starmap(_metric, of_kind.items())])]
    return "\n" + "\n\n".join(parts) + "\n"


def _metric(name: str, entry: Any) -> str:
    """Return the line of a metric; an arrow after the unit points to the better values."""
    arrow = {"lower": " ↓", "higher": " ↑"}.get(entry.better, "")
    source = "" if entry.source == "kvsim" else entry.source
    value = entry.summary.removesuffix("; summaries add up the layers")
    if entry.kind == "rows":  # as the text above the table says
        value = value.replace(", mean over rows after the prompt", "")
    unit = f"{entry.unit}{', sum over layers' if entry.layers == 'sum' else ''}{arrow}"
    cells = (f"`{name}`", value.replace("|", r"\|"), unit, source)
    return f"| {' | '.join(cells)} |"


#: Arguments that the page of figures explains once.
_PLAIN = {"trace", "traces", "record", "records", "layer", "layers", "head"}


def figures() -> str:
    """Return a section for each figure of `kvsim plot`, from its docstring."""
    from kvsim import plots  # noqa: PLC0415 - as metrics()
    from kvsim.plots.registry import FIGURES  # noqa: PLC0415 - as metrics()

    parts = []
    for name, figure in FIGURES.items():
        summary, body, *_, given, _ = (inspect.getdoc(getattr(plots, name)) or "").split("\n\n")
        parts += [f"## {name}", summary]
        if (ROOT / "docs/figures" / f"{name}.png").is_file():
            parts.append(f"![{name}](figures/{name}.png)")
        named = re.findall(r"(?m)^    (\w[\w, ]*): ((?:.|\n {8})+)", given)
        own = [f"`{x}`: {' '.join(text.split())}" for x, text in named if {*x.split(", ")} - _PLAIN]
        flags = "".join(f", `--{flag}`" for flag in figure.flags)
        parts.append(" ".join([*body.split(), *own, f"*Takes* {figure.needs}{flags}."]))
    return "\n" + "\n\n".join(parts) + "\n"


#: An option in the help of a command.
_OPTION = re.compile(r"^  -[^\n]+\n(?: {3,}[^\n]+\n)*", re.MULTILINE)


def commands() -> str:
    """Return what `--help` prints for each command, 80 columns wide; equal options stand once."""
    command = typer.main.get_command(app())
    texts = {"": _help(command, [])}
    texts |= {name: _help(command, name.split()) for name in command_names()}
    options: dict[str, dict[str, str]] = {}
    for name, text in texts.items():
        for option in _OPTION.findall(text):
            options.setdefault(_plain(option), {})[name] = option
    shared: dict[tuple[str, ...], list[str]] = {}
    for of_commands in options.values():
        if len(of_commands) > 1:
            names = tuple(filter(None, of_commands))
            shared.setdefault(names, []).append(max(of_commands.values(), key=len))
    parts = []
    for name, text in texts.items():
        own = _OPTION.sub(lambda x: x[0] * (len(options[_plain(x[0])]) == 1), text)
        own = _LISTING.sub("\n", re.sub(r"\n\nOptions:(?=\n\n|$)", "", own.rstrip()))
        parts += [f"## {f'kvsim {name}'.strip()}", _block(own)]
        names = [_name(each) for each in _OPTION.findall(text) if len(options[_plain(each)]) > 1]
        if names[:-1]:  # the last is -h
            parts.append(f"And [options of several commands]({_SHARED}): {', '.join(names[:-1])}.")
    parts.append("## Options of several commands")
    for names, same in sorted(shared.items(), key=lambda x: -len(x[0]))[1:]:  # all have -h
        parts += [f"{', '.join(f'`{name}`' for name in names)}:", _block("".join(same))]
    return "\n" + "\n\n".join(parts) + "\n"


_SHARED = "#options-of-several-commands"
#: The list of commands in the help of a group, each of which has its own section.
_LISTING = re.compile(r"\n\nCommands:\n(?:  [^\n]*\n?)+")


def _plain(option: str) -> str:
    return re.sub(r"(?<=\w)- (?=\w)", "-", " ".join(option.split()))  # broken at a hyphen


def _name(option: str) -> str:
    return f"`{option.split(maxsplit=1)[0].rstrip(',')}`"


def _block(text: str) -> str:
    return f"```text\n{text.rstrip()}\n```"


def command_names() -> list[str]:
    """The commands, in the order of `kvsim --help`."""
    names = _names(app())
    for group in app().registered_groups:
        names += [group.name, *(f"{group.name} {name}" for name in _names(group.typer_instance))]
    return names


def _names(part: typer.Typer) -> list[str]:
    return [info.name or info.callback.__name__ for info in part.registered_commands]


def _help(command: Any, path: list[str]) -> str:
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        command.main([*path, "--help"], "kvsim", standalone_mode=False, terminal_width=80)
    return text.getvalue()


#: Parts of a reason or a note that differ from family to family.
_SHORTER = {
    r"(an indexer chooses) .*": r"\1 the entries that a row reads; a short text has all of them",
    r"queries and keys of layers .*": "RoPE unknown: policies that read before it are refused",
    r"(recorded without \w+): .*": r"\1",
    r"^\w+ (?=called|takes)": "",
    r"called the kernel .*": "no attention, or a kernel of its own (ALiBi, relative positions)",
    r"attention of layer .*": "attention does not follow from q, k, v",
    r"the kernel .* was called by .*": "several modules of a layer call the kernel",
    r"takes an? \w+ alone, expected .*": "takes a cache of its own",
}


def census() -> str:
    """Return families of the last census by outcome, without its variants of them."""
    last = json.loads((ROOT / "docs/families-census.json").read_text("utf-8"))
    groups: dict[str, list[str]] = {}
    for name, each in last["families"].items():
        base, _, variant = name.partition("#")
        plain = variant == "vl" and base not in last["families"]
        if not variant or plain:  # no variant of a family
            for outcome in _outcomes(each):
                groups.setdefault(outcome, []).append(f"`{base}`")
    lines = ["| outcome | families |", "| --- | --- |"]
    order = sorted(groups, key=lambda x: (x.startswith(("refused", "not")), x != "recorded"))
    rows = (f"| {outcome} | {', '.join(dict.fromkeys(groups[outcome]))} |" for outcome in order)
    return "\n".join([*lines, *rows])


def _outcomes(each: Mapping[str, Any]) -> list[str]:
    """Return the result of a family with its reason, or what is not as usual in its traces."""
    if each["result"] == "not built":
        return ["not built for the census"]
    if each["result"] != "recorded":
        return [_shorter(f"{each['result']}: {each['reason'].partition('; ')[0]}")]
    notes = [
        _shorter(note) for note in each.get("notes", ()) if re.match("an ind|que|recorded", note)
    ]
    kinds = ["recorded, with other layers without attention"] if "others" in each else []
    return [*dict.fromkeys([*kinds, *notes])] or ["recorded"]


def _shorter(text: str) -> str:
    refused = "refused: " if text.startswith("refused: ") else ""
    reason = text.removeprefix(refused)
    for pattern, short in _SHORTER.items():
        reason = re.sub(pattern, short, reason)
    return refused + reason


PARTS: Mapping[str, Callable[[], str]] = {
    "access": rules.access,
    "answers": validity.answers,
    "bits": bits.part,
    "census": census,
    "commands": commands,
    "figures": figures,
    "lengths": rules.lengths,
    "metrics": metrics,
    "needles": needle.part,
    "parameters": rules.parameters,
    "policies": rules.policies,
    "deviations": conformance_page.deviations,
    "conformance_costs": conformance_page.costs,
    "conformance_engines": conformance_page.engines,
    "conformance_releases": conformance_page.releases,
    "validity": validity.part,
}


def pages() -> list[Path]:
    """Every page of the documentation."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]


def generated(text: str) -> str:
    """The page with its generated parts written anew."""
    return _PART.sub(lambda found: f"{found[1]}{PARTS[found['name']]()}\n{found[3]}", text)


def main() -> int:
    """Rewrite the pages, or only say which are out of date."""
    check = "--check" in sys.argv[1:]
    texts = {page: page.read_text("utf-8") for page in pages()}
    stale = [page for page, text in texts.items() if generated(text) != text]
    for page in stale:
        if not check:
            page.write_text(generated(texts[page]), "utf-8")
        print(f"{'out of date' if check else 'written'}: {page.relative_to(ROOT)}")
    if "--figures" in sys.argv[1:]:
        drawing.draw(drawing.texts())
    wrong = drawing.problems() if check else []
    print("".join(f"{line}\n" for line in wrong), end="")
    return 1 if check and (stale or wrong) else 0


if __name__ == "__main__":
    sys.exit(main())
