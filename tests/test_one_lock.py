"""What a mesh has is read and changed under its lock alone."""

from __future__ import annotations

import sys
import threading
from collections.abc import Collection
from typing import Any

import pytest
from meeting import DEADLINE, runtime
from test_lead import is_in

import mq
from mq import speed
from mq.mesh.driver import Driver
from mq.mesh.mesh import Mesh
from mq.mesh.poller import Poller
from mq.testing.waiting import wait_until

__all__ = ["runtime"]

pytestmark = pytest.mark.skipif(
    not speed.COMPILED, reason="the compiled lock alone knows which thread has it"
)


class Watch:
    """Notes who uses what one member's mesh has, and has not its lock.

    Attributes:
        breaches: What was used, and by which function.
    """

    def __init__(self) -> None:
        self.lock: threading.Lock | None = None
        self.breaches: list[str] = []

    def look(self, what: str, user: Any) -> None:
        """It is being used by this frame."""
        if self.lock is not None and not speed.is_mine(self.lock):
            self.breaches.append(f"{what} in {user.f_code.co_name}")

    def attributes(self, thing: object, names: Collection[str]) -> None:
        """Look whenever one of these attributes is used."""
        kind, watch = type(thing), self

        class Watched(kind):  # type: ignore[valid-type,misc]
            __slots__ = ()

            def __getattribute__(self, name: str) -> Any:
                if name in names:
                    watch.look(name, sys._getframe(1))
                return kind.__getattribute__(self, name)

            def __setattr__(self, name: str, value: object) -> None:
                if name in names:
                    watch.look(name, sys._getframe(1))
                kind.__setattr__(self, name, value)

        thing.__class__ = Watched

    def calls(self, owner: object, name: str) -> None:
        """Look whenever this method is called."""
        method = getattr(owner, name)

        def watched(*args: Any, **options: Any) -> Any:
            self.look(name, sys._getframe(1))
            return method(*args, **options)

        setattr(owner, name, watched)


@pytest.fixture
def watch() -> Watch:
    """Of the member that `watched` connects."""
    return Watch()


def watched(watch: Watch, patch: pytest.MonkeyPatch, **options: Any) -> mq.MQ:
    """Connect a member that is watched from the start."""

    class WatchedDriver(Driver):
        def __init__(self, mesh: Mesh, poller: Poller, where: str) -> None:
            super().__init__(mesh, poller, where)
            watch.lock = self.lock
            watch.attributes(mesh, {"sessions", "conns", "forgotten"})
            watch.calls(mesh, "replace")

    with patch.context() as connecting:
        connecting.setattr("mq.join.Driver", WatchedDriver)
        return mq.connect("tcp", group="watched", **options)


@pytest.mark.parametrize("why", ["its name is another's", "its link has ended"])
def test_who_is_replaced_is_told_under_the_lock(
    watch: Watch, monkeypatch: pytest.MonkeyPatch, runtime: object, why: str
) -> None:
    """All its calls end, that of the thread that leads and those that follow it."""
    ended: list[str] = []

    def recv() -> None:
        with pytest.raises(mq.Closed) as closed:
            queue.recv(DEADLINE)
        ended.append(str(closed.value))

    with watched(watch, monkeypatch, name="a") as queue:
        joined = queue._joined
        assert joined.meeting is not None
        if why == "its link has ended":
            monkeypatch.setattr(type(joined.link), "ended", why)
        else:
            why = "replaced by another 'a', which took the name"
            monkeypatch.setattr(joined.meeting, "renew", lambda record: False)
        threads = [threading.Thread(target=recv) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            wait_until(lambda thread=thread: is_in("_sleep", thread), "recv")
        joined.upkeep()
        for thread in threads:
            thread.join(DEADLINE)
    assert [text.rpartition("closed: ")[2] for text in ended] == [why, why]
    assert watch.breaches == []
