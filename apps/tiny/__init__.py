"""Training and measurement of the shipped models.

Run from a checkout: ``python -m apps.tiny.train``, ``python -m apps.tiny.evaluate``.

    model       architecture and initial weights
    tokenizer   the tokenizer of the ledger language, as files
    curriculum  batches of samples for training
    probes      models without a layer or a head; attention of each head
    results     measurements in a file
    card        generated sections of the card
    heads       figure of the heads
"""
