"""Every number about a trace or a record.

arrays      types of arrays, and reductions of them
definition  a metric: its entry, and the Cells that it returns
subject     an Analysis of a trace and a Subject of a record, which metrics read
kept        kept sets
output      the attention output that is left
attention   full attention of a trace
registry    all metrics by name; each room has its entries in `metrics`
table       `measure`: a trace, or records of it, to a tidy Table
wide        tables of keys, dimensions and verdicts, for which a Table has no columns
results     the results of a Table, and their labels
summaries   means over prompts, their intervals
fronts      results that no other one beats at the cost of its cache
evidence    the metric that ranks policies
significance  the statistics of values by prompt and policy
verdict     what prompts say of policies at one budget
comparison  the policies of a Table compared at each budget (`by_budget`)
sentences   a comparison in English
live        what a running model says, and a judge
folder      run folders, and Tables in Parquet (`parquet`)
"""
