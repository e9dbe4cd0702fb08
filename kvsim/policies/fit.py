"""Lengths that fit the budget (`Policy.scaled`), and remarks where they do not."""

from __future__ import annotations

from dataclasses import replace

from kvsim.core.policy import Policy, keys_of


def fitted(policy: Policy) -> Policy:
    """The policy with lengths that fit the budget, called NAME@scaled; else itself."""
    if all(each.scaled for each in policy.lengths):
        return policy
    parts = policy.name.split("+")
    for depth in {each.depth for each in policy.lengths} & set(range(len(parts))):
        parts[depth] = parts[depth].removesuffix("@scaled") + "@scaled"
    default = policy.default and fitted(policy.default)
    lengths = tuple(each._replace(scaled=True) for each in policy.lengths)
    return replace(policy, name="+".join(parts), lengths=lengths, default=default)


def remark_of(policy: Policy, budget: int) -> str:
    """Say which lengths are scaled to this budget, or exceed half of it; empty for none."""
    if not policy.bounded:
        return ""
    changed = [x for x in policy.scaled or policy.lengths if x.at(budget) != x.value]
    if policy.scaled:
        keys = {(depth, name): key for depth, name, key in keys_of(policy)}
        spelt = ((keys[x.depth, x.name].replace("scorer__", "scorer."), x) for x in changed)
        values = (f"{key}={x.at(budget)} instead of {x.value}" for key, x in spelt)
        text = ", ".join(values) or "all lengths fit"
        return f"{policy.name}: scaled to budget {budget}: {text}"
    large = dict.fromkeys(
        f"{x.name}={x.value}"
        for x in changed
        if x.name in ("window", "recent") and 2 * x.value > budget
    )
    lengths = f"lengths exceed half of budget {budget} ({', '.join(large)})"
    return f"{policy.name}: {lengths}; --set fit=true scales them" if large else ""
