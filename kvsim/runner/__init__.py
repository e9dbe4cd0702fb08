"""A model's computation under a policy.

closed    a recorded prompt under a policy, teacher-forced and free
decoding  a policy on a running model
recorded  whether a model is the one that a trace was recorded from, and how far states moved
cache     the cache of that model, from which entries are gathered
reading   which of the held entries new rows read
paged     the cache in blocks, with block tables
blocks    attention over blocks, and moves of entries between them
model     that model, and a shared prefill
sketches  a sequence that is to be run on it, as a Trace of sizes and formulas
descent   its prefill in depth order, for a policy that drops rows on the way down
judgments a model by name, and the Table of what judging finds
judging   what the decisions of replays do to the model, several at once, in one forward pass
full      a pass with the full cache, with which runs under policies are compared
"""
