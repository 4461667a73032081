"""`python -m bench.apps.pipeline`."""

import sys

from bench.apps.command import main_of
from bench.apps.pipeline.cells import APP

if __name__ == "__main__":
    sys.exit(main_of(APP, sys.argv[1:]))
