"""Traces on disk: zarr groups in the format of `docs/trace-format.md`."""

from kvsim.store.publication import check_target, check_writable
from kvsim.store.recovery import Draft, discard, find_drafts, recover
from kvsim.store.verification import Verification, describe, verify
from kvsim.store.writer import TraceWriter

__all__ = [
    "Draft",
    "TraceWriter",
    "Verification",
    "check_target",
    "check_writable",
    "describe",
    "discard",
    "find_drafts",
    "recover",
    "verify",
]
