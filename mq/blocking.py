"""A queue whose calls block: what `mq.MQ` is without its asyncio twins."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mq import settings
from mq.errors import FlushTimeout, SubscribeTimeout
from mq.message import CLEAR, KEEP_ALL, History, check_topic, check_topics
from mq.options import switch
from mq.receiving import Receiving
from mq.seconds import PLAIN, deadline_after
from mq.subscribing import DEFAULT_DEPTH, DEFAULT_WINDOW_BYTES, check_options

if TYPE_CHECKING:
    from mq.buffers import Pool
    from mq.codec import Codec
    from mq.join import Joined
    from mq.mesh.feed import Feed
    from mq.mesh.subscription import Subscription


class BlockingQueue(Receiving):
    """The calls of `mq.MQ` but for its asyncio twins."""

    def __init__(
        self, resolved: settings.Settings, joined: Joined, codec: Codec, pool: Pool
    ) -> None:
        super().__init__(resolved, joined, codec, pool)
        self._topics: set[str] = set()
        self._publish = self._driver.publishing.publish
        self._known = self._mesh.publisher.used
        self._lock = self._lead.lock
        self._encode = codec.encode

    # -- publishing ----------

    def publish(
        self,
        topic: str,
        payload: Any,
        *,
        retain: bool = False,
        urgent: bool = False,
        timeout: float | None = None,
    ) -> None:
        """Hand a message to every subscriber of a topic, or to none.

        When it returns, the caller may change `payload` again.

        Args:
            topic: 1 to 255 bytes of UTF-8 without control characters.
            payload: Data, arrays and tensors in any nesting; see `mq.codec.Codec`.
                `mq.CLEAR` with `retain=True` drops the retained message.
            retain: Also send it to each later subscriber, until the next retained one.
            urgent: Send at once instead of joining a batch that is being filled.
            timeout: Seconds to wait for subscribers that are behind; None waits, 0
                only tries.

        Raises:
            PublishTimeout: Some subscriber had no room in time; nobody got it.
            MessageTooLarge, CodecError: Some subscriber would refuse it; nobody got it.
            Closed: The queue is closed.
        """
        is_simple = retain is False and urgent is False
        if is_simple and (timeout is None or (type(timeout) in PLAIN and timeout >= 0)):
            try:
                known = self._known.get(topic)
            except TypeError:  # it cannot be looked up: refused as all that is no str
                known = None
            if known is not None and known.gate.publish(payload, self._lock):
                return
        if not is_simple:
            retain, urgent = switch("retain", retain), switch("urgent", urgent)
        if type(topic) is not str or topic not in self._topics:
            topic = self._new_topic(topic)
        if payload is CLEAR:
            self._clear(topic, retain)
            return
        frames = self._encode(payload, topic, self._carried(topic, retain))
        self._publish(topic, frames, retain, urgent, timeout)

    def _carried(self, topic: str, retain: bool) -> frozenset[str]:
        """Devices whose tensors stay there in the next message on a topic."""
        publishing = self._driver.publishing
        devices = publishing.devices
        return devices if retain or not devices else publishing.carried(topic)

    def _new_topic(self, topic: str) -> str:
        topic = check_topic(topic)
        self._topics.add(topic)
        return topic

    def _clear(self, topic: str, retain: bool) -> None:
        if not retain:
            raise ValueError("mq.CLEAR is published with retain=True only")

        def clear() -> None:
            self._mesh.publisher.topic(topic).retained = None

        self._driver.run(clear)

    @contextlib.contextmanager
    def loan(
        self,
        topic: str,
        shape: Sequence[int],
        dtype: Any,
        *,
        retain: bool = False,
        timeout: float | None = None,
    ) -> Iterator[Any]:
        """A tensor in the transport's own memory, published when the block ends.

        An exception in the block publishes nothing. The tensor must not be used after
        the block.

        Args:
            topic: Where to publish.
            shape: Of the tensor.
            dtype: A torch dtype for a tensor, anything NumPy knows for an array.
            retain, timeout: As for `publish`.

        Yields:
            A tensor or array of that shape, uninitialised.

        Raises:
            MessageTooLarge: Some subscriber would refuse it, however it is filled.
            MemoryError: There is no memory for it here.
        """
        self._lead.check()
        from mq import loans  # not before: in a forked child that could wait for ever

        topic, retain = check_topic(topic), switch("retain", retain)
        self._topics.add(topic)
        nbytes = loans.room(shape, dtype)
        least = nbytes - loans.HEADER_BYTES
        self._driver.look(lambda: self._mesh.publisher.topic(topic).check_size(least))
        block = self._driver.memory.take_for_loan(topic, nbytes, timeout)
        memory = self._pool.take(nbytes) if block is None else block.area
        loaned = loans.lay_out(memory, shape, dtype)
        yield loaned
        self._lead.check()  # in a child forked meanwhile it is not to be written to
        frames = self._encode(loaned, topic)
        if block is not None:
            block = loans.finish(block, frames)
        self._publish(topic, frames, retain, False, timeout, block=block)

    def flush(self, timeout: float | None = None) -> None:
        """Wait until all that was published so far is in its subscribers' inboxes.

        Raises:
            FlushTimeout: Some message is still on its way; it will go on.
        """
        self._lead.check()
        marks = self._driver.marks()
        unsettled = self._mesh.publisher.unsettled
        if not self._driver.wait_until(lambda: not unsettled(marks), timeout):
            raise self._not_flushed(marks, timeout)

    def _not_flushed(
        self, marks: Sequence[tuple[Feed, int]], timeout: float | None
    ) -> FlushTimeout:
        driver, unsettled = self._driver, self._mesh.publisher.unsettled
        left = driver.look(lambda: driver.describe_feeds(unsettled(marks)))
        return FlushTimeout(f"{self!r}: not flushed within {timeout:g} s: {left}")

    # -- subscribing ----------

    def subscribe(
        self,
        topic: str,
        *,
        history: History = KEEP_ALL,
        depth: int = DEFAULT_DEPTH,
        window_bytes: int = DEFAULT_WINDOW_BYTES,
        zero_copy: bool = False,
        device: str | None = None,
        timeout: float | None = None,
    ) -> None:
        """Receive what is published on a topic from now on.

        When it returns, every member present will deliver what it publishes. Calling
        it again with the same options does nothing.

        Args:
            topic: Matched exactly.
            history: `mq.KEEP_ALL`: lose nothing, publishers wait for this member.
                `mq.keep_last(n)`: keep the newest n of each publisher.
            depth: Messages that may be on their way or unread at most, shared by all
                members that may publish: a part is kept for each that has not yet.
                Each may always have one. It bounds how far publishers run ahead: small
                where messages must be fresh, large for many small ones. No more than
                so many come in a round trip, so on a long path it must be at least the
                rate times that.
            window_bytes: The same in bytes; each publisher may always have one message
                of any size.
            zero_copy: Read-only views of the transport's memory, where it has any.
            device: Where received tensors go, such as "cuda:0"; None: where the
                transport delivers them.
            timeout: Seconds to wait for the members' acknowledgement.

        Raises:
            SubscribeTimeout: Some members have not acknowledged; the subscription is in
                force all the same.
            ValueError, TypeError: Already subscribed with other options, or a bad
                argument, also a device that is not there.
        """
        self._lead.check()
        topic = check_topic(topic)
        options = check_options(history, depth, window_bytes, zero_copy, device)
        deadline_after(timeout)  # a bad one is refused before anything is begun
        subscriber = self._mesh.subscriber
        found: list[Subscription] = []

        def begin() -> None:
            known = subscriber.topics.get(topic)
            if known is None:
                check_topics(len(subscriber.topics) + 1)
                counters = self._mesh.publisher.topic(topic).stats
                sessions = list(self._mesh.sessions.values())
                known = subscriber.subscribe(topic, *options, counters, sessions)
            elif known.options != options:
                raise ValueError(
                    f"already subscribed to {topic!r} with other options; unsubscribe "
                    "first"
                )
            found.append(known)

        self._driver.run(begin)
        subscription = found[0]
        if not self._driver.wait_until(
            lambda: not subscriber.unconfirmed(subscription), timeout
        ):
            silent = self._driver.look(lambda: subscriber.unconfirmed(subscription))
            names = [session.name for session in silent]
            raise SubscribeTimeout(
                f"{self!r}: {names} did not acknowledge the subscription to {topic!r} "
                f"within {timeout:g} s; it stays in force and reaches them when they "
                "answer"
            )

    def unsubscribe(self, topic: str) -> None:
        """End a subscription; when it returns, `recv` returns no more of this topic."""
        topic = check_topic(topic)

        def end() -> None:
            sessions = list(self._mesh.sessions.values())
            self._mesh.subscriber.unsubscribe(topic, sessions)
            self._mesh.changed += 1  # a thread may wait for it to be acknowledged

        self._driver.run(end)
