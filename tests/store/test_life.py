"""The life of a folder: whatever happens in whatever order, everything finished survives.

A Hypothesis rule machine runs commands on a folder of traces, each undisturbed or disturbed at one
of its writes by a kill, an interrupt or a full disk, and compares the folder with a plain model: a
dict of what is at each path. `HYPOTHESIS_PROFILE=nightly` runs thousands of steps.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import random
import shutil
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from disturbance import Disturbance
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import kvsim
from kvsim import files
from kvsim.cli import _status
from kvsim.core.trace import Trace
from kvsim.errors import KvsimError
from kvsim.recorder import capture
from kvsim.store import (
    TraceWriter,
    discard,
    find_drafts,
    open_trace,
    publication,
    recover,
    save_trace,
    verify,
)
from kvsim.store.draft import belongs_to
from kvsim.store.index import index
from kvsim.store.packing import pack, unpack
from small_model import small
from traces import random_trace

pytestmark = pytest.mark.deep

POLICIES = ("tova", "streaming_llm", "random")
PATHS = ("a.zarr", "b.zarr", "c.zarr")
PROMPT, RESPONSE = 500, 20


def capture_session(out: Path | None = None, **options) -> Trace:
    """Record a prompt of more than one block, and a response that ends a second one."""
    prompt = torch.randint(0, 64, (PROMPT,), generator=torch.Generator().manual_seed(1))
    return capture(small(), None, prompt.tolist(), max_new_tokens=RESPONSE, out=out, **options)


class Content:
    """What a trace holds, from a trace in memory that no store has touched."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.n = trace.n_pos
        self.digest = trace.digest
        self.kept = functools.cache(lambda name: _kept(trace, name))

    @functools.cache  # noqa: B019  as many as there are contents
    def first(self, n: int) -> Content:
        """The first n tokens."""
        if n == self.n:
            return self
        t = self.trace
        return Content(
            Trace.from_arrays(
                t.q[:, :, :n],
                t.k[:, :, :n],
                t.v[:, :, :n],
                attn_out=t.attn_out[:, :, :n],
                lse=t.lse[:, :, :n],
                prompt_len=min(n, t.prompt_len),
                rope=t.rope,
                scale=t.scale,
                tokens=t.tokens[:n],
                token_text=None if t.token_text is None else t.token_text[:n],
            )
        )

    def differs(self, trace: Trace) -> str:
        """Return what of an open trace is not this content; empty for nothing."""
        facts = ("digest", "n_pos", "prompt_len", "rope", "scale", "token_text", "layer_ids")
        different = [x for x in facts if getattr(trace, x) != getattr(self.trace, x)]
        arrays = ("q", "k", "v", "attn_out", "lse", "tokens")
        different += [
            x for x in arrays if not torch.equal(getattr(trace, x), getattr(self.trace, x))
        ]
        return ", ".join(different)


def _kept(trace: Trace, name: str) -> bytes:
    return kvsim.replay(trace, kvsim.policy(name), budget=24).evicted_at.tobytes()


@functools.cache
def contents() -> dict[str, Content]:
    """A short one, one of several blocks, and what a session records of a model."""

    def drawn(n: int, seed: int) -> Trace:
        sizes = {"heads": 1, "dim": 4, "size": 1.0, "prompt_len": n - 10}
        tokens = [i % 7 for i in range(n)]
        texts = [f"t{i}" for i in tokens]
        return random_trace(n=n, seed=seed, computed=True, tokens=tokens, token_text=texts, **sizes)

    return {
        "short": Content(drawn(40, 1)),
        "long": Content(drawn(600, 2)),
        "session": Content(capture_session()),
    }


def write(name: str, path: Path, *, overwrite: bool) -> None:
    """Write a content: the session by a capture, the long one block by block, with commits."""
    trace = contents()[name].trace
    if name == "session":
        capture_session(path, overwrite=overwrite)
    elif name == "short":
        save_trace(trace, path, overwrite=overwrite)
    else:
        _write_blocks(trace, path, overwrite=overwrite)


