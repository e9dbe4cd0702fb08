"""Kept sets at the end of the prefill equal kvpress's, in all layers, outside ties at the cut.

kvpress runs the model; kvsim replays what its recorder saw of the same model. Policies that draw
(`random`) have no common set. Each case also names a variant of kvsim's policy that must fail the
same comparison.

CriticalAdaKVPress has no case. It shares places out by the raw scores of all heads and ranks each
head in two stages afterwards; `adakv+criticalkv+X` shares out by the two-stage scores, which is
AdaKVPress around CriticalKVPress. `criticalkv+adakv+X` is no name: an allocator comes first.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import DynamicCache, PreTrainedModel

import kvsim
from kvsim.analysis.output.changed import kept_channels
from kvsim.core.policy import Inputs, Scorer
from kvsim.core.select import select
from kvsim.core.view import View
from kvsim.policies.criticalkv import projected_size
from kvsim.policies.duo import HeadPlan
from kvsim.policies.lukv import PERCENTS
from kvsim.schema import NEVER
from traces import changed

pytestmark = pytest.mark.peers

# Of scores, relative to the largest of the layer; of scores tied at the cut, relative to the cut.
CLOSE = 5e-6
TIED = 1e-5

Make = Callable[[ModuleType, kvsim.Trace], Any]
Recorded = tuple[PreTrainedModel, list[int], kvsim.Trace]


@dataclass(frozen=True)
class Case:
    """A press and our policy.

    differs: what makes our policy another one. shared: "" where each head fills its own budget,
    "layer" where heads compete, "chunks" where they hold one set. scored: whether the scores are
    the same numbers, and not only in the same order. tied: whether many entries tie at the cut.
    """

    press: Make
    name: str
    params: Mapping[str, Any] = field(default_factory=dict)
    differs: Mapping[str, Any] = field(default_factory=dict)
    kernel: str = "sdpa"
    length: int = 150
    ratios: tuple[float, ...] = (0.2, 0.5, 0.55)
    shared: str = ""
    scored: bool = True
    tied: bool = False


def _press(name: str, **arguments: Any) -> Make:
    return lambda kvpress, _: getattr(kvpress, name)(**arguments)


def _around(name: str, inner: Make, **arguments: Any) -> Make:
    return lambda kvpress, trace: getattr(kvpress, name)(inner(kvpress, trace), **arguments)


def _qfilter(rows: int) -> Make:
    """Filters found here, by another route than ours, with the sign of those that are published."""

    def make(kvpress: ModuleType, trace: kvsim.Trace) -> Any:
        q = trace.read("q")[:, :, :rows].double()
        u = torch.linalg.svd(q).Vh[..., 0, :]  # [layer, qhead, dim]
        u = u * (u * q.mean(2)).sum(-1, keepdim=True).sign()
        press = kvpress.QFilterPress()
        press.q_filters = -u.unflatten(1, (trace.n_heads, -1)).mean(2).float()
        press.post_init_from_model = lambda _: None  # which would download them
        return press

    return make


def _finch(window: int) -> Make:
    """Without a delimiter token, which would say how many rows the question has."""

    def make(kvpress: ModuleType, _: kvsim.Trace) -> Any:
        press = kvpress.FinchPress(rerotate_keys=False)
        press.window_size, press.delimiter_token_id = window, -1
        return press

    return make


def _compactor(parts: str) -> Make:
    """With keys as they are instead of a random sketch; no entry is left out of its scores."""

    def make(kvpress: ModuleType, trace: kvsim.Trace) -> Any:
        whole = {"chunk_size": 50, "sketch_dimension": trace.dim}
        press = kvpress.CompactorPress(blending=0.5, sink_size_start=0, sink_size_end=0, **whole)
        leverage = press._leverage_press
        sketched = leverage.compute_leverage_scores

        def exact(keys: torch.Tensor, size: int) -> torch.Tensor:
            plain = torch.eye(size).mul(size**0.5)
            with patch("torch.randn", lambda *shape, **_: plain.expand(shape)):
                return sketched(keys, size)

        leverage.compute_leverage_scores = exact
        return {"both": press, "leverage": leverage, "attention": press._non_causal_press}[parts]

    return make


_SNAPKV = _press("SnapKVPress", window_size=8, kernel_size=5)
_EXPECTED = _press("ExpectedAttentionPress", epsilon=0.01)

CASES = {
    "knorm": Case(_press("KnormPress"), "knorm", differs={"name": "keydiff"}),
    "keydiff": Case(_press("KeyDiffPress"), "keydiff", differs={"name": "knorm"}),
    "streaming": Case(
        _press("StreamingLLMPress"), "streaming_llm", differs={"sink": 3}, scored=False
    ),
    "tova": Case(_press("TOVAPress"), "tova@kvpress", differs={"heads": "group"}),
    "snapkv": Case(_press("SnapKVPress"), "snapkv@kvpress", differs={"pool_kernel": 7}),
    # n = 160 and ratios whose budgets are whole: 120, 100 and 80 entries of a layer on average.
    # The first layer is at its limit of n - window entries, the last one keeps the rest.
    "pyramidkv-limit": Case(
        _press("PyramidKVPress", window_size=8),
        "pyramidkv@kvpress",
        {"window": 8},
        differs={"window": 9},
        length=160,
        ratios=(0.375, 0.5, 0.25),
    ),
    # 40 and 60: the budgets of the layers are 70, 40, 10 and 105, 60, 15
    "pyramidkv-free": Case(
        _press("PyramidKVPress", window_size=8, beta=4),
        "pyramidkv@kvpress",
        {"window": 8, "beta": 4},
        differs={"beta": 3},
        length=160,
        ratios=(0.75, 0.625),
    ),
    # 70 and 75: the last layer would hold less than the window, so all keep the same
    "pyramidkv-flat": Case(
        _press("PyramidKVPress"),
        "pyramidkv@kvpress",
        differs={"rule": "fixed"},
        length=160,
        ratios=(0.5625, 0.53125),
    ),
    "expected": Case(
        _press("ExpectedAttentionPress"), "expected_attention@kvpress", differs={"epsilon": 0.01}
    ),
    "expected-epsilon": Case(_EXPECTED, "expected_attention", differs={"epsilon": 0.0}),
    "observed": Case(
        _press("ObservedAttentionPress"),
        "observed_attention",
        differs={"name": "h2o"},
        kernel="eager",
    ),
    "h2o@kvpress": Case(
        _press("ObservedAttentionPress"), "h2o@kvpress", differs={"name": "h2o"}, kernel="eager"
    ),
    "qfilter": Case(
        _qfilter(64), "qfilter", {"calibration": "prefix:64"}, differs={"calibration": "prefix:32"}
    ),
    # 150 = 4 + 9 * 16 + 2, 148 = 4 + 9 * 16, 36 = 4 + 2 * 16; in 35 nothing can be measured yet
    "lagkv": Case(
        _press("LagKVPress", lag_size=16), "lagkv", {"lag": 16}, differs={"lag": 15}, tied=True
    ),
    "lagkv-short": Case(
        _press("LagKVPress", lag_size=16),
        "lagkv",
        {"lag": 16},
        differs={"lag": 8},
        tied=True,
        length=35,
    ),
    "lagkv-cross": Case(
        _press("LagKVPress", lag_size=16, cross_scoring=True),
        "lagkv",
        {"lag": 16, "cross_scoring": True},
        differs={"cross_scoring": False},
    ),
    **{
        f"compactor-{parts}": Case(
            _compactor(parts),
            "compactor",
            {"chunk": 50, "sink": 0, "recent": 0, "parts": parts},
            differs={"parts": other},
        )
        for parts, other in pairwise(("both", "leverage", "attention", "both"))
    },
    "curdkv": Case(_press("CURPress"), "curdkv", differs={"segment": 15}),
    "curdkv-mean": Case(
        _press("CURPress", leverage_type="kv_avg", num_sinks=2, use_local_approximation=False),
        "curdkv",
        {"leverage": "mean", "sink": 2, "segment": None},
        differs={"leverage": "product"},
    ),
    "capkv": Case(_press("CapPress"), "capkv", differs={"tau": 1.0}),
    "capkv-near": Case(
        _press("CapPress", tau=2.0, n_future_positions=64, n_sink=2),
        "capkv",
        {"tau": 2.0, "n_future": 64, "sink": 2},
        differs={"n_future": 512},
    ),
    "finch": Case(_finch(8), "finch", {"window": 8}, differs={"window": 9}),
    # Scores of 0 or more alone: see test_criticalkv_signed.
    "criticalkv-snapkv-third": Case(
        _around("CriticalKVPress", _SNAPKV, epsilon=1e-2, first_stage_ratio=0.3),
        "criticalkv+snapkv@kvpress",
        {"window": 8, "epsilon": 1e-2, "first_stage": 0.3},
        differs={"first_stage": 0.9},
        scored=False,
    ),
    "criticalkv-observed": Case(
        _around("CriticalKVPress", _press("ObservedAttentionPress")),
        "criticalkv+observed_attention",
        differs={"first_stage": 0.9},
        kernel="eager",
        scored=False,
    ),
    "adakv-snapkv-floor": Case(
        _around("AdaKVPress", _SNAPKV, alpha_safeguard=0.9),
        "adakv@kvpress+snapkv@kvpress",
        {"window": 8, "floor": 0.9},
        differs={"name": "adakv+snapkv@kvpress"},
        shared="layer",
    ),
    "adakv-expected": Case(
        _around("AdaKVPress", _EXPECTED),
        "adakv@kvpress+expected_attention",
        differs={"epsilon": 0.0},
        shared="layer",
    ),
    "adakv-criticalkv-snapkv": Case(
        _around("AdaKVPress", _around("CriticalKVPress", _SNAPKV)),
        "adakv@kvpress+criticalkv+snapkv@kvpress",
        {"window": 8},
        differs={"first_stage": 0.9},
        shared="layer",
        scored=False,
    ),
    # 150 = 7 * 20 + 10 = 9 * 16 + 6 = 15 * 10; in 13 there is no whole chunk of 20
    "chunkkv-snapkv-16": Case(
        _around("ChunkKVPress", _SNAPKV, chunk_length=16),
        "chunkkv@kvpress+snapkv@kvpress",
        {"window": 8, "chunk": 16},
        differs={"name": "chunkkv+snapkv@kvpress"},
        shared="chunks",
    ),
    "chunkkv-tova": Case(
        _around("ChunkKVPress", _press("TOVAPress")),
        "chunkkv@kvpress+tova@kvpress",
        differs={"chunk": 16},
        length=157,
        ratios=(1 - 125 / 157, 1 - 78 / 157),
        shared="chunks",
    ),
    "chunkkv-short": Case(
        _around("ChunkKVPress", _press("KeyDiffPress")),
        "chunkkv@kvpress+keydiff",
        differs={"name": "chunkkv@kvpress+knorm"},
        length=13,
    ),
}


def pressed(
    press: Any, kvpress: ModuleType, recorded: Recorded
) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """What a press keeps of a prompt and how it scores it, [layer, head, pos] each."""
    model, tokens, trace = recorded
    scorer = press.press if isinstance(press, kvpress.AdaKVPress | kvpress.ChunkKVPress) else press
    scores, score = {}, scorer.score

    def listening(module: Any, *arguments: Any) -> torch.Tensor:
        found = score(module, *arguments)
        scores[module.layer_idx] = found.clone()  # AdaKV goes on to write into it
        return found

    scorer.score = listening
    cache = DynamicCache()
    with torch.no_grad(), press(model):
        model(torch.tensor([tokens]), past_key_values=cache)
    kept = torch.zeros(trace.n_layers, trace.n_heads, trace.n_pos, dtype=torch.bool)
    for layer, block in enumerate(model.model.layers):
        masked = block.self_attn.__dict__.pop("masked_key_indices", None)
        if masked is None:
            at = positions_of(cache.layers[layer].keys[0], trace.read("k")[layer])
            kept[layer] = torch.zeros_like(kept[layer]).scatter(-1, at, value=True)
        else:
            kept[layer] = True
            kept[layer][masked[1:]] = False
    stacked = torch.cat([scores[layer] for layer in sorted(scores)])
    return kept.numpy(), stacked.double().numpy()


def positions_of(keys: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """Positions of cached keys [head, n, dim] among the recorded ones [head, pos, dim]."""
    nearest = torch.cdist(keys.double(), known.double()).min(-1)
    assert float(nearest.values.max()) < 1e-4
    return nearest.indices


def assert_same_sets(
    ours: NDArray[np.bool_],
    theirs: NDArray[np.bool_],
    scores: NDArray[np.float64],
    case: Case,
) -> None:
    """Equal counts, of heads or layers, and equal sets but for entries tied at the cut.

    The cut is the best score among what the press lets go. Unless the case is one of ties, one pair
    of entries may be taken for each other, whose scores rounding has turned around.
    """
    axes = (-2, -1) if case.shared else (-1,)
    assert (ours.sum(axes) == theirs.sum(axes)).all()
    differs = ours != theirs
    if case.shared == "chunks":
        assert not differs.any()
    cut = np.where(theirs, -np.inf, scores).max(axes, keepdims=True)
    assert (differs <= (np.abs(scores - cut) <= TIED * np.abs(cut))).all()
    assert case.tied or differs.sum(axes).max() <= 2


def compare(
    case: Case, kvpress: ModuleType, recorded: Recorded, ratio: float, policy: kvsim.Policy
) -> kvsim.Record:
    """The Record of the policy at the budget of the ratio: sets and scores are the press's."""
    trace = recorded[2]
    press = case.press(kvpress, trace)
    press.compression_ratio = ratio
    theirs, scores = pressed(press, kvpress, recorded)
    budget = kvpress.utils.compute_n_kept(case.length, ratio)
    # the prefill event alone, whatever the policy's own schedule
    record = kvsim.replay(trace, policy, budget, interval=case.length, internals=True)
    assert record.events == [case.length - 1]
    assert_same_sets(record.retained(case.length - 1), theirs, scores, case)
    if case.scored:
        (plans,) = record.internals
        kept_anyway = policy.protection(budget, enforced=False).mask(
            torch.from_numpy(plans.pos), case.length - 1
        )
        free = ~kept_anyway.numpy()
        size = np.abs(np.where(free, scores, 0.0)).max((1, 2), keepdims=True)
        assert (np.abs(plans.scores - scores) <= CLOSE * size)[free].all()
    return record


