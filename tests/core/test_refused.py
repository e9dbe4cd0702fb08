"""Inputs that mean nothing are refused in one line, and those with one meaning are read so."""

import warnings

import numpy as np
import pytest
import torch

import kvsim
from kvsim.core.attention import Formula, Rope
from kvsim.core.trace import Trace
from kvsim.errors import KvsimError, TraceError
from kvsim.testing.strategies import make_case

N, DIM = 24, 8
CASE = make_case("normal", layers=2, heads=2, group=2, n=N, dim=DIM, dtype=np.float32)
NAN, INF = float("nan"), float("inf")


def build(**changed):
    """A trace of the case with some arguments replaced."""
    arguments = {"q": CASE.q, "k": CASE.k, "v": CASE.v, "prompt_len": 12, "rope": CASE.rope}
    return Trace.from_arrays(**{**arguments, **changed})


ARRAYS = {
    "objects": lambda a: a.astype(object),
    "text": lambda a: a.astype(str),
    "long doubles": lambda a: a.astype(np.longdouble),
    "complex numbers": lambda a: a.astype(complex),
    "fields": lambda a: a.view([("x", "f4")]),
    "masked": lambda a: np.ma.masked_array(a, a > 1),
    "a list": lambda a: a.tolist(),
    "a number": lambda _: 1.0,
    "nothing": lambda _: None,
    "sparse": lambda a: torch.from_numpy(a).to_sparse(),
    "without memory": lambda a: torch.from_numpy(a).to("meta"),
}


@pytest.mark.parametrize("change", ARRAYS.values(), ids=ARRAYS)
def test_arrays_that_hold_no_real_numbers_are_refused(change):
    """The message names the array and its dtype or kind, and the dtypes that are read."""
    with pytest.raises(TraceError, match="memory: k "):
        build(k=change(CASE.k))


FACTS = {
    "prompt_len": [1.5, "200", True, None, NAN, INF, [5], np.float64(5), 2**63, 0, N + 1],
    "scale": ["1", True, [1], 10**400, 1j, NAN, INF, 0, -1],
    "rope": [None, 5, "half", [], [None, None]],
    "formulas": [5, "ab", [], [None, None]],
    "layer_ids": [5, "01", [0, 1.5], ["0", "1"], [True, 2], [0, NAN], [1, 0], [0, 2**31]],
    "name": [None, 5, b"x"],
    "meta": [5, [1], {"x": {1}}, {"x": object()}],
    "token_text": [5, [1] * N, [None] * N, ["a"]],
    "tokens": [5, "a" * N, ["a"] * N, [None] * N, [0.5] * N, [True] * N, [-1] * N, [2**63] * N],
}


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in FACTS.items() for value in values],
    ids=lambda value: repr(value)[:24].replace("\n", " "),
)
def test_facts_that_mean_nothing_are_refused(name, value):
    """The message is one line that names the fact."""
    word = {"formulas": "formulas", "layer_ids": "layer", "rope": "rope"}.get(name, name)

    with pytest.raises(TraceError, match=f"^[^\n]*{word}[^\n]*$"):
        build(**{name: value})


@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        (Rope, {"inv_freq": [NAN] * 4}),
        (Rope, {"inv_freq": [True, True]}),
        (Rope, {"attention_scaling": 0}),
        (Rope, {"attention_scaling": "1"}),
        (Rope, {"rotary_dim": 6}),
        (Rope, {"rotary_dim": 8.0}),
        (Rope, {"layout": "x"}),
        (Formula, {"scale": NAN}),
        (Formula, {"softcap": "x"}),
        (Formula, {"softcap": 0}),
        (Formula, {"window": 1.5}),
        (Formula, {"sinks": "12"}),
        (Formula, {"sinks": [NAN]}),
    ],
    ids=str,
)
def test_a_rotation_and_a_formula_of_no_meaning_are_refused(kind, changed):
    """The message is one line that names the field and the value."""
    whole = {Rope: {"inv_freq": [1.0, 0.1, 0.01, 0.001]}, Formula: {"scale": 0.3}}

    with pytest.raises(TraceError, match=f"^[^\n]*{next(iter(changed))} is [^\n]+$"):
        kind(**whole[kind] | changed)


@pytest.mark.parametrize(
    "changed",
    [
        {"trace": None},
        {"policy": 7},
        {"budget": 2.5},
        {"interval": 2**63},
        {"interval": 2**31},
        {"layers": 0},
        {"device": "abc"},
        {"device": None},
        {"device": "meta"},
        {"device": "cuda:99"},
    ],
    ids=str,
)
def test_arguments_of_a_replay_that_mean_nothing_are_refused(changed):
    """The message is one line that names the argument, the device of metrics included."""
    whole = {"trace": build(), "policy": kvsim.policy("snapkv", window=4), "budget": 8}
    word = next(iter(changed))

    with pytest.raises(KvsimError, match=f"^[^\n]*{word} (is|are) [^\n]+$"):
        kvsim.replay(**{**whole, **changed})
    if word == "device":
        with pytest.raises(KvsimError, match=r"^device is "):
            kvsim.measure(build(), device=changed[word])


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a.astype(a.dtype.newbyteorder()),
        lambda a: np.ascontiguousarray(a[:, :, ::-1])[:, :, ::-1],
        lambda a: np.frombuffer(a.tobytes(), a.dtype).reshape(a.shape),
        lambda a: torch.complex(torch.zeros(a.shape), -torch.from_numpy(a)).conj().imag,
        lambda a: torch.nn.Parameter(torch.from_numpy(a)),
    ],
    ids=["other byte order", "negative stride", "read-only", "negative bit", "parameter"],
)
def test_arrays_with_one_meaning_are_read_so(change):
    """Another byte order, a negative stride or a read-only array is no other trace."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trace = build(**{name: change(getattr(CASE, name)) for name in "qkv"})

    assert trace.digest == build().digest


def test_tokens_of_any_integer_dtype_and_order_are_read():
    """Unsigned, reversed and big-endian token ids are the same ids."""
    ids = np.arange(N)
    kinds = [ids.astype(np.uint64), ids.astype(">i2"), ids[::-1].copy()[::-1], torch.arange(N)]

    for tokens in kinds:
        assert build(tokens=tokens).tokens.tolist() == ids.tolist()


def test_a_prompt_that_fills_the_text_is_remarked():
    """Kept sets have their meaning, rows that see them do not exist, and the record says so."""
    record = kvsim.replay(build(prompt_len=N), kvsim.policy("snapkv", window=4), 8)

    assert "the prompt fills the text: no row follows an event" in record.remark
    assert "fills" not in kvsim.replay(build(), kvsim.policy("snapkv", window=4), 8).remark
