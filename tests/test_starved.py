"""Where a member has no memory for what others publish: it waits, and they go on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from test_shm_limits import allow_all_memory, limit_more_memory
from test_shm_memory import group_of

import mq
from mq.mesh import lead, publishing
from mq.mesh.session import Session
from mq.testing import STEP, Member, wait_until
from mq.testing.harness import expect
from transports import inproc

MIB = 1 << 20


def _publish(queue: mq.MQ, topic: str, nbytes: int) -> None:
    queue.publish(topic, np.full(nbytes, 7, np.uint8), timeout=STEP)


def _receive(queue: mq.MQ) -> tuple[str, int, bool]:
    message = queue.recv(timeout=STEP)
    return message.topic, len(message.payload), bool((message.payload == 7).all())


def _connections(queue: mq.MQ) -> dict[str, int]:
    """How many there have been with each peer."""
    peers = queue.stats()["peers"]
    return {name: peer["connections"] for name, peer in peers.items()}


def _malformed(queue: mq.MQ) -> int:
    return sum(peer["malformed"] for peer in queue.stats()["peers"].values())


@contextlib.contextmanager
def _little_memory(member: Member) -> Iterator[None]:
    member.group.breaks = True  # for want of memory
    member.run(limit_more_memory, 48 * MIB)
    try:
        yield
    finally:
        member.run(allow_all_memory)


@pytest.mark.parametrize("backend", ["tcp", "zmq:ipc", "zmq:tcp", "nng:tcp"])
def test_a_message_waits_for_memory_and_others_do_not(backend: str) -> None:
    """It arrives once there is some; nothing is lost, and no session ends."""
    with group_of(backend, peer_timeout=60.0) as group:
        a, b, c = group.members("a", "b", "c")
        b.subscribe("large")
        b.subscribe("small")
        before = b.run(_connections)
        with _little_memory(b):
            a.run(_publish, "large", 160 * MIB)
            wait_until(
                lambda: b.run(_connections)["a"] > before["a"] + 1, "two attempts"
            )
            c.run(_publish, "small", 100)
            assert b.run(_receive) == ("small", 100, True)
        assert b.run(_receive) == ("large", 160 * MIB, True)
        assert b.run(_connections)["c"] == before["c"]
        assert not b.run(_malformed)


def _retain(queue: mq.MQ, topic: str, nbytes: int) -> None:
    queue.publish(topic, np.full(nbytes, 7, np.uint8), retain=True)


@pytest.mark.parametrize("history", [mq.KEEP_ALL, mq.keep_last(1)], ids=["all", "last"])
@pytest.mark.parametrize("backend", ["tcp", "zmq:ipc", "shm"])
def test_a_retained_message_without_memory_is_given_up_once(
    backend: str, history: mq.History
) -> None:
    """It would end each further session, too; others come in the next."""
    with group_of(backend, peer_timeout=2.0) as group:
        a, b = group.members("a", "b")
        a.run(_retain, "large", 160 * MIB)
        b.subscribe("small")
        with _little_memory(b):
            b.subscribe("large", history=history)
            with expect(mq.MessagesLost, "'a'", "large"):
                b.recv()
            for number in range(3):
                a.run(_publish, "small", 100 + number)
                assert b.run(_receive) == ("small", 100 + number, True)
            assert b.run(_forgotten) == 1
        a.run(_publish, "large", 1000)
        assert b.run(_receive) == ("large", 1000, True)


def _forgotten(queue: mq.MQ) -> int:
    return int(queue.stats()["mesh"]["forgotten"])


def _publish_without_memory(queue: mq.MQ, nbytes: int) -> list[str]:
    """The array is changed as soon as `publish` returns; who is subscribed then."""
    asked: list[int] = []

    def take(nbytes: int) -> memoryview:
        asked.append(nbytes)
        raise MemoryError("none is left")

    queue._mesh.publisher._take = take
    publishing.COPY_BYTES_PER_SECOND = 1e18  # it copies after 2 ms
    array = np.full(nbytes, 7, np.uint8)
    queue.publish("t", array, timeout=STEP)
    array[:] = 1
    assert asked
    return queue.subscribers("t")


def _publish_bytes(queue: mq.MQ, topic: str, nbytes: int) -> None:
    queue.publish(topic, bytes(nbytes), timeout=STEP)


def _retrieve(queue: mq.MQ) -> tuple[str, int]:
    message = queue.recv(timeout=STEP)
    return message.topic, len(message.payload)


def _receive_in_vain(queue: mq.MQ, call: str, times: int) -> list[str]:
    """What this call says each time."""
    calls: dict[str, Callable[[], object]] = {
        "recv": lambda: queue.recv(timeout=STEP),
        "arecv": lambda: asyncio.run(queue.arecv(timeout=STEP)),
        "iter": lambda: next(iter(queue)),
    }
    said = []
    for _ in range(times):
        with pytest.raises(MemoryError) as caught:
            calls[call]()
        said.append(str(caught.value))
    return said


@pytest.fixture(params=["copied", "decoded"])
def starving(request: pytest.FixtureRequest) -> Iterator[tuple[Member, Member]]:
    """A publisher of what takes memory in `recv`, and who has none for the first."""
    with group_of() as group:
        a, b = group.members("a", "b")
        if request.param == "copied":  # from shared memory: newer ones may replace it
            b.subscribe("t", history=mq.keep_last(2))
            publish = _publish
        else:
            b.subscribe("t")
            publish = _publish_bytes
        for nbytes in (90, 64):
            a.run(publish, "t", nbytes * MIB)
        a.call("flush", timeout=STEP)
        wait_until(lambda: b.run(_arrived) == 2, "both messages")
        yield a, b


def _arrived(queue: mq.MQ) -> int:
    """How many messages are there for `recv` to decode."""
    items = list(queue._inbox.fifo)
    return sum(getattr(item, "copying", None) is None for item in items)


@pytest.mark.parametrize("call", ["recv", "arecv", "iter"])
def test_what_recv_has_no_memory_for_comes_again(
    starving: tuple[Member, Member], call: str
) -> None:
    """Before what follows it: none may follow that is as new."""
    _, b = starving
    with _little_memory(b):
        (said,) = b.run(_receive_in_vain, call, 1)
    assert "message 0 from 'a' on 't', which comes again: " in said
    assert [b.run(_retrieve) for _ in range(2)] == [("t", 90 * MIB), ("t", 64 * MIB)]
    assert _counters(b) == (2, 0)


def test_what_recv_has_no_memory_for_twice_is_given_up(
    starving: tuple[Member, Member],
) -> None:
    """It may never fit, and must not keep what follows."""
    _, b = starving
    with _little_memory(b):
        said = b.run(_receive_in_vain, "recv", 3)
    assert ["is given up" in text for text in said] == [False, True, False]
    assert ["message 1 from 'a'" in text for text in said] == [False, False, True]
    assert b.run(_retrieve) == ("t", 64 * MIB)
    assert _counters(b) == (2, 1)


def _counters(member: Member) -> tuple[int, int]:
    counters = member.call("stats")["topics"]["t"]
    return counters["received"], counters["refused"]


@pytest.mark.parametrize("backend", ["tcp", "zmq:ipc", "nng:ipc"])
def test_what_cannot_be_copied_aside_is_waited_for(backend: str) -> None:
    """It is committed: the caller's memory is free when it has left, and not before."""
    with group_of(backend, peer_timeout=60.0) as group:
        a, b = group.members("a", "b")
        b.subscribe("t", window_bytes=1 << 30)
        assert a.run(_publish_without_memory, 128 * MIB) == ["b"]
        assert b.run(_receive) == ("t", 128 * MIB, True)
        a.publish("t", "next")
        assert b.recv().payload == "next"


