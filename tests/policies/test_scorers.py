"""Scorers of one formula each, against loops over heads and entries, and cases made by hand."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

import kvsim
from kvsim.core.attention import Formula
from kvsim.core.entries import Entries
from kvsim.core.policy import Policy, Schedule
from kvsim.core.view import Setting, View
from kvsim.engine.source import TraceSource
from kvsim.errors import NeedsError, PolicyError
from kvsim.policies import criticalkv as criticalkv_module
from kvsim.policies.calibration import Calibrated, Calibration, row_blocks
from kvsim.policies.criticalkv import CriticalKV, projected_size
from kvsim.policies.dropkv import DropKV
from kvsim.policies.expected_attention import ExpectedAttention
from kvsim.policies.h2o import H2O
from kvsim.policies.keydiff import KeyDiff
from kvsim.policies.knorm import Knorm
from kvsim.policies.lagkv import LagKV
from kvsim.policies.qfilter import QFilter
from kvsim.policies.snapkv import SnapKV
from kvsim.policies.triattention import TriAttention
from kvsim.policies.window import over_heads, smooth

LAYERS, HEADS, GROUP, N, DIM, HIDDEN = 2, 2, 3, 40, 8, 5
PROMPT = 12


def make_trace(seed=0, *, rope=None, **arrays):
    """Two layers, two KV heads, groups of three, float64; `arrays` replace what is drawn."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    drawn = {
        "q": normal(LAYERS, HEADS * GROUP, N, DIM) + 0.5,
        "k": normal(LAYERS, HEADS, N, DIM),
        "v": normal(LAYERS, HEADS, N, DIM),
        "o_proj": normal(LAYERS, HEADS * GROUP, DIM, HIDDEN),
    } | arrays
    return kvsim.Trace.from_arrays(
        **drawn,
        prompt_len=PROMPT,
        rope=rope or kvsim.Rope((1.0, 0.3, 0.01), attention_scaling=1.2),
        name=f"seed{seed}",
    )


def view_of(trace, row=N - 5, *, keep=None, budget=6, interval=8, clairvoyant=False):
    """The View after `row`; keep bool [layers, heads, row + 1] says what is still there."""
    source = TraceSource(trace, range(trace.n_layers), torch.device("cpu"))
    columns = {"acc": 0.0, "projected": math.nan}
    entries = Entries(trace.n_layers, trace.n_heads, columns, like=source.keys)
    entries.append(0, row + 1)
    if keep is not None:
        entries.compress(keep)
    return View(
        source,
        entries,
        Setting(
            budget=budget,
            prompt_len=trace.prompt_len,
            interval=interval,
            n_layers=trace.n_layers,
            clairvoyant=clairvoyant,
        ),
        row=row,
        since=torch.full((trace.n_layers,), -1),
        layers=torch.arange(trace.n_layers),
    )


def scores(scorer, view):
    """Values of the scorer, float64, NaN on pads."""
    answer = scorer.score(view)
    values = answer if isinstance(answer, torch.Tensor) else answer.values
    assert values.shape == view.pos.shape
    assert bool(values[view.live].isfinite().all())
    return values.masked_fill(~view.live, torch.nan)


def uneven(row=N - 5):
    """What is left where each head has lost other entries, and other numbers of them."""
    keep = torch.rand(LAYERS, HEADS, row + 1, generator=torch.Generator().manual_seed(9)) > 0.3
    keep[..., row - 3 :] = True
    keep[0, 1, 10:30] = False
    assert len(set(keep.sum(-1).flatten().tolist())) == LAYERS * HEADS
    return keep


def heads(view):
    """(layer, head, positions) of each head of the view, and the slice of its live entries."""
    n = view.pos.shape[-1]
    for layer in range(view.pos.shape[0]):
        for head in range(view.pos.shape[1]):
            count = int(view.count[layer, head])
            yield layer, head, view.pos[layer, head, n - count :].tolist(), slice(n - count, n)


# ------------------------------------------------------------------------------- what all have

SCORERS = {
    "keydiff": KeyDiff(),
    "knorm": Knorm(),
    "lagkv": LagKV(sink=2, lag=5),
    "lagkv crossing": LagKV(sink=2, lag=5, cross_scoring=True),
    "lagkv too long": LagKV(lag=20),
    "qfilter": QFilter("prefix:9"),
    "triattention": TriAttention("prefix:9"),
    "triattention max": TriAttention("prefix:9", protect_prompt=False, offsets="max"),
    "expected": ExpectedAttention(sink=2, n_future=7),
    "expected mixture": ExpectedAttention(sink=2, n_future=7, rope="mixture", value_norm="none"),
    "expected wo_v": ExpectedAttention(sink=2, n_future=7, value_norm="wo_v"),
    "criticalkv": CriticalKV(SnapKV(window=4)),
    "criticalkv signed": CriticalKV(KeyDiff()),
    "dropkv": DropKV(window=4, pool_kernel=3),
}


