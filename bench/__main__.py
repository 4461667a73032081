"""`python -m bench`, the same as `mq bench`."""

from __future__ import annotations

import sys

from bench.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
