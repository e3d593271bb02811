"""The worker's command with a fake model: `python -m tests.engine_worker.serving.fake_worker --model fake ...`."""

import sys

from engine_worker.serving.cli import main

if __name__ == "__main__":
    sys.exit(main(loader="tests.engine_worker.serving.fake_engine:load_fake", check_invariants=True))