@pytest.mark.parametrize("name", SCORERS)
def test_a_ragged_head_scores_as_it_would_alone(name):
    """Scores of a head do not depend on how many entries the others hold."""
    scorer, trace, keep = SCORERS[name], make_trace(), uneven()
    view = view_of(trace, keep=keep)
    together = scores(scorer, view)

    for layer, head, _, held in heads(view):
        mine = slice(head * GROUP, (head + 1) * GROUP)
        single = make_trace(
            q=trace.q[layer : layer + 1, mine],
            k=trace.k[layer : layer + 1, head : head + 1],
            v=trace.v[layer : layer + 1, head : head + 1],
            o_proj=trace.o_proj[layer : layer + 1, mine],
        )
        alone = view_of(single, keep=keep[layer : layer + 1, head : head + 1])
        expected, found = scores(scorer, alone)[0, 0], together[layer, head, held]
        if name.startswith("criticalkv"):  # a share of the layer's largest: the order is the head's
            expected, found = expected.argsort(), found.argsort()
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", SCORERS)
def test_a_scorer_says_whether_it_can_be_negative(name):
    """What is declared unsigned never is, and what is declared signed is somewhere."""
    values = scores(SCORERS[name], view_of(make_trace(), keep=uneven()))

    assert bool((values < 0).any()) == SCORERS[name].signed


@pytest.mark.parametrize("name", SCORERS)
@pytest.mark.parametrize("kind", ["zero", "repeated", "large"])
def test_scores_are_finite_for_degenerate_traces(name, kind):
    """Keys and values of 0, all alike, or far apart."""
    made = make_trace().k
    k = {"zero": made * 0, "repeated": made[:, :, :1].expand_as(made), "large": made * 1e3}[kind]
    v = {"zero": made * 0, "repeated": made[:, :, :1].expand_as(made), "large": made * 1e3}[kind]
    trace = make_trace(q=make_trace().q * (0 if kind == "zero" else 1), k=k, v=v)

    scores(SCORERS[name], view_of(trace, keep=uneven()))


@pytest.mark.parametrize("name", SCORERS)
def test_float32_traces_score_as_float64_ones(name):
    """No formula loses more than rounding."""
    exact = make_trace()
    single = make_trace(
        q=exact.q.float(), k=exact.k.float(), v=exact.v.float(), o_proj=exact.o_proj.float()
    )
    found = SCORERS[name].score(view_of(single))
    found = found if isinstance(found, torch.Tensor) else found.values

    assert found.dtype in (torch.float32, torch.float64)
    expected = scores(SCORERS[name], view_of(exact))
    torch.testing.assert_close(found.double(), expected, atol=2e-4, rtol=2e-4)


# -------------------------------------------------------------------------------------- keydiff


def test_keydiff_is_the_cosine_with_the_mean_direction_of_the_live_keys():
    """A loop over heads; what has left has no say in the anchor."""
    view = view_of(make_trace(), keep=uneven())
    found = scores(KeyDiff(), view)

    for layer, head, positions, held in heads(view):
        keys = make_trace().k[layer, head, positions].numpy()
        anchor = np.mean([k / np.linalg.norm(k) for k in keys], axis=0)
        expected = [-k @ anchor / np.linalg.norm(k) / np.linalg.norm(anchor) for k in keys]
        np.testing.assert_allclose(found[layer, head, held], expected)


def test_keydiff_keeps_the_key_that_differs_and_gives_a_zero_key_no_angle():
    """Three alike, one opposite, one 0: the opposite key is best, the zero key in between."""
    k = torch.zeros(LAYERS, HEADS, N, DIM, dtype=torch.float64)
    k[..., :3, 0], k[..., 3, 0] = 2.0, -1.0
    row = scores(KeyDiff(), view_of(make_trace(k=k), row=4))[0, 0]

    assert row.tolist() == [-1.0, -1.0, -1.0, 1.0, 0.0]


# ---------------------------------------------------------------------------------------- knorm


