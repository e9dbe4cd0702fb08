"""How well replay predicts the running model: what docs/fidelity.md is made of."""
