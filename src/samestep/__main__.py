"""``python -m samestep``: the command line."""

from samestep.cli import main

if __name__ == "__main__":
    main()
