"""Ranks of the tokens of a prompt in the layers of a model."""
