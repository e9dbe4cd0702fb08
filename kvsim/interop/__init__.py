"""Policies, scores and kept sets exchanged with other libraries.

kvpress       policies of kvsim as presses, scores of presses as scorers of kvsim
recording     what a running model's cache keeps, as a dump for the referee
masks         a Record as the attention mask of training under eviction
distillation  the loss of that training, of what a policy keeps of the present weights
"""
