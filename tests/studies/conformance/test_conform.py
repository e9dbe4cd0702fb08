"""`kvsim conform`: honest dumps are equal, and each known deviation is recognised by its name."""

import json

import numpy as np
import pytest
import torch

import kvsim
from kvsim.core.policy import Protection, Schedule
from kvsim.errors import DumpError, PolicyError
from kvsim.studies.conformance.dump import Dump, read_dump
from traces import changed

PROMPT, N, BUDGET, INTERVAL, WINDOW, SINK = 30, 75, 20, 12, 6, 2
EVENTS = list(range(PROMPT - 1, N, INTERVAL))
POLICY = kvsim.policy("snapkv@kvpress", window=WINDOW, pool_kernel=1, protect=Protection(sink=SINK))


@pytest.fixture(scope="module")
def trace():
    """A random trace of two layers, two KV heads and 75 tokens."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, heads, N, 8, generator=generator) for heads in (4, 2, 2))
    rope = kvsim.Rope.default(8)
    at = torch.arange(N)
    q, k = (rope.rotate(x, at) for x in (2 * q, k))
    return kvsim.Trace.from_arrays(q, k, v, prompt_len=PROMPT, rope=rope)


def rows_of(trace, window, row, layer, kind):
    """Queries of the window and the rows up to which they see; [qhead, w, d], [w]."""
    rows = torch.arange(row + 1 - window, row + 1) - int(kind == "window-early")
    q = trace.read("q")[layer][:, rows]
    if kind == "window-rotated" and row > PROMPT - 1:
        q = trace.ropes[0].rotate(trace.ropes[0].unrotate(q, rows), torch.full_like(rows, row))
    return q.double().numpy(), rows.numpy()


def votes(trace, live, row, layer, head, kind):
    """The score of each live entry, a plain loop over query heads and rows in float64."""
    window = 1 if kind == "window-of-one" else WINDOW
    q, rows = rows_of(trace, window, row, layer, kind)
    k = trace.read("k")[layer].double().numpy()
    out = []
    for qhead in range(4) if kind == "mean-of-all-heads" else (2 * head, 2 * head + 1):
        total = np.zeros(len(live))
        for i, r in enumerate(rows):
            z = k[qhead // 2, live] @ q[qhead, i] / np.sqrt(8)
            weights = np.where(np.array(live) <= r, np.exp(z), 0)
            total += weights / weights.sum() / len(rows)
        out.append(total)
    if kind == "max-of-heads":
        return np.max(out, 0)
    return out[0] if kind == "first-head" else np.mean(out, 0)


def lines_of(trace, kind=""):
    """What an implementation with one deviation writes: (layer, head, row, pos), entry by entry."""
    shift = {"row-late": 1, "row-early": -1}.get(kind, 0)
    more = {"window-on-top": WINDOW, "sinks-on-top": SINK, "one-more": 1, "one-fewer": -1}
    lines = []
    for layer in range(2):
        live, since = {0: [], 1: []}, 0
        for event in EVENTS:
            row = event + shift
            for head in (0, 1):
                live[head] += range(since, row + 1)
                before = list(live[head])
                if not (kind == "no-eviction" and event == EVENTS[2]):
                    protected = {p for p in before if p < SINK and kind != "lost-sinks"}
                    if kind != "lost-window":
                        protected |= {p for p in before if p > row - WINDOW}
                    scores = votes(trace, before, row, layer, head, kind)
                    scores = [
                        0.0 if p > row - WINDOW else s for p, s in zip(before, scores, strict=True)
                    ]
                    order = sorted(
                        range(len(before)),
                        key=lambda i: (before[i] not in protected, -scores[i], before[i]),
                    )
                    kept = order[: BUDGET + more.get(kind, 0)]
                    live[head] = sorted(before[i] for i in kept)
                shown = before if kind == "event-late" else live[head]
                lines += [(layer, head, row, p) for p in shown]
            since = row + 1
    return dict(zip(("layer", "head", "row", "pos"), np.array(lines).T, strict=True))


def dump_of(trace, kind=""):
    """The dump of an implementation that counts events as DecodingPress and PrefillPress do."""
    schedule = Schedule(INTERVAL)
    more = {"trace": trace, "budget": BUDGET, "schedule": schedule}
    return Dump.of_table(lines_of(trace, kind), **more)


KINDS = (
    *("event-late", "row-early", "row-late", "lost-sinks", "lost-window", "window-on-top"),
    *("sinks-on-top", "one-more", "one-fewer", "window-early", "window-rotated"),
    *("window-of-one", "max-of-heads", "first-head", "mean-of-all-heads", "no-eviction"),
)


def test_an_honest_dump_is_equal(trace):
    """Sets that a plain loop keeps are those of the definition, at every event, layer and head."""
    report = kvsim.conform(dump_of(trace), POLICY)
    assert report.equal
    assert report.differences == report.deviations == ()
    assert report.compared == len(EVENTS) * 4
    assert report.lines()[0].startswith("equal; 16 sets (4 events)")


@pytest.mark.parametrize("kind", KINDS)
def test_each_deviation_is_recognised_by_name(trace, kind):
    """A dump with one seeded deviation differs, and that deviation alone explains it."""
    report = kvsim.conform(dump_of(trace, kind), POLICY)
    assert not report.equal
    assert [each.name for each in report.deviations] == [kind]
    assert f"explained by {kind}: " in "\n".join(report.lines())


def _more(dump):
    return {name: getattr(dump, name) for name in ("trace", "budget", "schedule")}


def test_the_first_difference_has_its_place_and_gap(trace):
    """One entry swapped for another at the third event is found there, and nowhere later."""
    dump = dump_of(trace)
    row = EVENTS[2]
    sets = {r: kept.copy() for r, kept in dump.kept.items()}
    gone = int(np.flatnonzero(sets[row][1, 0, SINK : EVENTS[1]])[0]) + SINK
    back = int(np.flatnonzero(sets[EVENTS[1]][1, 0] & ~sets[row][1, 0, : EVENTS[1] + 1])[0])
    sets[row][1, 0, [gone, back]] = False, True
    later = {r: kept for r, kept in sets.items() if r <= row}
    report = kvsim.conform(Dump(later, dump.layers, **_more(dump)), POLICY)
    (difference,) = report.apart
    assert (difference.row, difference.layer, difference.head) == (row, 1, 0)
    assert (difference.extra, difference.missing) == ((back,), (gone,))
    largest, scores = 0.0, {}
    for head in (1, 0):
        live = [*np.flatnonzero(sets[EVENTS[1]][1, head]), *range(EVENTS[1] + 1, row + 1)]
        scores = dict(zip(live, votes(trace, live, row, 1, head, ""), strict=True))
        largest = max(largest, *(scores[p] for p in live if p <= row - WINDOW))
    assert difference.gap == pytest.approx((scores[gone] - scores[back]) / largest, rel=1e-4)


def test_ties_are_equal_and_their_rule_is_named():
    """Entries tied at the cut are free; an implementation that takes the higher ones is told."""
    k = torch.ones(1, 1, 40, 4)
    trace = kvsim.Trace.from_arrays(
        torch.ones(1, 1, 40, 4), k, k, prompt_len=30, rope=kvsim.Rope.default(4)
    )
    sets = {29: np.arange(30) >= 20}
    sets = {row: kept[None, None] for row, kept in sets.items()}
    report = kvsim.conform(Dump(sets, (0,), trace=trace), "knorm", 10)
    assert report.equal
    assert [each.name for each in report.deviations] == ["ties-high"]
    assert report.lines()[0].startswith("equal outside ties: 1 sets")
    sets[29][0, 0, [4, 29]] = True, False
    mixed = kvsim.conform(Dump(sets, (0,), trace=trace), "knorm", 10)
    assert mixed.equal
    assert mixed.deviations == ()


def test_another_preset_is_named(trace):
    """A dump of a preset is recognised where the definition asked for is another."""
    record = kvsim.replay(trace, "tova@kvpress", BUDGET, interval=INTERVAL, prefill=True)
    report = kvsim.conform(Dump.of_record(record, trace), "tova", BUDGET)
    assert "tova@kvpress" in [each.name for each in report.deviations]


def test_another_parameter_is_named(trace):
    """So is a dump with another choice of a parameter."""
    own, other = (kvsim.policy("snapkv", window=WINDOW, pool_kernel=n) for n in (7, 5))
    record = kvsim.replay(trace, other, BUDGET, interval=INTERVAL, prefill=True)
    report = kvsim.conform(Dump.of_record(record, trace), own, BUDGET)
    assert [each.name for each in report.deviations] == ["pool_kernel=5"]


@pytest.mark.parametrize(
    "name",
    [
        "tova",
        "h2o",
        "lagkv",
        "gkv",
        "ams+tova",
        "adakv+snapkv",
        "pyramidkv",
        "cake@gkv",
        "knorm+kivi",
    ],
)
def test_replays_conform(trace, name):
    """Ragged heads, columns, shared budgets: each event on the dump's sets is that of a replay."""
    built = kvsim.policy(name)
    sizes = {"window": 4, "lag": 4, "min_segment": 2, "max_segment": 8}
    sizes |= {"group": 4} if built.storage is not None else {}
    names = built.params.keys()
    built = kvsim.policy(name, **{x: y for x, y in sizes.items() if x in names})
    record = kvsim.replay(trace, built, BUDGET, interval=INTERVAL, prefill=True)
    assert kvsim.conform(Dump.of_record(record, trace), built).differences == ()
    assert not kvsim.conform(Dump.of_record(record, trace), "random", BUDGET).equal