@pytest.mark.parametrize("name", CASES)
def test_prefill_sets_equal_kvpress(kvpress, recorded, family, name):
    """On random models of three families, at several ratios: scores and kept sets of every head."""
    case = CASES[name]
    policy = kvsim.policy(case.name, **case.params)
    for ratio in case.ratios:
        compare(case, kvpress, recorded(family, case.length, case.kernel), ratio, policy)


@pytest.mark.parametrize("name", ["knorm", "streaming", "tova", "snapkv", "expected"])
def test_context_alone_equals_kvpress(kvpress, random_model, prompt, name):
    """kvpress compresses the context and appends the question; so does `compress="context"`."""
    case, asked = CASES[name], 30
    n = case.length + asked
    model, tokens = random_model(n), prompt(n, n)
    trace = kvsim.capture(model, None, tokens, context=case.length, max_new_tokens=0)
    press, cache = case.press(kvpress, trace), DynamicCache()
    press.compression_ratio = case.ratios[1]
    with torch.no_grad():
        with press(model):
            model(torch.tensor([tokens[: case.length]]), past_key_values=cache)
        question = torch.tensor([tokens[case.length :]])
        positions = torch.arange(case.length, n).unsqueeze(0)
        model(question, past_key_values=cache, position_ids=positions)
    budget = kvpress.utils.compute_n_kept(case.length, press.compression_ratio)
    policy = kvsim.policy(case.name, **case.params)

    record = kvsim.replay(trace, policy, budget, interval=n, compress="context")

    assert record.events == [case.length - 1]
    theirs = torch.zeros(record.evicted_at.shape, dtype=torch.bool)
    theirs[..., case.length :] = True
    for layer in range(trace.n_layers):
        keys = cache.layers[layer].keys[0]
        assert keys.shape[1] == budget + asked
        at = positions_of(keys[:, :budget], trace.read("k")[layer][:, : case.length])
        theirs[layer].scatter_(-1, at, value=True)
    assert (record.retained(n - 1) != theirs.numpy()).sum(-1).max() <= 2 * case.tied
    whole = kvsim.replay(trace, policy, budget, interval=n)
    if name != "knorm":  # whose scores are the same at any time
        shared = (slice(None), slice(None), slice(case.length))
        assert (whole.retained(n - 1)[shared] != theirs.numpy()[shared]).any()


