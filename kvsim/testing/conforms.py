"""`conforms`: a test of another implementation's kept sets, reads or rounding."""

from __future__ import annotations

from typing import Any

import kvsim


def conforms(dump: Any, policy: Any, **options: Any) -> None:
    """Assert that a dump has the sets that a policy defines; the message explains the difference.

    dump, policy, options: as `kvsim.conform` takes them. Raises AssertionError, and what that does.
    """
    report = kvsim.conform(dump, policy, **options)
    if not report.equal:
        raise AssertionError("\n".join(report.lines()))
