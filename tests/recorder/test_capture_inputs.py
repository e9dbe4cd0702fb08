"""Options of a capture: those of Python and the command line, layers."""

import inspect
import typing

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from recorder_models import four_layers
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import kvsim
from families import ids
from kvsim.cli import recording
from kvsim.cli.shared import parse_layers
from kvsim.core.options import declared
from kvsim.errors import CaptureError, PolicyError
from kvsim.recorder import Options, capture
from kvsim.recorder.options import select_layers
from kvsim.store.verification import describe, verify
from kvsim.studies.layers.ranking import ranking

ARRAYS = ("q", "k", "v", "attn_out", "lse", "o_proj", "residual")


def test_the_command_line_has_the_same_options():
    """`kvsim capture` offers each field of `Options` that is data, with the same help and bound."""
    offered = inspect.signature(recording.capture).parameters

    for option in declared(Options):
        if option.name == "progress":
            assert option.name not in offered
            continue
        _, info = typing.get_args(offered[option.name].annotation)
        name = option.help.flag or f"--{option.name.replace('_', '-')}"
        assert str(info.default).partition("/")[0] == name
        assert info.help.startswith(option.help.text)
        assert info.min == option.least


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop": ("a", "")}, "expected text that is not empty"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"chat": 1}, "chat is 1; expected True or False"),
        ({"store_dtype": "int8"}, "store_dtype is 'int8'; expected 'float16' or None"),
        ({"stop": 5}, "stop is 5, expected text that is not empty"),
        ({"stop": None}, "stop is None, expected text that is not empty"),
        ({"rows": "response+x"}, r"expected 'response', or 'response\+N'"),
        ({"rows": "response", "residual": True}, "are both given, expected one of them"),
        ({"labels": ["a"]}, "labels are ..a.., expected names with values"),
        ({"stop": "w1"}, "stop is text, and there is no tokenizer"),
        ({"system": "w1"}, "the prompt is token ids .*leave the system message out"),
        ({"overwrite": True, "resume": True}, "overwrite and resume are both given"),
        ({"layers": []}, "layers is empty"),
        ({"layers": [0, 4]}, "the model has no layer 4, expected numbers from 0 to 3"),
        ({"layers": [-5]}, "the model has no layer -5"),
        ({"layers": "01"}, "the model has no layer '[01]'"),
    ],
)
def test_bad_options_are_refused_before_the_model_runs(options, message, runs, tmp_path):
    """An option out of range is one line, and nothing has run or been written."""
    with pytest.raises(CaptureError, match=message) as caught:
        capture(four_layers(), None, [1], out=tmp_path / "a.zarr", **options)

    assert "\n" not in str(caught.value)
    assert (runs, list(tmp_path.iterdir())) == ([], [])


@pytest.mark.parametrize(
    ("asked", "found"), [([2, 0], (0, 2)), ([-1], (3,)), (range(1, 3), (1, 2))]
)
def test_selected_layers_are_those_of_a_whole_capture(asked, found, tmp_path):
    """Every array of the selected layers equals that of a capture of all layers."""
    more = {"max_new_tokens": 20, "o_proj": True, "residual": True}
    whole = capture(four_layers(), None, ids(270), **more)
    memory = capture(four_layers(), None, ids(270), layers=asked, **more)
    stored = capture(four_layers(), None, ids(270), layers=asked, out=tmp_path / "a.zarr", **more)

    for trace in (memory, stored):
        assert trace.layer_ids == found
        assert not trace.header.whole
        for name in ARRAYS:
            assert torch.equal(trace.read(name), whole.read(name)[list(found)]), name
        assert len(trace.meta["capture_check"]["max_relative_error"]) == len(found)
    assert whole.header.whole
    assert stored.digest == memory.digest
    assert verify(stored.path).ok
    assert describe(stored.path)["layer_ids"] == list(found)


def test_other_layers_may_compute_anything():
    """A layer that is not recorded is not checked; the same layer is refused where it is."""
    library = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def off(module, *args, **kwargs):
        out, weights = library(module, *args, **kwargs)
        return out * (1.1 if module.layer_idx == 2 else 1), weights

    ALL_ATTENTION_FUNCTIONS["sdpa"] = off
    try:
        trace = capture(four_layers(), None, ids(20), max_new_tokens=1, layers=[0, 3])
        with pytest.raises(CaptureError, match="attention of layer 2, recomputed"):
            capture(four_layers(), None, ids(20), max_new_tokens=1, layers=[2])
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]
    assert trace.layer_ids == (0, 3)


def test_what_needs_all_layers_refuses_some():
    """Propagation and ranks refuse the first layers alone."""
    trace = capture(four_layers(), None, ids(90), max_new_tokens=4, layers=[0, 1, 2], residual=True)
    asl = kvsim.policy("asl", window=8)

    message = r"the trace has layers \[0, 1, 2\]; expected 0, 1, 2, ... to the model's last"
    with pytest.raises(PolicyError, match="not all of a model"):
        kvsim.replay(trace, asl, 40)
    with pytest.raises(PolicyError, match=message):
        ranking(trace)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0", [0]), ("0,4-7,-1", [0, 4, 5, 6, 7, -1]), (" 2 , 3-3", [2, 3]), ("-2", [-2])],
)
def test_layers_on_the_command_line(text, expected):
    """Numbers, ranges, and negative ones from the end."""
    assert parse_layers(text) == expected


@given(st.sets(st.integers(-6, 5), min_size=1))
def test_layers_count_from_either_end(asked):
    """Negative numbers count as those of Python's lists do."""
    meant = {range(6)[one] for one in asked}

    assert select_layers(list(asked), range(6)) == tuple(sorted(meant))
