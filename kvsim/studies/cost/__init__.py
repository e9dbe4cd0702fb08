"""Cost of policies: memory, time and FLOPs, from a model's configuration.

    model = Model.from_config("config.json")
    cost = estimate(model, kvsim.policy("snapkv"), budget=2048, context=131072)

`model` has the arithmetic of a decoder model, `cases` what each layer computes and holds where rows
are dropped after a given one, and `accounting` puts them together. All of it is closed form and
nothing runs a model; docs/cost.md has the limits of the numbers.
"""
