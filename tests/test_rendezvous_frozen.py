"""A rendezvous in a directory whose file system stands still, as a network's may."""

from __future__ import annotations

import contextlib
import functools
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from meeting import eventually, meet, names, record

import mq
from mq import paths
from mq.errors import ConnectTimeout, PeerLost
from mq.rendezvous import open_rendezvous
from mq.rendezvous.bounded import BoundedStore
from mq.rendezvous.directory import DirectoryStore

SECONDS = 30.0
"""That it stands still for, where the test does not end that before."""


@contextlib.contextmanager
def _frozen() -> Iterator[threading.Event]:
    """No call of a rendezvous' file system ends meanwhile; the event: one has begun."""
    begun, thawed = threading.Event(), threading.Event()
    waited_for: list[str] = []

    def stand_still(call: Callable[..., Any], *args: Any) -> Any:
        begun.set()
        if not thawed.wait(SECONDS):
            waited_for.append(call.__name__)
        return call(*args)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("check_shared", "is_current"):
            slow = functools.partial(stand_still, getattr(paths, name))
            patch.setattr(paths, name, slow)
        try:
            yield begun
        finally:
            thawed.set()
    assert not waited_for


def test_connect_ends_at_its_deadline(tmp_path: Path) -> None:
    """And what it began is undone once the file system goes on."""
    spec = tmp_path.as_uri()
    with _frozen(), pytest.raises(ConnectTimeout, match=f"{tmp_path} does not answer"):
        mq.connect("inproc", group="g", rendezvous=spec, name="a", connect_timeout=0.2)
    eventually(lambda: not list(tmp_path.iterdir()))


def test_members_go_on_and_leave(tmp_path: Path) -> None:
    """Only who joins needs the file system; who leaves waits for it for a moment."""
    spec = tmp_path.as_uri()
    a = mq.connect("inproc", group="g", rendezvous=spec, name="a")
    with mq.connect("inproc", group="g", rendezvous=spec, name="b") as b:
        b.subscribe("t")
        with _frozen():
            a.publish("t", 1)
            assert b.recv(timeout=10.0).payload == 1
            a.close()
    eventually(lambda: not list(tmp_path.iterdir()))


def test_a_claim_that_nobody_waits_for_is_undone(tmp_path: Path) -> None:
    """The name is free as soon as the file system goes on."""
    with contextlib.closing(meet(tmp_path.as_uri())) as other:
        before = set(threading.enumerate())
        mine = open_rendezvous(tmp_path.as_uri(), group="g", secret=None, timeout=0.2)
        with _frozen():
            with pytest.raises(PeerLost, match="does not answer"):
                mine.claim(record("x"))
            mine.close()
        eventually(lambda: before.issuperset(threading.enumerate()))
        assert names(other) == []


def test_a_claim_is_undone_only_once_it_has_ended(tmp_path: Path) -> None:
    """Else what undoes it finds nothing, and the claim comes true after that."""
    thawed, claimed, removing = (threading.Event() for _ in range(3))

    class Standing(DirectoryStore):
        def swap(self, name: str, token: Any, new: Any) -> bool:
            thawed.wait(SECONDS)
            won = super().swap(name, token, new)
            claimed.set()
            return won

        def remove(self, name: str, incarnation: str) -> None:
            removing.set()
            super().remove(name, incarnation)

    def opened() -> Standing:
        return Standing(str(tmp_path), "g", shared=True, timeout=0.2)

    with contextlib.closing(meet(tmp_path.as_uri())) as other:
        before = set(threading.enumerate())
        store = BoundedStore(opened, "a directory", timeout=0.2)
        with pytest.raises(PeerLost, match="does not answer"):
            store.claim(record("x"))
        store.close()
        assert not removing.is_set()
        thawed.set()
        eventually(lambda: before.issuperset(threading.enumerate()))
        assert claimed.is_set()
        assert removing.is_set()
        assert names(other) == []


def test_an_interrupt_ends_the_wait(tmp_path: Path) -> None:
    """Which a system call that stands still would not let through."""
    spec, main = tmp_path.as_uri(), threading.main_thread().ident
    assert main is not None
    with _frozen() as begun:

        def interrupt() -> None:
            begun.wait(SECONDS)
            signal.pthread_kill(main, signal.SIGINT)

        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            mq.connect("inproc", group="g", rendezvous=spec, connect_timeout=SECONDS)
    eventually(lambda: not list(tmp_path.iterdir()))
