"""Policies and kept sets exchanged with other libraries.

kvpress  policies of kvsim as presses
harness  a policy behind the model interface of lm-evaluation-harness
masks    a Record as the attention mask of training under eviction
"""
