"""The language of the shipped models: prompts with their answers, and the demo."""