@pytest.mark.parametrize(
    ("name", "ratio", "counts"),
    [
        ("pyramidkv-limit", 0.375, [152, 100, 48]),
        ("pyramidkv-free", 0.75, [70, 40, 10]),
        ("pyramidkv-flat", 0.5625, [70, 70, 70]),
    ],
)
def test_pyramidkv_falls_and_does_not(kvpress, recorded, name, ratio, counts):
    """The three rules for what a layer keeps: at the limit, free, and the same for all."""
    case = CASES[name]
    policy = kvsim.policy(case.name, **case.params)
    record = compare(case, kvpress, recorded("llama", case.length), ratio, policy)
    assert record.retained(case.length - 1).sum(-1).tolist() == [[n, n] for n in counts]


@pytest.mark.parametrize("name", CASES)
def test_another_policy_does_not_equal_kvpress(kvpress, recorded, name):
    """With one parameter changed the sets differ at one of the ratios at least."""
    case = replace(CASES[name], scored=False)
    params = {**case.params, **case.differs}
    policy = kvsim.policy(params.pop("name", case.name), **params)
    with pytest.raises(AssertionError):  # noqa: PT012 - any of the ratios
        for ratio in case.ratios:
            compare(case, kvpress, recorded("llama", case.length, case.kernel), ratio, policy)


