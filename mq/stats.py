"""Counters behind `MQ.stats`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from mq.mesh.mesh import Mesh
    from mq.mesh.session import Session


@dataclass(slots=True)
class TopicStats:
    """Counters of one topic of this member.

    Attributes:
        published, published_bytes: Messages committed by this member.
        nobody: Messages published while nobody was subscribed.
        undelivered: Messages that a subscriber was still to have when it was lost, or
            this member closed; of a keep-last subscription those alone that none had
            replaced.
        blocked_seconds: Time that calls of `publish` waited for credit, or for memory.
        received, received_bytes: Messages that `recv` returned or refused.
        dropped: Messages that a keep-last subscription replaced by newer ones.
        lost: Messages that `recv` reported as lost, or as too large to be sent.
        refused: Of those received, which could not be decoded, also for want of memory,
            or were not trusted.
        discarded: Messages that had come and were never taken, when unsubscribing or
            closing. What is on its way then is in no counter of either member.

    `stats()` adds, by name of each subscriber, `queued`: how many messages it is still
    to have, which would be `undelivered` if it were lost now; and of those that keep
    all `credit`: how many more may be published before it has read some.
    """

    published: int = 0
    published_bytes: int = 0
    nobody: int = 0
    undelivered: int = 0
    blocked_seconds: float = 0.0
    received: int = 0
    received_bytes: int = 0
    dropped: int = 0
    lost: int = 0
    refused: int = 0
    discarded: int = 0


@dataclass(slots=True)
class PeerStats:
    """Counters of one session with a peer; in the next they begin anew.

    Attributes:
        sent_bytes, received_bytes: Bytes of frames, heads and bodies.
        sent_frames, received_frames: Frames in either direction.
        resent_frames: Frames sent again after a broken connection.
        duplicate_frames: Frames that arrived again and were dropped.
        connections: Connections of this session so far; more than 1: it was resumed.
        malformed: Frames that were not of the protocol.

    `stats()` adds `lent_bytes`: messages in this member's memory that the peer has not
    read, or still has views of; and `wire`: the other end of the connection, or of the
    last one while there is none, by which one sees what `auto` chose for this peer. To
    the member that dialled it is the peer's address. To the one that accepted it is
    its host and port, or over a socket file what the kernel tells of it, such as
    ``ipc://(pid 1234 of user 1000)``.
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    sent_frames: int = 0
    received_frames: int = 0
    resent_frames: int = 0
    duplicate_frames: int = 0
    connections: int = 0
    malformed: int = 0


@dataclass(slots=True)
class MeshStats:
    """Counters of the member as a whole.

    Attributes:
        malformed: Frames dropped because they were not of the protocol, any peer; and
            connections that ended before they had begun, as those of port scanners do,
            and after an outage or a stall those that members dialled in vain.
        unauthenticated: Connections whose peer did not prove the secret, or says that
            its own is another.
        refused: Connections refused for another reason, or that never greeted.
        forgotten: Sessions given up without proof that the peer was dead.
        lost_connections: Connections that broke, after both had begun: of two members
            that dial each other at once one may close one that the other has begun.
    """

    malformed: int = 0
    unauthenticated: int = 0
    refused: int = 0
    forgotten: int = 0
    lost_connections: int = 0


class LendingStats(NamedTuple):
    """Counters of a `mq.lending.Lender`.

    Attributes:
        limit_bytes: How much it may take from the system.
        mapped_bytes: How much it has, or is about to have.
        in_use_bytes: Blocks of messages on their way, unread or viewed, and of loans.
        segments: How many memfds that is.
        waits: How many times `publish` or `loan` found no memory.
    """

    limit_bytes: int
    mapped_bytes: int
    in_use_bytes: int
    segments: int
    waits: int


_TOPIC: Final = tuple(field.name for field in fields(TopicStats))
_counters: Final = attrgetter(*_TOPIC)  # a tenth of the time of `asdict`, of thousands
_UNUSED: Final = _counters(TopicStats())


def _of_peer(session: Session) -> dict[str, int | str]:
    return {
        "wire": session.wire,
        **asdict(session.stats),
        "lent_bytes": session.lent_bytes(),
    }


def of_mesh(mesh: Mesh, waited: Mapping[str, float]) -> dict[str, Any]:
    """The counters of a member, as plain dictionaries; the lock is held.

    Args:
        waited: For how many seconds calls that still wait have done so, by topic.
    """
    inbox = mesh.subscriber.inbox
    inbox.settle()
    replaced = inbox.replaced()
    topics = {}
    for name, topic in mesh.publisher.topics.items():
        topic.stats.published = topic.newest + 1
        topic.stats.published_bytes = topic.total()
        counted = _counters(topic.stats)
        if topic.feeds or name in mesh.subscriber.topics or counted != _UNUSED:
            counters: dict[str, Any] = dict(zip(_TOPIC, counted, strict=True))
            topics[name] = counters
            counters["blocked_seconds"] += waited.get(name, 0.0)
            counters["dropped"] += replaced[name]
            feeds = {feed.session.name: feed for feed in topic.feeds}
            counters["queued"] = {n: f.lacks(f.mark()) for n, f in feeds.items()}
            counters["credit"] = {
                n: f.credit() for n, f in feeds.items() if f.keep is None
            }
    whole = asdict(mesh.stats)
    whole["malformed"] += sum(link.malformed for link in mesh.links)
    return {
        "topics": topics,
        "peers": {s.name: _of_peer(s) for s in mesh.sessions.values()},
        "mesh": whole,
        "inbox": len(inbox),
        "shared": [
            link.lender.stats()._asdict()
            for link in mesh.links
            if link.lender is not None
        ],
    }
