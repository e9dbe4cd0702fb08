"""Pages of few policies, on long prompts or long answers: ranking, needles, time and memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from study import NAMED

from kvsim.analysis.significance import ENOUGH, rank_intervals
from kvsim.analysis.summaries import Interval
from results_page.answers import POLICIES, right_answers
from results_page.best import sentence, tasks_of, values
from results_page.claims import differing
from results_page.plan import PLANS, Plan
from results_page.rank_correlation import rank_correlation
from results_page.ranking import SETS, Row, correlated, markdown, shown
from results_page.stages import ANSWER, BEFORE, PEAK, SECONDS, STAGES
from results_page.statistics import Results
from results_page.text import command, sources
from results_page.traces import ANSWER as ANSWERED
from results_page.traces import labels

#: Columns of the table after KL: heading, metric, variant (None: the main one), format.
_COLUMNS = (
    ("top-1", "top_agreement", None, ".2f"),
    ("output error", "output_error", None, ".3f"),
    ("retained mass", "retained_mass", None, ".3f"),
    ("wipe-out 32", "wipeout", "length=32,threshold=0", ".2f"),
)
#: Not in rank correlations: what no budget binds, and chance, which would raise them.
REFERENCES = ("full", "random")


def long_page(
    r: Results, by_budget: Mapping[int, Sequence[Row]], figure: str, others: Sequence[Results]
) -> str:
    """The whole page; figure: as for `page`; others: results that may predict the ranking."""
    policies = [row.label for row in by_budget[r.plan.budget]]
    parts = [
        *_opening(r, others),
        "## Which policy is best",
        SETS,
        "\n".join(f"* {_best(r, policies, budget)}" for budget in r.plan.budgets),
        _meaning(r),
        _table(r, policies),
        f"![KL and wiped-out regions of each policy]({figure})",
        *_groups(r, policies),
        "## Do shorter prompts predict the ranking?"
        if r.plan.once
        else "## Do other prompts and models predict the ranking?",
        _prediction(r, others, [x for x in policies if x not in REFERENCES]),
        *(
            ["## Does judged KL predict right answers?", right_answers(r, POLICIES)]
            if r.plan.solved and not r.plan.sheets
            else []
        ),
        *_claims(r, others),
        *_needles(r, policies),
        "## Time and memory",
        _stages(r),
        "## How this was measured",
        _measured(r),
    ]
    return "\n\n".join(parts) + "\n"


_RIGHT_LIVE = " [How many stay right](qwen.md#answers-under-policies) was measured live."


def _opening(r: Results, others: Sequence[Results]) -> tuple[str, str]:
    """The title of the page, and what it is about."""
    tokens, prompt = np.array(r.sizes).T
    if not r.plan.once:
        model = r.plan.model if r.plan.solved else "the shipped model"
        answers = tokens - prompt
        kind, each, live = "answers that need reasoning", "", _RIGHT_LIVE
        if r.plan.sheets:
            kind, each, live = "long answers", ", each to three questions,", ""
        about = (
            f"{r.plan.prompts} answers of {min(answers)} to {max(answers)} tokens{each} behind "
            f"prompts of {min(prompt)} to {max(prompt)}, right with the full cache "
            f"([how often](qwen.md)). Policies evict after the prompt and after each "
            f"{r.plan.interval} rows of the answer. The answers say nothing of other tasks or "
            f"longer answers.{live}"
        )
        return f"# Results on {model}: {kind}", about
    model = _model(r) if r.plan.lengths else "the shipped model"
    whole = ", ".join(f"[{_model(x)}]({x.plan.page})" for x in others if not x.plan.only)
    about = (
        f"{r.plan.prompts} prompts of {min(prompt):,} to {max(prompt):,} tokens, one event after "
        f"the prompt, policies of the papers. All policies on shorter prompts: {whole}."
    )
    lengths = " and ".join(f"{length:,}" for length in sorted({*r.plan.lengths})) or max(tokens)
    return f"# Results on {model} at {lengths} tokens", about


def _model(r: Results) -> str:
    """The model as pages call it."""
    return NAMED.get(r.plan.model, r.plan.model)


def _meaning(r: Results) -> str:
    """What the columns of the first table are."""
    once = "Because the only event is after the prompt, decisions are those of a live run. "
    counts = {n: _count(r, n) for n in r.plan.budgets}
    fewer = ", ".join(f"{count} at {n}" for n, count in counts.items())
    fewer = f" (prompts: {fewer})" if len({*counts.values()}) > 1 else ""
    return (
        "*KL* is judged: how far the model's predictions of the response move from those with the "
        "full cache when each row sees what the replay kept, in nats per token, mean and 95 % "
        "interval over prompts. "
        + (
            once
            if r.plan.once
            else f"Budgets are at most half the tokens of prompt and answer{fewer}. "
        )
        + f"Rows are sorted by KL at budget {r.plan.budget}, that of the other "
        "[metrics](metrics.md): *top-1* is the share of tokens whose most likely one stays, "
        "*wipe-out 32* that of regions of 32 tokens of which nothing is left."
    )


def _count(r: Results, budget: int) -> int:
    """How many prompts were replayed at a budget."""
    return Interval.of(r.of("random", budget, "response_kl")).n


def _compared(r: Results) -> list[int]:
    """The budgets at which as many prompts were replayed as at that of the tables of one."""
    most = _count(r, r.plan.budget)
    return [budget for budget in r.plan.budgets if _count(r, budget) == most]


def _table(r: Results, policies: Sequence[str]) -> str:
    """KL at each budget, and the other metrics at the middle one."""
    rows = []
    for label in policies:
        kl = [
            Interval.of(r.of(label, budget, "response_kl")).text(".3f") for budget in r.plan.budgets
        ]
        values = (r.of(label, r.plan.budget, *which) for _, *which, _ in _COLUMNS)
        means = (Interval.of(x) for x in values)
        cells = [
            f"{x.mean:{form}}" if x.n else "" for x, (*_, form) in zip(means, _COLUMNS, strict=True)
        ]
        rows.append([shown(label), *kl, *cells])
    head = ["policy", *(f"KL {budget}" for budget in r.plan.budgets), *(x for x, *_ in _COLUMNS)]
    return markdown(head, rows)


def _best(r: Results, policies: Sequence[str], budget: int) -> str:
    names = [label for label in policies if label != "full"]
    x, prompts = values(r, names, budget)
    text = sentence(budget, [*map(shown, names)], x, tasks_of(r.plan, prompts))
    if len(x) < ENOUGH:
        return text
    first, last = (ranks[names.index("random")] for ranks in rank_intervals(x))
    return f"{text} `random` has a rank from {first} to {last}."


def _groups(r: Results, policies: Sequence[str]) -> list[str]:
    """Mean KL of the prompts of each task, or domain; of a model's answers each has one or two."""
    if r.plan.solved:
        return []
    name = "task" if r.plan.lengths else "domain"
    groups = [labels(r.plan, number + 1)[name] for number in range(r.plan.prompts)]
    columns = [(kind, budget) for kind in dict.fromkeys(groups) for budget in _compared(r)]
    rows = []
    for label in policies:
        kl = {budget: r.of(label, budget, "response_kl") for budget in r.plan.budgets}
        means = (Interval.of(kl[budget][np.array(groups) == kind]) for kind, budget in columns)
        rows.append([shown(label), *(f"{x.mean:.3f}" if x.n else "" for x in means)])
    count = ", ".join(f"{n} of `{kind}`" for kind, n in Counter(groups).items())
    head = ["policy", *(f"{kind} {budget}" for kind, budget in columns)]
    return ["## By " + name, f"Mean KL (prompts: {count}).\n\n" + markdown(head, rows)]


