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
        "_asked",
        "_short",
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
        self._asked = 0
        self._short: dict[Source, None] = {}  # in the order in which they became so
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

        While others hold too much of the window, a publisher gets what is left, and
        always at least one message; see `reclaim`.
        """
        if source.asked is not None:
            return False  # its totals may be going down
        before = (source.granted_messages, source.granted_bytes)
        held_messages, held_bytes = self.held()
        target, target_bytes = self._share(source)
        theirs = source.granted_messages - source.consumed_messages
        source.granted_messages += max(
            min(target - theirs, self.depth - held_messages), 1 - theirs, 0
        )
        source.grant_at_messages = source.granted_messages - target // 2
        source.at_once = max(1, min(MOST_AT_ONCE, target // 8))
        target = target_bytes
        theirs = source.granted_bytes - source.consumed_bytes
        # Below zero after a message that was larger than what was left of the grant.
        free = self.window_bytes - held_bytes - min(0, theirs)
        source.granted_bytes += max(min(target - theirs, free), 1 - theirs, 0)
        source.grant_at_bytes = source.granted_bytes - target // 2
        return before != (source.granted_messages, source.granted_bytes)

    def due(self, source: Source) -> list[Source]:
        """Whose credit to look at: a publisher's, and then who has too little."""
        for short in list(self._short):
            if self.sources.get(short.session) is not short:
                del self._short[short]
        return [source, *(short for short in self._short if short is not source)]

    def reclaim(self, source: Source) -> list[Source]:
        """Whom to ask for credit back, where a publisher has too little of the window.

        Those are asked that have more than their share and leave it unused: they had
        it before there were so many, and may not publish again for long.
        """
        target, target_bytes = self._share(source)
        if not source.active or (
            source.granted_messages - source.consumed_messages >= target // 2
            and source.granted_bytes - source.consumed_bytes >= target_bytes // 2
        ):
            self._short.pop(source, None)
            return []
        self._short[source] = None
        asked = []
        for other in self.sources.values():
            if other is source or other.asked is not None or not other.confirmed:
                continue
            target, target_bytes = self._share(other)
            messages = other.consumed_messages + target
            nbytes = other.consumed_bytes + target_bytes
            _, arrived, arrived_bytes = other.arrivals[0]
            used = max(messages, arrived, other.used_messages)
            used_bytes = max(nbytes, arrived_bytes, other.used_bytes)
            if (
                other.granted_messages - used > target // 4
                or other.granted_bytes - used_bytes > target_bytes // 4
            ):
                self._asked += 1
                other.asked = wire.Reclaim(self.id, self._asked, messages, nbytes)
                asked.append(other)
        return asked

    def returned(self, source: Source, answer: wire.Reclaim) -> bool:
        """A publisher says what it has now; False if that is said again.

        Raises:
            Malformed: It cannot be an answer to what was asked.
        """
        asked = source.asked
        if asked is None or answer.serial != asked.serial:
            return False
        for wanted, now, before in (
            (asked.messages, answer.messages, source.granted_messages),
            (asked.nbytes, answer.nbytes, source.granted_bytes),
        ):
            if not min(wanted, before) <= now <= before:
                raise wire.Malformed(
                    f"credit of {now} returned, not {wanted}..{before}"
                )
        if answer.messages > asked.messages:
            source.used_messages = answer.messages
        if answer.nbytes > asked.nbytes:
            source.used_bytes = answer.nbytes
        source.granted_messages = answer.messages
        source.granted_bytes = answer.nbytes
        source.asked = None
        return True

    def _share(self, source: Source) -> tuple[int, int]:
        """A publisher's part of the window, in messages and in bytes."""
        sources = len(self.sources)
        active = sum(other.active for other in self.sources.values())
        return (
            _share(self.depth, sources, active, source.active),
            _share(self.window_bytes, sources, active, source.active),
        )


def _share(window: int, sources: int, active: int, is_active: bool) -> int:
    """One publisher's part of a window.

    Those that have published nothing yet get little; those that publish divide the
    rest.
    """
    idle = max(1, min(window // (2 * sources), max(64, window // 16)))
    if not is_active:
        return idle
    return max(1, (window - (sources - active) * idle) // active)
