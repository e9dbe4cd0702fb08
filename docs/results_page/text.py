"""The text of the page: tables, what they mean, and the claims with their verdicts."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvsim import Policy, policy
from kvsim.analysis.significance import ALPHA, FEWEST
from kvsim.analysis.summaries import RESAMPLES, Interval
from kvsim.claims import CLAIMS, HOLDS, NOT, OPEN, Claim, Evidence
from kvsim.claims.claim import MATTERS, OF_TEN
from kvsim.policies import names, parameters
from results_page.groups import groups
from results_page.plan import PLANS, SMALLEST, Plan
from results_page.policies import ACROSS, PAPER, RELEASE, across_policies
from results_page.ranking import Row, opening, shown, table
from results_page.statistics import Results
from results_page.traces import ANSWER, DEPTHS, REAL, VERBS, labels

#: The heading of what follows the opening.
MEASURED = "## How this was measured"


def page(
    r: Results,
    policies: Mapping[str, Policy],
    by_budget: Mapping[int, Sequence[Row]],
    figure: str,
    tiny: Evidence | None = None,
) -> str:
    """The whole page.

    figure: its path as the page links to it. tiny: what the claims are tested on beside this model.
    """
    changed = ["### Parameters made smaller", _changed(policies)] if r.plan.sizes.ams else []
    claims = {paper: [*make(r.evidence)] for paper, make in CLAIMS.items()}
    elsewhere = {
        (one.number, one.says): one.verdict
        for make in CLAIMS.values()
        for one in (make(tiny) if tiny is not None else ())
    }
    parts = [
        _introduction(r, opening(by_budget, figure)),
        "## What policies keep and lose",
        reading(r, policies),
        *(table(budget, found, r.plan.prompts) for budget, found in by_budget.items()),
        *changed,
        "## By " + _and(["stage", *labels(r.plan, 1)]),
        groups(r),
        "## Across layers",
        _across(r),
        *(_of_a_real_model(r, policies) if r.plan.lengths else []),
        "## Which of the papers' claims hold here",
        _rules(r),
        _count(claims),
        *(
            f"### {paper}\n\n" + _claims(each, r.plan.prompts, elsewhere)
            for paper, each in claims.items()
        ),
        "## Names",
        f"The catalogue when this page was made: {listing()}.",
    ]
    return "\n\n".join(parts) + "\n"


def _of_a_real_model(r: Results, policies: Mapping[str, Policy]) -> list[str]:
    """Sections that tiny has no layers and no needles for."""
    return [
        "## What is left of the needle",
        _needle(r, policies),
        "## Where ASL selects",
        _selection(r),
    ]


def _and(names: Sequence[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def listing() -> str:
    """Every name of the catalogue, as the page lists it."""
    return ", ".join(f"`{name}`" for name in names())


def _introduction(r: Results, first: str) -> str:
    plan = r.plan
    option = f" --model {plan.model}" if plan.lengths else ""
    if plan == SMALLEST[plan.model]:
        option += " --smallest"
    elif plan != PLANS[plan.model]:
        option += f" --prompts {plan.prompts}"
    traces = hashlib.sha256("".join(r.digests).encode()).hexdigest()
    events = f"an event after each {plan.interval} rows of the response, and " + (
        f"one after the prompt (`--interval {plan.interval} --prefill`)"
        if plan.prefill
        else f"none after the prompt (`--interval {plan.interval} --no-prefill`)"
    )
    about = _smollm2(r) if plan.lengths else _tiny(r)
    return f"""{about[0]}

{first}

{MEASURED}

<!-- not run: takes {"hours" if plan.lengths else "minutes"}, and writes this page -->
```bash
python docs/results.py{option}
```