def test_who_takes_nothing_of_what_cannot_be_copied_is_given_up() -> None:
    """`publish` waits for that."""
    with group_of("tcp", peer_timeout=2.0) as group:
        a, b = group.members("a", "b")
        b.subscribe("t", window_bytes=1 << 30)
        b.stop()
        assert a.run(_publish_without_memory, 128 * MIB) == []
        b.cont()


def _interrupted(queue: mq.MQ) -> tuple[bool, list[str]]:
    """Whether somebody may look after the connections; who is subscribed."""
    try:
        _publish_without_memory(queue, 128 * MIB)
    except KeyboardInterrupt:
        free = queue._lead._leader in (None, lead._KEEPER)
        return free, queue.subscribers("t")
    raise AssertionError("it was not interrupted")


def test_an_interrupt_waits_until_the_memory_is_free() -> None:
    """And leaves the connections to be looked after."""
    with group_of("tcp", peer_timeout=2.0) as group:
        a, b = group.members("a", "b")
        b.subscribe("t", window_bytes=1 << 30)
        b.stop()
        published = a.begin(_interrupted, main=True)
        wait_until(lambda: a.begin(_published).result() == 1, "the commit")
        a.interrupt()
        assert published.result() == (True, [])
        b.cont()


def _published(queue: mq.MQ) -> int:
    return int(queue.stats()["topics"]["t"]["published"])


