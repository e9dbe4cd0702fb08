"""The text of the page: tables, what they mean, and the claims with their verdicts."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import numpy as np

from kvsim import Policy, policy
from kvsim.analysis.summaries import RESAMPLES, Interval
from kvsim.claims import CLAIMS, HOLDS, NOT, OPEN, Claim
from kvsim.policies import names, parameters
from results_page.groups import groups
from results_page.plan import FULL, INTERVAL
from results_page.policies import ACROSS, AMS, PAPER, RELEASE, across_policies
from results_page.statistics import Results
from results_page.traces import VERBS, weights

#: Columns of the tables: heading, metric, variant (None: the main one), format.
COLUMNS = (
    ("output error", "output_error", None, ".3f"),
    ("retained mass", "retained_mass", None, ".3f"),
    ("regret", "regret", None, ".3f"),
    ("wipe-out 16", "wipeout", "length=16,threshold=0", ".2f"),
    ("wipe-out 32", "wipeout", "length=32,threshold=0", ".2f"),
    ("IoU", "retained_iou", None, ".2f"),
    ("entries", "entries_seen", None, ".1f"),
)
#: The column behind which chance stands.
CHANCE = "IoU"


def page(r: Results, policies: Mapping[str, Policy], figure: str) -> str:
    """The whole page; `figure` is its path as the page links to it."""
    claims = {paper: list(make(r.evidence)) for paper, make in CLAIMS.items()}
    parts = [
        _introduction(r),
        "## What policies keep and lose",
        _reading(r),
        f"![Output error of every policy at every budget]({figure})",
        *(_table(r, policies, n) for n in r.plan.budgets),
        "### Parameters made smaller",
        _changed(policies),
        "## By stage, domain and task",
        groups(r),
        "## Across layers",
        _across(r),
        "## Which of the papers' claims hold here",
        _rules(r),
        _count(claims),
        *(f"### {paper}\n\n" + _claims(found, r.plan.prompts) for paper, found in claims.items()),
        "## Names",
        f"The catalogue when this page was made: {listing()}.",
    ]
    return "\n\n".join(parts) + "\n"


def listing() -> str:
    """Every name of the catalogue, as the page lists it."""
    return ", ".join(f"`{name}`" for name in names())


def _introduction(r: Results) -> str:
    plan = r.plan
    command = "python docs/results.py" + ("" if plan == FULL else " --smallest")
    traces = hashlib.sha256("".join(r.digests).encode()).hexdigest()
    tools = ", ".join(f"{name} {version(name)}" for name in ("kvsim", "torch", "transformers"))
    tokens, prompt = np.array(r.sizes).T
    size = f"level {plan.level}" if plan.level else f"{plan.facts} facts, up to {plan.lines} lines"
    return f"""# Results on the shipped model

`tiny` has three layers and about a million parameters, and was built for an artificial task with \
its retrieving heads partly put there, so these numbers show what policies do to such attention \
and not what they do to a large model. A claim that holds here has passed one small test; one \
that does not may hold all the same where texts are ten times as long and heads less sharp.

<!-- not run: takes minutes, and this page is what it writes -->
```bash
{command}
```

