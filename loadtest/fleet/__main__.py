"""Starts the fake fleet's command line."""

import sys

from loadtest.fleet.cli import main

if __name__ == "__main__":
    sys.exit(main())
