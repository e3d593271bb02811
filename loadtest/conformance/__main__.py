"""`python -m loadtest.conformance URL`."""

from __future__ import annotations

from loadtest.conformance.cli import main

if __name__ == "__main__":
    main()