@dataclass(frozen=True)
class Unshifted(Scorer):
    """CriticalKV that multiplies scores below 0 as they are, by which a large value counts less."""

    scorer: Scorer

    reads = Inputs(arrays=frozenset({"o_proj"}))

    def score(self, view: View) -> torch.Tensor:
        """The first half of the budget by s, the rest by (s + 1e-4) |W_o v|; [L, H, n]."""
        scores = self.scorer.score(view)
        share = (view.budget // 2).expand_as(view.count)
        first = select(scores, share, torch.zeros_like(view.live), view.live)
        sized = (scores + 1e-4) * projected_size(view.values, view.array("o_proj"))
        return sized.masked_fill(first, torch.finfo(sized.dtype).max)


@pytest.mark.parametrize("inner", ["knorm", "keydiff"])
def test_criticalkv_signed(kvpress, recorded, family, inner):
    """Around scores below 0 kvpress ranks large values last; but for that the sets are equal."""
    press = {"knorm": "KnormPress", "keydiff": "KeyDiffPress"}[inner]
    case = Case(_around("CriticalKVPress", _press(press)), "", scored=False)
    of = recorded(family, case.length)
    raw = kvsim.Policy("unshifted", Unshifted(kvsim.policy(inner).scorer))
    for ratio in case.ratios:
        compare(case, kvpress, of, ratio, raw)
        with pytest.raises(AssertionError):
            compare(case, kvpress, of, ratio, kvsim.policy(f"criticalkv+{inner}"))


def test_chunkkv_counts_chunks_by_the_budget(kvpress, recorded):
    """A ratio between two budgets may keep a chunk more in kvpress; the budget's own never does."""
    case = CASES["chunkkv-tova"]
    of, policy = recorded("llama", 157), kvsim.policy(case.name)
    keep = kvpress.utils.compute_n_kept
    assert keep(157, 0.5) == keep(157, 1 - 78 / 157) == 78  # of 8 chunks 4.0 and 3.97 are to stay
    compare(case, kvpress, of, 1 - 78 / 157, policy)
    with pytest.raises(AssertionError):
        compare(case, kvpress, of, 0.5, policy)


def test_criticalkv_first_stage_of_at_least_one(kvpress, recorded):
    """Of a budget of 1 half is nothing here and one entry in kvpress."""
    press = _around("CriticalKVPress", _press("ObservedAttentionPress"))
    case = Case(press, "criticalkv+observed_attention", kernel="eager", scored=False)
    of, ratio = recorded("llama", 150, "eager"), 1 - 1 / 150
    compare(case, kvpress, of, ratio, kvsim.policy(case.name, first_stage=1.0))
    with pytest.raises(AssertionError):
        compare(case, kvpress, of, ratio, kvsim.policy(case.name))


@dataclass(frozen=True)
class Bare(Scorer):
    """A scorer that protects nothing."""

    scorer: Scorer

    def score(self, view: View) -> torch.Tensor:
        """The scorer's; [L, H, n]."""
        return self.scorer.score(view)


def test_chunkkv_pads_sinks_that_lagkv_only_scores(kvpress, recorded):
    """The first chunk around LagKV: its sinks score 1 in kvpress, in ours the largest score + 1."""
    lagkv = _press("LagKVPress", lag_size=16, cross_scoring=True)
    around = _around("ChunkKVPress", lagkv)
    case = Case(around, "chunkkv@kvpress+lagkv", shared="chunks", scored=False)
    of, ratio = recorded("llama", 150), 0.7
    policy = kvsim.policy(case.name, lag=16, cross_scoring=True)
    with pytest.raises(AssertionError):
        compare(case, kvpress, of, ratio, policy)
    compare(case, kvpress, of, ratio, replace(policy, scorer=Bare(policy.scorer)))


@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.8])
def test_duo_masks_what_duo_attention_press_masks(kvpress, recorded, tmp_path, monkeypatch, ratio):
    """The same heads stream, and lose the same entries after the prompt."""
    model, _, trace = recorded("llama", 150)
    scores = np.random.default_rng(3).random((trace.n_layers, trace.n_heads))
    plan = tmp_path / "full_attention_heads.tsv"
    np.savetxt(plan, scores, delimiter="\t")
    press = kvpress.DuoAttentionPress(head_compression_ratio=ratio)
    monkeypatch.setattr(press, "load_attention_pattern", lambda _: (4, 20, scores))
    press.post_init_from_model(model)
    policy = kvsim.policy(f"duo:{plan}", share=1 - ratio, sink=4)
    gone = ~kvsim.replay(trace, policy, 24, interval=1).retained(149)

    for layer in range(trace.n_layers):
        keys = trace.read("k")[layer][None]
        module = SimpleNamespace(layer_idx=layer, config=model.config, masked_key_indices=None)
        press.compress(module, None, keys, keys, None, {})
        masked = np.zeros((trace.n_heads, 150), bool)
        masked[tuple(index.numpy() for index in module.masked_key_indices[1:])] = True
        assert (masked == gone[layer]).all()
    assert gone.any()