def test_knorm_is_minus_the_length_of_the_key():
    """Of (3, 4, 0, ...) it is -5."""
    k = torch.zeros(LAYERS, HEADS, N, DIM, dtype=torch.float64)
    k[0, 0, 1, :2] = torch.tensor([3.0, 4.0])

    assert scores(Knorm(), view_of(make_trace(k=k), row=2))[0, 0].tolist() == [0.0, -5.0, 0.0]


# ---------------------------------------------------------------------------------------- lagkv


def lagkv_loop(keys, values, sink, lag, crossing):
    """Scores of a head's entries, [n, d] each, by the definition."""
    n = len(keys)
    if n < sink + 2 * lag:
        return [1.0] * min(sink, n) + [(i - sink) / (n - sink) for i in range(sink, n)]
    out = [1.0] * n
    for start in range(sink, n - 2 * lag + 1, lag):
        total = np.zeros(lag)
        for x in (keys, values):
            own, following = x[start : start + lag], x[start + lag : start + 2 * lag]
            low, high = following.min(0), following.max(0)
            scale = np.where(high > low, high - low, np.inf)
            spread = np.array([((row - low) / scale).std(ddof=1) for row in own])
            total += np.exp(spread) / np.exp(spread).sum() / 2
        ranks = np.argsort(np.argsort(total, kind="stable")) / lag
        out[start : start + lag] = total if crossing else ranks
    return out


@pytest.mark.parametrize("crossing", [False, True])
@pytest.mark.parametrize(("sink", "lag"), [(4, 5), (0, 3), (2, 8), (3, 1), (4, 40), (30, 2)])
def test_lagkv_equals_the_loop_over_partitions(sink, lag, crossing):
    """For heads of many lengths, also shorter than two partitions, or than the sinks."""
    trace, view = make_trace(), view_of(make_trace(), keep=uneven())
    found = scores(LagKV(sink, lag, crossing), view)

    for layer, head, positions, held in heads(view):
        keys, values = (x[layer, head, positions].numpy() for x in (trace.k, trace.v))
        expected = lagkv_loop(keys, values, sink, lag, crossing)
        np.testing.assert_allclose(found[layer, head, held], expected)


def test_lagkv_ranks_equal_entries_by_position():
    """In a partition of equal entries the ranks are 0, 1, 2, ..."""
    same = torch.ones(LAYERS, HEADS, N, DIM, dtype=torch.float64)
    k = same.clone()
    k[..., 3:6, :] = make_trace().k[..., 3:6, :]  # what the first partition is measured by
    found = scores(LagKV(sink=0, lag=3), view_of(make_trace(k=k, v=k), row=8))[0, 0]

    assert found[:3].tolist() == [0.0, 1 / 3, 2 / 3]
    assert found[6:].tolist() == [1.0, 1.0, 1.0]


def test_lagkv_leaves_out_channels_in_which_the_reference_does_not_vary():
    """They count as 0 instead of dividing by zero."""
    draw = make_trace().k
    k = draw.clone()
    k[..., 4:8, 2] = 1.5  # constant over the second partition
    found = scores(LagKV(0, 4, cross_scoring=True), view_of(make_trace(k=k, v=k), row=7))[0, 0]

    low, high = k[0, 0, 4:8].min(0).values, k[0, 0, 4:8].max(0).values
    scaled = ((k[0, 0, :4] - low) / (high - low)).nan_to_num(0, 0, 0)
    scaled[:, 2] = 0
    torch.testing.assert_close(found[:4], scaled.std(-1).softmax(-1))


def test_lagkv_protects_its_sinks():
    """They score 1 like the last partitions, and stay by protection."""
    assert LagKV(sink=3).protection(10) == kvsim.core.policy.Protection(sink=3)


# ---------------------------------------------------------------------------------- calibration


@pytest.mark.parametrize("name", ["qfilter", "triattention"])
def test_a_calibrated_scorer_without_calibration_says_what_to_give(name):
    """The policy, what is missing, and the ways to give it."""
    scorer = {"qfilter": QFilter, "triattention": TriAttention}[name]
    message = rf'{name}: calibration is missing; give calibration="prefix:64" .*trace.*"oracle"'

    with pytest.raises(PolicyError, match=message):
        scorer()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("prefix:", "qfilter: calibration is 'prefix:'; expected a number of rows"),
        ("prefix:0", "calibration is 'prefix:0'; expected a number of rows, at least 1"),
        ("prefix:-3", "calibration is 'prefix:-3'; expected a number"),
        ("prefix:1.5", "calibration is 'prefix:1.5'; expected a number"),
        ("no/such.zarr", "qfilter: calibration is 'no/such.zarr', which is no trace .*prefix:64"),
        ("orakel", "calibration is 'orakel', which is no trace"),
    ],
)
def test_a_calibration_that_is_none_is_refused_when_the_policy_is_made(given, message):
    """Before any trace is replayed."""
    with pytest.raises(PolicyError, match=message):
        QFilter(given)


