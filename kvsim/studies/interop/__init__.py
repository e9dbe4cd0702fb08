"""Policies, scores and kept sets exchanged with other libraries.

kvpress       policies of kvsim as presses, scores of presses as scorers of kvsim
recording     the kept sets of a running model's cache, as a dump for the referee
masks         a Record as the attention mask of training under eviction
distillation  the loss of that training, for the kept sets of the present weights
"""
