"""The script's handle of one member: calls, faults and measurements."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

from mq.message import Message
from mq.testing import worker
from mq.testing.waiting import (
    CASE,
    STEP,
    MemberDied,
    StepTimeout,
    has_stopped,
    wait_until,
)

if TYPE_CHECKING:
    from mq.testing.harness import Group


class Future:
    """A call that runs in a member."""

    def __init__(self, member: Member, number: int, what: str) -> None:
        self._member = member
        self._number = number
        self.what = what

    def result(self, timeout: float = STEP) -> Any:
        """What the call returned; raises what it raised."""
        member = self._member
        if not self.done(timeout):
            what = f"{self.what} did not end in {timeout} s"
            raise StepTimeout(member.group.report(what))
        answer = member.answers.pop(self._number)
        if isinstance(answer, worker.Failure):
            raise answer.rebuild(member.name)
        return answer

    def done(self, timeout: float = 0.0) -> bool:
        """Whether the call ended, after waiting for that up to `timeout` seconds."""
        return self._member.await_answer(self._number, timeout)


class Member:
    """One member of the group, or a worker that is to become one.

    Attributes:
        name: Its name in the group.
        pid: Its process; that of the test where it is a thread.
        process: None where it is a thread.
        answers: Answers that nobody asked for yet.
        killed: Whether the case ended its process.
        stopped: Whether its process is stopped, so that it cannot close.
    """

    def __init__(
        self,
        group: Group,
        name: str,
        channel: Connection,
        running: BaseProcess | threading.Thread,
        stacks: Connection | None,
    ) -> None:
        self.group = group
        self.name = name
        self.answers: dict[int, Any] = {}
        self.killed = False
        self.stopped = False
        self._channel = channel
        self._running = running
        self._stacks = stacks
        self._number = 0
        self.process = running if isinstance(running, BaseProcess) else None
        self.pid = os.getpid()
        if self.process is not None and self.process.pid is not None:
            self.pid = self.process.pid

    # -- calls --------------------------------------------------------------------

    def ask(
        self,
        function: Callable[..., Any],
        *args: Any,
        worker_main: bool = True,
        **kwargs: Any,
    ) -> Future:
        """Have `function` called with the worker itself and the arguments."""
        if time.monotonic() > self.group.deadline:
            raise StepTimeout(self.group.report(f"the case takes over {CASE} s"))
        self._number += 1
        request = worker.Request(self._number, function, args, kwargs, worker_main)
        subject = args[0] if args else function
        what = f"{self.name}: {getattr(subject, '__name__', subject)}"
        try:
            self._channel.send_bytes(pickle.dumps(request))
        except OSError as error:
            raise MemberDied(f"{what}: its process has ended") from error
        return Future(self, self._number, what)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the member's queue and wait for the result."""
        return self.ask(worker.call, method, *args, **kwargs).result()

    def start(self, method: str, *args: Any, **kwargs: Any) -> Future:
        """Start a method of the member's queue in a thread of its own."""
        return self.ask(worker.call, method, *args, worker_main=False, **kwargs)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``function(queue, *args)`` in the member; it is a module's function."""
        return self.ask(worker.run, function, *args, **kwargs).result()

    def begin(
        self, function: Callable[..., Any], *args: Any, main: bool = False, **kw: Any
    ) -> Future:
        """Start ``function(queue, *args)``; `main`: in the thread that gets signals."""
        return self.ask(worker.run, function, *args, worker_main=main, **kw)

    def publish(self, topic: str, payload: Any, **options: Any) -> None:
        """`MQ.publish`, with the step's deadline unless `timeout` is given."""
        self.call("publish", topic, payload, **{"timeout": STEP, **options})

    def subscribe(self, topic: str, **options: Any) -> None:
        """`MQ.subscribe`."""
        self.call("subscribe", topic, **options)

    def recv(self, timeout: float | None = STEP) -> Message:
        """`MQ.recv`, with the step's deadline unless `timeout` is given."""
        message: Message = self.call("recv", timeout=timeout)
        return message

    def await_answer(self, number: int, timeout: float) -> bool:
        """Whether the answer to request `number` has come, waiting up to `timeout`."""
        deadline = time.monotonic() + timeout
        while number not in self.answers:
            try:
                if not self._channel.poll(max(0.0, deadline - time.monotonic())):
                    return False
                key, answer = pickle.loads(self._channel.recv_bytes())
            except (EOFError, OSError) as error:
                self._running.join(1.0)
                code = self.process.exitcode if self.process is not None else None
                what = f"{self.name} died, exit status {code}"
                raise MemberDied(self.group.report(what)) from error
            self.answers[key] = answer
        return True

    # -- faults, for members that are processes ------------------------------------

    def kill(self) -> None:
        """End the process by SIGKILL and wait until it is gone."""
        self.killed = self.group.breaks = True
        self.signal(signal.SIGKILL)
        self._running.join(STEP)

    def stop(self) -> None:
        """Stop the process by SIGSTOP; returns when it has stopped."""
        self.stopped = self.group.breaks = True
        self.signal(signal.SIGSTOP)
        wait_until(lambda: has_stopped(self.pid), f"{self.name} to stop")

    def cont(self) -> None:
        """Let a stopped process go on."""
        self.stopped = False
        self.signal(signal.SIGCONT)

    def interrupt(self) -> None:
        """What Ctrl-C does: SIGINT."""
        self.signal(signal.SIGINT)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process."""
        assert self.process is not None, f"{self.name} is a thread"
        os.kill(self.pid, number)

    # -- measurements -------------------------------------------------------------

    def rss(self) -> int:
        """Resident memory of the process in bytes."""
        return int(
            self.ask(worker.measure, "resident_bytes", worker_main=False).result()
        )

    def fds(self) -> list[str]:
        """Open descriptors of the process, in words."""
        return list(self.ask(worker.measure, "descriptors", worker_main=False).result())

    def threads(self) -> list[str]:
        """Names of the threads in the process, without those of the harness."""
        return list(self.ask(worker.measure, "threads", worker_main=False).result())

    def dump(self) -> str:
        """Where all threads of the process are, in words."""
        if self._stacks is None or not self._running.is_alive():
            return "(not running)"
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGUSR1)
        raw = b""
        while self._stacks.poll(2.0 if not raw else 0.1):
            read = os.read(self._stacks.fileno(), 65536)
            if not read:
                break
            raw += read
        return raw.decode(errors="replace")

    # -- end ----------------------------------------------------------------------

    def close(self) -> bool:
        """Close the queue and check that nothing of it is left in the process.

        And that no connection broke, unless the case disturbs the group.

        Returns:
            Whether it could be closed; not where the case has killed or stopped it.
        """
        if self.killed or self.stopped or not self._running.is_alive():
            return False
        broke = self.ask(worker.close, 1.0, worker_main=False).result()
        what = f"undisturbed, {self.name!r} counts {', '.join(broke)}"
        assert self.group.disturbed() or not broke, what
        if self.process is not None:
            left = self.ask(worker.leaks).result()
            assert not left, f"close of {self.name!r} left {', '.join(left)}"
        return True

    def end(self) -> None:
        """End the member whatever its state, and free what the harness holds."""
        if self.stopped or self.killed:
            self._end_process()
        self._channel.close()
        self._running.join(1.0)
        self._end_process()
        self._running.join(STEP)
        if self._stacks is not None:
            self._stacks.close()
        if self.process is not None and not self.process.is_alive():
            self.process.close()

    def _end_process(self) -> None:
        if self.process is not None and self.process.is_alive():
            self.process.kill()
