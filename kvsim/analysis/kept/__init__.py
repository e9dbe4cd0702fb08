"""Kept sets: entries that remain in the cache after an event."""
