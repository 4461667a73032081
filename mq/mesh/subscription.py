"""Subscriptions, each with a window that it divides among its publishers as credit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mq.mesh import wire
from mq.mesh.incoming import Source
from mq.stats import TopicStats

if TYPE_CHECKING:
    from mq.mesh.session import Session

Share = tuple[int, int]
"""Messages and bytes of a window."""
MOST_AT_ONCE: Final = 128
"""Messages that `recv` decodes ahead at most."""
AT_ONCE_PARTS: Final = 8
"""And one of so many parts of a publisher's share: none of them counts as taken before
the last is."""
GRANT_PARTS: Final = 2
"""Credit is told when one of so many parts of a share was taken: once for many
messages, and the rest lasts until the publisher hears of it."""
LACK_PARTS: Final = 4
"""Who lacks one of so many parts of its share has too little. As long as one has, it is
looked again after as little was taken of the others' messages."""
SILENT_PARTS: Final = 2
"""Those that have published nothing yet have one of so many parts of a window at most,
all together."""
ONE_SILENT_PARTS: Final = 16
"""Each of them has one of so many at most, for a start: who publishes gets a share."""
ONE_SILENT: Final = 64
"""Or so many messages, or bytes, where that is more."""


class Subscription:
    """One subscription of this member, over all publishers.

    Attributes:
        id: Never used again by this member, so that an old stream is not mistaken.
        keep: None for keep-all, else the n of keep-last.
        depth: Messages that all publishers together may have in flight or unread.
        window_bytes: The same in bytes.
        sources: The publishers that were told of this subscription.
        orphans: Publishers that are gone while messages of theirs are unread.
        ended: The same for keep-last.
    """

    __slots__ = (
        "_asked",
        "_short",
        "depth",
        "device",
        "ended",
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
        self.ended: list[Source] = []
        self._asked = 0
        self._short: dict[Source, None] = {}  # in the order in which they became so
        self.options = (keep, depth, window_bytes, zero_copy, device)

    def refuse(self) -> None:
        """Count a message that cannot be decoded, or is not trusted."""
        self.stats.refused += 1

    def add_source(self, session: Session, seen: int = -1) -> wire.Subscribe:
        """Expect messages of this publisher; what to tell it.

        Args:
            seen: Sequence of the last message of an earlier session, or -1.
        """
        source = Source(self, session)
        self.sources[session] = source
        self._give(source, self._shares()[source.active], *self._free())
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

    def end(self) -> None:
        """No publisher sends any more; each source and this refer to each other."""
        for source in self.sources.values():
            source.end()

    def drop_source(self, session: Session) -> None:
        """The publisher is gone."""
        source = self.sources[session]
        source.end()  # messages that are still to be read refer to it
        self._short.pop(source, None)
        if self.keep is not None:  # first: an interrupt before the next is repeated
            lives = dict.fromkeys((*self.ended, source))
            self.ended = [life for life in lives if life.kept]
        del self.sources[session]

    def outlive(self, source: Source) -> None:
        """A message is about to be kept: of the publisher's earlier lives one less is.

        The inbox counts what is gone when it comes to it.
        """
        assert self.keep is not None
        name = source.session.name
        lives = [life for life in self.ended if life.session.name == name]
        room = max(0, self.keep - 1 - len(source.kept))
        for life in reversed(lives):  # the newest first
            while len(life.kept) > room:
                life.kept.popleft()
            room -= len(life.kept)
        self.ended = [life for life in self.ended if life.kept]

    def _free(self) -> Share:
        """What of the window nobody has; less than nothing where it is exceeded."""
        messages, nbytes = self.held()
        return self.depth - messages, self.window_bytes - nbytes

    def divide(self, source: Source | None) -> tuple[list[Source], list[Source]]:
        """Give a publisher what it may have now, and the rest to who has too little.

        While others hold too much of the window, a publisher gets what is left, and
        always at least one message. Then those are asked for credit back that have more
        than their share and leave it unused: they had it before there were so many, and
        may not publish again for long.

        Args:
            source: Whose turn it is; None: of none, but there may be more to give.

        Returns:
            Who has more than before, and who is to be asked.
        """
        if source is None and not self._short:
            return [], []
        shares, free = self._shares(), self._free()
        turns = [] if source is None else [source]
        turns += [short for short in self._short if short is not source]
        given = []
        for turn in turns:
            if turn is source or max(free) > 0:
                left = self._give(turn, shares[turn.active], *free)
                if left is not None:
                    given.append(turn)
                    free = left
            # Also without having been given any: it may be enough of a smaller share.
            if turn.active and self._lacks(turn, shares[True]):
                self._short[turn] = None
            else:
                self._short.pop(turn, None)
        if not self._short:
            return given, []
        # What is taken of the others' messages is for them: it is looked at early.
        few, few_bytes = (max(1, part // LACK_PARTS) for part in shares[True])
        for other in (*self.sources.values(), *self.orphans):
            soon = min(other.consumed_messages + few, other.granted_messages)
            if not other.consumed_messages < other.grant_at_messages <= soon:
                other.grant_at_messages = soon
            soon = min(other.consumed_bytes + few_bytes, other.granted_bytes)
            if not other.consumed_bytes < other.grant_at_bytes <= soon:
                other.grant_at_bytes = soon
        return given, self._ask(shares)

    def fill_up(self) -> list[Source]:
        """Give publishers what is left of their shares; who has more than before.

        Credit is told by halves, while messages are taken. So who reads no more leaves
        a publisher with less than it may have, which nothing else would make up for.
        """
        if self._short:  # what is free is for them
            return []
        shares, free = self._shares(), self._free()
        given = []
        for source in self.sources.values():
            share, share_bytes = shares[True]
            if source.active and (
                source.granted_messages - source.consumed_messages < share
                or source.granted_bytes - source.consumed_bytes < share_bytes
            ):
                left = self._give(source, shares[True], *free)
                if left is not None:
                    given.append(source)
                    free = left
        return given

    @staticmethod
    def _give(source: Source, share: Share, messages: int, nbytes: int) -> Share | None:
        """Fill a publisher's credit up to its share, from what is free.

        Returns:
            What is free then, or None if it got nothing.
        """
        if source.asked is not None:  # its totals may be going down
            source.grant_at_messages = source.granted_messages
            source.grant_at_bytes = source.granted_bytes
            return None
        theirs = source.granted_messages - source.consumed_messages
        more = max(min(share[0] - theirs, messages), 1 - theirs, 0)
        source.granted_messages += more
        source.grant_at_messages = source.granted_messages - share[0] // GRANT_PARTS
        source.at_once = max(1, min(MOST_AT_ONCE, share[0] // AT_ONCE_PARTS))
        theirs = source.granted_bytes - source.consumed_bytes
        # Below zero after a message that was larger than what was left of the grant.
        room = nbytes - min(0, theirs)
        more_bytes = max(min(share[1] - theirs, room), 1 - theirs, 0)
        source.granted_bytes += more_bytes
        source.grant_at_bytes = source.granted_bytes - share[1] // GRANT_PARTS
        if not more and not more_bytes:
            return None
        return messages - more, nbytes - (more_bytes + min(0, theirs))

    @staticmethod
    def _lacks(source: Source, share: Share) -> bool:
        """Whether a publisher has too little of its share."""
        theirs = source.granted_messages - source.consumed_messages
        theirs_bytes = source.granted_bytes - source.consumed_bytes
        return (
            theirs < share[0] - share[0] // LACK_PARTS
            or theirs_bytes < share[1] - share[1] // LACK_PARTS
        )

    def _ask(self, shares: tuple[Share, Share]) -> list[Source]:
        """Publishers with more than their share that they leave unused.

        However little more: where one joins many, each has little that is its. They are
        asked once for each time that the shares become smaller, as nobody is given more
        than its share.
        """
        asked = []
        for other in self.sources.values():
            if other.asked is not None or not other.confirmed or other in self._short:
                continue
            share, share_bytes = shares[other.active]
            messages = other.consumed_messages + share
            nbytes = other.consumed_bytes + share_bytes
            _, arrived, arrived_bytes = other.arrivals[0]
            used = max(messages, arrived, other.used_messages)
            used_bytes = max(nbytes, arrived_bytes, other.used_bytes)
            if other.granted_messages > used or other.granted_bytes > used_bytes:
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
        # It may be less than was asked for: of a grant that an exception kept from it.
        _, arrived, _ = source.arrivals[0]
        if not arrived <= answer.messages <= source.granted_messages:
            limits = f"{arrived}..{source.granted_messages}"
            raise wire.Malformed(f"{answer.messages} messages left, not {limits}")
        if answer.nbytes > source.granted_bytes:
            raise wire.Malformed(
                f"{answer.nbytes} of {source.granted_bytes} bytes left"
            )
        if answer.messages > asked.messages:
            source.used_messages = answer.messages
        if answer.nbytes > asked.nbytes:
            source.used_bytes = answer.nbytes
        source.granted_messages = answer.messages
        source.granted_bytes = answer.nbytes
        source.asked = None
        return True

    def _shares(self) -> tuple[Share, Share]:
        """The part of one that has published nothing yet, and of one that publishes."""
        sources = max(1, len(self.sources))
        active = max(1, sum(other.active for other in self.sources.values()))
        windows = (self.depth, self.window_bytes)
        idle, share = (
            tuple(_share(window, sources, active, is_active) for window in windows)
            for is_active in (False, True)
        )
        return (idle[0], idle[1]), (share[0], share[1])


def due(source: Source, sequence: int) -> int:
    """How many messages before this one are due since the last taken."""
    owed = source.taken < source.retained < sequence
    return owed + max(0, sequence - max(source.taken + 1, source.first))


def _share(window: int, sources: int, active: int, is_active: bool) -> int:
    """One publisher's part of a window.

    Those that have published nothing yet get little; those that publish divide the
    rest.
    """
    one = max(ONE_SILENT, window // ONE_SILENT_PARTS)
    idle = max(1, min(window // (SILENT_PARTS * sources), one))
    if not is_active:
        return idle
    return max(1, (window - (sources - active) * idle) // active)
