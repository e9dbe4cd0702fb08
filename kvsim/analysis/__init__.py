"""Every number about a trace, a record or a live run: metrics, Tables, verdicts, run folders."""
