"""What results of a Table are called, and which of several is the main one."""

import json
from dataclasses import replace

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.analysis.results import Result, differing, labelled, labels, main, results
from kvsim.analysis.table import COLUMNS
from kvsim.core.record import facts_of
from kvsim.errors import PolicyError

HOSTILE = "<script>|`*&\n"


def result(policy="mine", interval=None, prefill=True, **params):
    """A result of made-up parameters."""
    return Result(policy, json.dumps(params, sort_keys=True), interval, prefill)


def of(policy):
    """A result of a policy, which knows what it changes."""
    changed = frozenset(facts_of(policy, policy.schedule).changed)
    return replace(result(policy.name, **policy.params), changed=changed)


def frame(*found):
    """A Table with a row for each result."""
    rows = [dict.fromkeys(COLUMNS) | vars(one) | {"trace": "t", "value": 1.0} for one in found]
    rows = [{name: row[name] for name in COLUMNS} for row in rows]
    return pl.DataFrame(rows, schema=COLUMNS)


def test_ablations_are_called_by_what_they_change():
    """The one that most others differ from in one parameter keeps the plain name."""
    found = [result(a=2, b=1), result(a=1, b=1), result(a=1, b=2), result(a=1, b=1, c=0.5)]

    assert main(found) == found[1]
    assert list(labels(found).values()) == ["mine (a=2)", "mine", "mine (b=2)", "mine (c=0.5)"]
    assert differing(found[0], found[2]) == {"a", "b"}


def test_schedules_are_named_where_they_tell_results_apart():
    """And only there: what parameters tell apart needs no more."""
    found = [result(interval=16, prefill=False), result(), result(interval=32, a=1)]

    assert list(labels(found).values()) == [
        "mine (after: every 16 rows)",
        "mine (after: the prompt)",
        "mine (a=1)",
    ]


@given(
    st.lists(
        st.builds(
            result,
            policy=st.sampled_from(["one", "two", HOSTILE]),
            interval=st.sampled_from([None, 1, 16]),
            prefill=st.booleans(),
            a=st.sampled_from([1, 2, None, HOSTILE]),
            b=st.sampled_from([True, 0.5]),
        ),
        unique=True,
        max_size=8,
    )
)
def test_labels_tell_all_results_apart(found):
    """Each has one of its own that begins with the policy; a Table keeps its other columns."""
    called = labels(found)
    table = frame(*found)
    shown = labelled(table)

    assert len(set(called.values())) == len(found)
    assert all(label.startswith(one.policy) for one, label in called.items())
    assert shown["policy"].to_list() == [called[one] for one in found]
    assert shown.drop("policy").equals(table.drop("policy"))
    assert list(results(table).values()) == found


def test_what_cannot_be_called_is_refused():
    """Parameters that kvsim did not write."""
    for text in ("{", "[1]", "null", "", None):
        with pytest.raises((PolicyError, ValueError), match=r"expected a JSON object|Expecting"):
            results(frame(Result("mine", text, None, prefill=True)))
