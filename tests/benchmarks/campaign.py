"""What campaigns of damage share: seeds, limits of time and memory, and the count of outcomes."""

import argparse
import contextlib
import resource
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

SECONDS = 5
BYTES = 1 << 30


class Late(BaseException):
    """A case that takes too long; no error that a reader could catch."""


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """End what takes more than five seconds."""

    def late(*_: object) -> None:
        raise Late

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def limit_memory() -> None:
    """Let this process take at most another gigabyte."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + BYTES, resource.RLIM_INFINITY))


def options(doc: str | None, cases: int) -> argparse.ArgumentParser:
    """The options of a campaign; case i of a run has the seed `--seed` + i."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--cases", type=int, default=cases)
    parser.add_argument("--seed", type=int, default=0)
    return parser


def campaign(judge: Callable[[int], str], given: argparse.Namespace) -> None:
    """Judge cases by their seeds, print findings and outcomes, and end with 1 for a finding."""
    outcomes = Counter[str]()
    for seed in range(given.seed, given.seed + given.cases):
        try:
            outcome = judge(seed)
        except (Exception, Late) as error:  # noqa: BLE001  any at all is what is looked for
            outcome = "FINDING"
            print(f"seed {seed}: {type(error).__name__}: {error}", flush=True)
        outcomes[outcome] += 1
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items())))
    sys.exit(any("FINDING" in outcome for outcome in outcomes))
