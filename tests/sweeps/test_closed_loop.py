"""`kvsim.live`: cells on a running model, what they share with replays, folders and errors."""

import copy
import itertools
import re
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import polars as pl
import pytest
import torch

import kvsim
from kvsim.analysis.folder import read_run
from kvsim.analysis.table import FACTS
from kvsim.core.policy import Policy, Scorer
from kvsim.errors import CaptureError, ConfigError, NeedsError, OutputError, PolicyError
from kvsim.recorder import capture
from kvsim.recorder.forward import cache_of
from kvsim.runner.closed import ClosedLoop
from kvsim.runner.decoding import Decoding
from kvsim.store.records import read_records
from kvsim.sweeps.driver import replay_all
from live_runs import older
from small_model import small, words_tokenizer


@pytest.fixture(scope="module")
def model():
    """A random model of two layers."""
    return small()


@pytest.fixture(scope="module")
def trace(model):
    """A prompt of 40 tokens and a response of 24."""
    words = " ".join(f"w{(7 * i + i * i) % 60}" for i in range(40))
    return capture(model, words_tokenizer(), words, max_new_tokens=24, answer="w3", name="one")


def policies(*names):
    """Policies by name."""
    return [kvsim.policy(name) for name in names]


def only(table, metric):
    """The values of a metric, by layer and policy."""
    return table.filter(metric=metric)["value"].to_list()


def test_a_prompt_without_a_response_runs(model, trace):
    """There are no rows to compare, and the kept sets are those after the prompt."""
    prompt = trace.tokens[: trace.prompt_len].tolist()
    alone = capture(model, None, prompt, max_new_tokens=0)
    record, outcome = ClosedLoop(kvsim_running(model), alone, None, None).run(
        kvsim.policy("tova"), 16, kvsim.policy("snapkv").schedule
    )

    assert (record.retained(alone.prompt_len - 1).sum(-1) == 16).all()
    assert len(outcome.forced.nll) == 0


@dataclass(frozen=True)
class Late(Scorer):
    """Fails in the response, with an error of a policy of the user's own."""

    label: ClassVar[str] = "late"

    def score(self, view):
        """Long keys stay."""
        assert view.row < 44, "too late"
        return view.keys.norm(dim=-1)


def test_responses_of_a_batch_are_those_of_one_by_one(model, monkeypatch):
    """Of any prompts, policies and budgets; what cannot join, or fails, runs alone."""
    from kvsim.sweeps import closed_loop

    terms = {"context": 30, "probe": "repeat", "max_new_tokens": 8}
    traces = [
        capture(model, None, [(5 * i + n) % 60 for i in range(n)], name=str(n), **terms)
        for n in (37, 58)
    ]
    chosen = [*policies("tova", "snapkv", "quest", "kvzip"), Policy("late", Late())]
    options = {"max_new_tokens": 18, "temperature": 0.7, "interval": 8}
    options |= {"fit": True, "compress": "context"}
    joined, respond = [], closed_loop.respond

    def counted(lanes, *rest, **more):
        joined.append(len(lanes))
        return respond(lanes, *rest, **more)

    alone = kvsim.live(model, traces, chosen[:4], [16, 24], **options)
    monkeypatch.setattr(closed_loop, "respond", counted)
    both = kvsim.live(model, traces, chosen, [16, 24], batch=5, **options)

    timed = pl.col("metric") != "decode_seconds"
    ours = both.table.filter(timed, pl.col("policy") != "late")
    assert ours.equals(alone.table.filter(timed))
    assert max(joined) == 5
    assert sum(joined) == 16
    assert [each.response for each in both.records] == [each.response for each in alone.records]
    assert {each.policy for each in both.failures} == {"late"}
    assert all("too late" in each.error for each in both.failures)
    assert any("quest writes one by one: it reads a part" in note for note in both.notes)


@pytest.fixture
def ran(monkeypatch):
    """The cells that are run; the one numbered `stop` is interrupted."""
    from types import SimpleNamespace

    counter, run_cell = SimpleNamespace(cells=[], stop=None), ClosedLoop.run

    def counted(self, policy, budget, *given):
        counter.cells.append((policy.name, budget))
        if len(counter.cells) == counter.stop:
            raise KeyboardInterrupt
        return run_cell(self, policy, budget, *given)

    monkeypatch.setattr(ClosedLoop, "run", counted)
    return counter


