"""`python -m bench`, the same as `mq bench`."""

from __future__ import annotations

import sys

from mq.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
