"""`python -m mq`, the same as `mq`."""

from __future__ import annotations

import sys

from mq.cli import main

if __name__ == "__main__":
    sys.exit(main())
