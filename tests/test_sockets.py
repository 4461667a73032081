"""What the system tells of the socket of an engine, by its descriptor alone."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from mq.stream import sockets


def test_an_interrupt_leaves_an_engine_its_descriptor() -> None:
    """It would end the process for one that is closed behind its back.

    At each line in turn, until there is none.
    """
    with socket.create_server(("127.0.0.1", 0)) as sock, warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        for line in itertools.count():
            lines = itertools.count()

            def interrupt(
                frame: FrameType,
                event: str,
                arg: object,
                line: int = line,
                lines: Iterator[int] = lines,
            ) -> Any:
                if frame.f_globals["__name__"] != sockets.__name__:
                    return None
                if event == "line" and next(lines) == line:
                    raise KeyboardInterrupt
                return interrupt

            before = sys.gettrace()
            sys.settrace(interrupt)
            try:
                sockets.quiet_seconds(sock.fileno())
            except KeyboardInterrupt:
                continue
            finally:
                sys.settrace(before)
                os.fstat(sock.fileno())
            break
    assert line > 5


def _received(fd: int) -> int | None:
    return sockets.received_bytes(fd, os.fstat(fd).st_ino)


def _shut(fd: int) -> None:
    sockets.shut(fd, os.fstat(fd).st_ino)


def _repeats(fd: int) -> int:
    return sockets.repeats(fd, os.fstat(fd).st_ino)


def _send_ahead(fd: int) -> object:
    return sockets.let_send_ahead(fd, 1 << 20)


def _control(sock: socket.socket) -> bytes:
    """How its congestion is controlled."""
    option = socket.IPPROTO_TCP, socket.TCP_CONGESTION
    return sock.getsockopt(*option, 16).rstrip(b"\0")


@pytest.mark.skipif(sys.platform != "linux", reason="names are Linux's")
@pytest.mark.parametrize(("before", "after"), [("bbr", "reno"), ("cubic", "cubic")])
def test_what_is_sent_within_a_host_is_not_paced(before: str, after: str) -> None:
    """Another control than BBR, which spaces out what it sends, is left as it is."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        try:
            listener.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_CONGESTION, before.encode()
            )
        except OSError as error:
            pytest.skip(f"{before} cannot be chosen here: {error}")
        address = listener.getsockname()
        dialled = stack.enter_context(socket.create_connection(address))
        accepted = stack.enter_context(listener.accept()[0])
        assert _control(accepted) == before.encode()
        sockets.unpace(accepted.fileno())
        assert _control(accepted) == after.encode()
        usual = _control(dialled)
        sockets.unpace(listener.fileno())  # it has no peer
        assert (_control(listener), _control(dialled)) == (before.encode(), usual)


LOOKS: list[Callable[[int], object]] = [
    sockets.quiet_seconds,
    sockets.is_within_host,
    sockets.unpace,
    _send_ahead,
    _received,
    _shut,
    _repeats,
]


@pytest.mark.parametrize("look", LOOKS)
def test_what_is_no_socket_any_more_leaves_nothing_open(
    look: Callable[[int], object],
) -> None:
    """An engine closes a descriptor when it likes, and the system uses it again."""
    reader, writer = os.pipe()
    try:
        before = os.listdir("/proc/self/fd")
        assert not look(reader)
        assert len(os.listdir("/proc/self/fd")) == len(before)
        os.fstat(reader)
    finally:
        os.close(reader)
        os.close(writer)


def test_what_another_socket_has_received_is_not_counted() -> None:
    """It may have the number of one that the engine has closed."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as sender,
        listener.accept()[0] as sock,
    ):
        sender.sendall(b"four")
        assert sock.recv(4, socket.MSG_WAITALL) == b"four"
        inode = os.fstat(sock.fileno()).st_ino
        assert sockets.received_bytes(sock.fileno(), inode) == 4
        assert sockets.received_bytes(sock.fileno(), inode + 1) is None


def test_no_descriptor_has_been_quiet_for_any_time() -> None:
    """Of a peer that is gone there is none."""
    assert sockets.quiet_seconds(-1) is None


@pytest.mark.parametrize(
    ("source", "within"), [("127.0.0.1", True), ("127.0.0.2", False)]
)
def test_a_socket_tells_whether_its_peer_is_on_this_host(
    source: str, within: bool
) -> None:
    """It has the same address then; the second stands for another host's."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(
            listener.getsockname(), source_address=(source, 0)
        ) as sender,
        listener.accept()[0] as accepted,
    ):
        for sock in (sender, accepted):
            assert sockets.is_within_host(sock.fileno()) == within
        assert not sockets.is_within_host(listener.fileno())
    assert not sockets.is_within_host(-1)


@pytest.mark.parametrize("look", LOOKS)
def test_a_file_keeps_its_locks(look: Callable[[int], object], tmp_path: Path) -> None:
    """A database's, say, whose descriptor is taken for a socket's: POSIX gives up all
    of a process's locks on a file with any descriptor of it that is closed."""
    path = tmp_path / "locked"
    with path.open("w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert not look(file.fileno())
        program = (
            "import fcntl, sys\n"
            "try: fcntl.lockf(open(sys.argv[1], 'w'), fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
            "except OSError: print('locked')"
        )
        done = subprocess.run(
            [sys.executable, "-c", program, path],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert done.stdout == "locked\n"


class Uncounted:
    """A socket of a kernel that knows no more of it than its state, as gVisor's."""

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        return b"\x01" + bytes(size - 1)


def test_a_kernel_that_does_not_count_says_nothing_of_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A peer of which nothing is heard would never be given up."""
    monkeypatch.setattr(
        sockets, "copy_of", lambda fd: contextlib.nullcontext(Uncounted())
    )
    assert sockets.quiet_seconds(0) is None


def test_the_peer_of_a_socket_file_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system does not tell of it, it is of this host at least."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        shown = f"(pid {os.getpid()} of user {os.getuid()})"
        assert sockets.peer_process(ours) == shown
        monkeypatch.delattr(socket, "SO_PEERCRED")
        assert sockets.peer_process(ours) == "(of this host)"
