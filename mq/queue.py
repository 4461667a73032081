"""The front: `connect` and the queue that it returns."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any

from mq import settings
from mq.blocking import BlockingQueue
from mq.descriptors import out_of_descriptors
from mq.errors import Closed, TransportUnavailable
from mq.lines import Lines, Place, let_others_run
from mq.membership import CLOSE_SECONDS
from mq.message import CLEAR, Message
from mq.options import switch
from mq.seconds import deadline_after
from mq.speed import Lock
from mq.undisturbed import Stopper, check_may_wait, undisturbed

if TYPE_CHECKING:
    import asyncio  # which takes as long as all of ours; who uses it has imported it

    from mq.buffers import Pool
    from mq.codec import Codec
    from mq.join import Joined


def connect(
    backend: str | None = None,
    *,
    group: str | None = None,
    name: str | None = None,
    rendezvous: str | None = None,
    listen: str | Sequence[str] | None = None,
    attach_to: str | Sequence[str] = (),
    labels: str | Sequence[str] = (),
    connect_timeout: float = 30.0,
    peer_timeout: float | None = 10.0,
    max_message_bytes: int | None = None,
    allow_pickle: bool = False,
    secret: str | bytes | None = None,
    insecure: bool = False,
    **transport_options: Any,
) -> MQ:
    """Join a group of processes that publish to and subscribe from each other.

    What is not given comes from the environment: `MQ_BACKEND`, `MQ_GROUP`, `MQ_NAME`,
    `MQ_RENDEZVOUS`, `MQ_LISTEN` and `MQ_LABELS` (comma-separated), `MQ_SECRET` or
    `MQ_SECRET_FILE`, and torchrun's variables. `MQ.describe` says where each value came
    from.

    Args:
        backend: The transport, such as "zmq"; `mq transports` lists them.
        group: Members of one group hear each other.
        name: This member's name, unique in its group; default: host, pid and a number,
            and in a container something random.
        rendezvous: Where members meet: None (a directory of this user on this host),
            ``tcp://host:port``, ``file:///shared/path`` or ``env://`` (torchrun).
        listen: Addresses to listen on; default: reachable from this host only.
            ``tcp://host:port`` will do for every transport between hosts.
        attach_to: Addresses of members to connect to; who listens there is dialled
            again when it was lost. With `listen` or `attach_to` and
            no `rendezvous` or MQ_RENDEZVOUS nothing else is looked for, but with
            `listen` alone torchrun's store, under torchrun.
        labels: What other members are told about this one.
        connect_timeout: Seconds to reach every member that is present.
        peer_timeout: Seconds of silence after which a member is forgotten, the larger
            of the two ends' values; None: only on proof that it is gone.
        max_message_bytes: Largest message to accept; default: the smaller of 4 GiB
            and half of the memory.
        allow_pickle: Whether objects of any type may travel, as pickles, which can run
            any code: only where every member is trusted.
        secret: Known to all members and proven at each connection.
        insecure: Whether to listen on routable addresses without a secret; `torchrpc`,
            which a secret does not protect, asks for it in any case.
        transport_options: Options of the transport.

    Raises:
        ValueError, TypeError: An argument is missing, malformed or unknown.
        UnknownTransport, TransportUnavailable: See `mq transports`; `inproc` is not
            available to a group with members in several processes.
        ConnectTimeout: Not every member could be greeted in time.
        ConnectRefused: A member refused this one, for example because of its name.
        AuthenticationFailed: A member knows another secret.
        PeerLost: The rendezvous is gone, or something else answers there.
        ForkedProcess: This is a forked child, which the transport does not survive.
        OSError: An address cannot be listened on, or a file not be read.
    """
    resolved = settings.resolve(
        backend=backend,
        group=group,
        name=name,
        rendezvous=rendezvous,
        listen=listen,
        attach_to=attach_to,
        labels=labels,
        secret=secret,
        connect_timeout=connect_timeout,
        peer_timeout=peer_timeout,
        max_message_bytes=max_message_bytes,
        insecure=insecure,
    )
    check_may_wait()
    try:
        # Loaded here, so that `import mq` loads neither NumPy nor an engine.
        from mq.buffers import Pool
        from mq.codec import Codec
        from mq.join import join

        codec = Codec(switch("allow_pickle", allow_pickle))
        pool = Pool(settings.memory_bytes() // 8)
        stopper = Stopper()

        def connected() -> MQ:
            joined = join(resolved, codec, pool, transport_options, stopper)
            return MQ(resolved, joined, codec, pool)

        return undisturbed(connected, lambda queue: queue.close(0.0), stopper)
    except OSError as error:
        if remedy := out_of_descriptors(error):
            where = f"{resolved.backend} queue of group {resolved.group!r}"
            raise TransportUnavailable(f"{where}: {error}: {remedy}") from error
        raise


class MQ(BlockingQueue):
    """A member of a group; made by `connect`. Any thread may call any method."""

    def __init__(
        self, resolved: settings.Settings, joined: Joined, codec: Codec, pool: Pool
    ) -> None:
        super().__init__(resolved, joined, codec, pool)
        self._lines: dict[asyncio.AbstractEventLoop, Lines] = {}

    async def arecv(self, timeout: float | None = None) -> Message:
        """`recv` for asyncio; cancelled, it has taken nothing.

        Of tasks that wait, each gets a message in turn.
        """
        deadline = deadline_after(timeout)
        await let_others_run()
        inbox = self._inbox
        box: list[Any] = [None]
        try:  # as `mq.receiving` says
            if self._stranded:
                self._put_back()
            if not self._pop_ready(self._lead, inbox, box):
                # Twice, here and below: a handler may raise before the first has ended.
                with self._place() as place, place:
                    while not self._receive(box, 0):
                        if not await place.wait(inbox, inbox.has_items, deadline):
                            raise self._nothing_came(timeout)
            message = box[0]
            box[0] = None
            return message  # type: ignore[no-any-return]
        finally:
            try:
                box[0] is None or self._strand(box) or self._put_back()
            finally:
                pass

    async def apublish(
        self,
        topic: str,
        payload: Any,
        *,
        retain: bool = False,
        urgent: bool = False,
        timeout: float | None = None,
    ) -> None:
        """`publish` for asyncio; cancelled while it waits, it did nothing."""
        # What is bad is refused even where nothing is waited for.
        deadline_after(timeout)
        retain, urgent = switch("retain", retain), switch("urgent", urgent)
        await let_others_run()
        try:
            known = None if retain or urgent else self._known.get(topic)
        except TypeError:  # as in `publish`
            known = None
        if known is not None and known.gate.publish(payload, self._lock):
            return
        if payload is CLEAR:
            self.publish(topic, payload, retain=retain)
            return
        if type(topic) is not str or topic not in self._topics:
            topic = self._new_topic(topic)
        frames = self._codec.encode(payload, topic, self._carried(topic, retain))
        waits = self._driver.waits
        with waits.turns(topic, timeout) as turns, self._place() as place, place:
            while not self._publish(topic, frames, retain, urgent, 0, turns):
                if (lacks := turns.lacks) is not None:
                    await place.wait(lacks, lacks.has_credit, turns.until())
                else:  # memory, of which each needs another amount
                    await place.wait(place, lambda: True, turns.until())

    async def aflush(self, timeout: float | None = None) -> None:
        """`flush` for asyncio."""
        driver = self._driver
        self._lead.check()
        deadline = deadline_after(timeout)
        await let_others_run()
        marks = driver.marks()

        def is_flushed() -> bool:
            return not driver.mesh.publisher.unsettled(marks)

        with self._place() as place, place:
            while not driver.wait_until(is_flushed, 0):
                if not await place.wait(place, is_flushed, deadline):
                    raise self._not_flushed(marks, timeout)

    def _place(self) -> Place:
        import asyncio

        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise RuntimeError(
                "no asyncio loop runs here, which this call waits with; under trio "
                "have trio.to_thread.run_sync make the one that blocks"
            ) from None
        lines = self._lines.get(loop)
        if lines is None:
            lines = Lines(self._lead, loop, self._lines)
        return Place(lines)

    async def __aiter__(self) -> AsyncIterator[Message]:
        """Messages until the queue is closed."""
        try:
            while True:
                yield await self.arecv()  # by no name: see `__iter__`
        except Closed:
            return

    async def __aenter__(self) -> MQ:
        return self.__enter__()

    async def __aexit__(self, *exc_info: object) -> None:
        import asyncio
        from concurrent.futures import Future

        try:
            asyncio.get_running_loop()
        except RuntimeError:  # another library's
            self.close()
            return
        closed: Future[None] = Future()
        closed.set_running_or_notify_cancel()  # who is cancelled leaves it closing
        stopper = Stopper()

        def close() -> None:
            try:
                self._close(CLOSE_SECONDS, stopper)
            except BaseException as error:
                closed.set_exception(error)
            else:
                closed.set_result(None)

        # Not asyncio's own threads: calls that this is to end may have them all. And a
        # daemon: exit waits for the queue, but not for as long as this would deliver.
        thread = threading.Thread(target=close, name="mq-close", daemon=True)
        try:
            with Lock():  # half started, it would be listed by `threading` for ever
                thread.start()
            await asyncio.wrap_future(closed)
            thread.join()
        except BaseException:
            stopper.stop()
            raise


def _name_calls() -> None:
    """Have errors of Python's, as of a misspelt option, name the class that users have.

    Else they name one of those behind it, which nobody can look up.
    """
    for base in MQ.__mro__:
        for name, call in vars(base).items():
            while isinstance(call, FunctionType) and not name.startswith("_"):
                call.__module__, call.__qualname__ = __name__, f"{MQ.__name__}.{name}"
                call = getattr(call, "__wrapped__", None)  # as that of a context


_name_calls()
