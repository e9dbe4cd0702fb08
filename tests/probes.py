"""Probes for tests: the rows of a context as those that repeat it."""


def repeated(q, k, end):
    """Arguments of `Trace.from_arrays`: a probe of one chunk whose rows are the first `end`."""
    probe = {"kind": "repeat", "chunks": [[0, end, end]], "tokens": [0] * end}
    return {"probe_q": q[:, :, :end], "probe_k": k[:, :, :end], "meta": {"probe": probe}}
