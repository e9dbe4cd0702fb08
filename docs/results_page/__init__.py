"""Parts of docs/results.py; each file imports from those above it alone.

plan                what is recorded and replayed
policies, traces    what is compared, and on what
statistics          the file of values, and the values of a row of the page
tables, timing      everything that is measured: of one prompt, and in seconds
ranking, groups     the rows, what ranks them, and the table by what the prompts are about
text, claims        the pages

Claims and verdicts are those of `kvsim.studies.claims`.
"""
