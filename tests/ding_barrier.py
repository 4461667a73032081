"""Workers of DI-engine that wait for each other; started by test_apps_ding.

Each appends a line to a file, the second argument, when all have come to a `Barrier`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ding.framework import Parallel, task
from ding.framework.context import OnlineRLContext
from ding.framework.middleware.barrier import Barrier

from mq.integrations import ding

WORKERS = 3


def main(path: str) -> None:
    """Every worker: two iterations, each between two barriers."""
    with task.start(async_mode=False, ctx=OnlineRLContext()):
        node = task.router.node_id
        task.use(Barrier(WORKERS - 1 - node, timeout=20), lock=False)

        def step(_: OnlineRLContext) -> None:
            with Path(path).open("a") as file:
                file.write(f"{node}\n")

        task.use(step)
        task.run(2)


if __name__ == "__main__":
    ding.register()
    Parallel.runner(WORKERS, mq_type=sys.argv[1], startup_interval=0)(main, sys.argv[2])
