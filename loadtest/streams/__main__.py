"""`python -m loadtest.streams`."""

import sys

from loadtest.streams.cli import main

if __name__ == "__main__":
    sys.exit(main())
