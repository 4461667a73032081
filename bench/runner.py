"""Runs one cell in fresh processes, and is never held up by it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from bench import interrupts, peer
from bench.baselines import QUEUES, queue_capacity
from bench.peer import Metrics, Unusable
from bench.rows import Cell, Result, Usage

_LONGEST = 32
"""Bytes of a path in which cells have their directories.

A socket's path has 107 at most; the longest are iceoryx2's, which add 75.
"""


class CellFailed(Exception):
    """A participant failed, died or hung; `detail` is its traceback, where known."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.detail = detail


def run_cell(
    cell: Cell, body: str, size: int, *, threads: bool = False, touch: int = 0
) -> Result:
    """Measure one cell; whatever goes wrong in it becomes a row, not an exception.

    Args:
        body: What each participant does, as ``module:function``.
        size: How many participants.
        threads: Whether they are threads of one process instead of processes.
        touch: Bytes of memory to touch beforehand.
    """
    start = time.monotonic()
    groups = [list(range(size))] if threads else [[rank] for rank in range(size)]
    try:
        _touch(cell, touch)
        with _started(cell, body, size, groups) as (processes, pipes):
            metrics, usage = Conversation(cell, groups, processes, pipes).hold()
    except Unusable as error:
        return Result.of(cell, "skipped", str(error))
    except CellFailed as error:
        seconds = time.monotonic() - start
        return Result.of(
            cell, "failed", str(error), detail=error.detail, seconds=seconds
        )
    seconds = time.monotonic() - start
    return Result.of(cell, "ok", metrics=metrics, processes=usage, seconds=seconds)


