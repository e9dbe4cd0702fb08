"""The text of the page: tables, and what they mean."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvsim import Policy, policy
from kvsim.analysis.significance import FEWEST
from kvsim.analysis.summaries import RESAMPLES, Interval
from kvsim.policies import parameters
from results_page.groups import groups
from results_page.plan import REAL, Plan
from results_page.policies import ACROSS, PAPER, RELEASE, across_policies, table_policies
from results_page.ranking import Row, markdown, opening, ranked_rows, shown, table, usual_entries
from results_page.statistics import Results
from results_page.traces import ANSWER, DEPTHS, VERBS, labels

#: The heading of what follows the opening.
MEASURED = "## How this was measured"


def page(
    r: Results, policies: Mapping[str, Policy], by_budget: Mapping[int, Sequence[Row]], figure: str
) -> str:
    """The whole page; figure: its path as the page links to it."""
    changed = ["### Parameters made smaller", _changed(policies)] if r.plan.sizes.ams else []
    later = [shown(label) for label in table_policies(r.plan, "prefix:64").keys() - policies.keys()]
    unmeasured = f"\n* Not measured, as newer: {', '.join(sorted(later))}." if later else ""
    parts = [
        _introduction(r, opening(r, by_budget, figure)) + unmeasured,
        "## What policies keep and lose",
        reading(r, policies, usual_entries(by_budget[r.plan.budget])),
        table(by_budget, r.plan.budget),
        *changed,
        "## By " + _and(["stage", *labels(r.plan, 1)]),
        groups(r),
        "## Layer-wise token pruning",
        _across(r),
        *(_of_a_real_model(r, by_budget[r.plan.budget]) if r.plan.lengths else []),
    ]
    return "\n\n".join(parts) + "\n"


def _of_a_real_model(r: Results, ranked: Sequence[Row]) -> list[str]:
    """Sections that tiny has no layers and no needles for."""
    return [
        "## What is left of the needle",
        _needle(r, [*(row.label for row in ranked_rows(ranked)), "oracle"]),
        "## Where ASL selects",
        _selection(r),
    ]


def _and(names: Sequence[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _introduction(r: Results, first: str) -> str:
    plan = r.plan
    events = f"an event after each {plan.interval} rows of the response, and " + (
        f"one after the prompt (`--interval {plan.interval} --set prefill=true`)"
        if plan.prefill
        else f"none after the prompt (`--interval {plan.interval} --set prefill=false`)"
    )
    about = _smollm2(r) if plan.lengths else _tiny(r)
    return f"""{about[0]}

{first}

{MEASURED}

{command(plan)}

