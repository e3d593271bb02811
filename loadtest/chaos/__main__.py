"""`python -m loadtest.chaos`."""

import sys

from loadtest.chaos.cli import main

if __name__ == "__main__":
    sys.exit(main())
