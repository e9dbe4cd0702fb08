"""Parts of docs/results.py; each file imports from those above it alone.

plan                what is recorded and replayed
policies, traces    what is compared, and on what
tables, timing      everything that is measured: of one prompt, and in seconds
statistics          the values of a row of the page
groups              the table by stage and by what the prompts are about
reasons, claims     verdicts on two models beside each other, and why they differ
text, drawing       the page and its figure

Claims and verdicts are those of `kvsim.claims`.
"""
