"""Replay: a policy over a trace, event by event, a block of layers at a time.

`replay` plans the blocks, `block` runs the events of one, and `rows` is the faster way through an
interval of 1. All three give the same Record.
"""

from kvsim.engine.replay import replay

__all__ = ["replay"]