def test_calibrations_compare_and_show_by_what_they_are(tmp_path):
    """A prefix by its text, a trace by its name and content, wherever it lies."""
    trace = make_trace(1)
    stored = QFilter(trace.save(tmp_path / "one.zarr"))

    assert QFilter("prefix:64") == QFilter("prefix:064") != QFilter("prefix:65")
    assert repr(QFilter("prefix:64")) == "QFilter(calibration='prefix:64')"
    assert QFilter(trace) == stored == QFilter(stored.calibration)
    assert hash(QFilter(trace)) == hash(stored)
    assert QFilter(trace) != QFilter(make_trace(2))
    assert repr(stored) == f"QFilter(calibration='seed1@{trace.digest[7:19]}')"


def test_a_prefix_needs_its_rows_and_only_the_oracle_looks_ahead():
    """What the engine is told."""
    prefix, oracle = TriAttention("prefix:9"), TriAttention("oracle")

    assert (prefix.least_rows, prefix.clairvoyant) == (9, False)
    assert (oracle.least_rows, oracle.clairvoyant) == (1, True)
    assert not TriAttention(make_trace()).clairvoyant


@pytest.mark.parametrize("held", [1, 1 << 24])
@pytest.mark.parametrize("scorer", [QFilter, TriAttention])
def test_prefix_oracle_and_trace_are_the_same_queries(scorer, held, monkeypatch):
    """The whole trace as a prefix, looked at ahead, or given as another trace, scores alike."""
    monkeypatch.setattr("kvsim.policies.calibration.LOGIT_BYTES", held)  # a row at a time, or all
    trace = make_trace()
    ahead = scores(scorer("oracle"), view_of(trace, clairvoyant=True))

    other = scores(scorer(trace), view_of(trace))
    last = N - 1
    prefix = scores(scorer(f"prefix:{N}"), view_of(trace, row=last))
    torch.testing.assert_close(other, ahead)
    torch.testing.assert_close(prefix, scores(scorer(trace), view_of(trace, row=last)))
    assert not torch.allclose(scores(scorer("prefix:3"), view_of(trace)), ahead)


def test_another_trace_serves_one_set_per_query_head_and_a_part_of_the_layers():
    """Filters go by query head and by the layer's place in the trace."""
    trace, other = make_trace(), make_trace(1)
    each = scores(QFilter(other), view_of(trace.per_query_head()))
    keys = trace.k.repeat_interleave(GROUP, dim=1)[:, :, : N - 4]
    filters = QFilter(other).learned(view_of(trace))[0].flatten(1, 2)
    torch.testing.assert_close(each, (keys @ filters.unsqueeze(-1)).squeeze(-1))

    source = TraceSource(trace, [1], torch.device("cpu"))
    entries = Entries(1, HEADS, {}, like=source.keys)
    entries.append(0, 10)
    setting = Setting(budget=5, prompt_len=5, interval=1, n_layers=LAYERS)
    view = View(source, entries, setting, row=9, since=torch.tensor([-1]), layers=torch.tensor([1]))
    expected = scores(QFilter(other), view_of(trace, row=9))[1:]
    torch.testing.assert_close(scores(QFilter(other), view), expected)


@dataclass(frozen=True)
class _Quantile(Calibrated):
    """A scorer of the user's own, whose parameter decides about what it learns."""

    quantile: float = 0.5
    rotated = True

    def learn(self, blocks, rope):
        return (torch.cat(list(blocks), dim=-2).quantile(self.quantile, dim=-2),)

    def score(self, view):
        return (view.keys * self.learned(view)[0].mean(2).unsqueeze(-2)).sum(-1)


def test_scorers_that_share_a_calibration_learn_what_is_their_own():
    """One with another parameter does not take what the first has learned."""
    low = _Quantile(calibration=make_trace(1), quantile=0.1)
    scores(low, view_of(make_trace()))
    high = replace(low, quantile=0.9)
    alone = _Quantile(calibration=make_trace(1), quantile=0.9)

    assert torch.equal(scores(high, view_of(make_trace())), scores(alone, view_of(make_trace())))


