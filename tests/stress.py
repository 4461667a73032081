"""Runs the conformance suite ten times in a row while another process burns a core.

Exits with the first failure, so that a flaky case cannot pass.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from pathlib import Path

CONFORMANCE = str(Path(__file__).with_name("test_conformance.py"))


def main() -> int:
    """Run it; the exit status of the first run that failed, or 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("pytest_args", nargs="*", help="such as -- -k shm-")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and end what was begun
    burner = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        for run in range(1, args.runs + 1):
            begin = time.monotonic()
            command = [sys.executable, "-m", "pytest", "-q", "-x", CONFORMANCE]
            command += args.pytest_args
            status = subprocess.run(command, check=False).returncode
            seconds = time.monotonic() - begin
            print(f"run {run} of {args.runs}: status {status}, {seconds:.0f} s")
            if status:
                return status
    finally:
        burner.kill()
        burner.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
