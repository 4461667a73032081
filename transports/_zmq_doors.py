"""Asking whether there is room for a connection, before it is made on one host.

libzmq 4.3.5 ends the process where a connection over ipc finds no descriptor left as it
is accepted, by an assertion; over tcp it tries again without a pause. So beside each
socket that a member listens on it has a door: a datagram socket without a file, named
after the socket file or the port, that answers without a descriptor of its own. Who
dials on the same host asks there first. Where no door is found, as where the path is
one that another program forwards, the connection is made unasked.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mq import addresses, forks
from mq.descriptors import free_descriptors

if TYPE_CHECKING:
    from mq.mesh.poller import Poller
    from transports._zmq_conns import Port

SPARE: Final = 8
"""Descriptors that must be left beside those of connections that were let in."""
_SILENT_SECONDS: Final = 1.0
"""For how long an answer is waited for, at least, before a dial goes on without."""
_UNASKED_SECONDS: Final = 30.0
_LET_IN_SECONDS: Final = 5.0
"""How long one that was let in, and is not there yet, counts as one that comes."""
_MAY_I, _YES, _NO = b"?", b"\1", b"\0"
_BURST: Final = 64
_CREDENTIALS: Final = struct.Struct("3i")  # pid, uid, gid: struct ucred of unix(7)
_CREDENTIALS_SPACE: Final = socket.CMSG_SPACE(_CREDENTIALS.size)


def _names_of(endpoint: str) -> list[str]:
    """The names of the doors beside a listening socket, in the abstract namespace.

    Returns:
        The nearest first; none where the socket may be another host's.

    Raises:
        OSError: There is no such file.
    """
    wire, _, rest = endpoint.partition("://")
    if wire == "ipc":
        found = os.stat(rest)  # whatever way leads to the file
        # The inode of a file that was removed is the next file's at once.
        numbers = found.st_dev, found.st_ino, found.st_mtime_ns
        return ["\0mq-zmq-ipc-" + "-".join(f"{number:x}" for number in numbers)]
    host, port = addresses.split(endpoint)
    number = ip_address(host.strip("[]"))
    names = [f"\0mq-zmq-tcp-{number}-{port}", f"\0mq-zmq-tcp-any-{port}"]
    if number.is_unspecified:
        return names[1:]
    return names if number.is_loopback else []


def _datagrams() -> socket.socket:
    """A socket that tells of each datagram whose it is."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    sock.setblocking(False)  # gevent's would wait with SOCK_NONBLOCK in the type
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    return sock


def _receive(sock: socket.socket) -> tuple[bytes, bool, Any]:
    """What came, whether it is of a trusted user, and where an answer goes.

    Raises:
        OSError: Nothing has come.
    """
    said, ancillary, _, sender = sock.recvmsg(1, _CREDENTIALS_SPACE)
    trusted = any(
        kind == socket.SCM_CREDENTIALS and _CREDENTIALS.unpack(data)[1] in _trusted()
        for _, kind, data in ancillary
    )
    return said, trusted, sender


def _finds(asking: socket.socket, name: str) -> bool:
    try:
        asking.connect(name)
    except ConnectionRefusedError:
        return False
    return True


def _trusted() -> tuple[int, ...]:
    """The users whose questions and answers count."""
    return os.geteuid(), 0


class _Question(NamedTuple):
    """What was asked, and not answered yet.

    Attributes:
        port: For whose connection.
        endpoint: What is to be dialled.
        socket: Where the answer comes.
        then: Called with the answer.
        since: When it was asked, by `time.monotonic`.
    """

    port: Port
    endpoint: str
    socket: socket.socket
    then: Callable[[bool], None]
    since: float


