"""Members of a group on a scripted network, with one clock for all."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from scripted import ScriptedLink, ScriptedNet

from mq.devices import Area
from mq.errors import MessagesLost
from mq.frames import ALIGNMENT, Frames, Spread
from mq.lending import Lender
from mq.mesh import publisher as publisher_module
from mq.mesh.config import Config, Watch
from mq.mesh.dial import Dial
from mq.mesh.mesh import Mesh
from mq.mesh.poller import Poller
from mq.mesh.session import Session
from mq.mesh.subscription import Subscription
from mq.process import ProcessId

CHUNK_BYTES = 256
"""Body size of the scripted links."""
INLINE_BYTES = 128
"""Messages up to this size are small ones, in tests with `small_messages`."""
HEADER_BYTES = ALIGNMENT
"""Payloads up to this size are all header; the rest of larger ones is a buffer."""
PIECE_BYTES = 300
"""The same of bodies that are tensors."""
WHOLE_BYTES = 1600
"""Messages up to this size are one body, where links are made for that."""
MOST_UNANSWERED = 2000
"""What such links have under way at most, and one body."""
DEVICES = ("device:0", "device:1")
"""What the tensors of messages are said to be on; they are on the CPU."""


def tensors_of(content: bytes, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Tensors that hold some bytes, of these sizes one after another."""
    if not sizes:
        return []
    whole = torch.tensor(list(content), dtype=torch.uint8)
    return list(whole.split(list(sizes)))


def area_of(device: str, tensor: torch.Tensor) -> Area:
    """The area of one tensor, said to be on a device."""
    area = Area(tensor.device)
    area.append(tensor)
    area.device = device
    return area


def incarnation(key: str, generation: int) -> str:
    """That of a life of a name; those of names are in the order of the names."""
    return f"{key}-{generation}".encode().hex().ljust(32, "0")


class Got(NamedTuple):
    """What a member received."""

    topic: str
    sender: str
    incarnation: str
    sequence: int
    payload: bytes


class ScriptedWatch:
    """A watch on a process of the world; what it says is `World.ended`."""

    def __init__(self, world: World, pid: int, fd: int) -> None:
        self._world = world
        self._pid = pid
        self._fd: int | None = fd
        world.watches[fd] = pid

    def ended(self) -> bool | None:
        if self._pid in self._world.invisible:
            return None
        return self._pid in self._world.ended

    def fileno(self) -> int | None:
        return self._fd

    def close(self) -> None:
        if self._fd is not None:
            del self._world.watches[self._fd]
            self._fd = None


