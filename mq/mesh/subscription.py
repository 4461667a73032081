"""Subscriptions, each with a window that it divides among its publishers as credit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mq.mesh import wire
from mq.mesh.incoming import Source
from mq.stats import TopicStats

if TYPE_CHECKING:
    from mq.mesh.session import Session

MOST_AT_ONCE: Final = 128
"""Messages that `recv` decodes ahead at most."""


class Subscription:
    """One subscription of this member, over all publishers.

    Attributes:
        id: Never used again by this member, so that an old stream is not mistaken.
        keep: None for keep-all, else the n of keep-last.
        depth: Messages that all publishers together may have in flight or unread.
        window_bytes: The same in bytes.
        sources: The publishers that were told of this subscription.
        orphans: Publishers that are gone while messages of theirs are unread.
    """

    __slots__ = (
        "depth",
        "device",
        "id",
        "keep",
        "options",
        "orphans",
        "sources",
        "stats",
        "topic",
        "window_bytes",
        "zero_copy",
    )

    def __init__(
        self,
        id: int,
        topic: str,
        keep: int | None,
        depth: int,
        window_bytes: int,
        zero_copy: bool,
        device: str | None,
        stats: TopicStats,
    ) -> None:
        self.id = id
        self.topic = topic
        self.keep = keep
        self.depth = depth
        self.window_bytes = window_bytes
        self.zero_copy = zero_copy
        self.device = device
        self.stats = stats
        self.sources: dict[Session, Source] = {}
        self.orphans: list[Source] = []
        self.options = (keep, depth, window_bytes, zero_copy, device)

    def add_source(self, session: Session, seen: int = -1) -> wire.Subscribe:
        """Expect messages of this publisher; what to tell it.

        Args:
            seen: Sequence of the last message of an earlier session, or -1.
        """
        source = Source(self, session)
        self.sources[session] = source
        self.grant(source)
        return wire.Subscribe(
            self.id,
            self.topic,
            self.keep,
            source.granted_messages,
            source.granted_bytes,
            seen,
            self.follows,
        )

    @property
    def follows(self) -> bool:
        """Whether messages are copied, so that it can begin while they are written."""
        return self.keep is None and not self.zero_copy

    def held(self) -> tuple[int, int]:
        """Messages and bytes that are granted, on their way or unread."""
        if self.orphans:
            self.orphans = [s for s in self.orphans if s.unread()[0]]
        unread = [source.unread() for source in self.orphans]
        messages = sum(n for n, _ in unread)
        nbytes = sum(n for _, n in unread)
        for source in self.sources.values():
            messages += source.granted_messages - source.consumed_messages
            nbytes += max(0, source.granted_bytes - source.consumed_bytes)
        return messages, nbytes

    def grant(self, source: Source) -> bool:
        """Give a publisher what it may have now; whether that is more than before.

        Grants are never revoked. While others hold too much of the window, a publisher
        gets what is left, and always at least one message.
        """
        sources = self.sources.values()
        active = sum(other.active for other in sources)
        before = (source.granted_messages, source.granted_bytes)
        held_messages, held_bytes = self.held()
        target = _share(self.depth, len(sources), active, source.active)
        theirs = source.granted_messages - source.consumed_messages
        source.granted_messages += max(
            min(target - theirs, self.depth - held_messages), 1 - theirs, 0
        )
        source.grant_at_messages = source.granted_messages - target // 2
        source.at_once = max(1, min(MOST_AT_ONCE, target // 8))
        target = _share(self.window_bytes, len(sources), active, source.active)
        theirs = source.granted_bytes - source.consumed_bytes
        # Below zero after a message that was larger than what was left of the grant.
        free = self.window_bytes - held_bytes - min(0, theirs)
        source.granted_bytes += max(min(target - theirs, free), 1 - theirs, 0)
        source.grant_at_bytes = source.granted_bytes - target // 2
        return before != (source.granted_messages, source.granted_bytes)


def _share(window: int, sources: int, active: int, is_active: bool) -> int:
    """One publisher's part of a window.

    Those that have published nothing yet get little, for a grant is never revoked;
    those that publish divide the rest.
    """
    idle = max(1, min(window // (2 * sources), max(64, window // 16)))
    if not is_active:
        return idle
    return max(1, (window - (sources - active) * idle) // active)
