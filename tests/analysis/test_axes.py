"""Layers and heads that are counted from the end, are not there, or were not replayed."""

from dataclasses import replace

import pytest

import kvsim
from apps.dashboard.html_text import token_html
from kvsim import plots
from kvsim.analysis.kept.states import token_states
from kvsim.analysis.kept.text import retention_lift
from kvsim.errors import PolicyError
from traces import random_trace

#: What draws or computes of a layer of a trace and a record, by name.
OF_LAYER = {
    "retention_map": plots.retention_map,
    "bursts": plots.bursts,
    "mass_curve": plots.mass_curve,
    "middle_coverage": plots.middle_coverage,
    "position_density": plots.position_density,
    "token_text": plots.token_text,
    "token_html": token_html,
    "lift_bars": plots.lift_bars,
    "token_states": token_states,
    "retention_lift": retention_lift,
}
OF_HEAD = [name for name in OF_LAYER if name not in ("lift_bars", "retention_lift")]


@pytest.fixture(scope="module")
def trace():
    """Two layers of two KV heads, with text."""
    return random_trace(name="small", token_text=[f"t{i % 9}" for i in range(90)])


@pytest.fixture(scope="module")
def record(trace):
    """A replay that every figure can draw."""
    return kvsim.replay(trace, kvsim.policy("ams+tova"), 48, interval=12, internals=True)


@pytest.mark.parametrize("name", OF_LAYER)
@pytest.mark.parametrize("layer", [2, 99, -3, 0.5])
def test_a_layer_that_the_trace_lacks_is_an_error(trace, record, name, layer):
    """It says what was given and which layers there are, instead of drawing another layer."""
    with pytest.raises(PolicyError, match=f"layer is {layer}; small has layers 0 to 1, -1 is the"):
        OF_LAYER[name](trace, record, layer=layer)


@pytest.mark.parametrize("name", OF_HEAD)
@pytest.mark.parametrize("head", [2, 99])
def test_a_head_that_the_trace_lacks_is_an_error(trace, record, name, head):
    """It says which heads there are."""
    with pytest.raises(PolicyError, match=f"head is {head}; small has heads 0 to 1"):
        OF_LAYER[name](trace, record, layer=0, head=head)


@pytest.mark.parametrize("name", OF_LAYER)
def test_a_layer_that_was_not_replayed_is_an_error(trace, record, name):
    """It says which layers the record has."""
    first = replace(record, evicted_at=record.evicted_at[:1], layers=(0,))

    with pytest.raises(PolicyError, match=r"layer is 1; the record of .* on small has layers 0;"):
        OF_LAYER[name](trace, first, layer=-1)


@pytest.mark.parametrize("name", OF_LAYER)
def test_minus_one_is_the_last_layer_and_head(trace, record, name):
    """Titles name the index from 0, and results are those of the last layer."""
    place = {"head": -1} if name in OF_HEAD else {}
    last = {"head": 1} if name in OF_HEAD else {}

    found = OF_LAYER[name](trace, record, layer=-1, **place)
    expected = OF_LAYER[name](trace, record, layer=1, **last)

    if hasattr(found, "get_suptitle"):
        assert found.get_suptitle() == expected.get_suptitle()
        assert "layer 1" in found.get_suptitle()
    else:
        assert repr(found) == repr(expected)