class Doors:
    """The doors of one link, and its questions at those of others.

    Args:
        poller: Wakes the link's thread where something is to be answered or read.

    Attributes:
        fd: Readable whenever `look` has something to do.
    """

    def __init__(self, poller: Poller) -> None:
        self._poller = poller
        self._doors: dict[int, socket.socket] = {}
        self._asked: dict[int, _Question] = {}
        self._silent: dict[str, float] = {}  # until when nobody is asked there
        self._let_in: deque[float] = deque()
        self._epoll = select.epoll()
        forks.register(self)
        self.fd = self._epoll.fileno()
        poller.register(self.fd)

    # -- answering ----------

    def open(self, endpoint: str) -> None:
        """Answer from now on who asks about a socket that listens there.

        Raises:
            OSError: There is no descriptor for it.
        """
        if not (names := _names_of(endpoint)):
            return
        door = _datagrams()
        self._doors[door.fileno()] = door  # before it has a name: a fork closes it
        try:
            door.bind(names[0])
            self._epoll.register(door.fileno(), select.EPOLLIN)
        except OSError as error:
            del self._doors[door.fileno()]
            door.close()
            if error.errno != errno.EADDRINUSE:  # else whoever it is: see `_hear`
                raise

    def came(self) -> None:
        """A connection was accepted: one that was let in, as far as is known."""
        if self._let_in:
            self._let_in.popleft()

    def _answer(self, door: socket.socket) -> None:
        for _ in range(_BURST):
            try:
                _, trusted, asker = _receive(door)
            except OSError:  # nobody else
                return
            answer = _YES if self._has_room() else _NO
            try:
                door.sendto(answer, asker)
            except (OSError, TypeError):  # it has gone, or cannot be answered
                continue
            # Other users could ask without end, and never come.
            if trusted and answer is _YES:
                self._let_in.append(time.monotonic() + _LET_IN_SECONDS)

    def _has_room(self) -> bool:
        now = time.monotonic()
        while self._let_in and self._let_in[0] < now:
            self._let_in.popleft()
        taken = SPARE + len(self._let_in)
        free, _ = free_descriptors(taken + 1)
        return free > taken

    # -- asking ----------

    def ask(self, port: Port, endpoint: str, then: Callable[[bool], None]) -> bool:
        """Ask at the door beside what is to be dialled; whether there is one.

        Not for a while after nobody answered: others may have taken the name.

        Args:
            port: Whose connection it will be; `withdraw` takes the question back.
            then: Called by `look` with the answer.

        Raises:
            OSError: It cannot be asked now, or there is no such path.
        """
        names = _names_of(endpoint)
        if not names or self._silent.get(endpoint, 0.0) > time.monotonic():
            return False
        asking = _datagrams()
        fd = asking.fileno()
        self._asked[fd] = _Question(port, endpoint, asking, then, time.monotonic())
        try:
            asking.bind("")  # a name that nobody has
            self._epoll.register(fd, select.EPOLLIN)
            if any(_finds(asking, name) for name in names):
                self._say(asking)
                return True
        except BaseException:
            self._forget(fd).close()
            raise
        self._forget(fd).close()
        return False

    def _say(self, asking: socket.socket) -> None:
        """Put a question, now or as soon as there is room for it among those of others.

        The kernel keeps eleven of them for a door, which in a crowd is soon full.
        """
        try:
            asking.send(_MAY_I)
        except BlockingIOError:
            self._epoll.modify(asking.fileno(), select.EPOLLIN | select.EPOLLOUT)
        else:
            self._epoll.modify(asking.fileno(), select.EPOLLIN)

    def withdraw(self, port: Port) -> None:
        """Forget what was asked for a port; idempotent."""
        now = time.monotonic()
        for fd, question in list(self._asked.items()):
            if question.port is port:
                if now - question.since > _SILENT_SECONDS:
                    known = self._silent.items()
                    self._silent = {at: until for at, until in known if until > now}
                    self._silent[question.endpoint] = now + _UNASKED_SECONDS
                self._forget(fd).close()

    def _forget(self, fd: int) -> socket.socket:
        """Take a question back; its socket, to be closed."""
        with contextlib.suppress(FileNotFoundError):  # it was not asked yet
            self._epoll.unregister(fd)  # as a forked child may have it open, too
        return self._asked.pop(fd).socket

    def _hear(self, fd: int) -> bool:
        """The answer to a question, which is over with that; yes, if there is none."""
        with self._forget(fd) as asking:
            try:
                answer, trusted, _ = _receive(asking)
            except OSError:  # the door was closed: whoever dials now will be told more
                return True
        # Somebody else may have been faster to take the name: he shall not say no.
        return answer != _NO or not trusted

    # -- both ----------

    def look(self) -> None:
        """Answer who asks, and go on where there is an answer."""
        for fd, events in self._epoll.poll(0, _BURST):
            if (door := self._doors.get(fd)) is not None:
                self._answer(door)
            elif (question := self._asked.get(fd)) is not None:
                if events == select.EPOLLOUT:
                    with contextlib.suppress(OSError):  # the door was closed: `_hear`
                        self._say(question.socket)
                        continue
                question.then(self._hear(fd))

    def close(self) -> None:
        """Close all."""
        self._poller.unregister(self.fd)
        self.abandon()

    def abandon(self) -> None:
        """In a forked child: close its copies."""
        for sock in (*self._doors.values(), *(q.socket for q in self._asked.values())):
            sock.close()
        self._doors.clear()
        self._asked.clear()
        self._epoll.close()
