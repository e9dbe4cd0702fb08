"""Kept sets: what stays in the cache, what is lost, and where in the sequence."""
