"""Traces as files, in the format of docs/trace-format.md, and records."""

from kvsim.store.compacting import compacted
from kvsim.store.publication import check_target, check_writable
from kvsim.store.reader import open_trace
from kvsim.store.verification import Verification, describe, verify
from kvsim.store.writer import TraceWriter, save_trace

__all__ = [
    "TraceWriter",
    "Verification",
    "check_target",
    "check_writable",
    "compacted",
    "describe",
    "open_trace",
    "save_trace",
    "verify",
]
