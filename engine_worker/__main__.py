"""`python -m engine_worker`: the worker's API process, which starts its engine process."""

import sys

from engine_worker.serving.cli import main

if __name__ == "__main__":
    sys.exit(main())
