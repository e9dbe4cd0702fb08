"""Training and measurement of the shipped models; programs that run from a checkout.

python -m apps.tiny.train --help       train a model
python -m apps.tiny.evaluate --help    measure it, write its card

model       architecture and initial weights
curriculum  batches of samples for training
probes      models without a layer or a head; attention of each head
results     measurements in a file
card        generated sections of the model cards
heads       figures of the heads
"""
