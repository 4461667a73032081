"""The calls of a queue that take messages out of its inbox.

What a call has taken is in a box, a list of one element, until it is the caller's: of a
call that a signal's handler ends the box is stranded, and comes again. Python looks for
signals as it calls and as it jumps, before 3.11 also as an ``except`` begins, unless
what begins is a ``try``. So from where a box is emptied to the ``return`` nothing is
called and no jump taken, and in ``finally``, on both of its ways, not before the box is
stranded. So is a message that there was no memory to decode, but not twice: one that
never fits must not keep what follows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import takewhile
from operator import attrgetter
from typing import TYPE_CHECKING, Any, cast

from mq import settings
from mq.errors import Closed, MessagesLost, MessageTooLarge, UntrustedPayload
from mq.errors import CodecError as _CodecError
from mq.membership import Membership
from mq.mesh.setbacks import NO_MEMORY
from mq.message import Message
from mq.seconds import PLAIN

if TYPE_CHECKING:
    from mq.buffers import Pool
    from mq.codec import Codec
    from mq.join import Joined
    from mq.mesh.incoming import Entry, Run

MOST_AHEAD = 16
"""Messages with arrays, tensors and the like that `recv` decodes ahead at most."""
LONGEST_PAUSE = 64
"""Messages that go by, at most, after one that could not be decoded ahead."""
_new_message = tuple.__new__
_READ_ONLY = attrgetter("readonly")
"""Whether an area came in a batch."""


class Receiving(Membership):
    """Those calls of `mq.MQ`, but for their asyncio twins."""

    def __init__(
        self, resolved: settings.Settings, joined: Joined, codec: Codec, pool: Pool
    ) -> None:
        from mq import borrowing, speed  # they load NumPy, which `import mq` does not

        super().__init__(resolved, joined, codec, pool)
        self._inbox = self._mesh.subscriber.inbox
        self._pop_ready = speed.pop_ready
        self._whole = speed.Lock  # one for each call: it is for its own thread
        self._stranded = self._driver.taking.stranded
        self._strand: Callable[[list[Any]], object] = self._stranded.append
        self._put_back: Callable[[], object] = self._driver.taking.put_back
        self._take = self._driver.taking.take
        self._decode = codec.decode
        self._decode_ahead = codec.decode_ahead
        self._decode_run = speed.decode_run
        self._settle = borrowing.settle
        self._let_go = borrowing.let_go
        self._inbox.prepare = self._prepare

    def recv(self, timeout: float | None = None) -> Message:
        """The next message of any subscribed topic.

        Args:
            timeout: Seconds to wait; None waits, 0 only looks.

        Raises:
            RecvTimeout: Nothing came in time.
            MessagesLost: A publisher and this member had given each other up, or one
                the other; the queue goes on.
            MessageTooLarge: A retained message was, for this member; it goes on, too.
            UntrustedPayload, CodecError: A message could not be decoded; the next
                call goes on.
            MemoryError: There was none to copy or to decode a message, here or on its
                `device`; it comes again at the next call, and is given up if there is
                none then, as it says.
            Closed: The queue is closed, or was closed while waiting.
        """
        box: list[Any] = [None]  # what is taken is in the inbox or in there
        try:
            if self._stranded:
                self._put_back()
            waits = timeout is None or (type(timeout) in PLAIN and timeout >= 0)
            ready = waits and self._pop_ready(self._lead, self._inbox, box)
            if not ready and not self._receive(box, timeout):
                raise self._nothing_came(timeout)
            message = box[0]
            box[0] = None
            return message  # type: ignore[no-any-return]
        finally:
            try:
                box[0] is None or self._strand(box) or self._put_back()
            finally:
                pass

    def _receive(self, box: list[Any], timeout: float | None) -> bool:
        """As `recv`, into a list of one element; false: nothing came in time.

        What is there after an exception is to be stranded.
        """
        if not self._take(box, timeout):
            return False
        with self._whole():  # what is raised in there is not a signal handler's
            try:
                box[0] = self._finish(box[0])
            except Exception as error:
                self._let_go(getattr(box[0], "area", None), error)
                is_final = getattr(box[0], "again", True)  # also what is no message
                again = isinstance(error, MemoryError) and not is_final
                box[0] = box[0]._replace(again=True) if again else None
                raise
        return True

    def _finish(
        self, item: Message | Entry | MessagesLost | MessageTooLarge
    ) -> Message:
        """What `recv` returns, or raises, for what it took."""
        if type(item) is Message:
            return item
        if isinstance(item, MessagesLost | MessageTooLarge):
            raise item
        return self._message(item)  # type: ignore[arg-type]

    def _prepare(self, run: Run, start: int, stop: int) -> list[Message]:
        """Decode messages of a run, several at once; called under the lock."""
        # What is in part on devices comes in a run of its own, which is not prepared.
        areas = cast("list[memoryview]", run.areas[start:stop])
        source = run.source
        subscription = source.subscription
        peer = source.session.peer
        topic, name, life = subscription.topic, peer.name, peer.incarnation
        first, times = run.first + start, run.times[start:stop]
        messages = self._decode_run(Message, topic, name, life, first, times, areas)
        if messages or subscription.device is not None:
            return messages
        pause, next_pause = source.ahead
        if pause:
            source.ahead = (pause - 1, next_pause)
            return []
        batched = takewhile(_READ_ONLY, areas[:MOST_AHEAD])
        for n, payload in enumerate(self._decode_ahead(batched)):
            fields = (topic, payload, name, first + n, life, times[n], len(areas[n]))
            messages.append(_new_message(Message, fields))
        more = min(2 * next_pause, LONGEST_PAUSE)
        source.ahead = (0, 1) if messages else (next_pause - 1, more)
        return messages

    def _message(self, entry: Entry) -> Message:
        source, sequence, published_at, area, _ = entry
        subscription = source.subscription
        peer = source.session.peer
        nbytes = len(area)
        in_place = False
        try:
            if type(area) is memoryview:
                area, in_place = self._settle(area, self._pool, subscription.zero_copy)
            payload = self._decode(
                area, device=subscription.device, read_only=in_place, own=True
            )
        except (_CodecError, MemoryError) as error:
            raise self._failure(entry, error) from error
        topic, life = subscription.topic, peer.incarnation
        fields = (topic, payload, peer.name, sequence, life, published_at, nbytes)
        return _new_message(Message, fields)

    def _failure(self, entry: Entry, error: _CodecError | MemoryError) -> Exception:
        """What `recv` raises for a message, of what kept it from being decoded."""
        subscription = entry.source.subscription
        topic, sender = subscription.topic, entry.source.session.peer.name
        what = f"message {entry.sequence} from {sender!r} on {topic!r}"
        is_starved = isinstance(error, MemoryError)
        if entry.again or not is_starved:
            self._driver.look(subscription.refuse)
        if is_starved:
            becomes = "is given up" if entry.again else "comes again"
            return MemoryError(f"{what}, which {becomes}: {str(error) or NO_MEMORY}")
        kind = UntrustedPayload if isinstance(error, UntrustedPayload) else _CodecError
        return kind(f"{what}: {error}", sender, topic)

    def __iter__(self) -> Iterator[Message]:
        """Messages until the queue is closed."""
        box: list[Any] = [None]
        while True:
            try:
                try:
                    if self._stranded:
                        self._put_back()
                    if not self._pop_ready(self._lead, self._inbox, box):
                        self._receive(box, None)
                except Closed:
                    return
                # By no name: that would keep it until the next has come.
                yield (box[0], box := [None])[0]
            finally:
                try:
                    box[0] is None or self._strand(box) or self._put_back()
                finally:
                    pass
