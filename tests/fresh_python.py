"""Programs run by an interpreter that has imported nothing yet."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def output_of(program: str, *, timeout: float = 120.0) -> str:
    """What a program prints, run in the root of the repository; it must exit with 0.

    Args:
        timeout: Seconds after which it is killed and the test fails.
    """
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        timeout=timeout,
        cwd=ROOT,
    )
    return done.stdout
