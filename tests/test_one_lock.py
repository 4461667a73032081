"""What a mesh has is read and changed under its lock alone."""

from __future__ import annotations

import dataclasses
import socket
import sys
import threading
from collections.abc import Collection
from typing import Any

import pytest
import torch
from meeting import DEADLINE, runtime
from test_join import lapsed, record_another
from test_lead import is_in

import mq
from mq import speed
from mq.mesh.dial import Dial
from mq.mesh.driver import Driver
from mq.mesh.mesh import Mesh
from mq.mesh.poller import Poller
from mq.rendezvous import claimants
from mq.rendezvous.record import Entry
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
            watch.lock = self.lead.lock
            watch.attributes(mesh, {"sessions", "conns", "forgotten", "changed"})
            watch.attributes(mesh.dialling, {"dials"})
            watch.calls(mesh, "replace")
            for link in mesh.links:
                for name in ("dial", "rank", "poll", "is_routable", "describe"):
                    watch.calls(link, name)

    class WatchedDial(Dial):
        def __getattribute__(self, name: str) -> Any:
            told = name in ("refusal", "error")
            # What it has come to in the end does not change any more.
            if name == "done" or (told and not super().__getattribute__("done")):
                watch.look(name, sys._getframe(1))
            return super().__getattribute__(name)

    with patch.context() as connecting:
        connecting.setattr("mq.join.Driver", WatchedDriver)
        for module in ("arrival", "attaching", "join"):
            connecting.setattr(f"mq.{module}.Dial", WatchedDial)
        return mq.connect("tcp", group="watched", **options)


@pytest.mark.parametrize("there", ["greeted", "unreachable", "silent", "lapsed"])
def test_who_is_recorded_is_greeted_under_the_lock(
    watch: Watch, monkeypatch: pytest.MonkeyPatch, runtime: object, there: str
) -> None:
    """Each session, and each dial, may begin and end while one looks at another."""
    with (
        mq.connect("tcp", group="watched", name="c") as c,
        socket.create_server(("127.0.0.1", 0)) as silent,
    ):
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        meeting, record = c._joined.meeting, c._joined.record
        assert meeting is not None
        assert record is not None
        if there == "lapsed":
            assert meeting.claim(lapsed(c, address)).holder is None
        elif there != "greeted":
            address = address if there == "silent" else "tcp://"
            record_another(c, addresses=(address,))
        if there in ("greeted", "lapsed"):
            watched(watch, monkeypatch, name="a", connect_timeout=DEADLINE).close()
        else:
            with pytest.raises(mq.ConnectTimeout, match=f"'b' .*{address}"):
                watched(watch, monkeypatch, name="a", connect_timeout=0.5)
    assert watch.breaches == []


@pytest.mark.parametrize("there", ["reached", "another secret", "silent"])
def test_who_is_attached_to_is_reached_under_the_lock(
    watch: Watch, monkeypatch: pytest.MonkeyPatch, there: str
) -> None:
    """As long as they are under way, dials tell what they come to."""
    options: dict[str, Any] = {"name": "b", "secret": "a secret of this test"}
    with (
        mq.connect("tcp", group="watched", listen="tcp://127.0.0.1:0", **options) as b,
        socket.create_server(("127.0.0.1", 0)) as silent,
    ):
        options.update(name="a", attach_to=b.describe()["addresses"])
        if there == "reached":
            watched(watch, monkeypatch, **options).close()
        elif there == "silent":
            silent_at = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
            options.update(attach_to=silent_at, connect_timeout=0.3)
            with pytest.raises(mq.ConnectTimeout, match=f"{silent_at} .no answer"):
                watched(watch, monkeypatch, **options)
        else:
            options["secret"] = "another secret"
            with pytest.raises(mq.AuthenticationFailed):
                watched(watch, monkeypatch, **options)
    assert watch.breaches == []


def test_who_is_new_is_dialled_under_the_lock(
    watch: Watch, monkeypatch: pytest.MonkeyPatch, runtime: object
) -> None:
    """By upkeep, while others come and go."""
    with watched(watch, monkeypatch, name="a") as queue:
        meeting, record = queue._joined.meeting, queue._joined.record
        assert meeting is not None
        assert record is not None
        new = dataclasses.replace(record, name="b", incarnation="e" * 16)
        monkeypatch.setattr(claimants, "_open", {new.incarnation})  # it lives
        monkeypatch.setattr(meeting, "recent", lambda: [Entry(new, 0.0)])
        queue._joined.upkeep()
        assert [
            dial.name for dial in queue._driver.look(lambda: queue._mesh.dialling.dials)
        ] == ["b"]
    assert watch.breaches == []


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
            wait_until(lambda thread=thread: is_in("sleep", thread), "recv")
        joined.upkeep()
        for thread in threads:
            thread.join(DEADLINE)
    assert [text.rpartition("closed: ")[2] for text in ended] == [why, why]
    assert watch.breaches == []


def test_what_was_not_done_in_time_is_told_under_the_lock(
    watch: Watch, monkeypatch: pytest.MonkeyPatch, runtime: object
) -> None:
    """Who has not acknowledged what, or not received it, may do so meanwhile."""
    with (
        mq.connect("tcp", group="watched", name="b") as b,
        watched(watch, monkeypatch, name="a") as a,
    ):
        b.subscribe("t")
        with b._lead.lock:  # it cannot answer
            a.publish("t", 1)
            with pytest.raises(mq.SubscribeTimeout):
                a.subscribe("u", timeout=0)
            (feed,) = a._mesh.publisher.topics["t"].feeds
            watch.attributes(feed, {"received"})
            watch.attributes(a._mesh.subscriber.topics["u"], {"sources"})
            with pytest.raises(mq.SubscribeTimeout, match=r"'b'.* did not acknowledge"):
                a.subscribe("u", timeout=0)
            with pytest.raises(mq.FlushTimeout, match="'b' lacks 1 on 't'"):
                a.flush(0)
            a.close(0)
    assert watch.breaches == []


def test_what_cannot_be_decoded_is_counted_under_the_lock(
    watch: Watch, monkeypatch: pytest.MonkeyPatch, runtime: object
) -> None:
    """Of two threads that count at once none is left out."""

    def broken(tensor: torch.Tensor, device: str) -> torch.Tensor:
        raise RuntimeError("CUDA error")

    with (
        mq.connect("tcp", group="watched", name="b") as b,
        watched(watch, monkeypatch, name="a") as a,
    ):
        a.subscribe("t", device="cpu")
        watch.attributes(a._mesh.subscriber.topics["t"].stats, {"refused"})
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "to", broken)
            b.publish("t", torch.ones(2))
            with pytest.raises(mq.CodecError, match="CUDA error"):
                a.recv(DEADLINE)
        assert a.stats()["topics"]["t"]["refused"] == 1
    assert watch.breaches == []
