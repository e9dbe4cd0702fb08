"""docs/plans.py: the results in the repository are of every policy, model and budget."""

from __future__ import annotations

import plans


def test_every_policy_is_measured_on_the_same_prompts():
    """Both models, both budgets; `docs/generate.py` writes the table of them."""
    names = {plans.label(scorer, x) for scorer, group in plans.GROUPS.items() for x in group}
    prompts = {model: set() for model in plans.NAMED}
    cells = {}
    for row in plans.read(plans.RESULTS):
        prompts[row["model"]].add(row["trace"])
        cells.setdefault((row["model"], row["name"], row["budget"]), set()).add(row["trace"])

    assert cells == {
        (model, name, budget): prompts[model]
        for model in prompts
        for name in names
        for budget in plans.BUDGETS
    }
    assert min(map(len, prompts.values())) >= 4
