"""Cost of policies: memory, time and FLOPs, from a model's configuration.

    model = Model.from_config("config.json")
    cost = estimate(model, kvsim.policy("snapkv"), budget=2048, context=131072)

`model` has the arithmetic of a decoder model, `flops` that of scores, and `accounting` puts them
together. Nothing runs a model; docs/cost.md has the limits of the numbers.
"""