class Member:
    """One member: a mesh, its link, and what a driver would do for it.

    Attributes:
        landed: Messages received of which a part came on devices.
        viewing: Whether messages are received in place and kept, in `views`, each with
            what it held then.
    """

    def __init__(self, world: World, name: str, config: Config) -> None:
        self.world = world
        self.name = name
        self.incarnation = config.incarnation
        self.pid = config.process.pid
        self.stalled = False
        self.fds: set[int] = set()
        lender = Lender(world.lends[name]) if name in world.lends else None
        self.link = ScriptedLink(
            world.net,
            config.addresses[0],
            chunk_bytes=world.chunk_bytes,
            lender=lender,
            devices=frozenset(DEVICES[: world.carries.get(name, 0)]),
            piece_bytes=world.piece_bytes,
            whole_bytes=WHOLE_BYTES if name in world.wholes else 0,
            most_unanswered=MOST_UNANSWERED if name in world.wholes else None,
        )
        self.landed = 0
        self.viewing = False
        self.views: list[tuple[memoryview, bytes]] = []
        self.link.open(world.poller, [], None)
        self.taken: list[int] = []
        self.mesh = Mesh(config, [self.link], take=self._take, clock=world.clock)
        self.mesh.watch_added = self.fds.add
        self.mesh.watch_removed = self.fds.discard

    def _take(self, nbytes: int) -> memoryview:
        self.taken.append(nbytes)
        return memoryview(bytearray(b"\xaa" * nbytes))

    def dial(self, other: Member) -> Dial:
        """Dial a member whose record was found at the rendezvous."""
        dialling = self.mesh.dialling
        routes = dialling.routes(other.mesh.config.addresses, True)
        dial = Dial(routes, incarnation=other.incarnation, name=other.name)
        return dialling.start(dial)

    def dial_blindly(self, address: str) -> Dial:
        """Dial an address without knowing who is there."""
        dialling = self.mesh.dialling
        return dialling.start(Dial(dialling.routes([address], True)))

    def poll(self) -> None:
        """One turn of the driver."""
        ended = [
            fd
            for fd in self.fds
            if (pid := self.world.watches.get(fd)) in self.world.ended
            and pid not in self.world.invisible
        ]
        self.mesh.poll(ended)

    def session(self, other: Member) -> Session:
        """The session with another member."""
        return self.mesh.sessions[other.incarnation]

    def peers(self) -> list[str]:
        """Names of the peers that told their subscriptions."""
        sessions = self.mesh.sessions.values()
        return sorted(s.name for s in sessions if s.introduced)

    # -- the application's calls ----------

    def subscribe(
        self,
        topic: str,
        keep: int | None = None,
        depth: int = 1000,
        window_bytes: int = 1 << 28,
        zero_copy: bool = False,
    ) -> Subscription:
        mesh = self.mesh
        subscription = mesh.subscriber.subscribe(
            topic,
            keep,
            depth,
            window_bytes,
            zero_copy,
            None,
            mesh.publisher.topic(topic).stats,
            list(mesh.sessions.values()),
        )
        mesh.pump(self.world.clock(), flush=True)
        return subscription

    def unsubscribe(self, topic: str) -> None:
        self.mesh.subscriber.unsubscribe(topic, list(self.mesh.sessions.values()))
        self.mesh.pump(self.world.clock(), flush=True)

    def publish(
        self,
        name: str,
        payload: bytes,
        retain: bool = False,
        areas: Sequence[int] = (),
    ) -> bool:
        """Publish if there is credit; the payload's memory is wiped on return.

        Args:
            areas: Sizes of the last parts of the payload, which are on devices.
        """
        mesh = self.mesh
        topic = mesh.publisher.topic(name)
        host = payload[: len(payload) - sum(areas)]
        memory = bytearray(host[HEADER_BYTES:])
        buffers = (memoryview(memory),) if memory else ()
        tensors = tensors_of(payload[len(host) :], areas)
        frames = Frames(
            payload[:HEADER_BYTES],
            buffers,
            len(payload),
            frozenset(),
            tuple(map(area_of, DEVICES, tensors)),
        )
        now = self.world.clock()
        mesh.publisher.check(topic, frames)
        if not (buffers or retain or areas) and topic.gate.admit(now, payload):
            return True
        if not topic.has_credit():
            return False
        block = None
        lender = self.link.lender
        if (
            lender is not None
            and len(payload) > publisher_module.INLINE_BYTES
            and not areas
        ):
            followed = not retain and mesh.publisher.is_followed(topic)
            block = lender.take(len(payload), followed)
            if block is None:
                if mesh.publisher.borrowers(topic):
                    return False
            elif block.counter is None:  # otherwise written once it was announced
                frames.pack_into(block.area)
        message = mesh.publisher.publish(topic, frames, now, retain, now, block=block)
        mesh.publisher.own(topic, message, list(mesh.sessions.values()))
        memory[:] = b"\xee" * len(memory)
        for tensor in tensors:
            tensor.fill_(0xEE)
        topic.open_gate(now, now)
        return True

    def recv(self) -> Got | MessagesLost | None:
        inbox = self.mesh.subscriber.inbox
        item = None
        try:
            item = self.mesh.subscriber.take()
            inbox.hand_over()
        except BaseException:
            if not inbox.undo_take() and item is not None:
                inbox.put_back(item)
            raise
        if item is None or isinstance(item, MessagesLost):
            return item
        peer = item.source.session.peer
        if isinstance(item.area, Spread):
            self.landed += 1
            landed = [area.claim().numpy().tobytes() for area in item.area.areas]
            content = b"".join((item.area.host, *landed))
        else:
            content = bytes(item.area)
        if self.viewing and not isinstance(item.area, Spread):
            self.views.append((item.area, content))
        return Got(
            item.source.subscription.topic,
            peer.name,
            peer.incarnation,
            item.sequence,
            content,
        )

    def recv_all(self) -> list[Got | MessagesLost]:
        return list(iter(self.recv, None))

    def payloads(self) -> list[bytes]:
        """Payloads of all that is in the inbox; notices of loss are not expected."""
        items = self.recv_all()
        assert not any(isinstance(item, MessagesLost) for item in items), items
        return [item.payload for item in items if isinstance(item, Got)]

    def newest(self, topic: str) -> int:
        """Sequence of the last message this member published on a topic."""
        return self.mesh.publisher.topic(topic).newest