* {about[1]}
* Weights of `{plan.model}`: sha256 `{r.made["weights"]}`. Digests of the traces together: sha256 \
`{traces}`.
* {r.made["tools"]}, CPU.
* The values of every prompt: `docs/{_stem(plan)}.parquet`. `python docs/results.py{option} \
--stored` makes the page of them.
* One schedule for every policy, whatever its own is: {events}. This compares what policies keep, \
and not when they act.
* A value is the mean over layers and heads (and over the rows of the response, where rows count) \
of a prompt, then over prompts. In brackets: its 95 % bootstrap interval over prompts \
({RESAMPLES} resamples, seed 0); fewer than {FEWEST} prompts have none.
* Numbers of layer 0 are exact, those of deeper layers open loop: errors do not add up over \
layers ([fidelity](concepts.md#fidelity))."""


def _stem(plan: Plan) -> str:
    return "results" + f"-{plan.model}" * bool(plan.lengths)


def _tiny(r: Results) -> tuple[str, str]:
    """The beginning of the page on tiny, and its prompts."""
    plan = r.plan
    tokens, prompt = np.array(r.sizes).T
    size = f"level {plan.level}" if plan.level else f"{plan.facts} facts, up to {plan.lines} lines"
    beginning = (
        "# Results on the shipped model\n\n"
        "`tiny` has three layers and about a million parameters, and was built for an artificial "
        "task with its retrieving heads partly put there, so these numbers show what policies do "
        "to such attention and not what they do to a large model. A claim that holds here has "
        "passed one small test; one that does not may hold all the same where texts are ten times "
        "as long and heads less sharp. [Results on SmolLM2](results-smollm2.md) has a pretrained "
        "model beside it."
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
        "and 3 KV heads, here from the weights that [`--model smollm2`](smollm2.md) finds, in "
        "4 bits. The texts are Python's documentation. What holds here holds on one model, one "
        "kind of text and short contexts, measured open loop, and is no statement on accuracy; "
        "what fails here may hold on models fifty times as large."
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


def reading(r: Results, policies: Mapping[str, Policy]) -> str:
    """Explain the columns of the tables."""
    gaps = [r.of(label, n, "regret_gap") for label in policies for n in r.plan.budgets]
    gap = np.nanmax(gaps)
    left_open = f"at most {gap:.0e}" if gap else "nothing"
    return (
        "Rows are sorted by KL; only KL has its interval here. *Regret* is the mass that the "
        "[optimum](optimum.md) retains on the same terms, minus retained mass: no kept sets retain "
        f"more, and the proof leaves {left_open} open. Without a bound on the size there is none. "
        f"{_of_fewer(r)}*Wipe-out 32* is the share of regions of 32 tokens of which nothing is "
        "left after the last event; `full` has none. Beside the *IoU* of consecutive kept sets "
        "stands what random sets of the same sizes have. *Entries* is what a row sees, on average "
        "over rows, so it lies above the budget. [Definitions](metrics.md)."
        "\n\n" + _sizes(r.plan)
    )


def _of_fewer(r: Results) -> str:
    """How many prompts regret was measured on, where that is not all."""
    if r.plan.regret is None:
        return ""
    counts = [str(Interval.of(r.of("random", n, "regret")).n) for n in r.plan.budgets]
    return (
        f"It was measured on the first {r.plan.regret} prompts alone, at these budgets on "
        f"{_and(counts)} of them. "
    )


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
        "AMS, G-KV and others are made for caches of hundreds or thousands of entries, so their "
        "windows and segments are made smaller here ([how](#parameters-made-smaller)). "
        f"{shown(PAPER)} and {shown(RELEASE)}, are AMS with the numbers of the paper and of the "
        "released code, which at these budgets leave little or nothing to choose: the most recent "
        f"entries alone take 32. The window of `ams` is {small:.0%} of the cache before an event "
        f"at the smallest budget and {large:.0%} at the largest; with 512 entries, an event every "
        f"512 rows and the window of the paper it is {128 / (512 + 512):.1%}. `kvzip` has no "
        "scores of the response, whose entries displace the context at later events; "
        "`kvzip@kvpress`, which keeps four sinks, loses far less. Its paper evicts once, after "
        "the context ([on the running model](live.md#rows-that-repeat-the-context))."
    )


def _across(r: Results) -> str:
    """Policies that drop rows of the prompt, and what they are beside."""
    head = "| policy | " + " | ".join(f"budget {n}" for n in r.plan.budgets) + " | entries |"
    lines = [head, "| --- |" + " ---: |" * (len(r.plan.budgets) + 1)]
    for one in across_policies(r.plan.sizes):
        errors = (r.of(one.name, n, "output_error") for n in r.plan.budgets)
        cells = [Interval.of(error).text(".3f") for error in errors]
        entries = [np.nanmean(r.of(one.name, n, "entries_seen")) for n in r.plan.budgets]
        seen = f"{min(entries):.0f} to {max(entries):.0f}"
        label = shown(one.name.removeprefix(ACROSS))
        lines.append(f"| {label} | {' | '.join(cells)} | {seen} |")
    forced = (
        "Windows are 8 rows. In a model of three layers there is one layer behind a selection, and "
        "ASL is forced to select (tau 1.01); the numbers of that layer are open loop. "
        if r.plan.sizes.across
        else "The numbers of layers behind a selection are open loop. "
    )
    text = (
        "Output error of [policies that drop rows of the prompt on the way down]"
        "(across-layers.md), at the one event after the prompt; SnapKV, which cuts caches alone, "
        f"stands first. {forced}*Entries* is what a row sees from the smallest budget to the "
        "largest, means over layers: caches grow while the response is written, and those of "
        "`pyramidinfer` and of *full before* are larger to begin with. Dropping rows saves time, "
        "which is not in this table: [costs](cost.md)."
    )
    return "\n".join([text, "", *lines])


def _needle(r: Results, policies: Mapping[str, Policy]) -> str:
    """Recall of the needle by policy and budget, and the share of needles that are wiped out."""
    budgets = r.plan.budgets
    heads = [f"{what} {n}" for what in ("recall", "wiped out") for n in budgets]
    lines = [f"| policy | {' | '.join(heads)} |", "| --- |" + " ---: |" * len(heads)]
    rows = []
    for label in policies:
        recall, gone = (
            [r.of(label, n, metric) for n in budgets]
            for metric in ("needle_recall", "needle_wipeout")
        )
        cells = [Interval.of(one).text(".2f") for one in (*recall, *gone)]
        rows.append((-float(np.nanmean(recall[0])), f"| {shown(label)} | {' | '.join(cells)} |"))
    by_chance = (r.chance("random", n, "needle_recall") for n in budgets)
    chance = [f"{np.nanmean(x):.2f}" for x in by_chance if not np.isnan(x).all()]
    return (
        "Share of the needle's tokens that the rows of the answer still see, mean over layers and "
        "heads, and the share of layers and heads that see nothing of it. A set of the same size "
        f"drawn at random has {_and(chance)} of it at budgets with needles. A head that never "
        "reads the needle loses nothing with it, so a low recall need not be a wrong answer.\n\n"
    ) + "\n".join([*lines, *(row for _, row in sorted(rows))])


def _selection(r: Results) -> str:
    """The layers that ASL selects, by its tokens and threshold, and the variance they follow from.

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
    variants = r.evidence.variants("rank_relative")
    head = "| layer | " + " | ".join(variants) + " |"
    rows = [head, "| ---: |" + " ---: |" * len(variants)]
    for layer in r.evidence.layers("rank_relative", variants[0]):
        means = [
            f"{np.nanmean(r.evidence.value('rank_relative', variant, layer)):.2f}"
            for variant in variants
        ]
        rows.append(f"| {layer} | {' | '.join(means)} |")
    return (
        "The layer behind which ASL drops rows of the prompt, for the numbers of tokens of the "
        "budgets; prompts in which it selects nowhere keep all rows.\n\n"
        + "\n".join(lines)
        + "\n\nVariance of ranks over that of the first layer that ASL tests, means over prompts; "
        "ASL selects where it falls below its threshold.\n\n" + "\n".join(rows)
    )


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
            lines.append(f"| {shown(label)} | {', '.join(changed)} |")
    return "\n".join(lines)


def _required(name: str) -> dict[str, Any]:
    return {"calibration": "prefix:64"} if "calibration" in parameters(name) else {}


def _rules(r: Results) -> str:
    return (
        "Each claim becomes a number per prompt that is above 0 where the claim is right, most "
        "often the difference between two policies on the same prompt. Where a paper speaks of "
        "accuracy, *better* means a lower judged KL here, which is not the same. Cases are "
        "budgets, unless they say otherwise. Each is tested by sign flips over the "
        f"{r.plan.prompts} prompts (n where it is another number), and its p corrected for the "
        f"number of cases (Holm). It counts with p up to {ALPHA:g} and a mean that matters: at "
        f"least {MATTERS:g} of the mean of two settings that are compared, or of the unit of any "
        "other number. These limits were fixed before this page was made.\n\n"
        f"* **{HOLDS}**: above 0, or inside the margin where something is to change little, in at "
        f"least {OF_TEN} of 10 cases.\n"
        f"* **{NOT}**: on the other side in more than {10 - OF_TEN} of 10 cases, which are marked "
        "*against*.\n"
        f"* **{OPEN}**: otherwise. Either too many cases are *open*, have fewer than {FEWEST} "
        "prompts or are out of the range of a method, or there is no number, for the reason "
        "given.\n\n"
        "A method is out of its range at a budget of which its window is more than half; a claim "
        "on what the mass of AMS decides also where most of that mass is filled in. Schedule and "
        "parameters are those of the tables, except for Expected Attention: it is tested at one "
        "event, after the prompt, which is what its paper is about. Claims that are plain "
        "arithmetic on printed numbers, or that need free generation or training, are not listed."
    )


def _count(tested: Mapping[str, Sequence[Claim]]) -> str:
    lines = [f"| paper | tests | {HOLDS} | {NOT} | {OPEN} |", "| --- | ---: | ---: | ---: | ---: |"]
    for paper, found in tested.items():
        verdicts = [claim.verdict for claim in found]
        counts = [verdicts.count(v) for v in (HOLDS, NOT, OPEN)]
        lines.append(f"| {paper} | {len(found)} | " + " | ".join(map(str, counts)) + " |")
    return "\n".join(lines)


def _claims(found: Sequence[Claim], prompts: int, elsewhere: Mapping[tuple[str, str], str]) -> str:
    """Every claim, and its verdict on tiny where that is known."""
    titles = ["", "claim", "test", "result", "verdict", *["on `tiny`"] * bool(elsewhere)]
    lines = [f"| {' | '.join(titles)} |", "| --- " * len(titles) + "|"]
    for claim in found:
        result = "<br>".join(claim.lines(prompts))
        cells = [claim.number, claim.says, claim.tested, result, f"**{claim.verdict}**"]
        if elsewhere:
            cells.append(elsewhere.get((claim.number, claim.says), "not tested"))
        lines.append("| " + " | ".join(map(_escaped, cells)) + " |")
    return "\n".join(lines)


def _escaped(text: str) -> str:
    """Bars would end a cell."""
    return text.replace("|", "\\|")