* {about[1]}
{sources(r)}
* One schedule for every policy: {events}.
* A value is the mean over layers and heads (and over the rows of the response) of a prompt, then \
over prompts. In brackets: its 95 % bootstrap interval over prompts ({RESAMPLES} resamples, \
seed 0), with at least {FEWEST} prompts.
* Numbers of layer 0 are exact, those of deeper layers [open loop](concepts.md#fidelity)."""


def command(plan: Plan) -> str:
    """The command that makes the page."""
    time = "hours" if plan.lengths else "minutes"
    return f"""<!-- not run: takes {time}, and writes this page -->
```bash
python docs/results.py{plan.option}
```"""


def sources(r: Results) -> str:
    """Lines on the weights, the traces, the packages and the file of values."""
    traces = hashlib.sha256("".join(r.digests).encode()).hexdigest()
    return f"""* Weights of `{r.plan.model}`: sha256 `{r.made["weights"]}`. Digests of the traces \
together: sha256 `{traces}`.
* {r.made["tools"]}, {r.made.get("device", "CPU")}.
* The values of every prompt: `docs/{r.plan.page.replace(".md", ".parquet")}`, from which \
`python docs/results.py{r.plan.option} --stored` writes this page."""


def _tiny(r: Results) -> tuple[str, str]:
    """The beginning of the page on tiny, and its prompts."""
    plan = r.plan
    tokens, prompt = np.array(r.sizes).T
    size = f"level {plan.level}" if plan.level else f"{plan.facts} facts, up to {plan.lines} lines"
    beginning = (
        "# Results on the shipped model\n\n"
        "`tiny` has three layers, about a million parameters and an artificial task, and some of "
        "its retrieval heads were built by hand: these numbers do not carry over to large models. "
        "[Results on SmolLM2](results-smollm2.md) are those of a pretrained model; "
        "[claims](claims.md) are tested on both."
    )
    prompts = (
        f"{plan.prompts} prompts in the language of `tiny` ({', '.join(VERBS)} in turn, domains in "
        f"turn, {size}, seed {plan.seed}), answered greedily: {tokens.min()} to {tokens.max()} "
        f"tokens, of which {prompt.min()} to {prompt.max()} are prompt. One more prompt serves to "
        "calibrate `qfilter` and `triattention`."
    )
    return beginning, prompts


def _smollm2(r: Results) -> tuple[str, str]:
    """The beginning of the page on SmolLM2, and its prompts."""
    plan = r.plan
    tokens, prompt = np.array(r.sizes).T
    lengths = _and([f"{length:,}" for length in sorted(set(plan.lengths))])
    depths = _and([f"{depth:.0%}" for depth in DEPTHS])
    answered = sorted(set(REAL) - {"text"})
    beginning = (
        "# Results on SmolLM2\n\n"
        "SmolLM2-135M-Instruct is a small pretrained language model of 30 layers, 9 query heads "
        "and 3 KV heads, in 4 bits ([`--model smollm2`](smollm2.md)). The texts are Python's "
        "documentation. These results are of one model, one kind of text and short contexts, and "
        "say nothing of accuracy. [Claims of the papers](claims.md) are tested on them."
    )
    prompts = (
        f"{plan.prompts} prompts of about {lengths} tokens, seed {plan.seed}, half of them `text`: "
        "the last quarter of a text is the response, recorded in one pass. The others are tasks "
        f"that [SmolLM2 solves](smollm2.md), {_and([f'`{task}`' for task in answered])}, with "
        f"needles at a depth of {depths} in turn; the model writes {ANSWER} tokens at most. "
        f"{tokens.min()} to {tokens.max()} tokens, of which {prompt.min()} to {prompt.max()} are "
        "prompt. A text more serves to calibrate `qfilter` and `triattention`. A prompt is "
        "replayed at the budgets of at most half its tokens; variants that claims ask for at "
        f"{_and([str(budget) for budget in plan.tried or plan.budgets])} alone."
    )
    return beginning, prompts


def reading(r: Results, policies: Mapping[str, Policy], entries: str) -> str:
    """Explain the columns of the tables."""
    gaps = [r.of(label, n, "regret_gap") for label in policies for n in r.plan.budgets]
    gap = np.nanmax(gaps)
    left_open = f"at most {gap:.0e}" if gap else "nothing"
    return (
        f"KL at each budget{_prompts(r)}, then the other [metrics](metrics.md) at budget "
        f"{r.plan.budget}, by whose KL rows are sorted. *Regret* is the mass that the "
        f"[optimum](optimum.md) retains minus retained mass; its proof leaves {left_open} open. "
        f"{_of_fewer(r)}*Wipe-out 32* is the share of regions of 32 tokens of which nothing is "
        "left after the last event, *IoU by chance* what random sets of the same sizes have. "
        f"A row sees {entries} entries, mean over rows, where the name of a policy says no other."
        "\n\n" + _sizes(r.plan)
    )


def _of_fewer(r: Results) -> str:
    """How many prompts regret was measured on, where that is not all."""
    if r.plan.regret is None:
        return ""
    count = Interval.of(r.of("random", r.plan.budget, "regret")).n
    return f"It was measured on {count} of the first {r.plan.regret} prompts. "


def _prompts(r: Results) -> str:
    """How many prompts each budget has, where that is not all."""
    counts = [Interval.of(r.of("random", n, "entries_seen")).n for n in r.plan.budgets]
    return "" if min(counts) == r.plan.prompts else f" ({_and([*map(str, counts)])} prompts)"


def _sizes(plan: Plan) -> str:
    """How the parameters of the policies go with the budgets."""
    if not plan.sizes.ams:
        return (
            "Every policy has its own parameters, save that none protects the whole prompt, "
            "which is longer than the budgets. They do not fit every budget: the window of `ams` "
            "is 128, so at a budget of 128 it is a sliding window."
        )
    window = plan.sizes.ams["window"]
    small, large = (window / (n + plan.interval) for n in (plan.budgets[0], plan.budgets[-1]))
    return (
        "AMS, G-KV and others are made for caches of hundreds or thousands of entries: their "
        "windows and segments are made smaller here ([how](#parameters-made-smaller)). "
        f"{shown(PAPER)} and {shown(RELEASE)}, leave little to choose at these budgets: the most "
        f"recent entries take 32. The window of `ams` is {small:.0%} of the cache before an event "
        f"at the smallest budget and {large:.0%} at the largest, in the paper "
        f"{128 / (512 + 512):.1%}. `kvzip` scores the context alone, so the response displaces it "
        "at later events; `kvzip@kvpress` keeps four sinks and loses far less "
        "([on the running model](live.md#rows-that-repeat-the-context))."
    )


def _across(r: Results) -> str:
    """Policies that drop rows of the prompt, and what they are beside."""
    lines = []
    for each in across_policies(r.plan.sizes):
        errors = (r.of(each.name, n, "output_error") for n in r.plan.budgets)
        cells = [Interval.of(error).text(".3f") for error in errors]
        entries = [np.nanmean(r.of(each.name, n, "entries_seen")) for n in r.plan.budgets]
        seen = f"{min(entries):.0f} to {max(entries):.0f}"
        lines.append([shown(each.name.removeprefix(ACROSS)), *cells, seen])
    forced = (
        "Windows are 8 rows; ASL is forced to select (tau 1.01) before the last of three layers. "
        if r.plan.sizes.across
        else ""
    )
    text = (
        "Output error of [policies that drop rows of the prompt on the way down]"
        "(across-layers.md), and of SnapKV, which only cuts caches, at the one event after the "
        f"prompt. {forced}*Entries* is what a row sees from the smallest budget to the largest, "
        "mean over layers. Dropping rows also [saves time](cost.md)."
    )
    head = ["policy", *(f"budget {n}" for n in r.plan.budgets), "entries"]
    return f"{text}\n\n{markdown(head, lines)}"


def _needle(r: Results, policies: Sequence[str]) -> str:
    """Recall of the needle by policy and budget, and the share of needles that are wiped out."""
    heads = [*(f"recall {n}" for n in r.plan.budgets), f"wiped out {r.plan.budget}"]
    rows = []
    for label in policies:
        recall = [Interval.of(r.of(label, n, "needle_recall")) for n in r.plan.budgets]
        gone = Interval.of(r.of(label, r.plan.budget, "needle_wipeout"))
        cells = [f"{each.mean:.2f}" if each.n else "" for each in (*recall, gone)]
        rows.append((-recall[0].mean, [shown(label), *cells]))
    by_chance = (r.chance("random", n, "needle_recall") for n in r.plan.budgets)
    chance = [f"{np.nanmean(x):.2f}" for x in by_chance if not np.isnan(x).all()]
    return (
        "*Recall*: share of the needle's tokens that the rows of the answer still see, mean over "
        f"layers and heads; random sets of the same size have {_and(chance)}. *Wiped out*: share "
        "of layers and heads that see nothing of it. A head that never reads the needle loses "
        "nothing with it, so a low recall need not be a wrong answer.\n\n"
    ) + markdown(["policy", *heads], [row for _, row in sorted(rows)])


def _selection(r: Results) -> str:
    """The layers that ASL selects, by its tokens and threshold.

    With ASL's own look-back and first layer (`kvsim.policies.asl.ASL`).
    """
    lines = ["| | selects in | layer, mean | least | most |", "| --- |" + " ---: |" * 4]
    for variant in r.evidence.variants("selection_layer"):
        layers = r.evidence.value("selection_layer", variant)
        chosen = layers[~np.isnan(layers)]
        cells = [f"{len(chosen)} of {r.plan.prompts}", "", "", ""]
        if len(chosen):
            cells[1:] = [f"{chosen.mean():.1f}", f"{chosen.min():.0f}", f"{chosen.max():.0f}"]
        lines.append(f"| {variant} | {' | '.join(cells)} |")
    return (
        "The layer behind which ASL drops rows of the prompt, for the numbers of tokens of the "
        "budgets; prompts in which it selects nowhere keep all rows.\n\n" + "\n".join(lines)
    )


def _changed(policies: Mapping[str, Policy]) -> str:
    """Where rows differ from the policies of their names, one line for rows of the same changes."""
    rows: dict[str, list[str]] = {}
    for label, one in policies.items():
        if label.partition(",")[2]:
            continue
        default = policy(label, **_required(label)).params
        changed = [
            f"`{key}={value}`"
            for key, value in one.params.items()
            if default[key] != value and not key.endswith("calibration")
        ]
        if changed:
            rows.setdefault(", ".join(changed), []).append(shown(label))
    lines = (f"| {changed} | {', '.join(labels)} |" for changed, labels in rows.items())
    return "\n".join(["| parameters | policies |", "| --- | --- |", *lines])


def _required(name: str) -> dict[str, Any]:
    return {"calibration": "prefix:64"} if "calibration" in parameters(name) else {}
