"""Full attention of a trace: how it is distributed, and what is expected of it."""
