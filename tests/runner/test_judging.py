"""Replays judged by their model, against live runs, dense masks, and each record alone."""

import functools
import math
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
import torch

import kvsim
from families import FAMILIES
from kvsim.analysis.evidence import ranking
from kvsim.analysis.live.metrics import JUDGED
from kvsim.analysis.output.changed import first_moved
from kvsim.analysis.overview import summarise
from kvsim.core.trace import Trace
from kvsim.errors import CaptureError, NeedsError, PolicyError
from kvsim.policies import names, parameters
from kvsim.recorder import load_model, loading
from kvsim.recorder.layers import Residual
from kvsim.runner.full import FullPass
from kvsim.runner.judging import Judge, unjudged
from kvsim.runner.model import RunningModel
from kvsim.runner.recorded import holds_cache
from kvsim.sweeps import replay_all
from kvsim.sweeps.pool import in_this_process
from live_runs import judged_logits, live_policies, run_live
from live_runs import relative as gap
from tests.reference.masked import masked_logits
from traces import short_lengths

CLOSE = 1e-5
PROMPT, LENGTH, INTERVAL, BUDGET = 80, 152, 8, 64
TOKENS = torch.randperm(256, generator=torch.Generator().manual_seed(0))[:LENGTH].tolist()
READING = {
    "quest": {"page": 4, "dense_layers": 0, "share": 0.5},
    "topp": {},
    "magicpig": {"bits": 3, "tables": 9, "sink": 1, "local": 4, "dense_layers": 0},
    "h2o+magicpig+int4": {"bits": 3, "tables": 9, "sink": 1, "local": 4, "dense_layers": 0},
    "skip_softmax": {"page": 4, "threshold": 0.8},
    "h2o+quest": {"page": 4, "dense_layers": 0, "heads": "layer", "share": 0.4},
    "adakv+snapkv+quest": {"page": 4, "dense_layers": 1, "heads": "kv", "share": 0.4, "window": 8},
}
ROUNDING = {
    "int4": {},
    "kivi": {"group": 8, "window": 16},
    "kvquant": {"group": 4, "outliers": 0.25},
    "turboquant@prod": {"window": 4},
    "nvfp4": {},
    "think": {"pruned": 0.6},
    "h2o+think": {"pruned": 0.6, "window": 8, "recent": 4},
    "tova+int8": {"k_bits": "2/16", "v_bits": "16/2"},
    "h2o+kivi": {"group": 4, "window": 8},
    "adakv+expected_attention+kivi": {"group": 8, "window": 8},
    "h2o+lookm": {},
    "adakv+snapkv+lookm": {"window": 8, "merge": "weighted"},
    "streaming_llm+d2o": {},
    "adakv+snapkv+d2o": {"window": 8},
}


@functools.cache
def running(name):
    """A small random model of a family."""
    family = FAMILIES[name]
    changes = {**family.changes, "vocab_size": 256}
    family = replace(family, changes=changes)
    return RunningModel(family.build(family.kernels[0], torch.float32))


@functools.cache
def recorded(name):
    """Its trace of `TOKENS`."""
    return kvsim.capture(running(name).model, None, TOKENS[:PROMPT], response=TOKENS[PROMPT:])


@functools.cache
def tiny():
    """The shipped model, its sample trace and its judge."""
    run, trace = RunningModel(load_model("tiny")[0]), kvsim.open_trace(kvsim.sample_trace())
    return run, trace, Judge(run, trace)


def lived(name, policy, budget=BUDGET, **options):
    """A live run, its logits of the rows that predict the response, and its record as a replay."""
    live = run_live(running(name), policy, budget, TOKENS, PROMPT, interval=INTERVAL, **options)
    record = replace(live.record, closed=False, trace=recorded(name).name)
    return record, live.logits[PROMPT - 1 : -1]


