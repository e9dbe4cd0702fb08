"""Prediction and validity: how well a replay says what the running model will do."""