def _prediction(r: Results, others: Sequence[Results], policies: Sequence[str]) -> str:
    """The rank correlations with each of the other results."""
    text = (
        f"Rank correlation of the {len(policies)} policies, without `full` and `random`, by mean "
        "KL here (columns) and elsewhere (rows); in brackets the 95 % interval for other policies "
        "and other prompts of both sides, from 12 prompts of either on that order the policies "
        "reliably. Of model, kind of text, length and budget several differ at once, mostly, so "
        "that no difference has one cause."
    )
    if r.plan.once:
        text += " Elsewhere, evictions go on during the response."
    return "\n\n".join([text, *(_predicted(r, each, policies) for each in others)])


def _claims(r: Results, others: Sequence[Results]) -> list[str]:
    """What budgets of the papers change about their claims, beside shorter answers."""
    shorter = [each for each in others if each.plan.solved == r.plan.solved and not each.plan.once]
    if not r.plan.sheets or not shorter:
        return []
    return ["## Do claims hold at these budgets?", differing(r, shorter[0])]


def _predicted(r: Results, shorter: Results, policies: Sequence[str]) -> str:
    """Rank correlation of KL with that on shorter prompts, for each pair of budgets."""
    known = [label for label in policies if shorter.has(label)]
    fewer = f" ({len(known)} policies)" if known != [*policies] else ""
    same = bool(shorter.plan.beside)
    here = {budget: values(r, known, budget) for budget in _compared(r)}
    kinds = [] if r.plan.solved else [*dict.fromkeys(tasks_of(r.plan, np.arange(r.plan.prompts)))]
    rows = []
    for short in shorter.plan.budgets:
        other, places = values(shorter, known, short)
        cells, apart = [], []
        for x, prompts in here.values():
            # other models have other digests
            of = x[[prompts.tolist().index(place) for place in places]] if same else x
            cells.append(correlated(*rank_correlation(of, other, same=same)))
            parts = (x[np.array(tasks_of(r.plan, prompts)) == kind] for kind in kinds)
            apart += [f"{rank_correlation(part, other, same=False)[0]:.2f}" for part in parts]
        rows.append([f"budget {short}", *cells, *apart])
    tokens = np.array(shorter.sizes).T[0]
    of_lengths = f"{tokens.min()} to {tokens.max()} tokens of {_model(shorter)}"
    of_prompts = (
        f"On the first {shorter.plan.prompts} of these answers, {of_lengths}, which did not write "
        "them"
        if same
        else f"On [{shorter.plan.prompts} prompts of {of_lengths}]({shorter.plan.page})"
    )
    head = ["elsewhere", *(f"budget {budget}" for budget in here)]
    head += [f"{kind} {budget}" for budget in here for kind in kinds]
    return f"{of_prompts}{fewer}:\n\n" + markdown(head, rows)


