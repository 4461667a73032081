"""The promises of `mq.transport.Link` about how connections, and links, end."""

from __future__ import annotations

import os
import tempfile
import threading
import time

from mq.testing.harness import expect
from mq.testing.link_world import PATIENCE, MakeLink, Member, World
from mq.transport import What


def shows_close_to_the_other_end(make: MakeLink, dialler_closes: bool = True) -> None:
    """A closed connection is LOST at the other end, after what was sent before."""
    with World(make) as world:
        ends = world.connect()
        ours, theirs = ends if dialler_closes else ends[::-1]
        closer, other = (0, 1) if dialler_closes else (1, 0)
        messages = [(b"%d" % index, b"x" * index * 1000) for index in range(8)]
        for head, body in messages:
            world.send(ours, head, body)
        ours.close()
        ours.close()
        world.lost(other, theirs)
        assert world.members[other].received.get(theirs) == messages
        assert ours not in world.members[closer].conns(What.LOST)
        assert theirs.try_send(b"after"), "on a lost connection try_send is True"
        assert ours.try_send(b"after"), "on a closed connection try_send is True"
        theirs.close()
        assert theirs.receive() is None


def reports_a_dead_address(make: MakeLink) -> None:
    """Dialling an address where nobody listens any more reports LOST, not OPENED."""
    with World(make) as world:
        gone = Member(make, world.poller)
        gone.link.close()
        conn = world.members[0].link.dial(gone.addresses[0])
        world.lost(0, conn)
        assert conn not in world.members[0].conns(What.OPENED)
        assert conn.try_send(b"nobody reads this"), "on a lost one try_send is True"
        conn.close()


def starts_a_new_connection_afresh(make: MakeLink) -> None:
    """Nothing that was sent on an old connection arrives on a new one."""
    with World(make) as world:
        first, second = world.members
        dialled, accepted = world.connect()
        body = memoryview(b"old body")
        taken = sum(dialled.try_send(b"old", body) for _ in range(6))
        dialled.close()
        again, accepted_again = world.connect()
        for _ in range(6):
            accepted_again.try_send(b"old answer")
        world.send(again, b"new")
        world.until(lambda: accepted_again in second.received, "the new message")
        world.lost(1, accepted)
        assert second.received[accepted_again] == [(b"new", b"")]
        old = second.received.get(accepted, [])
        assert old == [(b"old", b"old body")] * taken, f"of {taken} came {len(old)}"
        accepted_again.close()
        third, accepted_third = world.connect()
        world.send(accepted_third, b"answer")
        world.until(lambda: third in first.received, "the new answer")
        world.lost(0, again)
        assert first.received[third] == [(b"answer", b"")]


def delivers_before_the_link_closes(make: MakeLink, dialler: bool = True) -> None:
    """What try_send accepted before the link's close still arrives, then LOST."""
    with World(make) as world:
        ends = world.connect()
        ours, theirs = ends if dialler else ends[::-1]
        closer, other = (0, 1) if dialler else (1, 0)
        body = bytes(200_000)
        world.send(ours, b"0", body)
        more = (b"1", b"2", b"3")
        heads = [b"0", *(h for h in more if ours.try_send(h, memoryview(body)))]
        closing = threading.Thread(target=world.members[closer].link.close)
        closing.start()
        survivor = world.members.pop(other)
        world.members[:] = [survivor]
        world.lost(0, theirs)
        closing.join(PATIENCE)
        assert not closing.is_alive()
        arrived = [head for head, _ in survivor.received.get(theirs, [])]
        assert arrived == heads, f"of {heads}, which were accepted, came {arrived}"


def rejects_foreign_addresses(make: MakeLink) -> None:
    """Malformed and foreign addresses are a ValueError, and ranked out."""
    with World(make, 1) as world:
        (member,) = world.members
        for address in ("", "nonsense", "carrier-pigeon://loft", "://"):
            with expect(ValueError, repr(address)):
                member.link.dial(address)
            assert member.link.rank([address], same_host=True) == []
        assert member.link.rank(member.addresses, same_host=True) == member.addresses
        assert not any(map(member.link.is_routable, member.addresses))


def leaves_nothing_behind(make: MakeLink, cycles: int = 200) -> None:
    """Opening, connecting and closing leaves no descriptor, thread or file."""
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="mqt-") as directory:
        tempfile.tempdir = directory  # what is there is the link's
        try:
            _leaves_nothing(make, cycles)
        finally:
            tempfile.tempdir = before


def _leaves_nothing(make: MakeLink, cycles: int) -> None:

    def cycle(index: int) -> None:
        with World(make) as world:
            dialled, accepted = world.connect()
            world.send(dialled, b"ping", b"body")
            world.until(lambda: accepted in world.members[1].received, "one message")
            if index % 20:  # else the link waits in vain for a peer that does nothing
                dialled.close()
                world.lost(1, accepted)

    cycle(0)
    before = _resources()
    for index in range(cycles):
        cycle(index)
    deadline = time.monotonic() + PATIENCE
    while (more := _left_over(before)) and time.monotonic() < deadline:
        threading.Event().wait(0.01)  # the kernel frees a finished thread a bit later
    assert not more, f"left over: {more}"


def _left_over(before: tuple[int, int, list[str]]) -> str:
    """What there is more of than before; what other tests left may go meanwhile."""
    descriptors, threads, files = _resources()
    if descriptors <= before[0] and threads <= before[1] and files == before[2]:
        return ""
    return f"{(descriptors, threads, files)} in place of {before}"


def _resources() -> tuple[int, int, list[str]]:
    return (
        len(os.listdir("/proc/self/fd")),
        len(os.listdir("/proc/self/task")),
        sorted(os.listdir(tempfile.gettempdir())),
    )
