"""Replay: a policy over a trace, event by event, a block of layers at a time.

`replay` plans the blocks, `block` runs the events of one, and `rows` is the faster way through an
interval of 1. All three give the same Record.
"""

from kvsim.engine.replay import check_cell, layers_per_block, replay

__all__ = ["check_cell", "layers_per_block", "replay"]
