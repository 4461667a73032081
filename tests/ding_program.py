"""Workers of DI-engine over a backend of mq; started by test_apps_ding.

Node 0 writes what it heard from the others into a file: an argument of this program, or
`DING_HEARD` where `ditask` starts `told`.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from ding.framework import Parallel

from mq.integrations import ding

WORKERS, EVENTS = 3, 40


def main(path: str) -> None:
    """Every worker: the first asks the others to begin, and to end."""
    router = Parallel()
    if router.node_id == 0:
        _hear(router, Path(path))
    else:
        _speak(router)


def told() -> None:
    """`main` for `ditask`, which gives it no argument."""
    main(os.environ["DING_HEARD"])


def _hear(router: Parallel, path: Path) -> None:
    ready, done, lock = threading.Semaphore(0), threading.Event(), threading.Lock()
    heard: dict[int, list[int]] = {}

    def result(node: int, number: int, data: bytes) -> None:
        with lock:
            heard.setdefault(node, []).append(number + len(data))
            if sum(map(len, heard.values())) == EVENTS * (WORKERS - 1):
                done.set()

    router.on("result", result)
    router.on("ready", ready.release)
    for _ in range(WORKERS - 1):
        assert ready.acquire(timeout=60)
    router.emit("begin")
    assert done.wait(60)
    router.emit("end")
    lines = [f"{node} {sorted(numbers)}" for node, numbers in sorted(heard.items())]
    path.write_text("\n".join(lines))


def _speak(router: Parallel) -> None:
    begin, end = threading.Event(), threading.Event()
    router.on("begin", begin.set)
    router.on("end", end.set)
    # DI-engine has no word for this: what nobody listens to yet is not heard.
    router._mq._queue.wait_for_subscribers("ready", 1, timeout=60)
    router.emit("ready")
    assert begin.wait(60)
    for number in range(EVENTS):
        router.emit("result", router.node_id, number, b"x" * 1000)
    assert end.wait(60)


if __name__ == "__main__":
    ding.register()
    Parallel.runner(WORKERS, mq_type=sys.argv[1], startup_interval=0)(main, sys.argv[2])
