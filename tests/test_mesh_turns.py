"""Large messages of several topics on one connection: whose is sent next."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from world import WHOLE_BYTES, Got, World

from mq.frames import ALIGNMENT
from mq.mesh import wire
from mq.mesh.backlog import Backlog
from mq.mesh.feed import Feed
from mq.mesh.frame import Frame

SLACK_BYTES = 50
LARGEST = WHOLE_BYTES + ALIGNMENT + SLACK_BYTES
"""A body, what may precede the message in it, and what turns do not look at."""
WAITING = 30
"""Messages of which some always wait, whatever the connection takes."""


class Turns:
    """From `a` to `b`, who is subscribed to several topics.

    Attributes:
        framed: Topics of the frames that were made, one after another.
        nbytes: Of large messages of each topic, how much was framed.
        published, got: What was, on each topic.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, wholes: str, *topics: str):
        monkeypatch.setattr("mq.mesh.publisher.INLINE_BYTES", 128)
        monkeypatch.setattr("mq.mesh.backlog.SLACK_BYTES", SLACK_BYTES)
        self.world = world = World("a", "b", wholes=wholes)
        self.a, self.b = world["a"], world["b"]
        self.a.link.capacity = 4
        for topic in topics:
            self.b.subscribe(topic, keep=1 if topic == "newest" else None)
        world.settle()
        self.session = self.a.session(self.b)
        self.feeds = {f.topic.name: f for f in self.session.feeds.values()}
        self.framed: list[str] = []
        self.nbytes: Counter[str] = Counter()
        self.published: dict[str, list[bytes]] = {topic: [] for topic in topics}
        self.got: dict[str, list[bytes]] = {topic: [] for topic in topics}
        self._chance = random.Random(0)
        append = Backlog._append

        def watched(backlog: Backlog, frame: Frame) -> None:
            append(backlog, frame)
            if backlog is self.session and frame.kind == wire.DATA:
                assert frame.completes
                self.framed.append(
                    "".join(feed.topic.name for feed, _ in frame.completes)
                )
            elif backlog is self.session and frame.kind == wire.CHUNK:
                subscription = wire.CHUNK_HEAD.unpack(frame.parts[0])[0]
                topic = self.session.feeds[subscription].topic.name
                self.framed.append(topic)
                self.nbytes[topic] += frame.body_nbytes + len(frame.parts[1])
                self.made()

        monkeypatch.setattr(Backlog, "_append", watched)

    def made(self) -> None:
        """A frame of a large message was made."""

    def publish(self, topic: str, nbytes: int) -> None:
        assert nbytes <= WHOLE_BYTES
        payload = self._chance.randbytes(nbytes)
        assert self.a.publish(topic, payload)
        self.published[topic].append(payload)

    def step(self) -> None:
        """Whoever can go on does; what is under way arrives in part."""
        steps = self.world.net.steps()
        for conn in steps[: self._chance.randint(1, 2)]:
            self.world.net.deliver(conn)
        self.world.now += 0.0002
        self.b.poll()
        self.a.poll()
        self._receive()

    def settle(self) -> None:
        """Everything arrives."""
        self.world.settle()
        self._receive()
        self.world.settle()

    def _receive(self) -> None:
        for item in self.b.recv_all():
            assert isinstance(item, Got)
            self.got[item.topic].append(item.payload)


WHOLES = pytest.mark.parametrize("wholes", ["", "ab"], ids=["cut", "whole"])


