"""Prompts over real text, for any model with a tokenizer, with answers that can be checked.

The text is Python's own documentation, which every Python has (`pydoc_data.topics`).
`docs/models.md` says which tasks SmolLM2 solves. Nothing here loads torch or transformers.
"""
