"""Traces as files, in the format of docs/trace-format.md, and records."""