def test_another_trace_is_of_the_same_model():
    """A model of the same shape and another name is refused, in one line."""
    trace, other = make_trace(), make_trace(1)
    other.meta.update(model={"name": "base", "type": "llama"})
    kvsim.replay(trace, kvsim.policy("qfilter", calibration=other), 5)  # does not say of which
    trace.meta.update(model={"name": "chat", "type": "llama"})
    with pytest.raises(PolicyError, match=r"^qfilter: [^\n]* is of base [^\n]*of chat[^\n]*model$"):
        kvsim.replay(trace, kvsim.policy("qfilter", calibration=other), 5)


def test_another_trace_is_measured_once(monkeypatch):
    """Not again at the next event, nor for another part of the layers."""
    scorer = QFilter(make_trace(1))
    first = scores(scorer, view_of(make_trace()))
    monkeypatch.setattr(QFilter, "learn", lambda *_: pytest.fail("measured again"))

    assert torch.equal(scores(scorer, view_of(make_trace())), first)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": 1}, "calibration seed3@.* has 1 layers and the trace that is replayed has 2"),
        ({"q": (slice(None), slice(0, 4))}, "has 4 query heads .* has 6"),
        ({"q": (..., slice(0, 6))}, "has 6 dimensions .* has 8"),
        ({"rope": kvsim.Rope((1.0,))}, "has 2 rotated dimensions .* has 6"),
        ({"layer_ids": (1, 2)}, "has 1, 2 as numbers of layers .* has 0, 1"),
    ],
)
def test_a_trace_of_another_model_is_refused(change, message):
    """With what differs, and before any work."""
    arrays = {name: getattr(make_trace(3), name) for name in "qkv"}
    index = change.get("q")
    if index == 1:
        arrays = {name: array[:1] for name, array in arrays.items()}
    elif index is not None and index[0] is ...:
        arrays = {name: array[index] for name, array in arrays.items()}
    elif index is not None:
        arrays["q"] = arrays["q"][index]
    if "layer_ids" in change:
        arrays |= change
    other = make_trace(3, rope=change.get("rope"), **arrays, o_proj=None)

    with pytest.raises(PolicyError, match=message):
        kvsim.replay(make_trace(), kvsim.policy("qfilter", calibration=other), budget=4)


