"""The inbox of `recv`: what has arrived, from all publishers on all topics.

Small messages wait in the runs in which they arrived, and are decoded several at once.
What is decoded, and how much of its run `recv` has taken, is one fact: the products
that are left. So nothing needs be done for a message but to pop its product; credit and
counters follow when the last one is taken, or when somebody asks.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mq.errors import MessagesLost, MessageTooLarge
from mq.mesh.incoming import Entry, Run, Source, uncounted
from mq.mesh.subscription import Subscription, due
from mq.speed import take_alone

if TYPE_CHECKING:
    from mq.mesh.session import Session

AHEAD_BYTES: Final = 32 * 1024
"""How much is decoded ahead at most."""
Prepare = Callable[[Run, int, int], Sequence[Any]]


class Returned(NamedTuple):
    """What a call took and could not hand out: it was interrupted, or lacked memory."""

    item: Any


Item = Run | Source | MessagesLost | MessageTooLarge | Returned
"""What waits in the inbox; a Source stands for the oldest message it keeps, if any."""

Found = tuple[dict[Subscription | str | None, list[Item]], int]
"""What the first so many items came by, as long as none of them is taken."""


class Prepared(NamedTuple):
    """Messages of the first run, ready for `recv`, and how many of it are thus left."""

    run: Run
    stop: int
    ready: deque[Any]


def prepare_nothing(run: Run, start: int, stop: int) -> Sequence[Any]:
    """A `prepare` that leaves all messages as they are."""
    return ()


class Inbox:
    """What has arrived and not been taken, in order of arrival.

    Attributes:
        prepare: Makes what `take` returns of some messages of a run, or of as many as
            it can; of the others `take` returns the entry.
        ready: The products of `prepared`; all but the last may be popped at any time.
        counted: The publisher of whom something was taken, until the caller resets it.
        touched: Subscriptions from which something was taken, until the caller forgets
            them.
    """

    def __init__(self) -> None:
        self.fifo: deque[Item] = deque()
        self.prepare: Prepare = prepare_nothing
        self.ready: deque[Any] = deque()
        self.counted: Source | None = None
        self.touched: dict[Subscription, None] = {}
        self._prepared: Prepared | None = None
        self._taking: tuple[Item, Any] | None = None
        self._found: Found | None = None
        # Of these the queue holds so many items that are empty.
        self._ended: list[Subscription] = []
        self._emptied = 0

    def __len__(self) -> int:
        """How many messages and notices wait."""
        others = [item for item in self.fifo if not isinstance(item, Source)]
        return sum(len(source.kept) for source in self._sources()) + sum(
            len(item.areas) - self._position(item) if isinstance(item, Run) else 1
            for item in others
        )

    def _sources(self) -> set[Source]:
        """Those of which something may be kept."""
        return {item for item in self.fifo if isinstance(item, Source)}

    def has_items(self) -> bool:
        """Whether there is anything that `take` may return."""
        return bool(self.fifo)

    def _position(self, run: Run) -> int:
        """How many messages of a run have been taken."""
        prepared = self._prepared
        if prepared is not None and prepared.run is run:
            return prepared.stop - len(prepared.ready)
        return run.taken

    def take(self) -> Any:
        """The next product, entry or notice, which is an error, or None.

        The caller calls `hand_over` when it has it, and `undo_take` after an exception.
        """
        self._taking = self._found = None  # what was taken before is the caller's
        if (entry := take_alone(self)) is not None:
            return entry
        while fifo := self.fifo:
            item = fifo[0]
            kind = type(item)
            if kind is Run:
                if item.copying is not None:  # type: ignore[union-attr]
                    if self._bring_forward():
                        continue
                    return None
                found = self._take_of(item)  # type: ignore[arg-type]
            elif kind is Source:
                found = self._take_kept(item)  # type: ignore[arg-type]
            else:
                self._taking = (item, 0)
                fifo.popleft()
                return item.item if isinstance(item, Returned) else item
            if found is not None:
                return found
            fifo.popleft()  # there is nothing left in it
        return None

    def _bring_forward(self) -> bool:
        """Put first what need not wait for a message that is still being copied."""
        blocked: set[tuple[Subscription, str]] = set()  # also of an earlier session
        for index, item in enumerate(self.fifo):
            if isinstance(item, Run):
                source = item.source
                stream = source.subscription, source.session.peer.incarnation
                if item.copying is not None:
                    blocked.add(stream)
                if stream in blocked:
                    continue
            # In one step, so that an interrupt loses nothing.
            before, after = islice(self.fifo, index), islice(self.fifo, index + 1, None)
            self.fifo = deque(chain((item,), before, after))
            return True
        return False

    def _take_of(self, run: Run) -> Any:
        prepared = self._prepared
        if prepared is None:
            start = run.taken
            left = len(run.areas) - start
            if left > 1:
                most = AHEAD_BYTES * len(run.areas) // (run.nbytes + 1) + 1
                stop = start + min(left, most, run.source.at_once)
                products = self.prepare(run, start, stop)
                if products:
                    stop = start + len(products)
                    prepared = self._prepared = Prepared(run, stop, deque(products))
                    self.ready = prepared.ready
            if prepared is None:
                if not left:
                    return None
                entry = run.entry(start)
                self._taking = (run, start)
                run.taken = start + 1
                self._count(run, start + 1)
                if left == 1:
                    self.fifo.popleft()
                return entry
        ready = prepared.ready
        product = ready[0]
        self._taking = (run, prepared.stop - len(ready))
        ready.popleft()
        if not ready:
            self._count(run, prepared.stop)
            self._unprepare()
            if run.taken == len(run.areas):
                self.fifo.popleft()
        return product

    def _take_kept(self, source: Source) -> Entry | None:
        if not source.kept:  # later lives of its publisher have replaced what it kept
            source.subscription.stats.dropped += _replaced(source)
            source.taken = source.newest
            return None
        entry = source.kept[0]
        self._taking = (source, entry)
        source.kept.popleft()
        self.fifo.popleft()
        sequence = entry.sequence
        stats = source.subscription.stats
        if sequence != source.taken + 1:
            stats.dropped += due(source, sequence)
        source.taken = sequence
        stats.received += 1
        stats.received_bytes += len(entry.area)
        return entry

    def _count(self, run: Run, position: int) -> None:
        """Tell credit and counters of the messages taken of a run."""
        count = position - run.counted
        if count <= 0:
            return
        source = run.source
        nbytes = sum(map(len, run.areas[run.counted : position]))
        self.touched[source.subscription] = None  # first: an interrupt may come
        source.consumed_messages += count
        source.consumed_bytes += nbytes
        source.taken = run.first + position - 1
        stats = source.subscription.stats
        stats.received += count
        stats.received_bytes += nbytes
        run.counted = position
        self.counted = source

    def settle(self) -> None:
        """Bring the counters up to date."""
        prepared = self._prepared
        if prepared is not None:
            self._count(prepared.run, prepared.stop - len(prepared.ready))

    def replaced(self) -> Counter[str]:
        """Messages that newer ones have replaced since the last taken, by topic.

        Of what is still to be taken: the counters learn of them when it is.
        """
        found: Counter[str] = Counter()
        for source in self._sources():
            found[source.subscription.topic] += _replaced(source)
        return found

    def _unprepare(self) -> None:
        """Forget the products; what they were made of is still there."""
        prepared = self._prepared
        if prepared is not None:
            prepared.run.taken = prepared.stop - len(prepared.ready)
            self.ready = deque()
            self._prepared = None

    def hand_over(self) -> None:
        """What `take` returned is the caller's; nothing refers to it here any more."""
        self._taking = self._found = None

    def undo_take(self) -> bool:
        """`take` was interrupted: give back what was taken since `hand_over`.

        Returns:
            Whether that was anything.
        """
        if self._taking is None:
            return False
        item, what = self._taking
        self._taking = None
        if isinstance(item, Source):
            if not item.kept or item.kept[0] is not what:
                self.put_back(what)
            return True
        if not self.fifo or self.fifo[0] is not item:
            self.fifo.appendleft(item)
        if isinstance(item, Run) and self._position(item) > what:
            self._unprepare()
            item.taken = what
            if item.counted > what:
                stats = item.source.subscription.stats
                stats.received -= item.counted - what
                stats.received_bytes -= sum(map(len, item.areas[what : item.counted]))
                item.counted = what
        return True

    def put_back(self, item: Any) -> None:
        """Hand out `item` next: see `Returned`."""
        self._unprepare()
        self._found = None
        self.fifo.appendleft(Returned(item))

    def runs(self) -> dict[Source, list[Run]]:
        """Those that wait, by source; found at once, as there may be very many."""
        found: dict[Source, list[Run]] = {}
        for item in self.fifo:
            if isinstance(item, Run):
                found.setdefault(item.source, []).append(item)
        return found

    def cut(self, session: Session) -> None:
        """A publisher is gone: drop what it has not written to the end, and after.

        That is as if it had not arrived. It may be repeated after an interrupt.
        """
        gone: set[int] = set()
        for source, runs in self.runs().items():
            if source.session is not session:
                continue
            lacks = [run.copying is not None and run.copying.lacks() for run in runs]
            if True not in lacks:
                continue
            first = lacks.index(True)
            source.cut(runs[first].first - 1, *uncounted(runs[:first]))
            for run in runs[first:]:
                if run.copying is not None:
                    run.copying.wanted = False
            gone.update(map(id, runs[first:]))
        if gone:
            self._found = None
            self.fifo = deque(item for item in self.fifo if id(item) not in gone)

    def end(self, subscription: Subscription) -> None:
        """Have nothing more come by a subscription, which counts what nobody had taken.

        What waits is emptied where it is, and removed once half of all is so: else as
        many as end one after another would each have all the others looked through.
        """
        self.settle()
        self._unprepare()
        found = self._look()
        items = found.get(subscription, [])
        if items:
            self._ended.append(subscription)
            self._emptied += len(items)
        notices = subscription.topic in found or Returned in set(map(type, items))
        if notices or 2 * self._emptied >= len(self.fifo):
            self.drop([subscription])
            return
        for item in items:
            if isinstance(item, (Run, Source)):
                _empty(item)

    def _look(self) -> dict[Subscription | str | None, list[Item]]:
        """What waits, by what it came by; only what is new is looked through."""
        found, seen = self._found or ({}, 0)
        count = len(self.fifo)
        for item in islice(reversed(self.fifo), count - seen):
            found.setdefault(_came_by(item), []).append(item)
        self._found = found, count
        return found

    def drop(self, subscriptions: Iterable[Subscription]) -> None:
        """Remove the messages of some subscriptions, which count what nobody had taken.

        What was taken and put back is counted as received, a notice as lost.
        """
        self.settle()
        self._unprepare()
        ended: set[Subscription | str | None] = set(self._ended)
        for subscription in subscriptions:
            ended |= {subscription, subscription.topic}
        kept: deque[Item] = deque()
        for item in self.fifo:
            if _came_by(item) not in ended:
                kept.append(item)
            elif isinstance(item, (Run, Source)):
                _empty(item)
        self._found = None
        self.fifo = kept  # in one step: an interrupt loses nothing
        self._ended.clear()
        self._emptied = 0


def _empty(item: Run | Source) -> None:
    """Discard what a subscription that has ended had still to hand out."""
    if isinstance(item, Run):
        count = len(item.areas) - item.taken
        if item.copying is not None:
            item.copying.wanted = False
            item.copying = None
        item.areas = item.areas[: item.taken]  # in one step, which may be repeated
        item.source.subscription.stats.discarded += count
        return
    stats = item.subscription.stats
    stats.dropped += _replaced(item)
    stats.discarded += len(item.kept)
    item.taken = item.newest
    # Source and entry refer to each other, and a borrowed area must not wait for the
    # garbage collector to go back to its publisher.
    item.kept.clear()


def _replaced(source: Source) -> int:
    """How many of them newer ones have replaced."""
    return due(source, source.newest + 1) - len(source.kept)


def _came_by(item: Item) -> Subscription | str | None:
    """The subscription, or its topic; a notice of loss came by none."""
    if isinstance(item, Run):
        return item.source.subscription
    if isinstance(item, Source):
        return item.subscription
    if isinstance(item, MessageTooLarge):
        return item.topic
    if isinstance(item, Returned):
        if isinstance(item.item, Entry):
            return item.item.source.subscription
        return getattr(item.item, "topic", None)
    return None
