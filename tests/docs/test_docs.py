"""The documentation is true: code blocks run or say why not, generated parts are fresh."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import generate
import kvsim
from blocks import blocks
from kvsim.analysis.registry import METRICS
from kvsim.policies import ACCESS, CATALOGUE
from rules import with_rules

ROOT = Path(__file__).resolve().parents[2]

PAGES = {str(page.relative_to(ROOT)): page for page in generate.pages()}

ALL = [block for name, page in PAGES.items() for block in blocks(name, page.read_text("utf-8"))]

#: Pages that readers type through first; blocks of other pages run in the deep tier.
FIRST = ("README", "quickstart", "record", "add-a-policy", "policies", "sweeps", "conform")
RUN = [
    name if Path(name).stem in FIRST else pytest.param(name, marks=pytest.mark.deep)
    for name in sorted({block.page for block in ALL if block.how == "run"})
]


@pytest.mark.parametrize("name", PAGES)
def test_every_block_says_whether_it_runs(name):
    """A block of code is marked `exec` or `file=NAME`, or follows `<!-- not run: reason -->`."""
    other = ("json", "text", "{eval-rst}")
    code = [b for b in ALL if b.page == name and b.language not in other]
    silent = [f"{b.page}:{b.line}" for b in code if b.how is None]
    strange = [
        f"{b.page}:{b.line}"
        for b in ALL
        if b.page == name and b.how == "run" and not b.file and b.language not in ("bash", "python")
    ]

    assert silent == []
    assert strange == []


@pytest.mark.usefixtures("no_layout")
@pytest.mark.parametrize("name", RUN)
def test_blocks_run(name, tmp_path, monkeypatch, warm_kvsim):
    """The blocks of a page run in order in one empty folder, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    path = [str(warm_kvsim), str(Path(sys.executable).parent), os.environ["PATH"]]
    monkeypatch.setenv("PATH", os.pathsep.join(path))
    monkeypatch.setattr(sys, "path", [*sys.path])  # a page may add to it
    names = {"__name__": "__main__"}
    for block in ALL:
        if block.page != name or block.how != "run":
            continue
        where = f"{block.page}:{block.line}"
        if block.file is not None:
            (tmp_path / block.file).write_text(block.body, "utf-8")
        elif block.language == "bash":
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", block.body],
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, f"{where}\n{done.stdout}{done.stderr}"
            names = {"__name__": "__main__"}
        else:
            # blank lines in front give a traceback the line of the page
            code = compile("\n" * (block.line - 1) + block.body, block.page, "exec")
            exec(code, names)  # noqa: S102 - the page is ours


def test_pages_write_to_places_of_their_own():
    """Readers of several pages work in one folder: no page writes what another one has written."""
    pages = {}
    for block in ALL:
        commands = block.body.replace("\\\n", " ").splitlines() if block.how == "run" else []
        for line in commands:
            for out in re.findall(r"^kvsim .* --out (\S+)(?!.*--overwrite)", line):
                pages.setdefault(out, {block.page}).add(block.page)

    assert "report.html" in pages
    assert {out: names for out, names in pages.items() if len(names) > 1} == {}


@pytest.mark.parametrize("name", PAGES)
def test_generated_parts_are_fresh(name):
    """What docs/generate.py writes is what the page holds."""
    text = PAGES[name].read_text("utf-8")

    assert generate.generated(text) == text


def test_no_page_says_twice_what_an_option_does():
    """An option of several commands has its lines once; each of these names it."""
    text = PAGES["docs/cli.md"].read_text("utf-8")
    options = [" ".join(each.split()) for each in generate._OPTION.findall(text)]
    replay = text.partition("## kvsim replay\n")[2].partition("\n## ")[0]

    assert max(map(options.count, options)) == 1
    assert "And [options of several commands](#options-of-several-commands): `--" in replay


def test_everything_is_documented():
    """Every public name, command, policy, preset and metric has its place in the documentation."""
    python = PAGES["docs/api.md"].read_text("utf-8")
    commands = PAGES["docs/cli.md"].read_text("utf-8")
    policies = PAGES["docs/policies.md"].read_text("utf-8")
    metrics = PAGES["docs/metrics.md"].read_text("utf-8")
    names = [(name, f"{name}@{preset}") for name, e in CATALOGUE.items() for preset in e.presets]

    assert [n for n in kvsim.__all__ if not re.search(rf"\b{n}\b", python)] == []
    assert [c for c in generate.command_names() if f"## kvsim {c}\n" not in commands] == []
    assert [p for p in (*CATALOGUE, *ACCESS) if not re.search(rf"\| \[`{p}\b", policies)] == []
    assert [p for _, p in names if f"| `{p}` |" not in policies] == []
    assert [m for m in METRICS if f"| `{m}` |" not in metrics] == []