class World:
    """Members, their network, their processes and their clock.

    Args:
        lends: Members whose messages others of them read in place, and how many bytes
            of memory each has for that.
        carries: Of how many of `DEVICES` tensors travel from and to each member.
        wholes: Members whose links carry messages as one body.
        leads: What such bodies begin with, for one connection after the other.
    """

    def __init__(
        self,
        *names: str,
        lends: Mapping[str, int] | None = None,
        carries: Mapping[str, int] | None = None,
        wholes: str = "",
        leads: Sequence[int] = (0,),
        **options: object,
    ) -> None:
        self.net = ScriptedNet(leads)
        self.wholes = wholes
        self.lends = lends or {}
        self.carries = carries or {}
        self.poller = Poller()
        self.now = 1000.0
        self.options = options
        self.chunk_bytes = CHUNK_BYTES
        self.piece_bytes = PIECE_BYTES
        self.members: dict[str, Member] = {}
        self.ended: set[int] = set()
        self.invisible: set[int] = set()
        self.watches: dict[int, int] = {}
        self._generations: dict[str, int] = {}
        self._pids = itertools.count(100)
        self._fds = itertools.count(5000)
        self.poller.close()
        for name in names:
            self.join(name)
        self.settle()

    def close(self) -> None:
        """Free what is not only memory of Python's."""
        for member in self.members.values():
            member.views.clear()
            member.mesh.close()
            for conn in member.link.conns:
                conn.mappings.clear()
            if member.link.lender is not None:
                member.link.lender.close()
        for conn in self.net.conns:
            conn.mappings.clear()
        self.members.clear()
        self.net.conns.clear()

    def clock(self) -> float:
        return self.now

    def __getitem__(self, name: str) -> Member:
        return self.members[name]

    def _watch(self, process: ProcessId) -> Watch | None:
        return ScriptedWatch(self, process.pid, next(self._fds))

    def config(self, key: str, **options: object) -> Config:
        """A configuration for the next life of a name."""
        generation = self._generations.get(key, 0) + 1
        self._generations[key] = generation
        pid = next(self._pids)
        values: dict[str, object] = {
            "group": "g",
            "name": key,
            "incarnation": incarnation(key, generation),
            "backend": "script",
            "process": ProcessId("host", pid, "boot", 1, 1, pid),
            "since": self.now,
            "generation": generation,
            "addresses": [f"script://{key}-{generation}"],
            "secret": b"secret",
            "watch": self._watch,
        }
        return Config(**{**values, **self.options, **options})  # type: ignore[arg-type]

    def add(self, key: str, **options: object) -> Member:
        """Start a member that knows nobody; its name is `key`, unless an option."""
        config = self.config(key, **options)
        member = self.members[key] = Member(self, config.name, config)
        return member

    def join(self, key: str, **options: object) -> Member:
        """Start a member that dials everyone who is there."""
        others = [m for k, m in self.members.items() if k != key]
        member = self.add(key, **options)
        for other in others:
            member.dial(other)
        return member

    # -- what happens ----------

    def kill(self, name: str, *, visible: bool = True) -> Member:
        """End a member's process; what it sent is still on its way."""
        member = self.members.pop(name)
        (self.ended if visible else self.invisible).add(member.pid)
        self.net.links.pop(member.link.address, None)
        for conn in list(member.link.conns):
            conn.close()
            conn.mappings.clear()
        if member.link.lender is not None:
            member.link.lender.close()
        return member

    def leave(self, name: str) -> Member:
        """A member closes, with little patience; its process goes on."""
        member = self.members[name]
        member.mesh.leave("left")
        self.advance(0.5)
        del self.members[name]
        member.mesh.close()
        return member

    def stall(self, name: str) -> None:
        """The member's process is not scheduled until `unstall`."""
        self.members[name].stalled = True

    def unstall(self, name: str) -> None:
        self.members[name].stalled = False

    def partition(self, one: str, other: str) -> None:
        """Nothing moves between two members until `heal`; nobody is told."""
        pair = (self[one].link.address, self[other].link.address)
        self.net.separated.add(frozenset(pair))

    def heal(self) -> None:
        self.net.separated.clear()

    def cut(self, one: str, other: str, lose_one: int = 0, lose_other: int = 0) -> None:
        """Break the connections between two members and report it to both."""
        for conn in self.net.between(self[one].link, self[other].link):
            self.net.cut(conn, (lose_one, lose_other))

    # -- time ----------

    def running(self) -> list[Member]:
        return [m for m in self.members.values() if not m.stalled]

    def pump(self, first: bool = True) -> None:
        """Deliver and handle everything, until nothing moves; no time passes.

        Args:
            first: Whether somebody may have something to send that nobody asks for.
        """
        for turn in range(10_000):
            moved = self.net.deliver_all()
            polled = False
            for member in self.running():
                news = member.link.has_news()
                at_once = first and not turn
                if news or at_once or member.mesh.next_deadline() <= self.now:
                    member.poll()
                    polled = True
                moved |= news
            if not polled or not (moved or self.net.steps()):
                return
        raise AssertionError("the members never come to rest")

    def advance(self, seconds: float) -> None:
        """Let time pass; everybody is polled when the mesh says so, no earlier."""
        end = self.now + seconds
        idle = 0
        first = True
        while True:
            self.pump(first)
            first = False
            if self.now >= end:
                return
            due = min((m.mesh.next_deadline() for m in self.running()), default=end)
            idle = idle + 1 if due <= self.now else 0
            assert idle < 100, "next_deadline stays in the past"
            self.now = min(max(due, self.now + 1e-4), end)

    def settle(self) -> None:
        """Let batches, answers and first dials come through."""
        self.advance(0.05)


def subscribed(
    *names: str,
    by: Sequence[str] | None = None,
    topics: Sequence[str] = ("t",),
    keep: int | None = None,
    depth: int = 1000,
    window_bytes: int = 1 << 28,
    **options: Any,
) -> World:
    """A world of these members; subscribed are some, else all but the first."""
    world = World(*names, **options)
    for name in names[1:] if by is None else by:
        for topic in topics:
            world[name].subscribe(topic, keep, depth, window_bytes)
    world.settle()
    return world
