"""The vocabulary in code: attention, Trace, View, the pieces of a policy, Record."""
