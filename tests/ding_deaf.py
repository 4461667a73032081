"""Workers of DI-engine, one with a handler that raises; started by test_apps_ding.

Node 0 writes into a file, the second argument, who listens when that one is deaf.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from pathlib import Path

from ding.framework import Parallel

from mq.integrations import ding
from mq.testing.waiting import wait_until


def main(path: str) -> None:
    """Every worker: node 1 is the one that hears no more."""
    router = Parallel()
    if router.node_id == 0:
        _emit(router, Path(path))
    elif router.node_id == 1:
        _raise(router, Path(path))
    else:
        _listen(router)


def _emit(router: Parallel, path: Path) -> None:
    raised, deaf = threading.Event(), threading.Event()
    router.on("raised", raised.set)
    router.on("deaf", deaf.set)
    queue = router._mq._queue
    queue.wait_for_subscribers("work", 2, timeout=60)
    router.emit("work")
    assert raised.wait(60)
    router.emit("work")  # DI-engine ends the worker's listener by the next event
    assert deaf.wait(60)
    wait_until(lambda: "node-1" not in queue.subscribers("work"), "node 1 to be deaf")
    path.write_text(f"{queue.subscribers('work')} {queue.subscribers('late')}")
    router.emit("end")


def _raise(router: Parallel, path: Path) -> None:
    def work() -> None:
        raise ValueError("no such work")

    router._mq._queue.wait_for_subscribers("deaf", 1, timeout=60)
    for topic in range(20):  # refused, and so nothing that is to be ended
        with contextlib.suppress(TypeError):
            router.on(topic, work)
    router.on("work", work)
    wait_until(lambda: router._event_loop._exception, "the handler to raise")
    router.emit("raised")
    router._listener.join(60)
    router.on("late", print)
    router.emit("deaf")
    wait_until(path.exists, "node 0, which cannot tell this one")


def _listen(router: Parallel) -> None:
    end = threading.Event()
    router.on("end", end.set)
    router.on("work", lambda: None)
    assert end.wait(60)


if __name__ == "__main__":
    ding.register()
    Parallel.runner(3, mq_type=sys.argv[1], startup_interval=0)(main, sys.argv[2])