def test_a_run_that_goes_on_writes_only_what_is_left(model, trace, tmp_path, monkeypatch, ran):
    """Responses of cells that are done are in no batch."""
    from kvsim.sweeps import closed_loop

    joined, respond = [], closed_loop.respond
    monkeypatch.setattr(
        closed_loop, "respond", lambda *x, **more: joined.append(len(x[0])) or respond(*x, **more)
    )
    options = {"max_new_tokens": 4, "batch": 3, "out": tmp_path / "run", "interval": 8}
    ran.stop = 3
    kvsim.live(model, [trace], ["tova", "knorm"], [16, 20], **options)
    run = kvsim.live(model, [trace], ["tova", "knorm"], [16, 20], **options)

    assert joined == [3, 2]
    assert len(run.records) == 4


def test_a_batch_beyond_the_memory_fails_in_a_line(model, trace, monkeypatch):
    """Each of its cells says what to make smaller."""
    from kvsim.sweeps import closed_loop

    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(closed_loop, "respond", full)
    run = kvsim.live(model, [trace], "tova", [16, 24, 30], max_new_tokens=4, batch=2)

    assert [each.budget for each in run.failures] == [16, 24, 30]
    assert all("at once take more memory" in each.error for each in run.failures)


@pytest.mark.parametrize("options", [{}, {"max_new_tokens": 8, "paged": 4}])
def test_a_batch_without_responses_or_in_blocks_is_refused(model, trace, options):
    """In one line that says what to give."""
    with pytest.raises(PolicyError, match=r"^[^\n]*batch is 4, [^\n]*give --max-new-tokens[^\n]*$"):
        kvsim.live(model, [trace], "tova", 16, batch=4, **options)


def test_teacher_forced_likelihoods_are_those_of_the_model(model, trace):
    """With nothing evicted, those of one plain forward over all tokens."""
    loop = ClosedLoop(kvsim_running(model), trace, None, None)
    _, outcome = loop.run(kvsim.policy("full"), 16, kvsim.policy("full").schedule)
    with torch.no_grad():
        logits = model(trace.tokens[None]).logits[0].double().log_softmax(-1)
    rows = torch.arange(trace.prompt_len - 1, trace.n_pos - 1)
    expected = -logits[rows, trace.tokens[rows + 1]]

    np.testing.assert_allclose(outcome.forced.nll, expected, rtol=1e-5)
    np.testing.assert_allclose(outcome.forced.full_nll, expected, rtol=1e-5)


def kvsim_running(model):
    """The model as a live run takes it."""
    from kvsim.runner.decoding import RunningModel

    return RunningModel(model)


def test_divergence_is_that_of_the_masked_model(model, trace):
    """The record as a mask over the whole model gives the same predictions, computed apart."""
    from tests.reference.masked import masked_logits

    run = kvsim.live(model, [trace], policies("tova", "knorm"), [16], interval=8)
    full = kvsim.live(model, [trace], policies("full"), [16], interval=8)
    logits = masked_logits(model, trace.tokens, [*full.records, *run.records])[:, :-1]
    masked = logits.double().log_softmax(-1)
    divergence = (masked[0].exp() * (masked[0] - masked[1:])).sum(-1)
    expected = divergence[:, 1:].mean(-1).tolist()  # the first is predicted by the prompt

    assert only(run.table, "response_kl") == pytest.approx(expected, rel=1e-3)
    assert min(only(run.table, "response_kl")) > 1e-6


