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


def printed_by(example: str, folder: Path) -> list[str]:
    """The lines that an example prints, copied into a file of its own and started.

    It must exit with 0 and say nothing on stderr.
    """
    script = folder / "example.py"
    script.write_text(example)
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout.splitlines()
