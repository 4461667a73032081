"""The inside of a cell: one participant, in a process or a thread of its own."""

from __future__ import annotations

import importlib
import os
import resource
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

from bench.rows import Cell, Usage

Metrics: TypeAlias = dict[str, float]


class Unusable(Exception):
    """A cell cannot be measured here; the text says why. Not a failure."""


class Peer:
    """One participant of a cell. Rank 0 is the hub, the others are spokes.

    Attributes:
        size: How many participants the cell has.
        cpu_seconds: Processor time of this process in the last `timed` block.
        directory: A directory of this cell, for its sockets, and where members meet. It
            is removed in the end, and so are files in /dev/shm that begin with its name
            and an underscore.
        group: A name that no other cell has.
        queues: One of multiprocessing's for each participant, where the cell is about
            them.
    """

    def __init__(
        self,
        cell: Cell,
        rank: int,
        size: int,
        directory: str,
        pipe: Connection,
        queues: Sequence[Any] = (),
    ) -> None:
        self.cell = cell
        self.rank = rank
        self.size = size
        self.directory = directory
        self.queues = queues
        self.group = ""
        self.cpu_seconds = 0.0
        self._pipe = pipe
        self._deadline = time.monotonic() + cell.limit

    @property
    def spokes(self) -> int:
        """How many participants there are besides the hub."""
        return self.size - 1

    def remaining(self) -> float:
        """Seconds until the cell is given up."""
        return max(0.0, self._deadline - time.monotonic())

    @contextmanager
    def timed(self) -> Iterator[None]:
        """What is timed happens in this block: its processor time is kept."""
        start = time.process_time()
        yield
        self.cpu_seconds = time.process_time() - start

    def meet(self, value: Any = None) -> list[Any]:
        """Wait until every participant is here; what each of them brought, by rank.

        Raises:
            TimeoutError: Some participant did not come before the cell's limit.
        """
        self._pipe.send(("meet", value))
        if not self._pipe.poll(self.remaining()):
            raise TimeoutError(f"rank {self.rank} waited in vain for the others")
        answers: list[Any] = self._pipe.recv()
        return answers


Body: TypeAlias = Callable[[Peer], "Metrics | None"]


def run_peers(
    body: str,
    cell: Cell,
    ranks: Sequence[int],
    size: int,
    directory: str,
    pipes: Sequence[Connection],
    queues: Sequence[Any] = (),
) -> None:
    """The main function of a cell's process: `body` once per rank, each in a thread.

    Args:
        body: ``module:function``, imported here only; a function of a `Peer` that
            returns `Metrics` or None.

    What happens is reported over the pipes: ``("meet", value)``, then ``("done",
    metrics)``, ``("skipped", reason)`` or ``("failed", reason, traceback)``, and at
    last ``("exit", usage)`` over the first pipe.
    """
    import torch

    # Its threads spin: on a busy machine a check of 640 MB took 30 s, not 0.1.
    torch.set_num_threads(1)
    # Members meet in there: what a killed one leaves goes with the cell's directory.
    os.environ["XDG_RUNTIME_DIR"] = directory
    cpu, base = time.process_time(), _resident("VmRSS")
    peers = [
        Peer(cell, rank, size, directory, pipe, queues)
        for rank, pipe in zip(ranks, pipes, strict=True)
    ]
    threads = [
        threading.Thread(
            target=_run, args=(body, peer), name=f"bench-{peer.rank}", daemon=True
        )
        for peer in peers[1:]
    ]
    for thread in threads:
        thread.start()
    _run(body, peers[0])
    for thread in threads:
        thread.join(peers[0].remaining())
    used = Usage(
        list(ranks),
        time.process_time() - cpu,
        base,
        max(base, _resident("VmHWM")),
        max(peer.cpu_seconds for peer in peers),  # each counts the whole process
    )
    pipes[0].send(("exit", used))


def _run(body: str, peer: Peer) -> None:
    try:
        module, _, name = body.partition(":")
        function: Body = getattr(importlib.import_module(module), name)
        peer.group = peer.meet(f"bench-{os.getpid()}-{time.time_ns()}")[0]
        peer._pipe.send(("done", function(peer) or {}))
    except Unusable as reason:
        peer._pipe.send(("skipped", str(reason)))
    except BaseException as error:  # the outermost frame: the parent reports it
        text = f"{type(error).__name__}: {error}"
        peer._pipe.send(("failed", text, traceback.format_exc()))


def _resident(field: str) -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return next(int(li.split()[1]) * 1024 for li in lines if li.startswith(field))


def touch_memory(nbytes: int) -> None:
    """Write to `nbytes` of new memory once, in a process of its own before a cell.

    Virtual machines hand pages that were free for seconds back to their host, and the
    next touch costs 20 times as much: without this a cell measures its host.
    """
    import numpy as np

    blocks = []
    for start in range(0, nbytes, 1 << 28):
        block = np.empty(min(1 << 28, nbytes - start), np.uint8)  # huge pages
        block[::4096] = 1
        blocks.append(block)