@pytest.fixture
def pair() -> Iterator[tuple[mq.MQ, mq.MQ]]:
    """Two queues of this process, one of which publishes what the other gets."""
    options: Any = {"group": "starved", "peer_timeout": 1.0}
    with (
        mq.connect("inproc", name="a", **options) as a,
        mq.connect("inproc", name="b", **options) as b,
    ):
        b.subscribe("t")
        yield a, b


class Memory:
    """What `inproc` copies messages into; the publisher has none to copy them aside.

    Attributes:
        left: How often there is some.
        asked: How often there was none.
    """

    def __init__(self, patch: pytest.MonkeyPatch, publisher: mq.MQ, left: int) -> None:
        self.left = left
        self.asked = 0
        keep = inproc._End._keep

        def keep_some(end: Any, body: memoryview | None) -> memoryview | None:
            if body is not None:
                self.take()
            return keep(end, body)

        def take(nbytes: int) -> memoryview:
            raise MemoryError

        patch.setattr(inproc._End, "_keep", keep_some)
        patch.setattr(publisher._mesh.publisher, "_take", take)

    def take(self) -> None:
        """Take some of it."""
        if not self.left:
            self.asked += 1
            raise MemoryError
        self.left -= 1


@pytest.mark.parametrize("left", [0, 1, 7])
def test_what_an_engine_has_no_memory_for_is_given_up(
    pair: tuple[mq.MQ, mq.MQ], monkeypatch: pytest.MonkeyPatch, left: int
) -> None:
    """After as long as a peer may be silent; then the caller's memory is free."""
    a, b = pair
    with monkeypatch.context() as patch:
        memory = Memory(patch, a, left)
        a.publish("t", np.full(40 * MIB, 7, np.uint8), timeout=STEP)
        assert memory.asked > 1
        assert a.stats()["mesh"]["forgotten"] == 1
    with pytest.raises(mq.MessagesLost):
        b.recv(timeout=STEP)
    a.publish("t", "next", timeout=STEP)
    assert b.recv(timeout=STEP).payload == "next"


def test_what_an_engine_had_no_memory_for_arrives_once_there_is_some(
    pair: tuple[mq.MQ, mq.MQ], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is committed, and neither lost nor doubled."""
    a, b = pair
    memory = Memory(monkeypatch, a, 3)
    take = memory.take

    def take_later() -> None:
        if memory.asked == 2:
            memory.left = 1 << 30
        take()

    monkeypatch.setattr(memory, "take", take_later)
    array = np.arange(40 * MIB, dtype=np.uint8)
    sent = array.copy()
    a.publish("t", array, timeout=STEP)
    array[:] = 1
    a.publish("t", "next", timeout=STEP)
    assert (b.recv(timeout=STEP).payload == sent).all()
    assert b.recv(timeout=STEP).payload == "next"
    assert memory.asked == 2
    assert a.stats()["mesh"]["forgotten"] == 0


def test_a_session_begins_though_its_first_frames_find_no_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It rests as one does that has begun, and whoever connects is told nothing."""
    pump = Session.pump
    refused: list[str] = []

    def refuse(session: Session, now: float, flush: bool = False) -> bool:
        if len(refused) < 2:
            refused.append(session.name)
            raise MemoryError
        return pump(session, now, flush)

    monkeypatch.setattr(Session, "pump", refuse)
    options: Any = {"group": "starved", "peer_timeout": 30.0}
    with (
        mq.connect("inproc", name="a", **options) as a,
        mq.connect("inproc", name="b", **options) as b,
    ):
        b.subscribe("t")
        a.wait_for_subscribers("t", timeout=STEP)
        a.publish("t", "first", timeout=STEP)
        assert b.recv(timeout=STEP).payload == "first"
    assert len(refused) == 2