def test_files_hold_what_was_dumped(trace, tmp_path):
    """A dump returns from its file as it was."""
    dump = dump_of(trace)
    back = read_dump(dump.save(tmp_path / "d.npz"))
    assert back.layers == dump.layers
    assert all((back.kept[row] == kept).all() for row, kept in dump.kept.items())
    assert (back.budget, back.schedule) == (BUDGET, dump.schedule)
    assert (back.trace.read("k") == trace.read("k")).all()
    assert back.trace.ropes[0] == trace.ropes[0]


def test_layers_have_their_numbers_in_the_model(trace, tmp_path):
    """Sets of layers 1 and 2 are judged on a trace of these, whichever place they have in it."""
    some = changed(trace, layer_ids=[1, 2])
    record = kvsim.replay(some, POLICY, BUDGET, interval=INTERVAL, prefill=True)
    dump = Dump.of_record(record)
    assert dump.layers == (1, 2)
    assert kvsim.conform(dump, POLICY, trace=some).equal
    single = Dump.of_record(
        kvsim.replay(some, POLICY, BUDGET, interval=INTERVAL, prefill=True, layers=[0])
    )
    assert single.layers == (1,)
    assert kvsim.conform(single, POLICY, trace=some).equal
    other = kvsim.conform(single, "knorm", trace=some)
    assert {each.layer for each in other.differences} == {1}
    with pytest.raises(DumpError, match=r"layers \[1, 2\].* expected layers of \[0, 1\]"):
        kvsim.conform(dump, POLICY, trace=trace)
    back = read_dump(Dump.of_record(record, some).save(tmp_path / "d.npz"))
    assert back.trace.layer_ids == (1, 2)
    assert kvsim.conform(back, POLICY).equal


