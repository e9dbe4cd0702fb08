"""Training, evaluation and model cards of the shipped models."""