@pytest.mark.parametrize("window", [1, 32])
def test_lukv_masks_what_lukv_press_masks(kvpress, recorded, tmp_path, window):
    """The numbers of each head, and which entries stay, down to fewer than sinks and window."""
    model, tokens, trace = recorded("llama", 150)
    shape = (PERCENTS, trace.n_layers, trace.n_heads)
    ratios = np.random.default_rng(5).random(shape) ** 0.5
    inner, training = kvpress.ExpectedAttentionPress(epsilon=0.02), {}
    if window == 32:
        inner = kvpress.SnapKVPress(window_size=window, kernel_size=7)
        params = {"window": window, "pool": "avg", "pool_kernel": 7}
        training = {"scorer": "snapkv", "params": params}
    path = tmp_path / "plan.json"
    path.write_text(HeadPlan(ratios.tolist(), training).text(), "utf-8")
    policy = kvsim.policy(f"lukv:{path}", exact=False)
    press, least = kvpress.LUKVPress(inner, window=window), 150
    press._budget_curves = ratios  # so that none is downloaded
    for ratio in (0.02, 0.2, 0.5, 0.56, 0.9, 0.98):
        press.compression_ratio = ratio
        with torch.no_grad(), press(model):
            model(torch.tensor([tokens]), past_key_values=DynamicCache())
        stays = np.ones((trace.n_layers, trace.n_heads, 150), bool)
        for layer, block in enumerate(model.model.layers):
            masked = block.self_attn.__dict__.pop("masked_key_indices")
            stays[layer][tuple(index.numpy() for index in masked[1:])] = False
        record = kvsim.replay(trace, policy, round(150 * (1 - ratio)))
        assert (record.retained(149) == stays).all()
        least = min(least, int(stays.sum(-1).min()))
    assert least < 5


