"""Kept sets: which entries of the cache stay after an event."""
