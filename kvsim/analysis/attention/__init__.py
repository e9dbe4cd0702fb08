"""Full attention of a trace, before any policy evicts."""
