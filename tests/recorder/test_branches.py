"""Several prompts with one context: it runs once, is stored once, and each trace is whole."""

import os

import numpy as np
import pytest
import torch
from recorder_models import four_layers, small

import kvsim
from families import ids
from kvsim.errors import CaptureError
from kvsim.recorder import Prompt, Turn, capture, capture_many, contexts
from kvsim.runner.judgments import judge
from kvsim.store import layout as stored_layout
from kvsim.store.forecast import Forecast
from kvsim.store.reader import open_trace
from kvsim.store.verification import verify
from kvsim.store.writer import TraceWriter

#: Tokens of the context, which end within a block.
N, NEW, BUDGET = 300, 12, 150
CONTEXT = ids(N)
PROMPTS = [
    Prompt("a", [*CONTEXT, 5, 6, 7], context=N),
    Prompt("b", [*CONTEXT, *range(30)], context=N),
    Prompt("c", [*CONTEXT, 9], response=[1, 2, 3, 4], context=N),
    Prompt("d", [*CONTEXT, 8, 8], context=N, turns=(Turn([4, 5], max_new_tokens=3),)),
]
NAMED = {"first": [1, 2], "second": [3, 4, 5]}
ARRAYS = ("q", "k", "v", "attn_out", "lse", "residual_norm")


def recorded(folder, prompts=PROMPTS, model=None, **options):
    """Traces of prompts in a folder."""
    model = model or four_layers()
    return capture_many(model, None, prompts, folder, **{"max_new_tokens": NEW, **options})


def files(trace):
    """Each file of a trace by its key: inode, bytes and links."""
    found = {}
    for path in sorted(trace.path.rglob("*")):
        if path.is_file():
            status = path.stat()
            key = path.relative_to(trace.path).as_posix()
            found[key] = status.st_ino, status.st_size, status.st_nlink
    return found


def shared(trace):
    """The keys of files that other traces have, too."""
    return {key for key, (_, _, links) in files(trace).items() if links > 1}


@pytest.fixture(scope="module")
def branches(tmp_path_factory):
    """Traces of `PROMPTS`, not to be changed."""
    return recorded(tmp_path_factory.mktemp("branches"))


def whole(prompt, folder, **options):
    """The trace of a prompt recorded by itself."""
    given = {} if prompt.response is not None else {"max_new_tokens": NEW}
    return capture(
        four_layers(), None, prompt, out=folder / f"{prompt.id}.zarr", **given, **options
    )


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: prompt.id)
def test_branch_is_the_trace_recorded_whole(prompt, branches, tmp_path):
    """A branch has the digest of a capture with a forward for the context; one forward rounds."""
    branch = branches[PROMPTS.index(prompt)]
    alone, single = (whole(prompt, tmp_path / str(n), chunk=n) for n in (N, None))

    assert branch.digest == alone.digest
    assert branch.header.questions == alone.header.questions
    assert branch.header.response_logprobs == alone.header.response_logprobs
    assert any(
        "4 prompts share, was run in a forward of its own" in note for note in branch.meta["notes"]
    )
    assert not any("prompts share" in note for note in alone.meta["notes"])
    assert verify(branch.path, deep=True).ok
    for name in ARRAYS:
        assert torch.equal(branch.read(name), alone.read(name))
        assert torch.allclose(branch.read(name), single.read(name), rtol=1e-4, atol=1e-5)
    record, expected = (kvsim.replay(x, kvsim.policy("snapkv"), BUDGET) for x in (branch, alone))
    assert np.array_equal(record.evicted_at, expected.evicted_at)
    judged = [judge(four_layers(), x, record) for x in (branch, alone)]
    assert judged[0].drop("trace").equals(judged[1].drop("trace"))


def test_context_goes_through_the_model_once(tmp_path):
    """The rows of the context run once for all prompts, those of each question once for each."""
    rows = []

    def count(_, args, kwargs):
        rows.append(kwargs.get("input_ids", args[0] if args else None).shape[1])

    with four_layers().register_forward_pre_hook(count, with_kwargs=True):
        traces = recorded(tmp_path, PROMPTS[:3], sensitivity=False)

    assert rows.count(N) == 1
    after = sum(trace.n_pos - N for trace in traces)
    assert sum(rows) - N - after < N / 2  # checks of a few tokens


def test_probe_of_the_context_runs_once(tmp_path):
    """Rows that repeat the context are read for the first prompt, and stored with each."""
    rows = []

    def count(_, args, kwargs):
        rows.append(kwargs.get("input_ids", args[0] if args else None).shape[1])

    with four_layers().register_forward_pre_hook(count, with_kwargs=True):
        traces = recorded(tmp_path, PROMPTS[:3], probe="repeat", sensitivity=False)

    assert rows.count(N) == 3  # the context, and again before its repetition
    alone = whole(PROMPTS[1], tmp_path / "alone", chunk=N, probe="repeat", sensitivity=False)
    assert traces[1].digest == alone.digest
    assert traces[1].header.probe == alone.header.probe
    assert all(verify(trace.path, deep=True).ok for trace in traces)


