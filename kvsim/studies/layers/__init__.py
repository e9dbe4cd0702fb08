"""ASL (arXiv 2601.07667): how layers rank the tokens of a prompt, and where it selects."""
