"""Caches of running models as dumps: kvpress, kvsim's live runs, caches of transformers.

The dump holds what the model itself computed, so all layers and events are judged, and each known
difference of kvpress in decoding (docs/kvpress.md) is recognised by its name.
"""

import pytest
import torch
from transformers import DynamicCache

import kvsim
from kvsim.errors import CaptureError
from kvsim.recorder.forward import cache_option
from kvsim.runner.decoding import Decoding, RunningModel
from kvsim.studies.conformance.dump import read_dump
from kvsim.studies.conformance.recording import recording

PROMPT, INTERVAL, TARGET, LENGTH = 40, 24, 32, 112


def decode(model, tokens, cache, prompt):
    """Run given tokens, the first of them as a prompt and the others one by one."""
    ids = torch.tensor([tokens])
    with torch.no_grad():
        model(ids[:, :prompt], **cache_option(model, cache))
        for row in range(prompt, ids.shape[1]):
            at = torch.tensor([row])
            model(
                ids[:, row : row + 1],
                position_ids=at[None],
                cache_position=at,
                **cache_option(model, cache),
            )


@pytest.fixture
def pressed(kvpress, recorded):
    """Runs a press in decoding; returns the dump of its cache."""

    def run(press, kernel="sdpa", buffer=256, first=None):
        model, tokens, _ = recorded("llama", LENGTH, kernel)
        later = kvpress.DecodingPress(press, INTERVAL, TARGET, buffer)
        with kvpress.PrefillDecodingPress(first, later)(model), recording(model) as tape:
            decode(model, tokens, DynamicCache(), PROMPT)
        for block in model.model.layers:  # the model is used again
            block.self_attn.__dict__.pop("masked_key_indices", None)
        return tape.dump(budget=TARGET, interval=INTERVAL, prefill=first is not None)

    return run


_ROW = {"window": 8, "pool_kernel": 1}
_SNAPKV = ("SnapKVPress", {"window_size": 8, "kernel_size": 1})
_LAG = {"cross_scoring": True}
#: names of presses from the outside in with the arguments of the innermost, the kernel; the
#: definition, its parameters, and what it deviates by
PRESSES = [
    ("KnormPress", {}, "sdpa", "knorm", {}, []),
    ("KeyDiffPress", {}, "sdpa", "keydiff", {}, []),
    ("TOVAPress", {}, "eager", "tova@kvpress", {}, []),
    ("StreamingLLMPress", {}, "sdpa", "streaming_llm", {}, ["top-k-order"]),
    ("LagKVPress", {"lag_size": 8, **_LAG}, "sdpa", "lagkv", {"lag": 8, **_LAG}, ["top-k-order"]),
    ("ObservedAttentionPress", {}, "eager", "observed_attention", {}, ["top-k-order"]),
    (*_SNAPKV, "sdpa", "snapkv@kvpress", _ROW, ["window-rotated"]),
    (*_SNAPKV, "eager", "snapkv@kvpress", _ROW, ["window-of-one"]),
    (
        "SnapKVPress",
        {"window_size": 8, "kernel_size": 5},
        *("sdpa", "snapkv@kvpress", {"window": 8}, ["window-rotated, top-k-order"]),
    ),
    (
        "PyramidKVPress",
        {"window_size": 4, "kernel_size": 1, "beta": 4},
        *("sdpa", "pyramidkv@kvpress", {"window": 4, "pool_kernel": 1, "beta": 4}),
        ["window-rotated"],
    ),
    ("AdaKVPress KnormPress", {}, "sdpa", "adakv@kvpress+knorm", {}, []),
    (
        "ExpectedAttentionPress",
        *({}, "sdpa", "expected_attention", {"query_buffer": 12}),
        ["expected_attention@kvpress"],
    ),
]


@pytest.mark.peers
@pytest.mark.parametrize("case", PRESSES, ids=lambda case: f"{case[0]} {case[2]} {case[5]}")
def test_the_referee_knows_kvpress(kvpress, pressed, fake_keys, case):
    """In all layers: equal where kvpress is, and else its documented difference by name."""
    names, arguments, kernel, policy, parameters, expected = case
    *around, inner = names.split()
    press = getattr(kvpress, inner)(**arguments)
    for name in reversed(around):
        press = getattr(kvpress, name)(press)
    dump = pressed(press, kernel, parameters.get("query_buffer", 256))
    assert next(iter(dump.kept.values())).shape[:2] == (3, 2)
    report = kvsim.conform(dump, kvsim.policy(policy, **parameters))
    assert report.equal is not bool(expected)
    assert [each.name for each in report.deviations] == expected