@pytest.mark.parametrize("numbers", [300, 1 << 23])
def test_logits_are_computed_some_rows_at_a_time(monkeypatch, numbers):
    """In captures of a response, judged and live runs; values are those of all rows together."""
    model, tokens, sizes = running("llama").model, TOKENS[: PROMPT + 20], []
    of_row = model.config.vocab_size

    def values():
        given = {"response": tokens[PROMPT:], "sensitivity": False}
        trace = kvsim.capture(model, None, tokens[:PROMPT], **given)
        records = [kvsim.replay(trace, name, BUDGET) for name in ("tova", "snapkv", "knorm")]
        outcomes = Judge(RunningModel(model), trace, 1 << 10).outcomes(records)
        judged = [getattr(x.forced, name) for x in outcomes for name in ("nll", "kl")]
        table = kvsim.live(model, trace, "tova", BUDGET).table
        live = table.filter(metric="response_kl")["value"]
        return [np.array(trace.header.response_logprobs), *judged, live.to_numpy()]

    whole = values()
    monkeypatch.setattr("kvsim.recorder.head.LOGITS", numbers)
    monkeypatch.setitem(FullPass.__init__.__kwdefaults__, "keep", 0)
    handle = model.lm_head.register_forward_hook(lambda *call: sizes.append(call[-1].numel()))
    parts = values()
    handle.remove()

    largest = max(sizes)
    assert largest <= max(numbers, 3 * of_row)  # a row of three records, at least
    assert numbers < 1 << 20 or largest > 19 * of_row
    for one, other in zip(parts, whole, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_a_pass_behind_the_recorded_prompt_is_the_whole_pass():
    """Rows from the last of the prompt on, with recorded keys and values before them."""
    run, trace = running("llama"), recorded("llama")
    whole, rows = FullPass(run, trace, Residual(run.model)), []
    handle = run.model.register_forward_pre_hook(
        lambda *given: rows.append(given[2]["position_ids"].shape[1]), with_kwargs=True
    )

    behind = Judge(run, trace)._full

    handle.remove()
    assert rows == [trace.n_pos - trace.prompt_len + 1]
    assert not holds_cache(trace, {**run.described, "weights": "sha256:other"}, torch.float32)
    assert not holds_cache(trace, run.described, torch.float64)  # stored with rounding
    logits = [each.predictions.logits() for each in (behind, whole)]
    assert gap(*logits) < 2 * CLOSE
    of_rows = ((x.rows.output, x.rows.input) for x in (behind, whole))
    arrays = [
        [*x.keys, *x.values, *(read(at, PROMPT) for read in each for at in range(trace.n_layers))]
        for x, each in zip((behind, whole), of_rows, strict=True)
    ]
    for mine, expected in zip(*arrays, strict=True):
        assert mine.shape == expected.shape
        assert gap(mine, expected) < 2 * CLOSE


@pytest.mark.parametrize(
    "family",
    [
        *("llama", "gemma2", "gpt_oss"),
        *(pytest.param(x, marks=pytest.mark.deep) for x in ("qwen2", "qwen3", "gemma3")),
    ],
)
def test_decisions_of_a_live_run_have_its_predictions(family):
    """Whatever the family's attention does, and however ragged heads and layers are."""
    some = 3 if family == "llama" else 7
    policies = [*live_policies().items()][::some]
    runs = [lived(family, policy, 96 if x == "triattention" else BUDGET) for x, policy in policies]
    found = judged_logits(Judge(running(family), recorded(family)), [record for record, _ in runs])

    moved = 0
    for (name, _), logits, (record, expected) in zip(policies, found, runs, strict=True):
        assert gap(logits, expected) < 2 * CLOSE, name
        moved += bool(record.events)
    assert moved > len(policies) // 2


@pytest.mark.parametrize("name", [*READING, *ROUNDING])
def test_what_a_live_run_reads_and_rounds_has_its_predictions(name):
    """Pages of each row, of ragged heads too; keys and values rounded after their rows."""
    policy = kvsim.policy(name, **(READING | ROUNDING)[name])
    record, expected = lived("llama", policy)
    plain = replace(record, reads=None, storage=None)
    if record.reads is not None:  # they are chosen again, in the pass
        empty = replace(record.reads, bits=np.zeros_like(record.reads.bits))
        record = replace(record, reads=empty)
    judge = Judge(running("llama"), recorded("llama"))

    mine, unread = judged_logits(judge, [record, plain])

    assert gap(mine, expected) < 2 * CLOSE
    assert gap(unread, expected) > 1e-3  # reads and quantizers matter


@pytest.mark.parametrize(
    ("family", "layers"), [("gemma2", None), ("gpt_oss", None), ("llama", [1])]
)
def test_layers_that_a_record_leaves_out_are_not_rounded(family, layers):
    """Those with a sliding window, and those that a live run was told to leave alone."""
    policies = [kvsim.policy("int4"), kvsim.policy("h2o+think", pruned=0.6), kvsim.policy("d2o")]
    runs = [lived(family, policy, layers=layers) for policy in policies]
    all_layers = tuple(range(recorded(family).n_layers))

    judged = judged_logits(Judge(running(family), recorded(family)), [record for record, _ in runs])

    for mine, (record, expected) in zip(judged, runs, strict=True):
        assert gap(mine, expected) < 2 * CLOSE
        assert record.layers != all_layers


# ------------------------------------------------------------------------- replays


def test_where_one_layer_evicts_the_live_run_is_judged():
    """Its decisions read what no eviction has touched: divergence and stream errors are equal."""
    run, trace, judge = tiny()
    terms = {"interval": 32, "layers": [1]}
    policies = ("h2o", "tova", "snapkv", "adakv+snapkv")
    live = kvsim.live(run.model, [trace], policies, 64, metrics=JUDGED, **terms)
    records = [kvsim.replay(trace, name, 64, prefill=True, **terms) for name in policies]

    table = kvsim.judge(run.model, trace, records)

    keys = ["policy", "metric", "layer"]
    both = table.join(live.table, on=keys, suffix="_live", nulls_equal=True)
    assert both.height == live.table.height == table.height
    assert (both["value"] - both["value_live"]).abs().max() < CLOSE
    assert set(table["fidelity"]) == {"judged"}
    assert judge.trace.name == trace.name


def test_predictions_are_those_of_masks_over_the_whole_sequence():
    """A forward of all rows with a dense mask, row by row from the record, has the same logits."""
    run, trace, judge = tiny()
    kept = ("random", "h2o", "adakv+snapkv", "cake", "oracle")
    records = [kvsim.replay(trace, name, 64, interval=32, prefill=True) for name in kept]
    by_query_head = (kvsim.policy("oracle", by="output"), "snapkv@original")
    records += [kvsim.replay(trace, x, 64, interval=32, prefill=True) for x in by_query_head]
    assert len({first_moved(x, trace, torch.from_numpy(x.evicted_at)) for x in records}) == 1

    found = judged_logits(judge, records)

    expected = masked_logits(run.model, trace.tokens, records)[:, :-1]
    assert gap(found, expected) < 5 * CLOSE


def test_the_kl_of_each_token_is_a_loop_over_the_logits():
    """Of dense masks, in float64, token by token; nothing before the first event can reach it."""
    run, trace, _ = tiny()
    names = ("h2o", "adakv+snapkv", "full")
    records = [kvsim.replay(trace, name, 64, interval=32, prefill=True) for name in names]
    with torch.inference_mode():
        full = run.model(trace.tokens[None]).logits[0, trace.prompt_len - 1 :]

    table = kvsim.judge(run.model, trace, records, tokens=True)

    by_token = table.filter(metric="response_kl_tokens")
    for name, live in zip(names, masked_logits(run.model, trace.tokens, records), strict=True):
        values = {
            variant: dict(by_token.filter(policy=name, variant=variant)["event", "value"].rows())
            for variant in ("", "changed")
        }
        assert [*values[""]] == [*values["changed"]] == [*range(trace.prompt_len + 1, trace.n_pos)]
        for position, kl in values[""].items():
            rows = [x[position - trace.prompt_len].double().tolist() for x in (live, full)]
            sums = [sum(map(math.exp, row)) for row in rows]
            mine, whole = ([math.exp(z) / s for z in x] for x, s in zip(rows, sums, strict=True))
            expected = sum(p * math.log(p / q) for p, q in zip(whole, mine, strict=True))
            assert kl == pytest.approx(expected, rel=1e-3, abs=CLOSE), (name, position)
            differs = mine.index(max(mine)) != whole.index(max(whole))
            assert values["changed"][position] == differs, (name, position)
        mean = table.filter(metric="response_kl", policy=name)["value"].item()
        assert sum(values[""].values()) / len(values[""]) == pytest.approx(mean, rel=1e-12)
        assert any(values[""].values()) == any(values["changed"].values()) == (name != "full")


@pytest.mark.parametrize("rows", [pytest.param(None, marks=pytest.mark.deep), 3])
def test_records_together_are_each_alone(monkeypatch, rows):
    """To 1e-5 of a token's value, or of 1e-3: whatever is judged too, and however much memory.

    Ragged heads, layers of own budgets, sparse attention, quantizers, mergers and chunks of a
    prompt; of a response of three tokens, whose products have few rows, too.
    """
    run, trace = tiny()[:2]
    if rows is not None:
        ids = trace.tokens.tolist()[: trace.prompt_len + rows]
        trace = kvsim.capture(run.model, None, ids[:-rows], response=ids[-rows:])
    kept = ("full", "kivi", "quest", "adakv+snapkv", "cake", "h2o+magicpig", "snapkv+lookm")
    terms = {"interval": 32, "prefill": True}
    records = [kvsim.replay(trace, name, budget, **terms) for name in kept for budget in (48, 96)]
    records += [kvsim.replay(trace, "adakv+snapkv", 64, prefill_chunk=100, **terms)]
    judge = Judge(run, trace)
    together, moved = judge.outcomes(records), []

    monkeypatch.setattr("kvsim.recorder.hooks.REPEATED", 0)  # and one KV head after the other
    small = Judge(run, trace, memory=1)
    for record, one in zip(records, together, strict=True):
        for (alone,) in (each.outcomes([record]) for each in (judge, small)):
            for value in ("kl", "nll", "full_nll", "stream_error"):
                mine, expected = (getattr(x.forced, value) for x in (one, alone))
                close = np.abs(mine - expected) <= CLOSE * np.maximum(np.abs(expected), 1e-3)
                assert close.all(), (record.policy, record.budget, value)
            assert (one.forced.agreement == alone.forced.agreement).all()
        moved.append(one.forced.kl.any())
    assert moved.count(False) == 2  # of the full cache
    assert small._together(99) == 1 < judge._together(99)


def test_rows_before_an_eviction_are_those_of_the_full_cache():
    """One entry of one head leaves: predictions change from the next row on, and never before."""
    _, trace, judge = tiny()
    record = kvsim.replay(trace, "full", 64)
    row = trace.prompt_len + 100  # within a block of rows
    evicted_at = record.evicted_at.copy()
    evicted_at[1, 2, :200] = row
    (outcome,) = judge.outcomes([replace(record, evicted_at=evicted_at)])

    kl = outcome.forced.kl
    assert not kl[: row - trace.prompt_len + 2].any()
    assert kl[row - trace.prompt_len + 2] > 0
    assert outcome.forced.stream_error[1].max() < CLOSE
    assert outcome.forced.stream_error[2, row - trace.prompt_len + 1 :].all()


@pytest.mark.parametrize("response", [0, 1, 2])
def test_a_response_of_hardly_any_token_is_judged(response):
    """The first event may leave a last row alone, or none; the first token never diverges."""
    run = running("llama")
    tokens = TOKENS[PROMPT : PROMPT + response]
    given = {"response": tokens} if response else {"max_new_tokens": 0}
    trace = kvsim.capture(run.model, None, TOKENS[:PROMPT], **given)
    records = [kvsim.replay(trace, name, 24, interval=32) for name in ("h2o", "tova")]

    for outcome in Judge(run, trace).outcomes(records):
        assert outcome.forced.kl.shape == (response,)
        assert not outcome.forced.kl[:1].any()
        assert (outcome.forced.kl[1:] > 0).all()
        assert outcome.forced.stream_error.shape[1] == response


def test_logits_that_are_not_finite_are_refused():
    """The row is named as the trace counts it, of whichever record it is."""
    run = RunningModel(load_model("tiny")[0])
    _, trace, _ = tiny()
    records = [kvsim.replay(trace, name, 64, interval=32, prefill=True) for name in ("h2o", "tova")]
    judge = Judge(run, trace)
    judge.check()

    def spoil(_, __, logits):
        logits[0, -1, 5] = float("inf")

    run.model.lm_head.register_forward_hook(spoil)
    with pytest.raises(CaptureError, match=rf"^row {trace.n_pos - 2} has NaN or infinity"):
        judge.outcomes(records)


@pytest.mark.deep
def test_every_policy_of_the_catalogue_is_judged_or_refused_in_one_line():
    """No row is left without entries; refusals name the policy and what to do."""
    _, trace, judge = tiny()
    refused = set()
    for name in names():
        try:
            given = {"calibration": "prefix:16"} if "calibration" in parameters(name) else {}
            if "protect_prompt" in parameters(name):
                given["protect_prompt"] = False
            if "crush" in parameters(name):
                given["recent"] = 32
            given |= short_lengths(name)
            record = kvsim.replay(trace, kvsim.policy(name, **given), 96, interval=32)
        except (PolicyError, NeedsError):  # a composition alone, or of other traces
            continue
        reason = unjudged(record)
        if reason:
            refused.add(name.partition("@")[0])
            assert reason.startswith(f"{name}: ")
            assert "\n" not in reason
            with pytest.raises(PolicyError, match="kvsim live"):
                judge.outcomes([record])
            continue
        (outcome,) = judge.outcomes([record])
        assert np.isfinite(outcome.forced.kl).all(), name
        assert np.isfinite(outcome.forced.nll).all(), name
    assert refused <= {"streaming_llm", "asl", "asl_2pass", "fastkv", "gemfilter", "pyramidinfer"}


def test_records_of_other_sequences_are_refused():
    """Other lengths and traces, and live runs, which need no judge."""
    _, trace, judge = tiny()
    record = kvsim.replay(trace, "h2o", 64, interval=32)
    unfit = {
        "the record is of 471 tokens": replace(record, evicted_at=record.evicted_at[..., :-1]),
        "of other": replace(record, trace="other"),
        "it is a live run": replace(record, closed=True),
    }
    for said, one in unfit.items():
        with pytest.raises(PolicyError, match=said):
            judge.outcomes([record, one])


def test_a_sweep_is_judged_by_the_model_that_its_trace_names(tmp_path, monkeypatch):
    """In one piece or in shares, resumed or not; what cannot be judged has a remark, no value."""
    monkeypatch.setattr(
        "kvsim.sweeps.driver.in_processes", lambda work, shares, _: in_this_process(work, shares)
    )
    _, trace, judge = tiny()
    policies = ["h2o", "snapkv", "streaming_llm@original"]
    metrics = ["retained_mass", "response_kl_tokens"]
    terms = {"interval": 32, "metrics": metrics, "judge": True}
    run = replay_all([trace.path], policies, [64, 96], **terms)
    again = replay_all([trace.path], policies, [64, 96], jobs=2, out=tmp_path / "run", **terms)
    resumed = replay_all([trace.path], policies, [64, 96], out=tmp_path / "run", **terms)

    assert run.table.equals(again.table)
    assert run.table.equals(resumed.table)
    kl = run.table.filter(metric="response_kl")
    assert set(kl["fidelity"]) == {"judged"}
    assert kl["policy"].to_list() == ["h2o", "h2o", "snapkv", "snapkv"]
    expected = [x.forced.kl[1:].mean() for x in judge.outcomes(run.records[:4])]
    assert np.allclose(kl["value"].to_numpy(), expected, atol=CLOSE)
    by_token = run.table.filter(metric="response_kl_tokens", variant="")
    of_each = by_token.group_by("policy", "budget", maintain_order=True).agg(pl.col("value").mean())
    assert np.allclose(of_each["value"].to_numpy(), kl["value"].to_numpy(), rtol=1e-12)
    assert "response_kl_tokens" not in summarise(run.table, terms["metrics"]).columns
    assert "response_kl_tokens" not in {*kvsim.averages(run.table)["metric"]}
    assert "response_kl_tokens" not in {*ranking(run.table)}
    assert any(x.startswith("streaming_llm@original: keys are rotated") for x in run.remarks)


def test_another_model_judges_nothing():
    """Before a cell is replayed: of other weights or sizes; a trace of some layers; no metric."""
    _, trace, _ = tiny()
    with pytest.raises(CaptureError, match="tiny-deep differs from the recorded tiny"):
        replay_all([trace], "h2o", 64, judge="tiny-deep")
    with pytest.raises(NeedsError, match="only some layers of its model"):
        replay_all([kvsim.sample_trace("smollm2")], "h2o", 64, judge="tiny")
    with pytest.raises(PolicyError, match="give --judge, or take kvsim live"):
        replay_all([trace], "h2o", 64, metrics="response_kl")
    with pytest.raises(PolicyError, match="answer_right is about a running model"):
        replay_all([trace], "h2o", 64, metrics="answer_right", judge=True)


def test_the_hub_is_not_asked_for_a_model_that_a_trace_names(monkeypatch):
    """The name is untrusted: the error says where it is from, and which option names another."""
    _, trace, _ = tiny()
    model = {**trace.meta["model"], "name": "local-folder"}
    header = replace(trace.header, meta={**trace.meta, "model": model})
    other = Trace(trace.source, header)
    monkeypatch.setattr(loading, "unreachable", pytest.fail)

    with pytest.raises(CaptureError, match=r"the hub is not asked.* names .*, give .* --model$"):
        replay_all([other], "h2o", 64, judge=True)
