"""What docs/results.py measures and claims are tested on; each file imports from those above it.

plan                  what is recorded and replayed
policies, traces      what is compared, and on what
statistics            the file of values
tables, timing        what is measured: of one prompt, and in seconds
answers, kept_answers right answers, of live runs and under judged evictions
rank_correlation      whether two rankings agree
page                  docs/claims.md

Claims and verdicts are those of `kvsim.studies.claims`.
"""
