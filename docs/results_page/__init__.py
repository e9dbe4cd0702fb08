"""What docs/results.py is made of; each file imports from those above it alone.

plan, quantities    what is recorded and replayed, and what is measured of it
policies, traces    what is compared, and on what
attention, kept     what full attention says, and what a kept set says
measures, timing    everything that is measured: of one trace, and in seconds
statistics          values over prompts, and intervals of their means
verdicts, claims    what a claim is, and those of each paper
groups              the table by stage, domain and task
text, drawing       the page and its figure
"""
