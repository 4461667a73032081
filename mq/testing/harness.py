"""Drives the members of one case by messages: each step has a deadline, none a sleep.

A case is a script. It runs in the test's process, makes members with `Group.member` and
commands them; a call that blocks is started as a `Future`, so the script decides what
happens meanwhile. Members are processes, or threads where the transport's members are.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import multiprocessing.context
import os
import shutil
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import IO, Any, TypeVar

from mq import registry
from mq.testing import worker
from mq.testing.member import Future, Member
from mq.testing.proxy import Proxy, another
from mq.testing.waiting import CASE, STEP
from mq.transport import Capabilities

_PROXY_FILE = "proxy"
_LISTEN_FILE = "listener"
E = TypeVar("E", bound=BaseException)


class Group:
    """The members of one case, in a group of its own.

    Attributes:
        backend: The transport under test.
        capabilities: What it declares.
        name: The group's name; no other case uses it.
        directory: An empty directory in which member processes keep their rendezvous
            and socket files.
        deadline: When the case is given up, by the monotonic clock.
        breaks: Whether connections may break: a member was killed or stopped, or the
            script says so, which has broken one in a way of its own.
    """

    def __init__(
        self, backend: str, capabilities: Capabilities, options: dict[str, Any]
    ) -> None:
        self.backend = backend
        self.capabilities = capabilities
        self.name = f"case-{uuid.uuid4().hex[:12]}"
        self.directory = tempfile.mkdtemp(prefix="mqt-")
        self.deadline = time.monotonic() + CASE
        self.breaks = False
        self._options = options
        self._members: list[Member] = []
        self._proxies: list[Proxy] = []

    # -- members ------------------------------------------------------------------

    def member(self, name: str, **options: Any) -> Member:
        """A connected member; `options` are those of `mq.connect`."""
        return self.members(name, **options)[0]

    def members(self, *names: str, **options: Any) -> list[Member]:
        """Several members, which connect at the same time."""
        made = [self.unconnected(name) for name in names]
        futures = [self.connecting(member, **options) for member in made]
        for future in futures:
            future.result()
        return made

    def unconnected(self, name: str) -> Member:
        """A worker that has no queue yet."""
        if self.capabilities.separate_processes:
            return self.process(name)
        ours, theirs = multiprocessing.Pipe()
        thread = threading.Thread(
            target=worker.thread_main,
            args=(theirs,),
            name=f"mq-test-{name}",
            daemon=True,
        )
        thread.start()
        return self._add(Member(self, name, ours, thread, None))

    def process(self, name: str) -> Member:
        """A worker in a process of its own, whatever the transport; no queue yet."""
        context = fork_server()
        ours, theirs = context.Pipe()
        stacks, write_stacks = context.Pipe(duplex=False)
        process = context.Process(
            target=worker.process_main,
            args=(theirs, write_stacks, self._setting()),
            name=f"mq-test-{name}",
            daemon=True,
        )
        process.start()
        theirs.close()
        write_stacks.close()
        member = self._add(Member(self, name, ours, process, stacks))
        if self.capabilities.engine_stays:
            member.ask(worker.start_engine, self.backend, self._options).result()
        return member

    def run_process(self, function: Callable[..., None], *args: Any) -> int | None:
        """Run a function as the whole of a process, which ends as such processes do.

        Returns:
            Its exit status; None if it does not end.
        """
        process = fork_server().Process(
            target=worker.plain_main, args=(self._setting(), function, *args)
        )
        process.start()
        process.join(STEP)
        status = process.exitcode
        if status is None:
            process.kill()
            process.join(STEP)
        process.close()
        return status

    def _setting(self) -> worker.Setting:
        backend = registry.canonical(self.backend)
        return worker.Setting(self.directory, backend, registry.table.get(backend))

    def _add(self, member: Member) -> Member:
        self._members.append(member)
        return member

    def connecting(self, member: Member, **options: Any) -> Future:
        """Start `mq.connect` in a worker; the future ends when it has connected."""
        given = self.options(name=member.name, **options)
        return member.ask(worker.connect, self.backend, given)

    def options(self, **options: Any) -> dict[str, Any]:
        """Options of `mq.connect` that lead into this group."""
        return {
            "group": self.name,
            "connect_timeout": STEP,
            **self._options,
            **options,
        }

    def proxied(
        self, listener: str, dialler: str, **options: Any
    ) -> tuple[Member, Member, Proxy | None]:
        """Two members whose only connection goes through a proxy.

        They know nothing but each other's addresses: `listener` the one that it
        listens on, `dialler` that of the proxy.

        Returns:
            The members and the proxy; None for it where the transport's addresses are
            not sockets that a proxy could stand in for.
        """
        first, second = self.unconnected(listener), self.unconnected(dialler)
        options = {"secret": "conformance", **options}
        address, is_socket = self.listening(first, **options)
        if not is_socket:
            self.connecting(second, attach_to=(address,), **options).result()
            return first, second, None
        proxy = Proxy(address, os.path.join(self.directory, _PROXY_FILE))
        self._proxies.append(proxy)
        self.connecting(second, attach_to=(proxy.address,), **options).result()
        return first, second, proxy

    def listening(self, member: Member, **options: Any) -> tuple[str, bool]:
        """Connect a worker, which listens on an address that others may be given.

        Returns:
            The address; and whether it is a socket's.
        """
        self.connecting(member).result()
        usual: str = member.call("describe")["addresses"][0]
        free = another(usual, os.path.join(self.directory, _LISTEN_FILE))
        member.close()
        self.connecting(member, listen=(free or usual,), **options).result()
        address: str = member.call("describe")["addresses"][0]
        return address, free is not None

    def forget(self, member: Member) -> None:
        """A member that was killed and ended has no part in the end of the case."""
        self._members.remove(member)

    # -- end ----------------------------------------------------------------------

    def disturbed(self) -> bool:
        """Whether the case did something that may break connections."""
        return self.breaks or any(proxy.breaks for proxy in self._proxies)

    def close(self) -> None:
        """Close the members, last first, and check that nothing of them is left."""
        closed = [member.close() for member in reversed(self._members)]
        if all(closed):
            left = [
                os.path.join(folder, file)
                for folder, _, files in os.walk(self.directory)
                for file in files
                if file != _PROXY_FILE
            ]
            assert not left, f"closing every member left {', '.join(left)}"

    def end(self) -> None:
        """End every process and thread of the case, whatever their state."""
        while self._proxies:
            self._proxies.pop().close()
        while self._members:
            self._members.pop().end()
        shutil.rmtree(self.directory, ignore_errors=True)

    def report(self, what: str) -> str:
        """`what`, and where every thread of every member is, for an error's text."""
        parts = [what]
        if any(member.process is None for member in self._members):
            parts.append(f"-- this process --\n{_own_stacks()}")
        parts += [
            f"-- {member.name}, process {member.pid} --\n{member.dump()}"
            for member in self._members
            if member.process is not None
        ]
        return "\n".join(parts)


def _own_stacks() -> str:
    file: IO[bytes]
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace")


_preloaded = threading.Lock()


def fork_server() -> multiprocessing.context.ForkServerContext:
    """What starts members, from a process that has imported all that they may need."""
    context = multiprocessing.get_context("forkserver")
    with _preloaded:
        preload = ["mq.testing.preload"]
        # Each child runs the main script again, and imports the module of its test.
        preload += [name for name in ("pytest", "hypothesis") if name in sys.modules]
        context.set_forkserver_preload(preload)
    return context


@contextlib.contextmanager
def expect(kind: type[E], *words: str) -> Iterator[list[E]]:
    """The block must raise `kind`, its text must have all `words`.

    The list that it gives holds the error after the block.
    """
    caught: list[E] = []
    try:
        yield caught
    except kind as error:
        caught.append(error)
    assert caught, f"{kind.__name__} was not raised"
    text = str(caught[0])
    missing = [word for word in words if word not in text]
    assert not missing, f"{kind.__name__} does not say {missing}: {text}"
