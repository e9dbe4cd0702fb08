"""Policies and scorers exchanged with other libraries that compress caches.

kvpress   policies of kvsim as presses, scores of presses as scorers of kvsim
"""
