"""Replay: a policy over a trace, event by event, a block of layers at a time.

`replay` goes through the blocks that `layers` plans, `block` runs the events of one, and `rows` is
the faster way through an interval of 1. Both ways give the same Record.
"""

from kvsim.engine.checks import check_cell
from kvsim.engine.layers import layers_per_block
from kvsim.engine.replay import replay

__all__ = ["check_cell", "layers_per_block", "replay"]