def test_values_stand_beside_those_of_a_replay(model, trace):
    """One schedule, the same columns; the first layer has the same sets, all are labelled."""
    names, terms = ("tova", "h2o", "streaming_llm"), {"interval": 8}
    lived = kvsim.live(model, [trace], policies(*names), [16, 24], **terms)
    replayed = replay_all([trace], policies(*names), [16, 24], metrics=["retained_iou"], **terms)

    assert set(lived.table["fidelity"]) == {"closed"}
    keys = ["policy", "budget", "interval", "prefill", "layer", "head"]
    first = pl.col("layer") == 0, pl.col("metric") == "retained_iou"
    keys += ["variant", "value", *FACTS]
    a, b = (run.table.filter(*first).select(keys).sort(keys) for run in (lived, replayed))
    assert a.height == 12  # policies, budgets, heads
    assert a.equals(b)
    assert [r.events for r in lived.records] == [r.events for r in replayed.records]


def test_a_folder_holds_the_run_and_is_continued(model, trace, tmp_path, ran):
    """Cells that are done when a run is interrupted are not run again; other cells are refused."""
    given, ran.stop = (model, [trace], policies("tova", "knorm"), [16, 24]), 3
    folder, options = tmp_path / "run", {"max_new_tokens": 8, "tokenizer": words_tokenizer()}
    first = kvsim.live(*given, interval=8, out=folder, **options)

    assert first.interrupted
    assert len(first.records) == 2
    second = kvsim.live(*given, interval=8, out=folder, **options)
    assert ran.cells[3:] == [("knorm", 16), ("knorm", 24)]
    assert read_run(folder).table.equals(second.table)
    stored = read_records(folder / "records.zarr")
    assert all(record.closed for record in stored)
    again = kvsim.live(*given, interval=8, **options)
    timed = pl.col("metric") != "decode_seconds"
    assert second.table.filter(timed).equals(again.table.filter(timed))
    assert second.responses[:2].equals(first.responses)
    assert [x.response for x in stored] == [x.response for x in second.records]
    with pytest.raises(OutputError, match="holds a run of other schedules"):
        kvsim.live(*given, interval=4, out=folder, **options)
    with pytest.raises(OutputError, match=r"holds a run of other .*loop"):
        replay_all([trace], policies("tova"), [16], out=folder)


def test_a_seed_fixes_what_is_drawn(model, trace):
    """The same seed draws the same tokens, another one others."""
    options = {"interval": 8, "max_new_tokens": 20, "temperature": 1.0}
    runs = [kvsim.live(model, [trace], "tova", 16, seed=seed, **options) for seed in (1, 1, 2)]
    first, again, other = (run.records[0].response.tokens for run in runs)

    assert first == again != other


def test_what_cannot_run_is_refused_before_anything_runs(model, trace, tmp_path):
    """Policies without a live rule, traces without tokens, other models, bad numbers."""
    given = (model, [trace])
    with pytest.raises(PolicyError, match="rows of the future"):
        kvsim.live(*given, policies("oracle"), [16])
    with pytest.raises(PolicyError, match="per query head"):
        kvsim.live(*given, policies("snapkv@original"), [16])
    with pytest.raises(ConfigError, match="max_new_tokens is -1"):
        kvsim.live(*given, policies("tova"), [16], max_new_tokens=-1)
    with pytest.raises(CaptureError, match=r"expected at most .* fewer new tokens"):
        kvsim.live(*given, policies("tova"), [16], max_new_tokens=10**6)
    bare = kvsim.Trace.from_arrays(
        *map(trace.read, "qkv"), prompt_len=trace.prompt_len, rope=trace.ropes[0]
    )
    with pytest.raises(NeedsError, match="no tokens"):
        kvsim.live(model, [bare], policies("tova"), [16])
    other, tokenizer = kvsim.recorder.load_model("tiny")
    with pytest.raises(CaptureError, match="differs from the recorded"):
        kvsim.live(other, [trace], policies("tova"), [16], tokenizer=tokenizer)
    assert list(tmp_path.iterdir()) == []


def changed(model, share):
    """The model with noise on its weights, a share of their spread."""
    other, draws = copy.deepcopy(model), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in other.parameters():
            noise = torch.randn(weight.shape, generator=draws)
            weight.add_(share * weight.std() * noise)
    return other