def _write_blocks(trace: Trace, path: Path, *, overwrite: bool) -> None:
    names = ("q", "k", "v", "attn_out", "lse")
    with TraceWriter(
        path,
        shapes={name: tuple(getattr(trace, name).shape) for name in names},
        source_dtypes=dict.fromkeys(names, "float32"),
        layer_ids=[0, 1],
        overwrite=overwrite,
    ) as writer:
        writer.begin(trace.header)
        for start in range(0, trace.n_pos, 256):
            block = slice(start, start + 256)
            writer.add_tokens(trace.tokens[block].tolist(), trace.token_text[block])
            for name in names:
                for layer in range(2):
                    writer.append(name, layer, getattr(trace, name)[layer][:, block])
        writer.publish(trace.header, tokens=trace.tokens.numpy(), token_text=trace.token_text)


@dataclass(frozen=True)
class Stored:
    """What is at a path: a content, perhaps with an edited byte."""

    content: Content
    edited: bool = False


@dataclass(frozen=True)
class Left:
    """A hidden folder: what it was to become, or what was set aside in it; None for outputs."""

    stored: Stored | None


def state_of(path: Path) -> str:
    """Return a digest of the names and bytes of a file or a folder."""
    digest = hashlib.sha256()
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    for file in files:
        digest.update(file.relative_to(path).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def judge(path: Path, stored: Stored) -> str:
    """How the trace at a path differs from the model; an edited one may be refused as well."""
    try:
        return stored.content.differs(open_trace(path))
    except KvsimError as error:
        return "" if stored.edited and "\n" not in str(error) else str(error)


def disturbances(calls: int) -> st.SearchStrategy[Disturbance | None]:
    """Nothing, or a disturbance of a command that makes about so many calls."""
    disturbance = st.builds(
        Disturbance,
        st.sampled_from(["kill", "kill", "interrupt", "full"]),
        st.integers(0, calls),
        st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    )
    return st.none() | disturbance


number = st.integers(0, 10**6)


class Life(RuleBasedStateMachine):
    """A folder of traces and what may happen to it."""

    def __init__(self) -> None:
        super().__init__()
        self.temporary = Path(tempfile.mkdtemp())
        # names of hidden folders are drawn, and Hypothesis repeats what it has seen
        numbers, self.patch = itertools.count(), pytest.MonkeyPatch()
        drawn = SimpleNamespace(token_hex=lambda _: f"{next(numbers):08x}")
        self.patch.setattr(files, "secrets", drawn)
        self.root = self.temporary / "traces"
        self.traces: dict[str, Stored] = {}
        self.left: dict[str, Left] = {}
        self.states: dict[str, str] = {}

    @initialize()
    def begin(self) -> None:
        """An empty folder."""
        self.root.mkdir()

    def teardown(self) -> None:
        """Remove the folder."""
        self.patch.undo()
        shutil.rmtree(self.temporary)

    def do(self, act, disturbance, *, target=None, new=None, may=True, leaves=None, gone=()):
        """Run a command, and bring the model to what it has left, which must be possible.

        target, new: the path that it writes and what is there if it succeeds. may: whether it
        succeeds undisturbed; None if either. leaves: what a hidden folder of it becomes. gone:
        hidden folders that are removed if it succeeds.
        """
        done = error = None
        disturbance = disturbance or Disturbance("none", 0)
        with disturbance.during(self.root):
            try:
                act()
                done = True
            except KvsimError as refusal:
                error = str(refusal)
                assert "\n" not in error
                done = False
        disturbed = disturbance.happened
        if disturbance.kind == "kill" and disturbed:
            done = None
        if not disturbed:
            assert done is not None
            assert may is None or done is may, f"{act} gave {error or 'success'}"
        before = self.traces.get(target)
        at = self.root / target if target else None
        hidden = {p.name: p for p in self.root.iterdir() if p.name.startswith(".")}
        appeared = sorted(hidden.keys() - self.left.keys())
        for name in appeared:
            place, kind = belongs_to(hidden[name])
            assert disturbed, f"{name} is left over"
            assert place.name == (target or place.name)
            self.left[name] = Left(before if kind == "old" else leaves)
        if done:
            for name in gone:
                self.left.pop(name)
        for name in [name for name in self.left if name not in hidden]:
            assert name in gone, f"{name} has disappeared"
            del self.left[name]
        if target is None:
            return
        if not (at.exists() or at.is_symlink()):
            assert not done or new is None
            self.traces.pop(target, None)
            if before is not None and not (done and new is None):
                set_aside = [name for name in appeared if belongs_to(hidden[name])[1] == "old"]
                assert disturbed
                assert any(not judge(self.root / name, before) for name in set_aside), "lost"
        elif done:
            self.traces[target] = new
        elif before is None or state_of(at) != self.states[target]:
            assert disturbed, f"{target} has changed, {error}"
            assert new is not None
            assert may is not False
            self.traces[target] = new
        self.states.pop(target, None)  # looked at again

    def pick(self, paths, choice):
        """Choose one of some paths."""
        return sorted(paths)[choice % len(paths)]

    def folders(self) -> list[str]:
        """Return the traces that are folders."""
        return [name for name in self.traces if not name.endswith(".zip")]

    @rule(
        name=st.sampled_from(["short", "long", "session"]),
        path=st.sampled_from(PATHS),
        overwrite=st.booleans(),
        disturbance=disturbances(250),
    )
    def record(self, name, path, overwrite, disturbance) -> None:
        """Capture or save, to a free path or over another trace."""
        new = Stored(contents()[name])
        self.do(
            lambda: write(name, self.root / path, overwrite=overwrite),
            disturbance,
            target=path,
            new=new,
            may=self.may_write(path, overwrite=overwrite),
            leaves=new,
        )

    def may_write(self, path, *, overwrite: bool):
        """Whether a trace may be written to a path."""
        if path not in self.traces:
            return True
        if not overwrite:
            return False
        # an edited root may not say any more that it is a trace, or be one still
        return None if self.traces[path].edited else True

    @rule(path=st.sampled_from(PATHS), disturbance=disturbances(190))
    def resume(self, path, disturbance) -> None:
        """Resume a session: a trace of it stays as it is, another one is refused."""
        new, before = Stored(contents()["session"]), self.traces.get(path)
        same = before is None or before.content is new.content
        self.do(
            lambda: capture_session(self.root / path, resume=True),
            disturbance,
            target=path,
            new=new if before is None else before,
            may=None if before and before.edited else same,
            leaves=new,
        )

    @precondition(lambda self: self.left)
    @rule(
        choice=number,
        out=st.none() | st.sampled_from(PATHS),
        overwrite=st.booleans(),
        disturbance=disturbances(120),
    )
    def recover(self, choice, out, overwrite, disturbance) -> None:
        """Recover what a capture has left, to its path or another one."""
        name = self.pick(self.left, choice)
        folder, left = self.root / name, self.left[name]
        (draft,) = [draft for draft in find_drafts(self.root) if draft.path == folder]
        target = out or draft.target.name
        new = left.stored
        if draft.kind == "old":
            whole = new is not None and (folder / "zarr.json").exists()
            may = whole and target not in self.traces
            may = None if may and new.edited else may
        else:
            assert draft.complete or draft.tokens % 256 == 0 or draft.tokens == new.content.n
            if draft.tokens and not draft.complete:
                new = Stored(new.content.first(draft.tokens))
            may = bool(draft.tokens) and self.may_write(target, overwrite=overwrite)
        self.do(
            lambda: recover(
                folder, out=self.root / out if out is not None else None, overwrite=overwrite
            ),
            disturbance,
            target=target,
            new=new,
            may=may,
            leaves=new,
            gone=(name,),
        )

    @precondition(lambda self: self.left)
    @rule(choice=number, disturbance=disturbances(40))
    def discard(self, choice, disturbance) -> None:
        """Discard what a command has left."""
        name = self.pick(self.left, choice)
        alone = self.left[name].stored
        if belongs_to(self.root / name)[1] == "old":  # else the only copy would be removed
            target = belongs_to(self.root / name)[0].name
            if target not in self.traces and alone is not None:
                return
        self.do(lambda: discard(self.root / name), disturbance, gone=(name,))

    @precondition(lambda self: self.folders())
    @rule(choice=number, out=st.sampled_from(PATHS), disturbance=disturbances(9))
    def pack(self, choice, out, disturbance) -> None:
        """Pack a trace."""
        source = self.pick(self.folders(), choice)
        target = f"{out}.zip"
        self.do(
            lambda: pack(self.root / source, self.root / target),
            disturbance,
            target=target,
            new=self.traces[source],
            may=None if self.traces[source].edited else target not in self.traces,
        )

    @precondition(lambda self: any(name.endswith(".zip") for name in self.traces))
    @rule(choice=number, out=st.sampled_from(PATHS), disturbance=disturbances(150))
    def unpack(self, choice, out, disturbance) -> None:
        """Unpack a packed trace."""
        source = self.pick([name for name in self.traces if name.endswith(".zip")], choice)
        self.do(
            lambda: unpack(self.root / source, self.root / out),
            disturbance,
            target=out,
            new=self.traces[source],
            may=None if self.traces[source].edited else out not in self.traces,
        )

    @precondition(lambda self: self.traces)
    @rule(choice=number, seed=number)
    def edit(self, choice, seed) -> None:
        """Flip a bit of a file."""
        name = self.pick(self.traces, choice)
        path, stored = self.root / name, self.traces[name]
        files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
        draw = random.Random(seed)  # noqa: S311  repeatable
        if not files:
            return
        file = draw.choice(sorted(files))
        data = bytearray(file.read_bytes())
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        file.write_bytes(data)
        self.traces[name] = replace(stored, edited=True)
        self.states.pop(name)

    @precondition(lambda self: len(self.traces) > 1)
    @rule(choice=number)
    def delete(self, choice) -> None:
        """Remove a trace, as a user does."""
        name = self.pick(self.traces, choice)
        path = self.root / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        del self.traces[name], self.states[name]

    @precondition(lambda self: self.traces)
    @rule(choice=number, policy=st.sampled_from(POLICIES))
    def replay(self, choice, policy) -> None:
        """Replay a policy: it keeps what it keeps of the trace in memory."""
        name = self.pick(self.traces, choice)
        stored = self.traces[name]
        try:
            kept = _kept(open_trace(self.root / name), policy)
        except KvsimError:
            assert stored.edited
            return
        assert kept == stored.content.kept(policy)

    @precondition(lambda self: self.traces)
    @rule(choice=number)
    def verify(self, choice) -> None:
        """Verify a trace: undamaged unless a byte was edited, and then what it is called."""
        name = self.pick(self.traces, choice)
        stored = self.traces[name]
        try:
            problems = verify(self.root / name).problems
        except KvsimError as error:
            problems = (str(error),)
        assert stored.edited or not problems
        if not problems:
            assert not judge(self.root / name, replace(stored, edited=False))

    @rule()
    def list(self) -> None:
        """List the folder: every trace and everything left over is named, with a command."""
        out, err = StringIO(), StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            assert _status(["traces", str(self.root)]) == 0
        for name, stored in self.traces.items():
            assert stored.edited or f"{name} " in out.getvalue()
        for name in self.left:
            assert f"{self.root}/{name}" in out.getvalue(), f"no command for {name}"

    @invariant()
    def everything_is_there(self) -> None:
        """What is at the paths is what the model says, and nothing else is."""
        if not self.root.exists():
            return
        names = sorted(path.name for path in self.root.iterdir())
        names = [name for name in names if not name.startswith("projections-")]
        assert names == sorted([*self.traces, *self.left])
        for name, stored in self.traces.items():
            now = state_of(self.root / name)
            if name not in self.states:
                assert not judge(self.root / name, stored), name
                self.states[name] = now
            assert now == self.states[name], f"{name} has changed"

    @invariant()
    def the_listing_agrees(self) -> None:
        """The index has the same paths, and calls whole what is."""
        if not self.root.exists():
            return
        entries = {entry.path: entry for entry in index(self.root)}
        assert sorted(entries) == sorted([*self.traces, *self.left])
        for name, stored in self.traces.items():
            entry = entries[name]
            assert entry.state == "whole" or (stored.edited and entry.state == "broken")
            if entry.state == "whole":
                assert entry.tokens == stored.content.n
        for name in self.left:
            assert entries[name].state in ("unfinished", "replaced", "superseded")


Life.TestCase.settings = settings(
    max_examples=max(2, settings.default.max_examples // 8), stateful_step_count=25
)
TestLife = Life.TestCase


def test_the_machine_notices_a_writer_that_loses(monkeypatch):
    """Where an old trace is removed before the new one is in its place, a kill is a finding."""

    def rename(folder, path, *, overwrite):
        if overwrite and path.exists():
            shutil.rmtree(path)
        folder.rename(path)

    monkeypatch.setattr(publication, "_rename", rename)

    def live(at):
        life = Life()
        try:
            life.begin()
            life.record("short", "a.zarr", overwrite=False, disturbance=None)
            life.everything_is_there()
            life.record("long", "a.zarr", overwrite=True, disturbance=Disturbance("kill", at))
            life.everything_is_there()
        finally:
            life.teardown()

    live(100)
    with pytest.raises(AssertionError, match=r"a\.zarr"):
        [live(at) for at in range(190, 250, 10)]
