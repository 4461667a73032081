"""How a window is divided again when one publisher more joins those that have it."""

from __future__ import annotations

import contextlib
import os
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import Parcel, ScriptedConn
from world import World

import mq
from mq.mesh import wire

WINDOW = 400
NAMES = st.sampled_from("abcdefgh")
BOUNDS = pytest.mark.parametrize("size", [1, 1000], ids=["messages", "bytes"])


class Group(World):
    """A receiver `r` and its publishers.

    Args:
        size: Of messages; the window holds `WINDOW` of them, by number or in bytes.

    Attributes:
        asked: How often who was asked for credit back, by address.
    """

    def __init__(self, size: int) -> None:
        super().__init__("r")
        self.payload = bytes(size)
        self.asked: Counter[str] = Counter()
        self.net.watcher = self._count

    def _count(self, conn: ScriptedConn, parcel: Parcel) -> None:
        if parcel[0][0] == wire.RECLAIM:
            self.asked[conn.link.address] += 1

    def subscribe(self) -> None:
        if len(self.payload) == 1:
            self["r"].subscribe("t", depth=WINDOW)
        else:
            nbytes = WINDOW * len(self.payload)
            self["r"].subscribe("t", depth=10 * WINDOW, window_bytes=nbytes)

    def publish(self, name: str, most: int) -> int:
        """Publish so many, or as many as there is credit for; how many that was."""
        count = 0
        while count < most and self[name].publish("t", self.payload):
            count += 1
        return count

    def fill(self, name: str) -> int:
        """Publish, and let everything arrive, until there is no credit."""
        count = 0
        while more := self.publish(name, WINDOW + 1):
            count += more
            self.settle()
        return count

    def read_all(self) -> None:
        self["r"].payloads()
        self.settle()

    def check_newcomer(self) -> None:
        """Who begins to publish now gets its share, and then all is in balance."""
        self.join("newcomer")
        self.settle()
        before = self.asked.copy()
        self.publish("newcomer", 1)
        self.settle()
        self.read_all()
        names = [name for name in self.members if name != "r"]
        for _ in range(2):
            assert self.fill("newcomer") >= WINDOW // len(names) // 2
            self.read_all()
        assert max((self.asked - before).values(), default=0) <= 1
        for name in names:  # those that have never published get more when they do
            self.fill(name)
            self.read_all()
        balanced = self.asked.copy()
        for _ in range(3):
            unread = sum(map(self.fill, names))
            assert unread <= WINDOW + len(names)
            self.read_all()
        assert self.asked == balanced
        assert self["r"].mesh.stats.malformed == 0
        self.close()


@BOUNDS
@pytest.mark.parametrize("unread", [1, WINDOW])
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("count", [1, 5, 12, 20])
def test_a_newcomer_gets_its_share_from_any_number_that_have_the_window(
    count: int, together: bool, unread: int, size: int
) -> None:
    """Each has little more than its new share, and need not publish again."""
    group = Group(size)
    group.subscribe()
    for number in range(count):
        group.join(f"p{number}")
        group.settle()
        if not together:
            group.publish(f"p{number}", unread)
            group.settle()
            group.read_all()
    if together:
        for number in range(count):
            group.publish(f"p{number}", unread)
        group.settle()
    if unread == 1:
        group.read_all()
    group.check_newcomer()


COUNTS = st.sampled_from((1, 3, 40, WINDOW))
STEPS = st.one_of(
    st.tuples(st.sampled_from(("join", "join", "join", "kill")), NAMES, st.just(0)),
    st.tuples(st.just("publish"), NAMES, COUNTS),
    st.tuples(st.just("publish"), NAMES, st.just(1)),
    st.tuples(st.just("read"), st.just("r"), COUNTS),
    st.tuples(st.just("deliver"), st.just(""), st.integers(0, 99)),
    st.tuples(st.sampled_from(("subscribe", "settle")), st.just(""), st.just(0)),
)


def follow(group: Group, what: str, name: str, count: int) -> None:
    """Do a step of a script, if it can be done."""
    if what == "subscribe":
        if not group["r"].mesh.subscriber.topics:
            group.subscribe()
    elif what == "settle":
        group.settle()
    elif what == "deliver":
        if steps := group.net.steps():
            group.net.deliver(steps[count % len(steps)])
            for member in group.running():
                member.poll()
    elif what == "join":
        if name not in group.members:
            group.join(name)
    elif name in group.members:
        if what == "kill":
            group.kill(name)
        elif what == "publish":
            group.publish(name, count)
        else:
            for _ in range(count):
                group["r"].recv()


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(STEPS, min_size=40, max_size=80), st.sampled_from((1, 1000)))
def test_a_newcomer_gets_its_share_whatever_was_before(
    script: list[tuple[str, str, int]], size: int
) -> None:
    """In any order of joining, publishing, reading and dying."""
    group = Group(size)
    for step in script:
        follow(group, *step)
    follow(group, "subscribe", "", 0)
    group.settle()
    group.check_newcomer()


def test_a_newcomer_gets_its_share_over_a_wire() -> None:
    """As on the scripted network."""
    name = f"newcomer-{os.getpid()}"
    with contextlib.ExitStack() as stack:

        def member() -> mq.MQ:
            return stack.enter_context(mq.connect("tcp", group=name))

        receiver = member()
        receiver.subscribe("t", depth=WINDOW)
        for queue in [member() for _ in range(7)]:
            queue.publish("t", 0, timeout=20.0)
        for _ in range(7):
            receiver.recv(timeout=20.0)
        newcomer = member()
        for _ in range(WINDOW // 8 // 2):
            newcomer.publish("t", 0, timeout=20.0)