def _needles(r: Results, policies: Sequence[str]) -> list[str]:
    """Answers that stay right, and what is left of the needles, where there are some."""
    asked = ~np.isnan(r.of("full", r.plan.budget, "needle_recall"))
    if not asked.any():
        return []
    rows, right = [], 0
    for label in policies:
        answers = [r.of(label, budget, ANSWER) for budget in r.plan.budgets]
        right = int((~np.isnan(answers[0])).sum())
        recall = (r.of(label, budget, "needle_recall") for budget in r.plan.budgets)
        cells = [f"{np.nansum(x):.0f} of {right}" for x in answers]
        rows.append([shown(label), *cells, *(f"{np.nanmean(x):.2f}" for x in recall)])
    titles = (f"{name} {budget}" for name in ("right", "recall") for budget in r.plan.budgets)
    text = (
        f"{asked.sum()} of the prompts ask for a code in the text; with the full cache {right} are "
        "answered right. *Right*: of these, how many the model would still answer: under greedy "
        "decoding from the evicted cache, no token of the answer changes. *Recall*: share of the "
        "needle's tokens that rows of the response still see, mean over layers and heads."
    )
    return ["## Needles", text, markdown(["policy", *titles], rows)]


def _stages(r: Results) -> str:
    """Seconds and memory of each stage."""
    rows = []
    for stage in STAGES:
        seconds, before, peak = (_of_stage(r, name, stage) for name in (SECONDS, BEFORE, PEAK))
        sizes = [f"{x / 2**30:.2f}" for x in (min(before), min(peak))]
        rows.append([stage, f"{np.mean(seconds):.0f}", f"{max(seconds):.0f}", *sizes])
    head = ["stage", "seconds, mean", "seconds, most", "GiB before", "GiB at its peak"]
    return _STAGES + "\n\n" + markdown(head, rows)


_STAGES = (
    "CPU seconds of a prompt on one thread, of all policies and budgets together; resident memory "
    "with the weights read so far, of the prompt with the least, for a process keeps memory of "
    "earlier ones."
)


def _of_stage(r: Results, metric: str, stage: str) -> list[float]:
    """A value for each prompt."""
    return r.stages.filter(metric=metric, variant=stage)["value"].to_list()


def _measured(r: Results) -> str:
    """The command, the prompts, and what limits the results."""
    plan = r.plan
    texts = [_TEXTS.format(response=plan.response, answer=ANSWERED)] if plan.lengths else []
    sizes = plan.sizes.ams
    limits = _AT_THE_END if plan.once else _OPEN_LOOP
    return "\n".join(
        [
            command(plan),
            "",
            *([_ANSWERS.format(least=plan.least), *_smaller(plan)] if plan.solved else texts),
            sources(r),
            *([_NARROW] if r.plan.prompts <= ENOUGH else []),
            *(line.format(and_ams=_OF_AMS.format(**sizes) if sizes else "") for line in _LIMITS),
            limits,
        ]
    )


def _smaller(plan: Plan) -> list[str]:
    """How the values of smaller models on the same answers were made."""
    return [
        f"* The same answers under {NAMED.get(each.model, each.model)}: "
        f"`python docs/results.py{each.option}`, values in `docs/{each.values}`."
        for each in PLANS.values()
        if each.beside == plan.name
    ]


_ANSWERS = (
    "* Prompts are the first of the [card](qwen.md) that the model answered right, in at least "
    "{least} tokens. The answer, written greedily in bfloat16, is recorded in one pass in float32."
)
_TEXTS = (
    "* Half of the prompts are `text`, whose last {response} tokens are the response, recorded in "
    "one pass; the others are `needle`, a code in the text and a question about it, to which the "
    "model writes {answer} tokens. The text is 28,000 tokens of Python's documentation, which "
    "prompts share: intervals say nothing of other texts."
)
_NARROW = (
    "* Intervals of so few prompts are too narrow: over 7 normal values, 87 % contain the mean."
)
_LIMITS = (
    "* Every policy has its own parameters, save that none protects the whole prompt{and_ams}.",
    "* `kvzip` (twice the positions) and [layer-wise token pruning](across-layers.md) are missing.",
)
_OF_AMS = (
    ", and that AMS has a quarter of its sizes, as budgets are a quarter of its paper's (segments "
    "of {min_segment} to {max_segment} tokens, a window of {window}, {recent} recent entries)"
)
_AT_THE_END = (
    "* A question is at the end of the prompt, which favours policies that look at the last rows."
)
_OPEN_LOOP = "* Decisions are those of a replay: queries and keys are those with the full cache."
