"""The promises of `mq.transport.Link`, as functions of what makes a link.

The cases look at a transport from above, where sessions mend much of what a link does
wrong; these look at the link alone, which they pump by hand.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable

from mq.mesh.poller import Poller
from mq.testing.link_ends import (
    delivers_before_the_link_closes,
    leaves_nothing_behind,
    rejects_foreign_addresses,
    reports_a_dead_address,
    shows_close_to_the_other_end,
    starts_a_new_connection_afresh,
)
from mq.testing.link_world import PATIENCE, Content, MakeLink, Member, World
from mq.transport import MAX_HEAD_BYTES, Conn, What


def mixed_messages(largest: int) -> list[Content]:
    """Messages of every kind of size, each unlike the others."""
    heads = [b"h", b"head" * 100, os.urandom(MAX_HEAD_BYTES)]
    bodies = [b"", b"b", os.urandom(70_000), os.urandom(largest), b""]
    return [
        (index.to_bytes(4, "big") + head, body)
        if len(head) < MAX_HEAD_BYTES
        # the largest head has no room for an index
        else (head, body)
        for index, (head, body) in enumerate(
            (head, body) for head in heads for body in bodies
        )
    ]


def keeps_messages_whole_and_in_order(make: MakeLink) -> None:
    """Messages of every size arrive whole, unaltered and in order, both ways."""
    with World(make) as world:
        dialled, accepted = world.connect()
        messages = mixed_messages(world.members[0].link.chunk_bytes) * 3
        for head, body in messages:
            world.send(dialled, head, body)
            world.send(accepted, head, body)
        for member, conn in zip(world.members, (dialled, accepted), strict=True):
            received = member.received.setdefault(conn, [])
            world.arrive(received, len(messages))
            assert received == messages


def copies_before_it_returns(make: MakeLink) -> None:
    """After try_send the caller may overwrite the head, after let_go a body, too."""
    with World(make) as world:
        dialled, accepted = world.connect()
        expected: list[Content] = []
        head = bytearray(1000)
        body = bytearray(world.members[0].link.chunk_bytes)
        for value in range(10):
            head[:] = bytes([value]) * len(head)
            dialled.let_go()
            if dialled.keeps_body:
                body = bytearray(len(body))
            body[:] = bytes([value]) * len(body)
            expected.append((bytes(head), bytes(body)))
            world.send(dialled, head, body)
        head[:] = bytes(len(head))
        if not dialled.keeps_body:
            dialled.let_go()
            body[:] = bytes(len(body))
        received = world.members[1].received.setdefault(accepted, [])
        world.arrive(received, len(expected))
        assert received == expected


def reports_accepted_before_readable(make: MakeLink) -> None:
    """A peer's first message is reported after ACCEPTED, which comes once."""
    with World(make) as world:
        first, second = world.members
        dialled = first.link.dial(second.addresses[0])
        world.until(lambda: dialled in first.conns(What.OPENED), "OPENED")
        for index in range(5):
            world.send(dialled, b"%d" % index)
        world.until(
            lambda: sum(map(len, second.received.values())) >= 5, "five messages"
        )
        (accepted,) = second.conns(What.ACCEPTED)
        assert list(second.received) == [accepted]
        assert first.conns(What.OPENED) == [dialled]


def discards_a_body(make: MakeLink) -> None:
    """A discarded body does not disturb what follows it."""
    with World(make) as world:
        dialled, accepted = world.connect()
        world.members[1].reading = False
        chunk = bytes(world.members[0].link.chunk_bytes)
        unsent = deque([(b"one", memoryview(chunk)), (b"two", memoryview(b"2"))])
        heads: list[tuple[bytes, int]] = []

        def take() -> bool:
            while unsent and dialled.try_send(*unsent[0]):  # there may be room for one
                unsent.popleft()
            if (message := accepted.receive()) is not None:
                heads.append((bytes(message[0]), message[1]))
                accepted.discard_body()
            return len(heads) == 2

        world.until(take, "two heads")
        assert heads == [(b"one", len(chunk)), (b"two", 1)], f"not these: {heads}"


