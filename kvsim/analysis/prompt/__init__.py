"""How the layers of a model rank the tokens of a prompt."""
