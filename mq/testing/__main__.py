"""``python -m mq.testing TRANSPORT [CASE ...]``: the suite without pytest."""

from __future__ import annotations

import argparse
import sys
import time
import traceback

from mq import registry
from mq.testing import CASES, Case, find, run_case


def main() -> int:
    """Run cases on one transport, a line for each.

    Returns:
        The exit status: 0 if every case that ran passed.
    """
    parser = argparse.ArgumentParser(prog="python -m mq.testing", description=__doc__)
    parser.add_argument("transport", help="as for mq.connect, such as zmq:tcp")
    parser.add_argument("cases", nargs="*", metavar="CASE", help="default: all")
    parser.add_argument("--large", action="store_true", help="also those beyond 2 GiB")
    arguments = parser.parse_args()
    try:
        chosen = [find(name) for name in arguments.cases] or [
            case for case in CASES if arguments.large or not case.large
        ]
    except LookupError as error:
        parser.error(str(error))
    if reason := registry.check(arguments.transport):
        parser.error(reason)
    failed = sum(not _passes(arguments.transport, case) for case in chosen)
    print(f"{len(chosen) - failed} of {len(chosen)} cases passed")
    return 1 if failed else 0


def _passes(transport: str, case: Case) -> bool:
    reason = case.unavailable()
    if reason is not None:
        print(f"skip  {case.name}: {reason}", flush=True)
        return True
    started = time.monotonic()
    try:
        run_case(transport, case)
    except Exception:  # reported here, and the next case runs
        print(f"FAIL  [{case.clause}] {case.name}", flush=True)
        traceback.print_exc()
        return False
    seconds = time.monotonic() - started
    print(f"pass  {seconds:5.2f} s  [{case.clause}] {case.name}", flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main())
