"""Metrics of a trace, a record or a live run: Tables, verdicts, run folders."""
