"""Traces on disk: zarr groups in the format of `docs/trace-format.md`."""
