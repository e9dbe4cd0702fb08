"""Studies: each asks a question of one paper or of one kind of work, beside the spine.

The spine is what it takes to record, replay, run, measure, compare and look. Something belongs to
it if users of any policy on any model need it, or if two studies do; everything else is a study, or
a package of a user.

* A study is a folder with its functions, commands, metrics, figures and section of the report.
* The spine finds them through entry points in `pyproject.toml` alone (`kvsim.registry`), as it
  finds those of packages. It never imports a study; no study imports another. Contracts hold that.
* Without its folder and its entry points, all other commands work as before.
"""