BAD = {
    "no column": (lambda x: x.pop("pos"), "pos is float64 [0]"),
    "lengths": (lambda x: x.update(pos=x["pos"][:-1]), "one of each"),
    "empty": (lambda x: x.update({c: x[c][:0] for c in list(x)}), "nothing was dumped"),
    "fractions": (lambda x: x.update(pos=x["pos"] + 0.5), "pos is float64"),
    "negative": (lambda x: x.update(pos=x["pos"] - 1), "from 0 to below"),
    "future": (lambda x: x.update(pos=x["pos"] + 70), "expected positions up to the row"),
    "twice": (lambda x: x.update({c: np.r_[x[c], x[c][:1]] for c in list(x)}), "listed twice"),
    "head": (lambda x: x.update({c: x[c][25:] for c in list(x)}), "of all 2 heads"),
    "far row": (lambda x: x["row"].__setitem__(-1, 10**13), "from 0 to below"),
    "large row": (lambda x: x["row"].__setitem__(-1, 2**31 - 2), "bytes; expected at most"),
    "large head": (lambda x: x["head"].__setitem__(-1, 2**31 - 2), "bytes; expected at most"),
    "budget": (lambda x: x.update(budget=1.7), "cannot be interpreted as an integer"),
    "layers": (lambda x: x.update(layer=x["layer"] + 7), "expected layers of [0, 1]"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_damaged_dump_is_one_line(trace, tmp_path, run, name):
    """Whatever is damaged: one line on standard error, and exit status 2."""
    spoil, message = BAD[name]
    lines = lines_of(trace)
    spoil(lines)
    arrays = {n: trace.read(n).numpy() for n in "qkv"}
    arrays |= {
        "prompt_len": PROMPT,
        "inv_freq": np.array(trace.ropes[0].inv_freq),
        "budget": BUDGET,
    }
    np.savez(tmp_path / "d.npz", **arrays | lines)
    status, out, err = run("conform", tmp_path / "d.npz", "--policy", "snapkv")
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert message in err


def test_files_that_are_no_dumps_are_refused(trace, tmp_path):
    """A missing, truncated or foreign file, and one that lacks arrays or a budget, say so."""
    path = dump_of(trace).save(tmp_path / "d.npz")
    (tmp_path / "half.npz").write_bytes(path.read_bytes()[:500])
    (tmp_path / "x.npz").write_bytes(b"")
    for name in ("half.npz", "x.npz", "none.npz"):
        with pytest.raises(DumpError):
            read_dump(tmp_path / name)
    table = Dump.of_table(lines_of(trace))
    with pytest.raises(DumpError, match="has no q, k and v"):
        kvsim.conform(table, POLICY, BUDGET)
    with pytest.raises(DumpError, match="has no budget"):
        kvsim.conform(table, POLICY, trace=trace)
    with pytest.raises(PolicyError, match="a set for each KV head"):
        kvsim.conform(dump_of(trace), "oracle")


def test_the_command_says_it_and_exits_by_it(trace, tmp_path, run, printed):
    """Exit status 0 for equal sets, 1 for others; --json has the report and every difference."""
    rule = ["--policy", "snapkv@kvpress", "--set", f"window={WINDOW}", "--set", "pool_kernel=1"]
    plain = kvsim.policy("snapkv@kvpress", window=WINDOW, pool_kernel=1)
    record = kvsim.replay(trace, plain, BUDGET, interval=INTERVAL, prefill=True)
    path = Dump.of_record(record, trace).save(tmp_path / "d.npz")
    out = printed("conform", path, *rule)
    assert out.startswith("equal; 16 sets")
    status, out, err = run("conform", path, *rule, "--budget", BUDGET - 1)
    assert status == 1
    assert "explained by one-more" in out
    assert err == "error: 16 of 16 sets differ beyond ties\n"
    status, out, _ = run("conform", path, *rule, "--budget", "19", "--json")
    document = json.loads(out)
    assert (status, document["equal"], len(document["differences"])) == (1, False, 16)
    kvsim.save_trace(trace, tmp_path / "t.zarr")
    table = Dump.of_record(record).save(tmp_path / "t.npz")
    more = ["--trace", tmp_path / "t.zarr", "--budget", BUDGET, "--interval", INTERVAL, "--prefill"]
    status, out, _ = run("conform", table, *rule, *more)
    assert (status, out.splitlines()[1][:10]) == (0, "states are")
