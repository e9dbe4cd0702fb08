"""Learning from traces: scorers (`kvsim learn`) and plans of heads (`kvsim heads`).

`lessons` has the value of each entry by the optimum, `training` fits a network to it, `learn` does
both on some prompts and compares the outcome with other policies on the rest. `heads` measures
which heads lose most if they hold sinks and recent entries alone.
"""