def test_the_page_says_which_policies_need_the_question():
    """Scores by attention change with the last queries of the prompt, scores by keys do not."""
    policies = PAGES["docs/policies.md"].read_text("utf-8")
    lines = re.findall(r"(?m)^\| \[`(\w+)[^|]*\|[^|]*\|[^|]*\| ([^|]*) \|", policies)
    needs = dict(lines)

    assert all(needs[x] == "question" for x in ("h2o", "snapkv", "expected_attention", "finch"))
    assert all(not needs[x] for x in ("random", "streaming_llm", "keydiff", "knorm", "lacache"))
    assert (needs["kvzip"], needs["qfilter"]) == ("context twice", "calibration")


def test_the_site_has_the_rule_of_every_policy():
    """The page of policies on the site ends with each docstring, and its tables link there."""
    text = with_rules(PAGES["docs/policies.md"].read_text("utf-8"))
    titles = re.findall(r"(?m)^### (.+)$", text.partition("## Rules\n")[2])

    assert titles == [*CATALOGUE, *ACCESS]
    assert "Every entry accumulates the attention that it\nreceives" in text
    assert "[`h2o`](#h2o)" in text
    assert set(re.findall(r"\]\(#(\S+)\)", text)) <= anchors(text)


def test_every_page_is_reachable():
    """The first page of the site, whose links are its navigation, links to each page once."""
    index = PAGES["docs/index.md"]
    links = re.findall(r"\]\(([^)#]+\.md)\)", index.read_text("utf-8"))
    pages = [(index.parent / link).resolve() for link in links]

    assert len(set(pages)) == len(pages)
    assert {*PAGES.values()} - {*pages} == {index}
    assert "](docs/index.md)" in PAGES["README.md"].read_text("utf-8")


def anchors(text):
    """The anchors of a page's headings, as GitHub and MyST make them."""
    prose = re.sub(r"(?ms)^(```+).*?^\1$", "", text)
    titles = re.findall(r"(?m)^#+ (.+)$", re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", prose))
    slugs = [re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles]
    return {f"{s}-{n}" if (n := slugs[:i].count(s)) else s for i, s in enumerate(slugs)}


def _target(page, link):
    """The file of a link; that of a module is where kvsim is installed."""
    if link.startswith("../kvsim/"):
        return Path(kvsim.__file__).parent / link.removeprefix("../kvsim/")
    return page.parent / link if link else page


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name):
    """Relative links and pictures exist, and so do the headings that links of pages name."""
    page = PAGES[name]
    links = re.findall(r"\]\((?!https?:|mailto:)([^)\s#]*)#?([^)\s]*)\)", page.read_text("utf-8"))
    targets = [(_target(page, link), anchor) for link, anchor in links]
    missing = [
        f"{target.name}#{anchor}"
        for target, anchor in targets
        if not target.is_file() or (anchor and anchor not in anchors(target.read_text("utf-8")))
    ]

    assert missing == []


def test_readme_commands():
    """The first commands of the README are the two that CI runs before all else."""
    bash = [b for b in ALL if b.page == "README.md" and b.language == "bash"]
    demo, tests, *_ = [b.body.strip() for b in bash]
    install = "python3 -m venv .venv && .venv/bin/pip install -q -c constraints.txt -e '.[test]'"
    script = (ROOT / ".ci" / "run").read_text("utf-8")

    assert demo == f"{install} && .venv/bin/kvsim demo --out results/demo"
    assert tests == f"{install} && .venv/bin/python -m pytest -q"
    assert "demo=$(readme_command 1)\ntests=$(readme_command 2)\n" in script
    commands = [script.index(f'bash -euo pipefail -c "${name}"') for name in ("demo", "tests")]
    installed = [script.index(command) for command in ("apt-get", "pip install", ".venv/bin")]
    assert [*commands, min(installed)] == sorted([*commands, min(installed)])
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