* {plan.prompts} prompts in the language of `tiny` ({", ".join(VERBS)} in turn, domains in turn, \
{size}, seed {plan.seed}), answered greedily: {tokens.min()} to \
{tokens.max()} tokens, of which {prompt.min()} to {prompt.max()} are prompt. One more \
prompt serves to calibrate `qfilter` and `triattention`.
* Weights of `tiny`: sha256 `{weights()}`. Digests of the traces together: sha256 `{traces}`.
* {tools}, Python {platform.python_version()}, CPU.
* One schedule for every policy, whatever its own is: an event after each {INTERVAL} rows of the \
response, and none after the prompt (`--interval {INTERVAL} --no-prefill`). This compares what \
policies keep, and not when they act.
* A value is the mean over layers and heads (and over the rows of the response, where rows count) \
of a prompt, then over prompts. In brackets: its 95 % bootstrap interval over prompts \
({RESAMPLES} resamples, seed 0).
* Numbers of layer 0 are exact, those of layers 1 and 2 open loop: errors do not add up over \
layers ([fidelity](concepts.md#fidelity))."""


def _reading(r: Results) -> str:
    small, large = (AMS["window"] / (n + INTERVAL) for n in (r.plan.budgets[0], r.plan.budgets[-1]))
    return (
        "Rows are sorted by output error. *Regret* is the mass that an oracle retains on the same "
        "terms, minus retained mass; without a bound on the size there is none. *Wipe-out 16* "
        "and *32* are the shares of regions of so many tokens of which nothing is left after the "
        "last event; `full` has none. Beside the *IoU* of consecutive kept sets stands what random "
        "sets of the same sizes have. *Entries* is what a row sees, on average over rows, so it "
        "lies above the budget. [Definitions](metrics.md).\n\n"
        "AMS, G-KV and others are made for caches of hundreds or thousands of entries, so their "
        "windows and segments are made smaller here ([how](#parameters-made-smaller)). "
        f"{_name(PAPER)} and {_name(RELEASE)}, are AMS with the numbers of the paper and of the "
        "released code, which at these budgets leave little or nothing to choose: the most recent "
        f"entries alone take 32. The window of `ams` is {small:.0%} of the cache before an event "
        f"at the smallest budget and {large:.0%} at the largest; with 512 entries, an event every "
        f"512 rows and the window of the paper it is {128 / (512 + 512):.1%}."
    )


def _table(r: Results, policies: Mapping[str, Policy], budget: int) -> str:
    rows = []
    for label, one in policies.items():
        cells = []
        for title, metric, variant, form in COLUMNS:
            cells.append(Interval.of(r.of(label, budget, metric, variant)).text(form))
            if title == CHANCE:  # follows from the sizes of sets alone, so it has no interval
                found = Interval.of(r.chance(label, budget, metric))
                cells.append(format(found.mean, form) if found.n else "")
        note = "" if one.bounded else " (no budget binds)"
        row = f"| {_name(label)}{note} | " + " | ".join(cells) + " |"
        rows.append((float(np.nanmean(r.of(label, budget, "output_error"))), row))
    titles = [title for title, *_ in COLUMNS]
    titles.insert(titles.index(CHANCE) + 1, f"{CHANCE} by chance")
    head = "| policy | " + " | ".join(titles) + " |"
    rule = "| --- |" + " ---: |" * len(titles)
    return "\n".join([f"### Budget {budget}", "", head, rule, *(row for _, row in sorted(rows))])


def _name(label: str) -> str:
    name, comma, rest = label.partition(",")
    return f"`{name}`{comma}{rest}"


def _across(r: Results) -> str:
    """Policies that drop rows of the prompt, and what they are beside."""
    head = "| policy | " + " | ".join(f"budget {n}" for n in r.plan.budgets) + " | entries |"
    lines = [head, "| --- |" + " ---: |" * (len(r.plan.budgets) + 1)]
    for one in across_policies():
        errors = (r.of(one.name, n, "output_error") for n in r.plan.budgets)
        cells = [Interval.of(error).text(".3f") for error in errors]
        entries = [r.of(one.name, n, "entries_seen").mean() for n in r.plan.budgets]
        seen = f"{min(entries):.0f} to {max(entries):.0f}"
        label = _name(one.name.removeprefix(ACROSS))
        lines.append(f"| {label} | {' | '.join(cells)} | {seen} |")
    text = (
        "Output error of [policies that drop rows of the prompt on the way down]"
        "(across-layers.md), at the one event after the prompt; SnapKV, which cuts caches alone, "
        "stands first. Windows are 8 rows. In a model of three layers there is one layer behind a "
        "selection, and ASL is forced to select (tau 1.01); the numbers of that layer are open "
        "loop. *Entries* is what a row sees from the smallest budget to the largest, means over "
        "layers: caches grow while the response is written, and those of `pyramidinfer` and of "
        "*full before* are larger to begin with. Dropping rows saves time, which is not in this "
        "table: [costs](cost.md)."
    )
    return "\n".join([text, "", *lines])


def _changed(policies: Mapping[str, Policy]) -> str:
    """Where a row differs from the policy of its name."""
    lines = ["| policy | here, and by default |", "| --- | --- |"]
    for label, one in policies.items():
        if label.partition(",")[2]:
            continue
        default = policy(label, **_required(label)).params
        changed = [
            f"`{key}={value}` ({default[key]})"
            for key, value in one.params.items()
            if default[key] != value and not key.endswith("calibration")
        ]
        if changed:
            lines.append(f"| {_name(label)} | {', '.join(changed)} |")
    return "\n".join(lines)


def _required(name: str) -> dict[str, Any]:
    return {"calibration": "prefix:64"} if "calibration" in parameters(name) else {}


def _rules(r: Results) -> str:
    return (
        "Each claim becomes a number per prompt that is above 0 where the claim is right, most "
        "often the difference between two policies on the same prompt. Where a paper speaks of "
        "accuracy, *better* means a lower output error here, which is not the same. The script "
        f"computes verdicts from the 95 % intervals of the means over the {r.plan.prompts} "
        "prompts (n where it is another number):\n\n"
        f"* **{HOLDS}**: above 0 in every case, or inside the margin where something is to change "
        "little. Cases are budgets, unless they say otherwise.\n"
        f"* **{NOT}**: on the other side in at least one case, which is marked *against*.\n"
        f"* **{OPEN}**: otherwise. Either an interval reaches both sides and is marked *open*, or "
        "there is no number, for the reason given.\n\n"
        "There are so many intervals that some miss by chance. Schedule and parameters are those "
        "of the tables, except for Expected Attention: it is tested at one event, after the "
        "prompt, which is what its paper is about. Claims that are plain arithmetic on printed "
        "numbers, or that need free generation or training, are not listed."
    )


def _count(tested: Mapping[str, Sequence[Claim]]) -> str:
    lines = [f"| paper | tests | {HOLDS} | {NOT} | {OPEN} |", "| --- | ---: | ---: | ---: | ---: |"]
    for paper, found in tested.items():
        verdicts = [claim.verdict for claim in found]
        counts = [verdicts.count(v) for v in (HOLDS, NOT, OPEN)]
        lines.append(f"| {paper} | {len(found)} | " + " | ".join(map(str, counts)) + " |")
    return "\n".join(lines)


def _claims(found: Sequence[Claim], prompts: int) -> str:
    lines = ["|  | claim | test | result | verdict |", "| --- | --- | --- | --- | --- |"]
    for claim in found:
        result = "<br>".join(claim.lines(prompts))
        cells = (claim.number, claim.says, claim.tested, result, f"**{claim.verdict}**")
        lines.append("| " + " | ".join(map(_escaped, cells)) + " |")
    return "\n".join(lines)


def _escaped(text: str) -> str:
    """Bars would end a cell."""
    return text.replace("|", "\\|")