def fork_server(
    preload: Sequence[str] = (),
) -> multiprocessing.context.ForkServerContext:
    """What starts the processes of cells: it imports torch once, for all of them.

    It and they never see SIGINT, which a terminal sends to all: who started them ends
    them, in order.

    Args:
        preload: Further modules for it to import, if it does not run yet.

    Raises:
        OSError: It cannot be started here.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["bench.preload", *preload])
    resource_tracker.ensure_running()  # first, as it unblocks SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # is inherited
    try:
        forkserver.ensure_running()
    except OSError as error:
        place = tempfile.gettempdir()
        raise OSError(
            f"no sockets in {place}: {error}; set TMPDIR to a short path, as /tmp"
        ) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context


def _touch(cell: Cell, nbytes: int) -> None:
    if not nbytes:
        return
    process = fork_server(cell.preload).Process(
        target=peer.touch_memory, args=(nbytes,)
    )
    with interrupts.deferred():
        process.start()
    _end([process], cell.limit)


def _base() -> str:
    """Where cells have their directories: among the temporary files, or in /tmp."""
    base = tempfile.gettempdir()
    far = len(os.fsencode(base)) > _LONGEST and os.access("/tmp", os.W_OK | os.X_OK)
    return "/tmp" if far else base


def _queues(
    context: multiprocessing.context.ForkServerContext, cell: Cell, size: int
) -> list[Any]:
    """Queues can only be given to processes when they start."""
    if cell.transport != QUEUES:
        return []
    return [context.Queue(queue_capacity(cell.nbytes)) for _ in range(size)]


@contextmanager
def _started(
    cell: Cell, body: str, size: int, groups: Sequence[Sequence[int]]
) -> Iterator[tuple[list[ForkServerProcess], list[Connection]]]:
    context = fork_server(cell.preload)
    ends = [context.Pipe() for _ in range(size)]
    ours, theirs = [end[0] for end in ends], [end[1] for end in ends]
    processes: list[ForkServerProcess] = []
    directory = tempfile.TemporaryDirectory(prefix="mq-bench-", dir=_base())
    queues = _queues(context, cell, size)
    grace = 0.0
    try:
        for ranks in groups:
            pipes = [theirs[rank] for rank in ranks]
            process = context.Process(
                target=peer.run_peers,
                args=(body, cell, ranks, size, directory.name, pipes, queues),
                name=f"bench-{cell.workload}-{ranks[0]}",
                daemon=True,
            )
            with interrupts.deferred():  # a process half begun could not be ended
                process.start()
                processes.append(process)
        for pipe in theirs:  # so that a dead process is seen as the end of its pipe
            pipe.close()
        yield processes, ours
        grace = 5.0
    finally:
        _end(processes, grace)
        directory.cleanup()  # ours, so that nothing remains of a killed cell
        for file in Path("/dev/shm").glob(f"{Path(directory.name).name}_*"):
            file.unlink(missing_ok=True)
        for pipe in [*ours, *theirs]:
            pipe.close()


def _end(processes: Sequence[ForkServerProcess], grace: float) -> None:
    for process in processes:
        process.join(grace)
        if process.exitcode is None:
            process.kill()
    for process in processes:
        process.join(10)  # until the kernel has freed a killed process's memory


class Conversation:
    """What the participants of a cell tell us, until all of them have finished."""

    def __init__(
        self,
        cell: Cell,
        groups: Sequence[Sequence[int]],
        processes: Sequence[ForkServerProcess],
        pipes: Sequence[Connection],
    ) -> None:
        self._limit = cell.limit
        self._groups = groups
        self._processes = processes
        self._pipes = pipes
        self._open = set(range(len(pipes)))
        self._ended: set[int] = set()
        self._met: dict[int, Any] = {}
        self._metrics: Metrics = {}
        self._usage: list[Usage] = []

    def hold(self) -> tuple[Metrics, list[Usage]]:
        """Listen to the end.

        Raises:
            CellFailed: A participant failed, died, or did not finish in time.
            Unusable: A participant says that the cell cannot be measured here.
        """
        deadline = time.monotonic() + self._limit
        while len(self._usage) < len(self._processes):
            left = deadline - time.monotonic()
            pipes = [self._pipes[rank] for rank in self._open - self._ended]
            ready = connection.wait(pipes, max(0.0, left))
            if not ready or left <= 0:
                raise CellFailed(f"hung: not finished within {self._limit:.0f} s")
            for rank in sorted(self._open - self._ended):
                if rank in self._open and self._pipes[rank] in ready:
                    self._hear(rank, self._pipes[rank])
        return self._metrics, self._usage

    def _hear(self, rank: int, pipe: Connection) -> None:
        try:
            kind, *values = pipe.recv()
        except (EOFError, OSError) as error:
            self._ended.add(rank)
            # What its process said last may be in the pipe of another of its ranks.
            if self._open.intersection(self._groups[self._index(rank)]) <= self._ended:
                raise CellFailed(f"rank {rank} died{self._status(rank)}") from error
            return
        if kind == "meet":
            self._met[rank] = values[0]
            self._answer()
        elif kind == "done":
            self._metrics.update(values[0])
        elif kind == "exit":
            self._usage.append(values[0])
            for other in set(values[0].ranks) & self._open - {rank}:
                self._hear_out(other)  # what it said before its process's last word
            self._open.difference_update(values[0].ranks)
        elif kind == "skipped":
            raise Unusable(values[0])
        else:
            raise CellFailed(f"rank {rank}: {values[0]}", values[1])

    def _hear_out(self, rank: int) -> None:
        while rank not in self._ended and self._pipes[rank].poll():
            self._hear(rank, self._pipes[rank])

    def _answer(self) -> None:
        if len(self._met) < len(self._pipes):
            return
        values = [self._met[rank] for rank in range(len(self._pipes))]
        self._met.clear()
        for rank in range(len(self._pipes)):
            self._tell(rank, values)

    def _tell(self, rank: int, values: list[Any]) -> None:
        try:
            self._pipes[rank].send(values)
        except OSError as error:
            raise CellFailed(f"rank {rank} died{self._status(rank)}") from error

    def _index(self, rank: int) -> int:
        return next(i for i, ranks in enumerate(self._groups) if rank in ranks)

    def _status(self, rank: int) -> str:
        process = self._processes[self._index(rank)]
        process.join(1.0)
        code = process.exitcode
        if code is None:
            return ""
        return f" of signal {-code}" if code < 0 else f" with exit status {code}"