def test_queries_are_read_in_blocks_that_cover_the_rows(monkeypatch):
    """Whatever fits, each row once and in order; at least one row at a time."""
    q = make_trace().q
    for held in (1, 5 * q[:, :, 0].numel() * 8, 1 << 30):
        monkeypatch.setattr("kvsim.policies.calibration.LOGIT_BYTES", held)
        blocks = list(row_blocks(lambda start, stop: q[:, :, start:stop], 3, 37))

        assert torch.equal(torch.cat(blocks, dim=2), q[:, :, 3:37])
        assert max(block.shape[2] for block in blocks) == max(1, min(34, held // q[:, :, 0].nbytes))


def test_a_prefix_longer_than_the_first_event_is_refused_by_the_engine():
    """The rows must have been seen."""
    policy = Policy("qfilter", QFilter(f"prefix:{PROMPT + 1}"), schedule=Schedule(interval=None))

    with pytest.raises(PolicyError, match=f"fires after {PROMPT} rows; expected at least 13"):
        kvsim.replay(make_trace(), policy, 4)


def test_a_replay_may_calibrate_on_its_own_future_only_as_an_oracle():
    """The engine lets the oracle look ahead; the outcome is another one."""
    trace = make_trace()
    schedule = Schedule(interval=8)
    oracle = kvsim.replay(trace, Policy("qfilter", QFilter("oracle"), schedule=schedule), 8)
    prefix = kvsim.replay(trace, Policy("qfilter", QFilter("prefix:4"), schedule=schedule), 8)

    assert isinstance(oracle.params["calibration"], str)
    assert oracle.params["calibration"] == "oracle"
    assert not np.array_equal(oracle.evicted_at, prefix.evicted_at)


# -------------------------------------------------------------------------------------- qfilter


def test_qfilter_is_the_projection_on_the_first_singular_vector_of_the_queries():
    """By a singular value decomposition of each query head, oriented by the mean, then averaged."""
    trace, rows = make_trace(), 11
    view = view_of(trace, keep=uneven())
    found = scores(QFilter(f"prefix:{rows}"), view)

    for layer, head, positions, held in heads(view):
        filters = []
        for g in range(GROUP):
            q = trace.q[layer, head * GROUP + g, :rows].numpy()
            u = np.linalg.svd(q)[2][0]
            filters.append(u * np.sign(q.mean(0) @ u))
        expected = trace.k[layer, head, positions].numpy() @ np.mean(filters, axis=0)
        np.testing.assert_allclose(found[layer, head, held], expected)


def test_qfilter_prefers_the_key_along_the_queries():
    """Queries around (1, 0, ...): a key along it is first, one against it last."""
    q = torch.zeros(LAYERS, HEADS * GROUP, N, DIM, dtype=torch.float64)
    q[..., 0], q[..., 1] = 1.0, torch.linspace(-0.1, 0.1, N, dtype=torch.float64)
    k = torch.zeros(LAYERS, HEADS, N, DIM, dtype=torch.float64)
    k[..., 1, 0], k[..., 2, 0] = 2.0, -2.0
    trace = make_trace(q=q, k=k)
    row = scores(QFilter("oracle"), view_of(trace, row=3, clairvoyant=True))[0, 0]

    torch.testing.assert_close(row, torch.tensor([0.0, 2.0, -2.0, 0.0]).double(), atol=2e-2, rtol=0)


# --------------------------------------------------------------------------------- triattention


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("offsets", ["mean", "max"])
@pytest.mark.parametrize("protect", [True, False])
def test_triattention_equals_the_trigonometric_series_in_the_distance(layout, offsets, protect):
    """Keys and queries taken back to before the embedding, and distances put in as numbers."""
    frequencies, scaling, rows = (1.0, 0.3, 0.01, 1e-4), 1.2, 11
    rope = kvsim.Rope(frequencies, attention_scaling=scaling, layout=layout)
    trace = make_trace(rope=rope)
    view = view_of(trace, keep=uneven())
    found = scores(TriAttention(f"prefix:{rows}", protect, offsets), view)

    def pairs(x):
        """Rotated pairs of x [n, 8] before the embedding as complex numbers [n, 4]."""
        if layout == "half":
            return x[:, :4] + 1j * x[:, 4:]
        return x[:, 0::2] + 1j * x[:, 1::2]

    def plain(x, positions):
        turn = np.exp(-1j * np.outer(positions, frequencies)) / scaling
        return pairs(x) * turn

    for layer, head, positions, held in heads(view):
        k = plain(trace.k[layer, head, positions].numpy(), positions)
        each = []
        for g in range(GROUP):
            q = plain(trace.q[layer, head * GROUP + g, :rows].numpy(), range(rows))
            a, b = q.mean(0), np.abs(q).mean(0)
            total = []
            for key, p in zip(k, positions, strict=True):
                series = [
                    sum(
                        abs(a[f]) * abs(key[f]) * math.cos(w * d + np.angle(a[f] * key[f].conj()))
                        for f, w in enumerate(frequencies)
                    )
                    for d in (view.row + 1 + 2**i - p for i in range(17))
                ]
                near = np.mean(series) if offsets == "mean" else max(series)
                total.append(scaling**2 * (near + ((b - np.abs(a)) * np.abs(key)).sum()))
            among = [t for t, p in zip(total, positions, strict=True) if p >= PROMPT or not protect]
            each.append((np.array(total) - np.mean(among)) / np.std(among))
        np.testing.assert_allclose(found[layer, head, held], np.max(each, axis=0), rtol=1e-6)


def test_triattention_gives_equal_keys_without_a_position_equal_scores():
    """Keys of 0 cannot be told apart: z-scores of 0, not NaN."""
    trace = make_trace(k=torch.zeros(LAYERS, HEADS, N, DIM, dtype=torch.float64))

    assert bool((scores(TriAttention("prefix:5"), view_of(trace)) == 0).all())


def test_triattention_protects_the_prompt_unless_told_not_to():
    """The prompt stays and counts in the budget."""
    assert TriAttention("oracle").protection(9).prompt
    assert not TriAttention("oracle", protect_prompt=False).protection(9).prompt
    with pytest.raises(PolicyError, match="triattention: offsets is 'median'; expected 'mean'"):
        TriAttention("oracle", offsets="median")


# ----------------------------------------------------------------------------------- criticalkv


def test_projected_size_is_the_mean_l1_norm_behind_the_output_projection(monkeypatch):
    """Also a few entries at a time."""
    trace = make_trace()
    expected = np.zeros((LAYERS, HEADS, N))
    for layer, head, j, g in np.ndindex(LAYERS, HEADS, N, GROUP):
        seen = trace.v[layer, head, j] @ trace.o_proj[layer, head * GROUP + g]
        expected[layer, head, j] += seen.abs().sum() / GROUP
    o_proj = trace.o_proj.unflatten(1, (HEADS, GROUP))
    for held in (1, 1000, 1 << 24):
        monkeypatch.setattr("kvsim.policies.criticalkv.LOGIT_BYTES", held)
        np.testing.assert_allclose(projected_size(trace.v, o_proj), expected)


@pytest.mark.parametrize("first", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("inner", [Knorm(), H2O(recent=2), ExpectedAttention(sink=3, n_future=5)])
def test_criticalkv_ranks_two_stages(first, inner):
    """First the scorer's best, what it protects before all; then score times value."""
    trace, budget, epsilon = make_trace(), 10, 0.05
    view = view_of(trace, keep=uneven(), budget=budget)
    found = scores(CriticalKV(inner, epsilon, first), view)
    raw = scores(inner, view)
    size = projected_size(view.values, view.o_proj)
    protected = inner.protection(budget)

    for layer, head, positions, held in heads(view):
        s = raw[layer, head, held]
        s = s - s.min() if inner.signed else s
        kept = protected.mask(torch.tensor(positions), view.row).tolist()
        order = sorted(range(len(s)), key=lambda j: (not kept[j], -s[j], j))
        best = order[: max(sum(kept), int(budget * first))]
        rest = [j for j in range(len(s)) if j not in best]
        second = ((s + epsilon) * size[layer, head, held])[rest]
        values = found[layer, head, held]
        assert bool((values[best] >= 1).all())
        assert bool((values[best] <= 2).all())
        assert bool((values[rest] < 1).all())
        assert bool((values[rest] >= 0).all())
        assert values[rest].argsort().tolist() == second.argsort().tolist()
        assert values[best].argsort(stable=True).tolist() == s[best].argsort(stable=True).tolist()


def test_criticalkv_orders_entries_across_heads_by_score_times_value():
    """Heads of a layer share a scale, so that an allocator can compare them."""
    view = view_of(make_trace())
    found = scores(CriticalKV(SnapKV(window=4), first_stage=0.0), view)
    free = view.pos <= view.row - 4
    raw = (SnapKV(window=4).score(view) + 1e-4) * projected_size(view.values, view.o_proj)

    for layer in range(LAYERS):
        at = free[layer]
        assert found[layer][at].argsort().tolist() == raw[layer][at].argsort().tolist()


def test_criticalkv_is_its_scorer_in_all_but_the_ranking():
    """Columns, window, protection and needs are the scorer's, with what is projected added."""
    around = CriticalKV(H2O(recent=3))

    assert around.columns.keys() == H2O.columns.keys() | {"projected"}
    assert around.protection(20) == H2O(recent=3).protection(20)
    assert CriticalKV(SnapKV(window=7)).rows == 7
    assert around.needs == {"o_proj"}
    assert not CriticalKV(KeyDiff()).signed
    assert not around.per_row
    assert CriticalKV(QFilter("oracle")).clairvoyant
    assert CriticalKV(QFilter("prefix:9")).least_rows == 9


def test_criticalkv_carries_the_columns_of_its_scorer_through_a_replay():
    """H2O inside accumulates as H2O alone does; with all of the budget in the first stage, too."""
    trace = make_trace()
    schedule = Schedule(interval=4)
    inner = Policy("h2o", H2O(), schedule=schedule)
    around = Policy("criticalkv+h2o", CriticalKV(H2O(), first_stage=1.0), schedule=schedule)

    alone = kvsim.replay(trace, inner, 8)
    assert np.array_equal(kvsim.replay(trace, around, 8).evicted_at, alone.evicted_at)
    half = Policy("criticalkv+h2o", CriticalKV(H2O()), schedule=schedule)
    assert not np.array_equal(kvsim.replay(trace, half, 8).evicted_at, alone.evicted_at)


def test_queries_of_a_prefix_are_learned_from_once(monkeypatch):
    """Their rows are the same at every event."""
    calls = []
    learn = QFilter.learn
    monkeypatch.setattr(
        QFilter, "learn", lambda self, *given: calls.append(1) or learn(self, *given)
    )

    record = kvsim.replay(
        make_trace(), kvsim.policy("qfilter", calibration="prefix:9"), 8, interval=4
    )

    assert len(record.events) > 1
    assert calls == [1]


def test_criticalkv_projects_each_value_once(monkeypatch):
    """At later events values of new entries alone; the kept sets are those of projecting all."""
    trace = make_trace()
    policy = Policy("criticalkv+h2o", CriticalKV(H2O()), schedule=Schedule(interval=4))
    counts = []

    def counting(values, o_proj):
        counts.append(values.shape[2])
        return projected_size(values, o_proj)

    monkeypatch.setattr(criticalkv_module, "projected_size", counting)
    once = kvsim.replay(trace, policy, 8)
    monkeypatch.setattr(
        criticalkv_module, "_projected", lambda view: projected_size(view.values, view.o_proj)
    )

    again = kvsim.replay(trace, policy, 8)

    assert counts == [trace.prompt_len] + [4] * (len(once.events) - 1)
    assert np.array_equal(once.evicted_at, again.evicted_at)


def test_criticalkv_needs_the_output_projection():
    """A trace without one is refused before any work."""
    policy = Policy("criticalkv+knorm", CriticalKV(Knorm()), schedule=Schedule(interval=4))

    with pytest.raises(NeedsError, match="o_proj"):
        kvsim.replay(make_trace(o_proj=None), policy, 8)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"epsilon": -1.0}, "criticalkv: epsilon is -1.0; expected a finite number of at least 0"),
        ({"epsilon": math.inf}, "epsilon is inf"),
        ({"first_stage": 1.5}, "first_stage is 1.5; expected a number from 0 to 1"),
    ],
)
def test_criticalkv_refuses_what_cannot_be(params, message):
    """With what was expected."""
    with pytest.raises(PolicyError, match=message):
        CriticalKV(Knorm(), **params)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"sink": -1}, "lagkv: sink is -1; expected an integer"),
        ({"lag": 0}, "lagkv: lag is 0; expected an"),
    ],
)
def test_lagkv_refuses_what_cannot_be(params, message):
    """With what was expected."""
    with pytest.raises(PolicyError, match=message):
        LagKV(**params)