@pytest.mark.parametrize("window", [0, 20])
def test_dms_masks_what_dms_press_masks(kvpress, recorded, window):
    """Prompt and decoding: a long key leaves each head when it leaves the window, row by row."""
    model, tokens, trace = recorded("llama", 150)
    norms = trace.read("k").norm(dim=-1).flatten().sort().values
    middle = norms[len(norms) * 9 // 20 : len(norms) * 11 // 20]
    widest = int(middle.diff().argmax())  # where rounding moves no key across the threshold
    threshold, prompt = -float(middle[widest : widest + 2].mean()), 90
    press = kvpress.DMSPress(kvpress.KnormPress(), threshold, window, decoding=True)
    for block in model.model.layers:
        block.self_attn.masked_key_indices = None
    cache = DynamicCache()
    with torch.no_grad(), press(model):
        model(torch.tensor([tokens[:prompt]]), past_key_values=cache)
        for row in range(prompt, 150):
            model(torch.tensor([tokens[row : row + 1]]), past_key_values=cache)
    stays = np.ones((trace.n_layers, trace.n_heads, 150), bool)
    for layer, block in enumerate(model.model.layers):
        masked = block.self_attn.__dict__.pop("masked_key_indices")
        stays[layer][tuple(index.numpy() for index in masked[1:])] = False
    policy = kvsim.policy("dms+knorm", threshold=threshold, window=window)
    record = kvsim.replay(changed(trace, prompt_len=prompt), policy, 1)

    assert (record.retained(149) == stays).all()
    assert not stays[0].all(-1).any()
    last = kvsim.policy("dms+knorm", threshold=threshold, window=window + 1)
    other = kvsim.replay(changed(trace, prompt_len=prompt), last, 1)
    assert (other.retained(149) != stays).any()


@pytest.mark.parametrize("ratio", [0.3, 0.55])
def test_think_prunes_what_think_press_prunes(kvpress, recorded, family, ratio):
    """The same channels of each head are 0 after the prompt; those of another window are not."""
    model, tokens, trace = recorded(family, 150)
    cache = DynamicCache()
    with torch.no_grad(), kvpress.ThinKPress(ratio, window_size=20)(model):
        model(torch.tensor([tokens]), past_key_values=cache)
    zero = torch.stack([(layer.keys[0] == 0).all(1) for layer in cache.layers])

    def pruned(window: int) -> torch.Tensor:
        quantizer = kvsim.policy("think@kvpress", pruned=ratio, window=window).storage
        gone = torch.full((trace.n_heads, 150), NEVER)
        layers = range(trace.n_layers)
        return ~torch.stack([kept_channels(quantizer, trace, i, gone, 149) for i in layers])

    assert (zero.sum(-1) == int(8 * ratio)).all()
    assert (pruned(20) == zero).all()
    assert (pruned(1) != zero).any()


def test_page_names_tests_that_exist():
    """Every test that docs/kvpress.md points to is in one of the modules."""
    here = Path(__file__).parent
    modules = ("test_interop.py", "test_kvpress.py", "test_kvzip.py", "test_recording.py")
    code = "".join((here / module).read_text("utf-8") for module in modules)
    page = (here.parents[1] / "docs" / "kvpress.md").read_text("utf-8")
    named = set(re.findall(r"`(test_\w+)`", page))
    assert named <= set(re.findall(r"^def (test_\w+)", code, re.MULTILINE))
