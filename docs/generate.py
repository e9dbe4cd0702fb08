"""Write the generated parts of the documentation, between `<!-- generated: NAME -->` marks.

python docs/generate.py              rewrite what is out of date
python docs/generate.py --figures    draw the pictures of the pages too (docs/drawing.py)
python docs/generate.py --check      change nothing; exit with status 1 if something is out of date
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import conformance_page
import typer
import validity

import drawing
from kvsim.cli import app

ROOT = Path(__file__).resolve().parent.parent

_PART = re.compile(r"(<!-- generated: (?P<name>\S+) -->\n).*?(<!-- /generated -->)", re.DOTALL)


def policies() -> str:
    """The table of policies and their presets."""
    from kvsim.cli.listing import fires, needs, shown  # noqa: PLC0415 - loads torch; --help doesn't
    from kvsim.policies import CATALOGUE, describe, names  # noqa: PLC0415

    lines = ["| policy | rule | evicts after | needs | paper |", "| --- " * 5 + "|"]
    for each in map(describe, names()):
        paper = "" if "@" in each.name else _link(each.entry.paper)
        name = _source(each.name, shown(each), CATALOGUE)
        lines.append(f"| {name} | {each.entry.rule} | {fires(each)} | {needs(each)} | {paper}|")
    return "\n".join(lines)


def _source(name: str, label: str, entries: Mapping[str, Any]) -> str:
    """The name, linked to the file whose docstring has the rule."""
    if name not in entries:  # a preset
        return f"`{label}`"
    module = f"kvsim.policies.{name}"
    if find_spec(module) is None:
        module = entries[name].piece.__module__
    return f"[`{label}`](../{module.replace('.', '/')}.py)"


def lengths() -> str:
    """The lengths that `@scaled` scales at 64 entries, and the budgets that they are meant for."""
    from kvsim.policies import CATALOGUE, names, policy  # noqa: PLC0415 - as policies()

    lines = ["| policy | meant for | values (at a budget of 64) |", "| --- " * 3 + "|"]
    for name in names():
        base, _, preset = name.partition("@")
        entry = CATALOGUE[base].preset(preset)
        inside = "" if entry.innermost or entry.default else "+tova"
        built = policy(name + inside, **entry.required)
        lengths = [length for length in built.lengths if length.depth == 0]
        values = (
            f"`{length.name}` {length.value}"
            + (f" ({length.at(64)})" if length.at(64) != length.value else "")
            for length in lengths
        )
        if any(length.at(64) != length.value for length in lengths):
            lines.append(f"| `{name}` | {lengths[0].entries} | {', '.join(values)} |")
    return "\n".join(lines)


def access() -> str:
    """The table of sparse attention and quantizers."""
    from kvsim.cli.listing import needs  # noqa: PLC0415 - as policies()
    from kvsim.policies import ACCESS, describe, names  # noqa: PLC0415

    lines = ["| part | kind | what it does | needs | paper |", "| --- " * 5 + "|"]
    for each in map(describe, names(ACCESS)):
        entry = each.entry
        paper = "" if "@" in each.name else _link(entry.paper)
        name = _source(each.name, each.name, ACCESS)
        lines.append(f"| {name} | {entry.kind} | {entry.rule} | {needs(each)} | {paper}|")
    return "\n".join(lines)


def _link(paper: str) -> str:
    number = paper.removeprefix("arXiv ")
    return f"[{paper}](https://arxiv.org/abs/{number}) " if number != paper else paper


def parameters() -> str:
    """Parameters with their defaults, and those that presets change."""
    from kvsim.policies import ACCESS, CATALOGUE, describe  # noqa: PLC0415 - as policies()

    lines = ["| policy | parameters |", "| --- | --- |"]
    for name, entry in {**CATALOGUE, **ACCESS}.items():
        defaults = describe(name).params
        values = {name: defaults}
        for preset in entry.presets:
            params = describe(f"{name}@{preset}").params
            changed = {key: x for key, x in params.items() if x != defaults.get(key)}
            values[f"{name}@{preset}"] = changed if params.keys() == defaults.keys() else params
        for label, params in values.items():
            if params:
                cell = ", ".join(f"`{key}={value}`" for key, value in params.items())
                lines.append(f"| `{label}` | {cell} |")
    return "\n".join(lines)


def metrics() -> str:
    """The table of all metrics."""
    from kvsim.analysis.registry import METRICS  # noqa: PLC0415 - as policies()

    lines = [
        "| metric | says | reads | unit | better | main variant | source |",
        "| --- " * 7 + "|",
    ]
    for name, entry in METRICS.items():
        says = entry.summary.replace("|", r"\|")
        reads = entry.kind if entry.default else f"{entry.kind}, by name"
        main = f"`{entry.main}`" if entry.main else ""
        cells = (f"`{name}`", says, reads, entry.unit, entry.better or "", main, entry.source)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def figures() -> str:
    """The table of the figures of `kvsim plot`."""
    from kvsim.plots.registry import FIGURES  # noqa: PLC0415 - as policies()

    lines = ["| name | shows | options | needs | source |", "| --- " * 5 + "|"]
    for name, figure in FIGURES.items():
        options = ", ".join(f"`--{flag}`" for flag in figure.flags)
        cells = (f"`{name}`", figure.summary.rstrip("."), options, figure.needs, figure.source)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


#: An option in the help of a command.
_OPTION = re.compile(r"^  -[^\n]+\n(?: {3,}[^\n]+\n)*", re.MULTILINE)
#: Commands from which on such an option is described once for all of them.
_SEVERAL = 3


def commands() -> str:
    """Return what `--help` prints for each command, 80 columns wide, without common options."""
    command = typer.main.get_command(app())
    texts = {"kvsim": _help(command, [])}
    texts |= {f"kvsim {name}": _help(command, name.split()) for name in command_names()}
    options: dict[str, list[str]] = {}
    for text in texts.values():
        for option in _OPTION.findall(text):
            options.setdefault(_plain(option), []).append(option)
    shared = {key: max(same, key=len) for key, same in options.items() if len(same) >= _SEVERAL}
    parts = []
    for title, text in texts.items():
        own = _OPTION.sub(partial(_unless, shared), text).rstrip()
        parts += [f"## {title}", _block(re.sub(r"\n\nOptions:(?=\n\n|$)", "", own))]
        names = [_name(each) for each in _OPTION.findall(text) if _plain(each) in shared]
        if names:
            parts.append(f"And [options of several commands]({_SHARED}): {', '.join(names)}.")
    parts += ["## Options of several commands", _block("".join(shared.values()))]
    return "\n" + "\n\n".join(parts) + "\n"


_SHARED = "#options-of-several-commands"


def _plain(option: str) -> str:
    return " ".join(option.split())


def _name(option: str) -> str:
    return f"`{option.split(maxsplit=1)[0].rstrip(',')}`"


def _unless(shared: Mapping[str, str], option: re.Match[str]) -> str:
    return "" if _plain(option[0]) in shared else option[0]


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


#: Of reasons why a family is refused: parts that differ from family to family.
_SHORTER = {
    r"^\w+ (?=called|takes)": "",
    r" layers? \d[\d, -]*": " a layer ",
    r" by [\d.]+ ": " ",
    r"was called by .*": "was called by several modules in a layer",
    r"takes an? \w+ alone, expected .*": "takes a cache of its own",
}


def census() -> str:
    """Families of the last census: recorded, refused with the reason, and not built."""
    last_census = json.loads((ROOT / "docs/families-census.json").read_text("utf-8"))
    kinds = {"": "causal language models", "vl": "multimodal, text alone"}
    names = (*kinds.values(), "variants")
    groups: dict[str, dict[str, Any]] = {kind: {} for kind in names}
    for name, each in last_census["families"].items():
        groups[kinds.get(name.partition("#")[2], "variants")][name] = each
    results = ("recorded", "refused", "foreign", "wrong", "not built")
    lines = [f"| | total | {' | '.join(results)} |", "| --- |" + " ---: |" * 6]
    for kind, families in groups.items():
        counts = (sum(x["result"] == result for x in families.values()) for result in results)
        lines.append(f"| {kind} | {len(families)} | {' | '.join(map(str, counts))} |")
    lines += ["", f"transformers {last_census['transformers']}.", ""]
    every = {name: each for families in groups.values() for name, each in families.items()}
    recorded = [name for name, each in every.items() if each["result"] == "recorded"]
    plain = [name for name in recorded if not {"others", "notes"} & every[name].keys()]
    lines += [f"Recorded, all layers, with everything: {', '.join(f'`{x}`' for x in plain)}.", ""]
    grouped: dict[str, list[str]] = {}
    for name in (x for x in recorded if x not in plain):
        others = ["layers without attention"] * ("others" in every[name])
        for note in (*others, *(x.partition(":")[0] for x in every[name].get("notes", ()))):
            grouped.setdefault(note, []).append(name)
    for name, each in every.items():
        if each["result"] != "recorded":
            reason = each["reason"].partition("; ")[0]
            for pattern, short in _SHORTER.items():
                reason = re.sub(pattern, short, reason)
            grouped.setdefault(f"{each['result']}: {reason}", []).append(name)
    lines += ["| | families |", "| --- | --- |"]
    for note, families in grouped.items():
        names_of = ", ".join(f"`{name.partition('#vl')[0]}`" for name in dict.fromkeys(families))
        lines.append(f"| {note.replace('|', 'or')} | {names_of} |")
    return "\n".join(lines)


PARTS: Mapping[str, Callable[[], str]] = {
    "access": access,
    "answers": validity.answers,
    "census": census,
    "commands": commands,
    "figures": figures,
    "lengths": lengths,
    "metrics": metrics,
    "parameters": parameters,
    "policies": policies,
    "conformance_costs": conformance_page.costs,
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
