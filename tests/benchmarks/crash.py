"""Captures that are killed at random moments, and what is left of them.

    python tests/benchmarks/crash.py --kills 30   # less than a minute

A process that has loaded the model forks children that record the same prompt; each is killed
(SIGKILL) after a random part of the time that an undisturbed capture takes. Every second one
overwrites an older trace, every second pair is sharded. What it leaves is recovered by children
that are killed as well. Then it is looked at: nothing but whole traces has a name without a dot,
and every draft is recovered as an exact prefix of the undisturbed capture, or says that nothing was
committed.
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from kvsim.core.trace import Trace
from kvsim.errors import TraceError
from kvsim.recorder import capture, load_model
from kvsim.store import find_drafts, layout, open_trace, recover, verify

#: Tokens of the prompt and of the response: commits in the prefill and while tokens come.
PROMPT, RESPONSE = 700, 100

ARRAYS = ("q", "k", "v", "attn_out", "lse")


def check_prefix(found: Trace, whole: Trace) -> None:
    """Raise AssertionError unless a trace has exactly the first tokens of another, and verifies."""
    n = found.n_pos
    parts = {name: getattr(whole, name)[:, :, :n] for name in ARRAYS}
    for name, part in parts.items():
        stored = getattr(found, name)
        assert stored.dtype == part.dtype
        assert torch.equal(stored, part), name
    assert torch.equal(found.tokens, whole.tokens[:n])
    assert found.token_text == (None if whole.token_text is None else whole.token_text[:n])
    made = Trace.from_arrays(
        *(parts[name] for name in "qkv"),
        attn_out=parts["attn_out"],
        lse=parts["lse"],
        prompt_len=min(n, whole.prompt_len),
        rope=whole.rope,
        scale=whole.scale,
        tokens=whole.tokens[:n],
        layer_ids=whole.layer_ids,
    )
    report = verify(found.path)
    assert report.ok, report.problems
    assert found.digest == made.digest == report.digest


@dataclass
class Outcome:
    """What was seen: how often what was left, and how many tokens each recovered prefix has."""

    left: Counter[str] = field(default_factory=Counter)
    tokens: list[int] = field(default_factory=list)
    recoveries_killed: int = 0

    def line(self, kills: int) -> str:
        """The summary."""
        parts = ", ".join(f"{count} {name}" for name, count in sorted(self.left.items()))
        lengths = " ".join(map(str, sorted(self.tokens)))
        return (
            f"{kills} captures killed: {parts}; tokens of the recovered: {lengths}; "
            f"{self.recoveries_killed} recoveries were killed before they ended"
        )


def run(kills: int, folder: Path, seed: int) -> Outcome:
    """Kill so many captures below `folder`, then look at what each has left."""
    model, tokenizer = load_model("tiny")
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, len(tokenizer), (PROMPT,), generator=generator).tolist()

    def record(path: Path, *, sharded: bool = False) -> None:
        layout.MOST_FILES = 0 if sharded else layout.MOST_FILES
        capture(
            model, tokenizer, ids, max_new_tokens=RESPONSE, out=path, o_proj=True, overwrite=True
        )

    # until the last child has ended, this process opens no trace: zarr has threads, and a fork
    # takes none of them along
    old, whole = folder / "old.zarr", folder / "whole.zarr"
    child(lambda: capture(model, tokenizer, ids[:20], max_new_tokens=0, out=old))
    seconds = child(lambda: record(whole))
    draw = random.Random(seed)  # noqa: S311  moments, not secrets
    outcome = Outcome()
    for i in range(kills):
        path = folder / str(i) / "t.zarr"
        path.parent.mkdir()
        if i % 2:
            shutil.copytree(old, path)
        write = functools.partial(record, path, sharded=i % 4 > 1)
        child(write, after=draw.uniform(0, 1.2 * seconds))
        for draft in sorted(path.parent.glob(".t.zarr.tmp-*")):
            spent = child(lambda draft=draft: again(draft), after=draw.uniform(0, 0.2))
            outcome.recoveries_killed += spent is None
    for i in range(kills):
        look(folder / str(i), open_trace(whole), open_trace(old) if i % 2 else None, outcome)
    return outcome


def again(draft: Path) -> None:
    """Recover a draft elsewhere, as a child that may be killed."""
    try:
        recover(draft, out=draft.parent / "recovered.zarr")
    except TraceError as error:
        assert "nothing to recover" in str(error), error  # noqa: PT017  no test of the error


def look(folder: Path, whole: Trace, old: Trace | None, outcome: Outcome) -> None:
    """Check one folder after the kill."""
    before = outcome.left.total()
    # output projections are whole as soon as they are there, and belong to no single trace
    ignored = (".", "projections-")
    visible = [path for path in folder.iterdir() if not path.name.startswith(ignored)]
    target, recovered = folder / "t.zarr", folder / "recovered.zarr"
    assert set(visible) <= {target, recovered}
    for path in visible:
        assert verify(path).ok
    for draft in find_drafts(folder):
        assert not draft.writing
        if draft.kind == "old":
            continue
        try:
            recover(draft.path, out=recovered)
        except TraceError as error:
            assert "has no committed tokens" in str(error), error  # noqa: PT017  as above
            assert draft.tokens == 0
            outcome.left["with nothing committed"] += 1
    if recovered.exists():
        trace = open_trace(recovered)
        check_prefix(trace, whole)
        outcome.left["recovered"] += 1
        outcome.tokens.append(trace.n_pos)
    for draft in find_drafts(folder):
        if draft.kind == "old" and not target.exists():
            recover(draft.path)  # killed between two renames
            outcome.left["with the old trace put back"] += 1
    assert old is None or target.exists()
    if target.exists():
        found = open_trace(target).digest
        assert found == whole.digest or (old is not None and found == old.digest)
        if found == whole.digest:
            outcome.left["whole"] += 1
    if outcome.left.total() == before:
        outcome.left["before there was a draft"] += 1


def child(do: Callable[[], object], after: float | None = None) -> float | None:
    """Run in a forked process, killed after so many seconds; None if it was, else its seconds."""
    begin = time.perf_counter()
    process = os.fork()
    if process == 0:
        status = 1
        try:
            do()
            status = 0
        finally:
            if status:
                sys.excepthook(*sys.exc_info())
            os._exit(status)
    if after is not None:
        time.sleep(after)
        os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    if os.WIFSIGNALED(status):
        return None
    assert os.WEXITSTATUS(status) == 0, "a child failed, see above"
    return time.perf_counter() - begin


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        outcome = run(options.kills, Path(folder), options.seed)
    print(outcome.line(options.kills))


if __name__ == "__main__":
    main()
