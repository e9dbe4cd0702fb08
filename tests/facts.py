"""Facts about policies for Tables that tests write by hand."""

from typing import Any

#: Columns of a policy that is ranked, and what others have instead.
_RANKED = {"looks_ahead": False, "bounds": "held", "access": "", "per_query_head": False}
_OTHERS: dict[str | None, dict[str, Any]] = {
    "full": {"bounds": ""},
    "oracle": {"looks_ahead": True},
    "quest": {"bounds": "read", "access": "read"},
    "tova+int8": {"access": "stored"},
    None: dict.fromkeys(_RANKED),  # rows of a trace
}


def facts(policy: str | None) -> dict[str, Any]:
    """Return the columns about a policy; its defaults are not known."""
    return {**_RANKED, "changed": None, **_OTHERS.get(policy, {})}
