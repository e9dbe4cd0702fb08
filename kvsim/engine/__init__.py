"""Replay: a policy over a trace, event by event, a block of layers at a time.

`replay` goes through the blocks that `layers` plans, `block` runs the events of one, and `rows` is
the faster way through an interval of 1. Both ways give the same Record.
"""
