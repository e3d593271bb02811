"""Starts the simulator's command line."""

import sys

from loadtest.sim.cli import main

if __name__ == "__main__":
    sys.exit(main())
