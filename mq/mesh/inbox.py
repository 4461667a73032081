"""The inbox of `recv`: what has arrived, from all publishers on all topics."""

from __future__ import annotations

from collections import deque

from mq.errors import MessagesLost
from mq.mesh.incoming import Entry, Item, Source, Subscription


class Inbox:
    """What has arrived and not been taken, in order of arrival."""

    def __init__(self) -> None:
        self.fifo: deque[Item] = deque()
        self.taking: Entry | MessagesLost | None = None
        """What `take` last began to hand out; reset before it is asked again."""

    def take(self) -> Entry | MessagesLost | None:
        """The next message or loss notice, or None; counts what was taken."""
        fifo = self.fifo
        while fifo:
            item = fifo[0]
            if type(item) is Entry:
                self.taking = item
                fifo.popleft()
                self._count(item[0], item)
                return item
            if type(item) is not Source:
                assert isinstance(item, MessagesLost)
                self.taking = item
                fifo.popleft()
                return item
            if item.kept:
                entry = self.taking = item.kept[0]
                item.kept.popleft()
                fifo.popleft()
                self._count(item, entry)
                return entry
            fifo.popleft()
        return None

    @staticmethod
    def _count(source: Source, entry: Entry) -> None:
        _, sequence, _, area = entry
        nbytes = len(area)
        stats = source.subscription.stats
        if sequence != source.taken + 1:
            stats.dropped += max(0, sequence - max(source.taken + 1, source.first))
        source.taken = sequence
        source.consumed_messages += 1
        source.consumed_bytes += nbytes
        stats.received += 1
        stats.received_bytes += nbytes

    def undo_take(self) -> None:
        """`take` was interrupted: nothing was taken."""
        item, self.taking = self.taking, None
        if item is None or (self.fifo and self.fifo[0] is item):
            return
        if type(item) is not Entry:
            self.fifo.appendleft(item)
            return
        source = item.source
        if not (source.kept and source.kept[0] is item):
            self.fifo.appendleft(item)
        source.taken = min(source.taken, item.sequence - 1)
        source.count_again(self.fifo)

    def put_back(self, entry: Entry) -> None:
        """Undo `take`: the call that took it was interrupted before it returned."""
        source = entry.source
        source.consumed_messages -= 1
        source.consumed_bytes -= len(entry.area)
        source.taken = entry.sequence - 1
        source.subscription.stats.received -= 1
        source.subscription.stats.received_bytes -= len(entry.area)
        self.fifo.appendleft(entry)

    def drop(self, subscription: Subscription) -> int:
        """Remove the messages of one subscription; how many there were."""
        kept: deque[Item] = deque()
        for item in self.fifo:
            source = item if isinstance(item, Source) else getattr(item, "source", None)
            if source is None or source.subscription is not subscription:
                kept.append(item)
        dropped = len(self.fifo) - len(kept)
        self.fifo = kept  # in one step, so that an interrupt loses nothing
        return dropped
