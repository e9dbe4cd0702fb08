"""What a report says of how layers rank the prompt."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from kvsim.analysis.subject import Analysis
from kvsim.report.html import details, image, interval, lines, section, table_of, tag
from kvsim.report.study import Section, Study
from kvsim.report.traces import Column, by_layer, trace_averages
from kvsim.studies.layers import figures
from kvsim.studies.layers.ranking import SHARES, Curve, budget_label, ranks


def _curves(analysis: Analysis) -> Sequence[Curve]:
    return [*analysis.of(ranks).curves.values()]


def _all(study: Study) -> list[Curve]:
    """Return the curves of all traces that can be ranked, at each k."""
    return [each for of_trace in study.collected[_curves] for each in of_trace]


def _layers(study: Study) -> str:
    curves = _all(study)
    if not curves:
        return ""
    note = Markup(
        "The attention of the prompt's last {} rows ranks the tokens before them in every layer, "
        "as ASL does. V is the variance over neighbouring layers of a token's rank; "
        "<i>relative</i> is V over that of the first layer that ASL tests, where k tokens "
        "propagate with these rows, a share of those ranked; <i>union</i> is how many tokens are "
        "among the first k in one of the layers compared, over k. Fidelity: exact."
    ).format(study.first.of(ranks).rule.window)
    head: list[Column] = [("entropy, nats", "layer_entropy", "", False)]
    head += [(f"relative, k={k}", "rank_relative", f"k={k}", False) for k in SHARES]
    head += [(f"union, k={k}", "rank_union", f"k={k}", True) for k in SHARES]
    middle = [each for each in curves if each.requested == budget_label(SHARES[1])]
    pictures = [
        image("Relative rank variance by layer", lambda: figures.variance_curves(middle)),
        image(f"Ranks in every layer, {middle[0].trace}", lambda: figures.rank_pattern(middle[0])),
    ]
    body = [by_layer(study, head, together=False), _selections(study), *pictures]
    if any(each.selected() is not None for each in curves):
        body.append(image("Selection layers", lambda: figures.selection_histogram(curves)))
    return section("How layers rank the prompt", note, lines(body))


def _selections(study: Study) -> str:
    """Where ASL selects under its own rule and others, or why nowhere."""
    table = trace_averages(study, study.table.filter(metric="selection_layer"))
    if not table["n"].sum():
        first = _all(study)[0]
        return tag(
            "p",
            "At no k, threshold or rule tried does ASL select on any of these prompts. "
            f"{first.trace} at k={SHARES[0]}: {first.verdict()}.",
        )
    head = ["rule", "layer after which it selects", "prompts that select"]
    rows: dict[bool, list[list[str]]] = {True: [], False: []}
    for row in table.to_dicts():
        usual = row["variant"].endswith(f"tau={study.first.of(ranks).rule.tau:g}")
        rows[usual].append([row["variant"], interval(row) or "-", f"{row['n']} of {row['of']}"])
    variants = details(table_of(head, rows[False]), "other thresholds, look-backs and first layers")
    return table_of(head, rows[True]) + variants


LAYERS = Section(_layers, after="expectation", collect=_curves)
