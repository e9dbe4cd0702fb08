"""`python -m kvsim.cli`: the command line without the installed program."""

from kvsim.cli import main

main()