def refuses_when_full(make: MakeLink, dialler_sends: bool = True) -> None:
    """A peer that does not read is refused, WRITABLE follows, nothing is lost."""
    with World(make) as world:
        ends = world.connect()
        sender, receiver = world.members if dialler_sends else world.members[::-1]
        ours, theirs = ends if dialler_sends else ends[::-1]
        receiver.reading = False
        body = memoryview(bytearray(sender.link.chunk_bytes))
        sent = 0
        while sent < 200:
            sender.pump()
            if not ours.try_send(sent.to_bytes(4, "big"), body):
                break
            sent += 1
        assert 0 < sent < 200, "a peer that does not read must be refused"
        receiver.reading = True
        known = len(sender.conns(What.WRITABLE))
        world.until(lambda: len(sender.conns(What.WRITABLE)) > known, "WRITABLE")
        for index in range(sent, sent + 20):
            world.send(ours, index.to_bytes(4, "big"), bytes(body))
        received = receiver.received.setdefault(theirs, [])
        world.arrive(received, sent + 20)
        heads = [int.from_bytes(head, "big") for head, _ in received]
        assert heads == list(range(sent + 20))
        assert all(len(got) == len(body) for _, got in received)


def does_not_spin_while_refused(make: MakeLink, dialler_sends: bool = True) -> None:
    """While nothing happens, poll reports nothing and the poller sleeps."""
    elsewhere = Poller()  # the receiver has something to read all the time
    with World(make, 1) as world:
        sender, receiver = world.members[0], Member(make, elsewhere)
        world.members.append(receiver)
        world.nap = 0.02
        ends = world.connect(*((0, 1) if dialler_sends else (1, 0)))
        _fill(world, ends[not dialler_sends], sender.link.chunk_bytes)
    elsewhere.close()


