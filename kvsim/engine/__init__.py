"""Replay: a policy over a trace, event by event, a block of layers at a time.

`replay` processes the blocks of layers from `layers`. `block` runs their events; `rows` does so
faster for an interval of 1, with the same Record.
"""
