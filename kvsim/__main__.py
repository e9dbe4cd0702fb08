"""`python -m kvsim`: the same as the command `kvsim`."""

from kvsim.cli import main

if __name__ == "__main__":
    main()