@pytest.mark.peers
@pytest.mark.parametrize(
    ("name", "policy"),
    [("TOVAPress", "tova@kvpress"), ("ExpectedAttentionPress", "expected_attention@kvpress")],
)
def test_an_event_after_the_prompt_is_a_press_of_its_own(kvpress, pressed, name, policy):
    """PrefillDecodingPress with the same press twice is a schedule with the prefill event."""
    press = getattr(kvpress, name)
    dump = pressed(press(), first=press(1 - (TARGET + 0.5) / PROMPT))
    assert min(dump.kept) == PROMPT - 1
    assert kvsim.conform(dump, policy).equal


@pytest.mark.peers
def test_masked_entries_that_return_are_recorded(kvpress, pressed, fake_keys):
    """AdaKV masks; around Expected Attention some entries come back, which `conform` says."""
    dump = pressed(kvpress.AdaKVPress(kvpress.ExpectedAttentionPress(epsilon=0.01)))
    policy = kvsim.policy("adakv@kvpress+expected_attention@kvpress", epsilon=0.01)
    report = kvsim.conform(dump, policy)
    assert [each.name for each in report.deviations] == ["evicted-return"]
    first = min(dump.kept)
    assert all(each.row > first for each in report.differences)


@pytest.mark.parametrize("name", ["tova", "ams+tova", "adakv+snapkv", "h2o"])
def test_our_live_run_conforms(recorded, name, tmp_path):
    """Sets that the recorder reads from the cache are those of the live run, and of the rule."""
    model, tokens, _ = recorded("llama", LENGTH)
    sizes = {"window": 8, "min_segment": 4, "max_segment": 16}
    built = kvsim.policy(name)
    policy = kvsim.policy(name, **{x: y for x, y in sizes.items() if x in built.params})
    decoding = Decoding(
        RunningModel(model),
        policy,
        TARGET,
        prompt_len=PROMPT,
        n_pos=LENGTH,
        interval=INTERVAL,
        prefill=True,
    )
    with decoding, recording(model) as tape:
        decoding.feed(tokens[:PROMPT])
        decoding.feed(tokens[PROMPT:])
    dump = tape.dump(decoding.record())
    seen = tape.dump(budget=TARGET, interval=INTERVAL, prefill=True)
    assert {*seen.kept} == {*dump.kept} - {LENGTH - 1}  # which no later forward shows
    assert all((dump.kept[row] == kept).all() for row, kept in seen.kept.items())
    back = read_dump(dump.save(tmp_path / "d.npz"))
    assert kvsim.conform(back, policy).differences == ()


def test_a_schedule_without_events_in_decoding(recorded, tmp_path):
    """Interval 0 says that an implementation evicts after the prompt alone, as in a dump's file."""
    model, tokens, _ = recorded("llama", LENGTH)
    policy = kvsim.policy("tova")
    decoding = Decoding(RunningModel(model), policy, TARGET, prompt_len=PROMPT, n_pos=LENGTH,
                        prefill=True, interval=LENGTH)  # fmt: skip
    with decoding, recording(model) as tape:
        decoding.feed(tokens[:PROMPT])
        decoding.feed(tokens[PROMPT : PROMPT + 8])

    dump = tape.dump(budget=TARGET, interval=0, prefill=True)

    assert (dump.schedule.interval, [*dump.kept]) == (None, [PROMPT - 1])
    assert read_dump(dump.save(tmp_path / "d.npz")).schedule == dump.schedule
    assert kvsim.conform(dump, policy).differences == ()


class Halved(DynamicCache):
    """A cache of a user's own: it keeps the most recent entries, and rounds keys if asked to."""

    rounding = False

    def update(self, keys, values, layer, *more, **options):
        """Add the rows, and let all but the last entries leave after each row of decoding."""
        keys, values = super().update(keys, values, layer, *more, **options)
        part = self.layers[layer]
        if keys.shape[2] > TARGET and part.keys.shape[2] > TARGET:
            part.keys, part.values = keys[:, :, -TARGET:], values[:, :, -TARGET:]
            if self.rounding:
                part.keys = part.keys.round(decimals=2)
        return keys, values


def test_a_cache_of_transformers_is_recorded(recorded):
    """A class of a user's own that keeps the last entries is StreamingLLM without sinks."""
    model, tokens, _ = recorded("llama", LENGTH)
    with recording(model) as tape:
        decode(model, tokens[:60], Halved(), PROMPT)
    dump = tape.dump(budget=TARGET, interval=1, prefill=True)
    assert kvsim.conform(dump, kvsim.policy("streaming_llm", sink=0)).equal
    report = kvsim.conform(dump, "streaming_llm")
    assert "lost-sinks" in [each.name for each in report.deviations]


def test_keys_that_are_changed_are_refused(recorded):
    """A cache that rounds its keys cannot be read by comparison."""
    model, tokens, _ = recorded("llama", LENGTH)
    cache = Halved()
    cache.rounding = True
    with recording(model), pytest.raises(CaptureError, match="did not compute"):
        decode(model, tokens[:60], cache, PROMPT)
