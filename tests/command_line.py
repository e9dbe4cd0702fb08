"""A policy of a user's own, and the line that a command prints."""

OWN = """
import os
import signal
from dataclasses import dataclass

from kvsim import Policy
from kvsim.core.policy import Protection, Schedule, Scorer
from kvsim.errors import NeedsError


@dataclass(frozen=True)
class Odd(Scorer):
    fails_at: int = 0
    stops_at: int = 0

    def score(self, view):
        if view.setting.budget == self.fails_at:
            raise NeedsError("odd: the trace has no gate; record it with --o-proj")
        if view.setting.budget == self.stops_at:
            if os.environ.get("TERMINATED"):
                signal.raise_signal(signal.SIGTERM)
            raise KeyboardInterrupt
        return view.pos.float()


def odd(**parameters):
    return Policy("odd", Odd(**parameters), schedule=Schedule(interval=8))


not_a_policy = 3
"""


def one_line(text):
    """The only line of a text."""
    lines = text.splitlines()
    assert len(lines) == 1, text
    return lines[0]