def test_blocks_of_the_context_are_stored_once(branches, monkeypatch, tmp_path):
    """Complete blocks of all arrays are one file on disk, whatever the number of prompts."""
    of_all = [files(trace) for trace in branches]
    expected = {f"{name}/c/{layer}" for name in ARRAYS for layer in range(4)}

    for trace in branches:
        chunks = [key.split("/") for key in shared(trace)]
        assert {f"{name}/c/{layer}" for name, _, layer, *_ in chunks} == expected
    sizes = [sum(size for _, size, _ in each.values()) for each in of_all]
    on_disk = sum({inode: size for each in of_all for inode, size, _ in each.values()}.values())
    blocks = sum(of_all[0][key][1] for key in shared(branches[0]))
    print(f"4 branches: {sum(sizes)} bytes, on disk {on_disk}")
    assert on_disk == sum(sizes) - 3 * blocks
    assert blocks > 0.5 * sizes[0]

    monkeypatch.setattr(stored_layout, "MOST_FILES", 1)
    sharded = whole(PROMPTS[0], tmp_path, chunk=N)
    again = recorded(tmp_path / "again", PROMPTS[:2])
    assert len(files(sharded)) < len(files(again[0]))
    assert sharded.digest == again[0].digest == branches[0].digest
    assert shared(again[0]) == shared(branches[0])


@pytest.mark.parametrize(
    "options",
    [
        {"rows": "response+16", "o_proj": False},
        {"residual": True, "store_dtype": "float16"},
        {"layers": [1, 3], "chunk": 256},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_of_a_capture(options, tmp_path):
    """What a capture can leave out or add, a branch has as the trace recorded whole."""
    prompts = [Prompt(name, [*ids(600), *more], context=600) for name, more in NAMED.items()]

    traces = recorded(tmp_path / "many", prompts, **options)

    alone = whole(prompts[1], tmp_path / "alone", **{"chunk": 600, **options})
    assert verify(traces[1].path, deep=True).ok
    assert len(shared(traces[1])) > 10
    assert traces[1].source.shapes == alone.source.shapes
    if "chunk" not in options:
        assert traces[1].digest == alone.digest


def test_interrupted_capture_resumes(branches, tmp_path, monkeypatch):
    """What is there stays, and its blocks are shared."""
    runs, publish = [], TraceWriter.publish

    def interrupted(self, *args, **kwargs):
        runs.append(1)
        if len(runs) == 2:
            raise KeyboardInterrupt
        return publish(self, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(TraceWriter, "publish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            recorded(tmp_path)
    before = files(open_trace(tmp_path / "a.zarr"))

    traces = recorded(tmp_path, resume=True)

    assert [trace.digest for trace in traces] == [trace.digest for trace in branches]
    assert all(verify(trace.path).ok for trace in traces)
    assert {k: v[0] for k, v in files(traces[0]).items()} == {k: v[0] for k, v in before.items()}
    assert all(shared(trace) >= shared(branches[0]) for trace in traces)


def test_without_links_each_trace_has_its_own(branches, tmp_path, monkeypatch):
    """On a file system without hard links nothing is shared, and all else is the same."""

    def refused(*_):
        raise PermissionError("no links")

    monkeypatch.setattr(os, "link", refused)

    traces = recorded(tmp_path)

    assert [trace.digest for trace in traces] == [trace.digest for trace in branches]
    assert not shared(traces[0])


def test_context_longer_than_the_model(tmp_path):
    """A context that the model has no room for is refused before anything runs."""
    prompts = [Prompt(name, [*ids(600), *more], context=600) for name, more in NAMED.items()]
    model = small("llama", max_position_embeddings=512)

    with pytest.raises(CaptureError, match=r"^prompt 'first': .* at most the model's context of"):
        recorded(tmp_path, prompts, model)

    assert not list(tmp_path.iterdir())


def test_model_that_runs_in_one_piece(tmp_path, monkeypatch):
    """A model that computes something else in two forwards runs the context with each question."""
    monkeypatch.setattr(contexts, "one_piece", lambda *_: "it starts anew")

    traces = recorded(tmp_path, PROMPTS[:2])

    assert not shared(traces[0])
    assert "was run with each: it starts anew" in traces[1].meta["notes"][0]


def test_plan_counts_the_context_once(tmp_path, monkeypatch):
    """The plan of two branches has fewer bytes than twice that of one, as the disk has."""
    plans = []
    monkeypatch.setattr(Forecast, "check", lambda plan, _: plans.append(plan))
    prompts = [Prompt(name, [*ids(600), *more], context=600) for name, more in NAMED.items()]

    recorded(tmp_path / "one", prompts[:1])
    recorded(tmp_path / "two", prompts)

    one, two = (plan.written for plan in plans)
    assert one < two < 1.6 * one
