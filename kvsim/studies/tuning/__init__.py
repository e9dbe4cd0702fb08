"""Tuning: the parameters of a policy, searched offline and judged on prompts held out."""
