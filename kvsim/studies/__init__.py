"""Studies: each answers questions of one paper or one kind of work, outside the core commands.

The core records, replays, runs, measures, compares and draws. Code belongs to it if users of any
policy on any model need it, or if two studies do; everything else is a study, or a user's package.

* A study is a folder with its functions, commands, metrics, figures and section of the report.
* The core finds studies only through entry points in `pyproject.toml` (`kvsim.registry`), like
  packages. It never imports a study, and no study imports another, as contracts check.
* Without its folder and its entry points, all other commands work as before.
"""