@WHOLES
@pytest.mark.parametrize("sizes", [(130, 400), (130, 130), (1500, 1500)])
def test_topics_whose_messages_always_wait_get_as_many_bytes(
    wholes: str, sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However large the messages of each are."""

    class Watched(Turns):
        def made(self) -> None:
            if not self.feeds["mid"].queued():
                self.nbytes.clear()  # they begin together
            difference = self.nbytes["large"] - self.nbytes["mid"]
            assert abs(difference) <= LARGEST

    turns = Watched(monkeypatch, wholes, "large", "mid")
    chance = random.Random(1)
    for _ in range(400):
        for topic, (least, most) in (("large", (1500, 1500)), ("mid", sizes)):
            while turns.feeds[topic].queued() < WAITING:
                turns.publish(topic, chance.randint(least, most))
        turns.step()
    assert turns.nbytes["mid"] > 8 * LARGEST
    turns.settle()
    assert turns.got == turns.published


class Claims(Turns):
    """With what each topic may claim as long as it has messages to be sent.

    Attributes:
        since: For each topic that has some, the bytes of all when it began to.
    """

    since: dict[str, Counter[str]]

    def made(self) -> None:
        waits = {name for name, feed in self.feeds.items() if self._has_large(feed)}
        for name in list(self.since):
            if name not in waits:
                del self.since[name]
        for name in waits:
            self.since.setdefault(name, Counter(self.nbytes))
        for name, before in self.since.items():
            own = self.nbytes[name] - before[name]
            for other in self.feeds:
                others = self.nbytes[other] - before[other]
                assert others <= own + 2 * LARGEST, (name, other)

    @staticmethod
    def _has_large(feed: Feed) -> bool:
        head = feed.head()
        return head is not None and not isinstance(head.data, bytes)


@WHOLES
@pytest.mark.parametrize("seed", range(15))
def test_nobody_starves_beside_large_messages(
    wholes: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has a message gets as many bytes as others, small ones go in between."""
    Claims.since = {}
    turns = Claims(monkeypatch, wholes, "large", "mid", "mixed", "tiny", "newest")
    chance = random.Random(seed)
    for _ in range(200):
        while turns.feeds["large"].queued() < 3:
            turns.publish("large", chance.randint(1000, 1500))
        for topic, most in (("mid", 400), ("mixed", 1500), ("newest", 1500)):
            if chance.random() < 0.3:
                turns.publish(
                    topic, chance.randint(1 if topic == "mixed" else 130, most)
                )
        if chance.random() < 0.3:
            turns.publish("tiny", chance.randint(1, 20))
        if chance.random() < 0.1:  # as an urgent one has it
            turns.a.mesh.pump(turns.world.clock(), flush=True)
        turns.step()
    turns.settle()
    newest = turns.got.pop("newest")
    assert len(newest) > 5
    published = turns.published.pop("newest")
    assert newest[-1] == published[-1]
    assert newest == [payload for payload in published if payload in newest]
    assert turns.got == turns.published
    assert turns.framed.count("tiny") > 5


def test_a_message_overtakes_what_others_have_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Several, too, where one of the others' is as large as all of them."""
    turns = Turns(monkeypatch, "ab", "large", "mid")
    for _ in range(6):
        turns.publish("mid", 130)
        turns.publish("large", 1500)
        turns.settle()
        for _ in range(8):
            turns.publish("large", 1500)
        del turns.framed[:]
        for _ in range(6):
            turns.publish("mid", 200)
        turns.settle()
        assert turns.framed[:7].count("mid") == 6


def test_small_messages_wait_for_one_large_one_of_each_topic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever those have had before."""
    turns = Turns(monkeypatch, "ab", "large", "mid", "tiny")
    for _ in range(40):
        for topic, nbytes in (("large", 1500), ("mid", 300)):
            while turns.feeds[topic].queued() < WAITING:
                turns.publish(topic, nbytes)
        del turns.framed[:]
        turns.publish("tiny", 10)
        while turns.feeds["tiny"].queued():
            turns.step()
        assert turns.framed.index("tiny") <= 2


@pytest.mark.parametrize("others", [300, 10, 5000], ids=["large", "small", "any"])
def test_many_topics_are_not_looked_at_for_each_large_message(
    others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few of them are, for each frame and topic."""
    monkeypatch.setattr("mq.mesh.publisher.INLINE_BYTES", 128)
    monkeypatch.setattr("mq.mesh.backlog.SLACK_BYTES", 3000)
    chance = random.Random(0)
    world = World("a", "b")
    a, b = world["a"], world["b"]
    names = [f"topic {number}" for number in range(300)]
    for name in ("large", *names):
        b.subscribe(name)
    world.settle()
    a.link.capacity = 1
    for _ in range(3):
        assert a.publish("large", bytes(1500))
    looks, slot = [0], Feed.served  # type: ignore[misc]

    def get(feed: Feed) -> int:
        looks[0] += 1
        return slot.__get__(feed)  # type: ignore[no-any-return, attr-defined]

    monkeypatch.setattr(Feed, "served", property(get, slot.__set__))  # type: ignore[attr-defined]
    for _ in range(2):
        for name in names:
            nbytes = others if others < 1500 else chance.randint(10, 1500)
            assert a.publish(name, bytes(nbytes))
        assert a.publish("large", bytes(1500))
    session = a.session(b)
    before, looks[0] = session.number, 0
    a.link.capacity = 10_000
    world.settle()
    frames = session.number - before
    assert len(b.recv_all()) == 2 * len(names) + 5
    assert looks[0] <= 4 * (frames + 2 * len(names)), frames


def test_who_was_alone_meanwhile_owes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor has who comes back a claim to what went meanwhile."""
    turns = Turns(monkeypatch, "ab", "one", "two")
    for _ in range(8):
        turns.publish("two", 140)
    turns.publish("one", 1500)
    turns.settle()
    for _ in range(20):
        turns.publish("two", 140)
        turns.settle()
    turns.a.link.capacity = 1
    for _ in range(8):
        turns.publish("two", 140)
        turns.publish("one", 140)
    del turns.framed[:]
    turns.settle()
    assert turns.framed[:6].count("one") == 3
