"""Where socket files are that no rendezvous has a directory for, and that they go."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import signal
import tempfile
import warnings
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from meeting import DEADLINE, meet, process_of, runtime
from nng_links import nng_runs

import mq
from mq import paths, process
from mq.stream.files import SocketFiles

__all__ = ["nng_runs", "runtime"]  # fixtures


def _connect(backend: str, group: str, shared: str) -> mq.MQ:
    return mq.connect(backend, group=group, rendezvous=f"file://{shared}")


def _be_member(backend: str, group: str, shared: str, pipe: Connection) -> None:
    """A member until killed."""
    with _connect(backend, group, shared):
        pipe.send("connected")
        pipe.recv()


def _be_forked(pipe: Connection) -> None:
    """Has a socket file until killed; a forked child lives on."""
    socket_files = SocketFiles("test")
    path = socket_files.new(None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        socket_files.remove()  # the parent's, not its own
        pipe.send(os.path.exists(os.path.dirname(path)))
        pipe.close()
        signal.pause()
    pipe.send(child)
    pipe.recv()


def _come_and_go() -> None:
    """As a member that has a socket file for a while."""
    socket_files = SocketFiles("test")
    socket_files.new(None)
    socket_files.remove()


def _left(runtime: Path) -> list[Path]:
    return list(runtime.glob("mq-*/*"))


@pytest.mark.parametrize("backend", ["shm", "zmq:ipc", "nng:ipc"])
def test_the_next_member_sweeps_what_a_killed_one_left(
    backend: str, runtime: Path
) -> None:
    """And nothing of who lives, in whichever group."""
    shared = str(runtime)
    with (
        process_of(_be_member, backend, "a", shared) as (doomed, _),
        process_of(_be_member, backend, "b", shared),
    ):
        assert len(_left(runtime)) == 2
        doomed.kill()
        doomed.join(DEADLINE)
        before = _left(runtime)
        with _connect(backend, "c", shared):
            after = _left(runtime)
        assert len(before) == len(after) == 2
        assert len({*before} & {*after}) == len(_left(runtime)) == 1
    _come_and_go()
    assert _left(runtime) == []


def test_a_member_that_meets_on_this_host_sweeps_too(runtime: Path) -> None:
    """At once, for nobody comes back to such a directory."""
    shared = str(runtime)
    with process_of(_be_member, "shm", "a", shared) as (doomed, _):
        assert len(_left(runtime)) == 1
        doomed.kill()
        doomed.join(DEADLINE)
    with contextlib.closing(meet(None)) as living:
        assert [str(path) for path in _left(runtime)] == [living.directory]


def test_close_leaves_nothing(runtime: Path) -> None:
    """Not even the directory of this user, where nobody else is in it."""
    socket_files = SocketFiles("test")
    paths_ = [Path(socket_files.new(None)) for _ in range(2)]
    assert len({path.parent for path in paths_}) == 1
    assert paths_[0].parent.stat().st_mode & 0o777 == 0o700
    for path in paths_:
        path.touch()
        socket_files.add(str(path))
    socket_files.remove()
    socket_files.remove()
    assert list(runtime.iterdir()) == []


def test_a_forked_child_keeps_nothing(runtime: Path) -> None:
    """Neither does it remove what its parent has, nor count as its parent."""
    with process_of(_be_forked) as (doomed, pipe):
        said = [pipe.recv(), pipe.recv()]
        child = next(item for item in said if item is not True)
        try:
            assert True in said
            assert len(_left(runtime)) == 1
            doomed.kill()
            doomed.join()
            _come_and_go()
            assert _left(runtime) == []
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("boot_id", ["another-boot", ""])
def test_what_another_kernel_may_use_is_not_swept(
    boot_id: str, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where hosts share such a directory, a lock is perhaps of its host only."""
    with monkeypatch.context() as patch:
        patch.setattr(process, "boot_id", lambda: boot_id)
        theirs = SocketFiles("test")
        theirs.new(None)
        os.utime(_left(runtime)[0] / "lock", (0, 0))
        theirs.abandon()  # as the end of its process, or a lock that is not seen here
        if not boot_id:
            _come_and_go()
    _come_and_go()
    with contextlib.closing(meet(None)):
        pass
    assert len(_left(runtime)) == 1


def test_a_directory_that_is_swept_before_it_is_locked_is_made_anew(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweeper cannot tell it from one that a process left at its end."""
    swept: list[Path] = []
    flock = fcntl.flock

    def lock(fd: int, operation: int) -> None:
        if not swept:
            swept.extend(_left(runtime))
            paths.remove_files(str(swept[0]))
            swept[0].rmdir()
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", lock)
    socket_files = SocketFiles("test")
    path = Path(socket_files.new(None))
    assert path.parent.exists()
    assert swept != [path.parent]
    socket_files.remove()


def test_where_files_cannot_be_locked_nothing_is_left(
    runtime: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A file system may have no locks; nobody could sweep there."""

    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    _come_and_go()
    assert not list(runtime.iterdir())
    assert "would stay if this process was killed" in caplog.text


def test_a_directory_that_was_left_empty_is_swept(runtime: Path) -> None:
    """By a process that was killed before it had a lock."""
    socket_files = SocketFiles("test")
    made = Path(socket_files.new(None)).parent
    socket_files.abandon()
    (made / "lock").unlink()
    _come_and_go()
    assert not made.exists()


def test_a_base_that_cannot_be_trusted_is_done_without(
    runtime: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As it was made by somebody else before; the log says what does not work then."""
    monkeypatch.setattr(tempfile, "tempdir", str(runtime))
    base = runtime / f"mq-{os.geteuid()}"
    base.mkdir()
    base.chmod(0o755)
    socket_files = SocketFiles("test")
    with caplog.at_level(logging.WARNING):
        path = Path(socket_files.new(None))
    assert path.parent.parent == runtime
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert f"the directory for socket files {base} is open to others" in caplog.text
    path.touch()
    socket_files.add(str(path))
    socket_files.remove()
    assert list(runtime.iterdir()) == [base]
