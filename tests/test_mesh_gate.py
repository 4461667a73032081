"""What leaves without a look at credit and limits was looked at before."""

from __future__ import annotations

import pytest
from world import World

from mq.errors import MessageTooLarge
from mq.mesh.outgoing import BATCH_MESSAGES


def held(*topics: str, **options: object) -> World:
    """A world in which `b` is subscribed, and a first message of `a` is unanswered."""
    world = World("a")
    world.join("b", **options)
    for topic in topics:
        world["b"].subscribe(topic, depth=1 << 16)
    world.settle()
    for topic in topics:
        assert world["a"].publish(topic, b"active")
        world.settle()
    assert len(world["b"].payloads()) == len(topics)
    world.settle()
    assert world["a"].publish(topics[0], b"first")
    return world


def test_a_limit_below_that_of_small_messages_holds_behind_a_batch_too() -> None:
    """A batch that is held opens the topic for messages of its kind, not for larger."""
    world = held("t", max_message_bytes=1000)
    assert world["a"].publish("t", b"held")
    assert not world["a"].mesh.publisher.topic("t").gate.admit(world.now, bytes(1001))
    with pytest.raises(MessageTooLarge, match="'b': 1000"):
        world["a"].publish("t", bytes(1001))
    world.settle()
    assert world["b"].payloads() == [b"first", b"held"]
    assert world["b"].mesh.stats.malformed == 0


def test_what_follows_on_a_topic_whose_batch_has_left_is_not_left_behind() -> None:
    """Though another topic's, of which a part had no room in it, is still held."""
    world = held("t", "u")
    a, sent = world["a"], {"t": 1, "u": 0}

    def publish(topic: str, count: int) -> None:
        for _ in range(count):
            assert a.publish(topic, b"%d" % sent[topic])
            sent[topic] += 1

    publish("t", 1)
    publish("u", 200)
    publish("t", BATCH_MESSAGES - 1)  # a full batch of it leaves
    (feed,) = a.mesh.publisher.topic("t").feeds
    assert feed.next > a.newest("t")
    assert a.session(world["b"]).batch_at is not None
    publish("t", 1)
    world.settle()
    assert len(world["b"].payloads()) == sum(sent.values())
    assert not a.mesh.publisher.unsettled(a.mesh.marks())