def _offer(sender: Member, conn: Conn, body: memoryview) -> None:
    """Send until it is refused, before that has taken too much memory."""
    for _ in range(200 * sender.link.chunk_bytes // len(body)):
        if not conn.try_send(b"head", body):
            return
        sender.pump()
    raise AssertionError("a peer that does not read must be refused")


def _fill(world: World, conn: Conn, nbytes: int) -> None:
    """Send from the first member until it comes to rest, which it must."""
    sender = world.members[0]
    body = memoryview(bytearray(nbytes))
    deadline = time.monotonic() + PATIENCE
    quiet = 0
    while quiet < 3:  # at first the kernel's buffers still fill
        assert time.monotonic() < deadline, "the sender never came to rest"
        _offer(sender, conn, body)
        sender.events.clear()
        sender.pump()
        woken = world.poller.wait(0.05)
        quiet = 0 if woken or sender.events else quiet + 1


def serves_others_while_one_is_full(make: MakeLink) -> None:
    """A peer that does not read delays neither another one nor its own successor."""
    with World(make, 3) as world:
        _, stalled = world.connect(0, 2)
        reader, lively = world.connect(1, 2)
        world.members[0].reading = False
        body = memoryview(bytearray(world.members[2].link.chunk_bytes))
        _offer(world.members[2], stalled, body)
        for index in range(100):
            world.send(lively, b"%d" % index, b"body")
        received = world.members[1].received.setdefault(reader, [])
        world.arrive(received, 100)
        world.members[0].reading = True
        world.until(
            lambda: stalled in world.members[2].conns(What.WRITABLE), "WRITABLE"
        )


def ends_a_poll_while_more_arrives(make: MakeLink) -> None:
    """To a mesh that takes a message at a time from a peer that sends without end.

    Another peer is heard meanwhile.
    """
    elsewhere = Poller()
    with World(make, 2) as world:
        receiver = Member(make, elsewhere)
        receiver.reading = False
        world.members.append(receiver)
        world.nap = 0.02
        flooding, flooded = world.connect(0, 2)
        modest, heard = world.connect(1, 2)
        place = memoryview(bytearray(4096))
        _fill(world, flooding, len(place))
        world.send(modest, b"modest")
        partial = False

        def take() -> bool:
            nonlocal partial
            for count, event in enumerate(receiver.link.poll()):
                assert count < 100, "a poll goes on and on"
                if event.conn is heard and event.conn.receive() is not None:
                    return True
                if event.conn is flooded and (partial or flooded.receive() is not None):
                    partial = not flooded.receive_body(place)
                while flooding.try_send(b"head", place):
                    world.members[0].pump()
            return False

        for _ in range(1000):
            if take():
                break
            world.members[0].pump()
            world.members[1].pump()
            elsewhere.wait(world.nap)
        else:
            raise AssertionError("the other peer is not heard")
    elsewhere.close()


def wakes_a_waiting_thread(make: MakeLink, rounds: int = 2000) -> None:
    """Nothing is missed while one thread waits, if `poll` follows what others send."""
    poller = Poller()
    done = threading.Event()
    with World(make, 1) as world:
        asker, echo = world.members[0], Member(make, poller)

        def answer() -> None:
            unsent: deque[tuple[Conn, bytes]] = deque()
            while not done.is_set():
                echo.pump()
                unsent += [(c, m[0]) for c, ms in echo.received.items() for m in ms]
                echo.received.clear()
                idle = True
                while unsent and unsent[0][0].try_send(unsent[0][1]):
                    unsent.popleft()
                    idle = False
                if idle:
                    poller.wait(PATIENCE)
            echo.link.close()

        answering = threading.Thread(target=answer)
        answering.start()
        try:
            conn = asker.link.dial(echo.addresses[0])
            world.until(lambda: conn in asker.conns(What.OPENED), "OPENED")
            _exchange(world, asker, conn, rounds)
        finally:
            done.set()
            poller.wake()
            answering.join(PATIENCE)
            poller.close()
        assert not answering.is_alive()


def _exchange(world: World, asker: Member, conn: Conn, rounds: int) -> None:
    """Send from one thread while another waits in the poller and receives."""
    lock = threading.Lock()
    room = threading.Semaphore(4)
    unsent: deque[bytes] = deque()
    failure: list[str] = []

    def go_on() -> None:
        with lock:
            asker.pump()
            while unsent and conn.try_send(unsent[0]):
                unsent.popleft()
                asker.pump()

    def ask() -> None:
        for index in range(rounds):
            if not room.acquire(timeout=PATIENCE):
                failure.append(f"no answer to message {index}")
                return
            unsent.append(index.to_bytes(4, "big"))
            go_on()
            world.poller.wake()

    asking = threading.Thread(target=ask)
    asking.start()
    answers = asker.received.setdefault(conn, [])
    deadline = time.monotonic() + PATIENCE
    seen = 0
    while seen < rounds and not failure and time.monotonic() < deadline:
        go_on()
        for _ in range(len(answers) - seen):
            room.release()
        seen = len(answers)
        if seen < rounds:
            world.poller.wait(PATIENCE)  # a lost wake-up must not go unnoticed
    asking.join(PATIENCE)
    assert not failure, failure
    numbers = [int.from_bytes(head, "big") for head, _ in answers]
    assert numbers == list(range(rounds)), f"{len(numbers)} answers to {rounds}"


def _from(
    promise: Callable[[MakeLink, bool], None], dialler: bool
) -> Callable[[MakeLink], None]:
    return lambda make: promise(make, dialler)


_ONE_WAY: tuple[Callable[[MakeLink], None], ...] = (
    keeps_messages_whole_and_in_order,
    copies_before_it_returns,
    reports_accepted_before_readable,
    discards_a_body,
    serves_others_while_one_is_full,
    ends_a_poll_while_more_arrives,
    reports_a_dead_address,
    starts_a_new_connection_afresh,
    rejects_foreign_addresses,
    leaves_nothing_behind,
    wakes_a_waiting_thread,
)
_BOTH_WAYS: tuple[Callable[[MakeLink, bool], None], ...] = (
    refuses_when_full,
    does_not_spin_while_refused,
    shows_close_to_the_other_end,
    delivers_before_the_link_closes,
)
PROMISES: dict[str, Callable[[MakeLink], None]] = {
    **{promise.__name__: promise for promise in _ONE_WAY},
    **{promise.__name__: _from(promise, True) for promise in _BOTH_WAYS},
    **{f"{promise.__name__}_accepted": _from(promise, False) for promise in _BOTH_WAYS},
}
"""By name; what holds for the end that dialled holds for the end that accepted."""
