"""Records of members that have ended, and those of members that only seem to have."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from fresh_python import output_of
from meeting import DEADLINE, freeze, meet, process_of

import mq
from mq.rendezvous import Rendezvous

HOURS = 2 * 3600.0


def set_back(meeting: Rendezvous) -> None:
    """Have all files of a group be as old as if the clock had been set forward."""
    assert meeting.directory is not None
    then = time.time() - HOURS
    for file in Path(meeting.directory).iterdir():
        os.utime(file, (then, then))


@pytest.mark.parametrize("backend", ["tcp", "zmq:tcp"])
def test_a_clock_that_is_set_forward_hides_nobody(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each that joins meets who lives, and nobody gets its name."""
    options: dict[str, Any] = {"backend": backend, "group": f"clock-{os.getpid()}"}
    with mq.connect(name="a", **options) as queue:
        meeting = queue._joined.meeting
        assert meeting is not None
        monkeypatch.setattr(meeting, "renew", lambda _: True)  # it is not due yet
        set_back(meeting)
        for name in "bc":
            with mq.connect(name=name, **options) as late:
                assert [member.name for member in late.members()] == ["a", name]
        with pytest.raises(
            mq.ConnectRefused,
            match=r"'a'.* is held by pid .* this process .* close that queue",
        ):
            mq.connect(name="a", **options)


def _replaced(options: dict[str, Any], pipe: Connection) -> None:
    """Be a member until another one has the name."""
    with mq.connect(name="a", **options) as queue:
        pipe.send("connected")
        with pytest.raises(mq.Closed) as caught:
            queue.recv()
        pipe.send(str(caught.value))


@pytest.mark.parametrize("backend", ["tcp", "shm"])
def test_who_was_stopped_for_hours_learns_that_it_was_replaced(backend: str) -> None:
    """Whatever others have done with its record meanwhile."""
    options: dict[str, Any] = {"backend": backend, "group": f"hours-{os.getpid()}"}
    with (
        process_of(_replaced, options) as (child, pipe),
        contextlib.closing(meet(None, options["group"])) as looking,
    ):
        assert pipe.recv() == "connected"
        freeze(child.pid)
        for name in "bc":
            set_back(looking)
            with mq.connect(name=name, **options) as passing:
                assert [member.name for member in passing.members()] == [name]
        with mq.connect(name="a", **options) as queue:
            os.kill(child.pid, signal.SIGCONT)
            assert pipe.poll(DEADLINE), "it was not told"
            assert "replaced by another 'a'" in pipe.recv()
            with mq.connect(name="d", **options) as late:
                assert [member.pid for member in late.members()] == [os.getpid()] * 2
            assert queue.describe()["name"] == "a"


EXEC = """
import os, sys, mq
queue = mq.connect({backend!r}, group={group!r}, name="a")
os.execv(sys.executable, [sys.executable, "-c", {again!r}])
"""
AGAIN = """
import mq
from mq import arrival
arrival.PROBE_SECONDS = 1000.0
queue = mq.connect({backend!r}, group={group!r}, name={name!r}, connect_timeout=10)
print([member.name for member in queue.members()])
"""


@pytest.mark.parametrize("backend", ["tcp", "shm"])
@pytest.mark.parametrize("name", ["a", "b"])
def test_a_process_that_became_another_program_does_not_wait_for_itself(
    backend: str, name: str
) -> None:
    """Whose record has its id and its start, and whose queue has ended."""
    options = {"backend": backend, "group": f"exec-{name}-{os.getpid()}"}
    again = AGAIN.format(name=name, **options)
    assert output_of(EXEC.format(again=again, **options)) == f"['{name}']\n"


def test_a_record_that_close_could_not_remove_is_nobodys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A queue of this process has ended if it is closed."""
    options: dict[str, Any] = {"backend": "tcp", "group": f"left-{os.getpid()}"}

    def fail(*_: object) -> None:
        raise mq.PeerLost("no answer", "there")

    with contextlib.closing(meet(None, options["group"])):  # so that it stays
        ghost = mq.connect(name="a", **options)
        meeting = ghost._joined.meeting
        assert meeting is not None
        monkeypatch.setattr(meeting._store, "remove", fail)
        ghost.close()
        with mq.connect(name="b", connect_timeout=10.0, **options) as queue:
            assert [member.name for member in queue.members()] == ["b"]