def test_other_weights_are_refused_in_a_line(model, trace, tmp_path):
    """By their digest; of a trace without one, by what the model computes before any cell runs."""
    other, out = changed(model, 1e-2), tmp_path / "run"
    exchanged = older(trace, tokens=trace.tokens.roll(1))
    for recorded, with_model, words in (
        (trace, other, "has weights sha256:"),
        (older(trace), other, "computes another q of layer 0"),
        (exchanged, model, "computes another q of layer 0"),
    ):
        with pytest.raises(CaptureError, match=rf"^[^\n]*{words}[^\n]*$"):
            kvsim.live(with_model, [recorded], "tova", 16, out=out)
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_not_continued_with_other_weights(model, trace, tmp_path):
    """Not with weights that compute the same within rounding either."""
    other, given = changed(model, 1e-3 * 2**-8), ([older(trace)], policies("tova"), [16])
    kvsim.live(model, *given, out=tmp_path / "run")

    ClosedLoop(kvsim_running(other), given[0][0], None, None).check()
    with pytest.raises(OutputError, match="holds a run of other weights"):
        kvsim.live(other, *given, out=tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "params"), [("fastkv", {"layer": 0, "rows": 30}), ("gemfilter", {})]
)
def test_policies_that_drop_rows_of_the_prompt(model, trace, name, params):
    """The prediction of the first token is that of a run of the prompt alone."""
    policy, prompt = kvsim.policy(name, **params), trace.tokens[: trace.prompt_len].tolist()
    running = kvsim_running(model)
    with Decoding(running, policy, 20, prompt_len=len(prompt), n_pos=len(prompt)) as alone:
        logits = alone.feed(prompt)[0]

    record, outcome = ClosedLoop(running, trace, None, None).run(policy, 20, policy.schedule)

    nll = -float(logits.double().log_softmax(-1)[int(trace.tokens[trace.prompt_len])])
    assert outcome.forced.nll[0] == pytest.approx(nll, rel=1e-5)
    assert record.selection == alone.record().selection
    assert record.selection.dropped
    assert len(outcome.forced.nll) == trace.n_pos - trace.prompt_len
    assert np.isfinite(outcome.forced.nll).all()


def written(model, ids, n):
    """The tokens that plain transformers writes, greedy, and the bytes of its own cache."""
    out = model.generate(
        ids[None],
        attention_mask=torch.ones_like(ids[None]),
        max_new_tokens=n,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
    )
    layers = cache_of(out).layers
    tokens = tuple(out.sequences[0, len(ids) :].tolist())
    return tokens, sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)


@pytest.mark.parametrize("kind", ["shorter", "drawn"])
def test_the_text_with_the_full_cache_is_its_own(model, trace, kind):
    """That of the model, greedy, whatever the trace has as its response."""
    prompt = trace.tokens[: trace.prompt_len]
    options = {
        "shorter": {"max_new_tokens": 3},
        "drawn": {"max_new_tokens": 20, "temperature": 2.0},
    }
    recorded = capture(model, None, prompt.tolist(), name="one", **options[kind])
    run = kvsim.live(model, [recorded], policies("tova"), [12], interval=4, max_new_tokens=12)
    tokens, _ = written(model, prompt, 12)

    response = run.records[0].response
    assert response.full_tokens == tokens
    assert response.text is response.full_text is None
    assert len(response.tokens) == 12
    same = [a == b for a, b in zip(response.tokens, tokens, strict=True)]
    assert response.same_tokens == [*same, False].index(False)


@pytest.mark.parametrize(("policy", "new_tokens"), [("tova", 2), ("asl", 0)])
def test_logits_that_are_not_finite_fail(policy, new_tokens, model, trace):
    """A live run names the row, instead of metrics without a value and a response."""
    passes = itertools.count()

    def spoil(_, __, logits):  # once the model has been probed and compared with the trace
        if next(passes) > 2:
            logits[..., 5] = float("nan")

    hook = model.lm_head.register_forward_hook(spoil)
    run = kvsim.live(model, [trace], policies(policy), [36], max_new_tokens=new_tokens)
    hook.remove()

    (failure,) = run.failures
    assert re.search(r"row 39 has NaN or infinity in its logits \(1 of 64\)", failure.error)
    assert len(run.table) == 0
