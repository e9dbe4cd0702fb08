"""Traces on disk: zarr groups in the format of `docs/trace-format.md`."""

from kvsim.store.verification import Verification, describe, verify
from kvsim.store.writer import TraceWriter, check_target

__all__ = ["TraceWriter", "Verification", "check_target", "describe", "verify"]
