"""DI-engine's `Parallel` and `ditask` over any backend of mq.

In a program, before `Parallel.runner`::

    from mq.integrations import ding
    ding.register()
    Parallel.runner(n_parallel_workers=3, mq_type="shm")(main)

On the command line, in place of ``ditask``::

    python -m mq.integrations.ding --parallel-workers 3 --mq-type shm ...

`mq_type` is a backend string. ``nng``, which DI-engine has itself, stays DI-engine's:
say ``mq:nng`` for ours; every backend has such a longer name. All workers of a run are
members of one group, each connected to each, whatever `topology` says; `protocol`,
`address`, `ports` and `attach_to` are not used. Workers started by several commands, or
on several hosts, meet when `MQ_GROUP` and `MQ_RENDEZVOUS` say so (between hosts with
`MQ_LISTEN` and `MQ_SECRET`, too), with different `node_ids`.

Other than DI-engine's own queues, nothing is lost: who emits waits for listeners that
are behind. A worker in which a handler has raised hears no more events, with any queue;
with ours an error says so, and nobody waits for it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ding.framework import Parallel
from ding.framework.message_queue import MQ as DingQueue
from ding.utils import MQ_REGISTRY
from mpire.pool import WorkerPool

import mq
from mq import registry
from mq.log import Log
from mq.message import check_topic

logger = Log(__name__)

_PREFIX = "mq:"
_TOGETHER = 60.0  # seconds in which all workers of a run must have started
_LINGER = 5.0  # seconds to deliver what was emitted, when a worker ends


class Queue(DingQueue):  # type: ignore[misc]
    """A worker's member of the run's group.

    Args:
        backend: A backend string of mq.
        group: Of the run.
        member: This worker's name.
        workers: How many workers to wait for.
        earlier: The workers of this command that come before this one.

    Attributes:
        attach_to: Whom DI-engine would have this worker connect to, in its mesh: its
            `Barrier` waits for as many and those that it was told of.
    """

    def __init__(
        self,
        backend: str,
        group: str,
        member: str,
        workers: int,
        earlier: Sequence[str],
        **_: object,
    ) -> None:
        self.attach_to = list(earlier)
        self._topics: set[str] = set()
        self._is_deaf = False
        self._lock = threading.Lock()  # of what is subscribed
        self._queue = mq.connect(backend, group=group, name=member)
        self._queue.wait_for_members(workers, timeout=_TOGETHER)

    def listen(self) -> None:
        """Nothing is left to do: the queue is connected from the start."""

    def publish(self, topic: str, data: bytes) -> None:
        self._queue.publish(topic, data)

    def subscribe(self, topic: str) -> None:
        with self._lock:
            if not self._is_deaf:
                self._topics.add(check_topic(topic))
                self._queue.subscribe(topic)

    def unsubscribe(self, topic: str) -> None:
        with self._lock:
            self._topics.discard(topic)
            self._queue.unsubscribe(topic)

    def turn_deaf(self) -> None:
        """Listen to nothing from now on: nobody receives, and others would wait."""
        with self._lock, contextlib.suppress(mq.Closed):
            self._is_deaf = True
            for topic in self._topics:
                self._queue.unsubscribe(topic)

    def recv(self) -> tuple[str, bytes] | None:
        """The next topic and its data; None when the queue is stopped."""
        try:
            message = self._queue.recv()
        except mq.Closed:
            return None
        except mq.MessagesLost as error:
            logger.error("%s", error)
            return self.recv()
        return message.topic, message.payload

    def stop(self) -> None:
        self._queue.close(_LINGER)


def register() -> None:
    """Let DI-engine know mq's backends. Idempotent."""
    if getattr(Parallel.runner, "of_mq", False):
        return
    for name in (*registry.names(), *registry.aliases):
        for mq_type in (name, _PREFIX + name):
            if mq_type not in MQ_REGISTRY:
                MQ_REGISTRY.register(mq_type)(Queue)
    theirs = Parallel.runner
    signature = inspect.signature(theirs)

    @functools.wraps(theirs)
    def runner(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        mq_type = given.arguments["mq_type"]
        if mq_type in MQ_REGISTRY and MQ_REGISTRY.get(mq_type) is not Queue:
            return theirs(*args, **kwargs)
        backend = mq_type.removeprefix(_PREFIX)
        registry.load(backend)  # here, not in each worker, says why it cannot be used
        return _runner(backend=backend, **given.arguments)

    runner.of_mq = True  # type: ignore[attr-defined]
    Parallel.runner = staticmethod(runner)
    # `Parallel.stop` looks for it, also where no queue could be made: what it raised
    # would hide why.
    Parallel._mq = None
    for name in ("on", "once"):
        setattr(Parallel, name, _listening_first(name))
    Parallel.listen = _telling_why_it_ends(Parallel.listen)


def _listening_first(name: str) -> Callable[..., None]:
    """`Parallel.on` or `once` in the order in which no event is dropped.

    DI-engine subscribes first, and drops what comes before its event loop knows the
    listener: that is seen with queues that deliver as soon as one is subscribed.
    """

    def listen(self: Parallel, event: str, fn: Callable[..., None]) -> None:
        getattr(self._event_loop, name)(event, fn)
        if self.is_active:
            self._mq.subscribe(event)

    return listen


def _telling_why_it_ends(theirs: Callable[..., None]) -> Callable[..., None]:
    """`Parallel.listen`, the main function of the thread that hears events.

    DI-engine ends it by the event after the one whose handler has raised. Its worker
    goes on.
    """

    @functools.wraps(theirs)
    def listen(self: Parallel) -> None:
        queue = self._mq
        try:
            theirs(self)
        except Exception as error:
            # When the worker ends, what DI-engine takes down under it may raise here.
            if self.is_active and isinstance(queue, Queue):
                said = f"{type(error).__name__}: {error}"
                logger.error("node %s hears no more events: %s", self.node_id, said)
                queue.turn_deaf()
            raise

    return listen


def _runner(
    n_parallel_workers: int,
    mq_type: str,
    backend: str,
    *,
    node_ids: Sequence[int] | int | None = None,
    **options: Any,
) -> Callable[..., None]:
    """What `Parallel.runner` returns for our backends."""
    if n_parallel_workers < 1:
        raise ValueError(f"n_parallel_workers is {n_parallel_workers}, not 1 or more")
    group = os.environ.get("MQ_GROUP") or f"ding-{os.getpid()}-{time.time_ns()}"
    nodes = list(Parallel.padding_param(node_ids, n_parallel_workers, 0))
    if len(set(nodes)) != n_parallel_workers:
        raise ValueError(f"{n_parallel_workers} workers need as many ids, not {nodes}")
    names = [f"node-{node}" for node in nodes]
    known = ("labels", "auto_recover", "max_retries", "startup_interval")
    shared = {name: options[name] for name in known if name in options}

    def run(main: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        settings = [
            {
                **shared,
                "n_parallel_workers": n_parallel_workers,
                "mq_type": mq_type,
                "node_id": node,
                "local_id": place,
                "backend": backend,
                "group": group,
                "member": names[place],
                "workers": n_parallel_workers,
                "earlier": names[:place],
            }
            for place, node in enumerate(nodes)
        ]
        tasks = [(one, (main, args, kwargs)) for one in settings]
        if n_parallel_workers == 1:
            work(*tasks[0])
            return
        with WorkerPool(
            n_jobs=n_parallel_workers, start_method="spawn", daemon=False
        ) as pool:
            atexit.register(pool.__exit__)  # as DI-engine does: if the program crashes
            pool.map(work, tasks)

    return run


def work(settings: dict[str, Any], task: tuple[Any, ...]) -> None:
    """The main function of a worker's process."""
    register()
    Parallel._subprocess_runner(settings, task)


def main() -> None:
    """Run `ditask`."""
    from ding.entry.cli_ditask import cli_ditask

    # Not `__main__`, which is another module in the workers.
    from mq.integrations import ding as importable

    importable.register()
    cli_ditask()


if __name__ == "__main__":
    main()