def test_a_calibration_stays_itself_when_parsed_again():
    """So that a policy can be made from the parameters of another."""
    one = Calibration.parse("qfilter", "prefix:8")

    assert Calibration.parse("triattention", one) is one


@pytest.mark.parametrize("group", [3, 7, 8, 14])
def test_neighbours_that_a_max_pool_makes_equal_stay_equal(group):
    """Many heads to add up, and no rounding between entries that are equal in all of them."""
    unequal = 0
    for seed in range(40):
        draw = torch.Generator().manual_seed(seed)
        pooled = smooth(torch.rand(2, 2, group, 101 + seed, generator=draw), "max", 9)
        same = (pooled[..., 1:] == pooled[..., :-1]).all(2)
        total = over_heads(pooled, 2)

        assert same.any()
        assert (total[..., 1:] == total[..., :-1])[same].all()
        assert torch.allclose(total, pooled.sum(2), rtol=1e-6)
        plain = pooled.sum(2)
        unequal += int((plain[..., 1:] != plain[..., :-1])[same].sum())
    if group == 7:  # what a plain sum does
        assert unequal


# ---------------------------------------------------------------------------------------- DropKV


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("sharp", [1, 30, 1000])
def test_dropkv_measures_the_output_without_the_entry(sharp, sinks):
    """The score is the squared move of a row's output when it attends to all entries but one.

    Also where one entry has all of the weight that a double holds, and next to sinks.
    """
    queries = make_trace().q * sharp
    learned = torch.linspace(-3, 2, HEADS * GROUP, dtype=torch.float64) * sharp
    formula = Formula(DIM**-0.5, sinks=learned.tolist() if sinks else ())
    trace, window = make_trace(q=queries, formulas=[formula] * LAYERS), 3
    view = view_of(trace, keep=uneven())
    found = scores(DropKV(window=window, pool_kernel=1), view)

    for layer, head, positions, held in heads(view):
        z = view.logits(window)[layer, head, ..., held].double()  # [G, w, n]
        values = view.values[layer, head, held].double()
        if sinks:  # an entry more, whose value is 0
            sink = learned.view(HEADS, GROUP)[head, :, None, None].expand(-1, window, 1)
            z = torch.cat([z, sink], -1)
            values = torch.cat([values, torch.zeros(1, DIM, dtype=torch.float64)])
        for slot, pos in enumerate(positions):
            if pos >= view.first(window):
                continue
            without = z.clone()
            without[..., slot] = -torch.inf
            moved = (without.softmax(-1) - z.softmax(-1)) @ values
            expected = moved.square().sum((-1, -2)).mean()
            torch.testing.assert_close(
                found[layer, head, held][slot], expected, rtol=1e-5, atol=1e-12
            )
