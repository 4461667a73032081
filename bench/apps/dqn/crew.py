"""Collectors as child processes; one that dies is started again."""

from __future__ import annotations

from multiprocessing.context import ForkServerProcess

import torch

import mq
from bench.apps.app import AppCell
from bench.apps.dqn.collector import collect
from bench.apps.dqn.task import Task
from bench.runner import fork_server

_GRACE = 10.0  # seconds for a collector to end by itself
_TERMINATION = 5.0  # seconds for one to end when it is told to


def collector_name(index: int) -> str:
    """The name of a collector in the group."""
    return f"collector-{index}"


def play(backend: str, group: str, task: Task, index: int) -> None:
    """The main function of a collector's process."""
    torch.set_num_threads(1)
    name = collector_name(index)
    with mq.connect(backend, group=group, name=name) as queue:
        collect(queue, task, index)


class Crew:
    """The collectors of a training, started on entry and ended on exit.

    Attributes:
        processes: By the collector's index.
    """

    def __init__(self, backend: str, group: str, task: Task) -> None:
        self._arguments = (backend, group, task)
        # Who replaces a dead one begins at once.
        self._context = fork_server(AppCell.preload)
        self.processes: list[ForkServerProcess] = []

    def __enter__(self) -> Crew:
        _, _, task = self._arguments
        # The server takes seconds to start: of what is interrupted meanwhile nothing
        # must be left but a process that does nothing.
        first = self._context.Process()
        first.start()
        first.join()
        try:
            for index in range(task.collectors):
                self.processes.append(self._start(index))
        except BaseException:
            self._end(0.0)
            raise
        return self

    def _start(self, index: int) -> ForkServerProcess:
        process = self._context.Process(
            target=play, args=(*self._arguments, index), name=collector_name(index)
        )
        process.start()
        return process

    def mend(self) -> None:
        """Start again whoever has died; not for those that ended as they should."""
        for index, process in enumerate(self.processes):
            if process.exitcode:
                self.processes[index] = self._start(index)

    def __exit__(self, kind: object, *_: object) -> None:
        self._end(_GRACE if kind is None else 0.0)

    def _end(self, grace: float) -> None:
        for process in self.processes:
            process.join(grace)
            if process.exitcode is None:
                process.terminate()
        for process in self.processes:
            process.join(_TERMINATION)
            if process.exitcode is None:  # stopped, or busy where no signal is seen
                process.kill()
            process.join()
            process.close()
