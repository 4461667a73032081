"""The front: `connect` and the queue that it returns."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from mq import settings
from mq.blocking import BlockingQueue
from mq.descriptors import out_of_descriptors
from mq.errors import Closed, RecvTimeout, TransportUnavailable
from mq.message import CLEAR, Message
from mq.options import switch
from mq.seconds import deadline_after
from mq.undisturbed import Stopper, undisturbed

if TYPE_CHECKING:
    import asyncio  # which takes as long as all of ours; who uses it has imported it

    from typing_extensions import Self

    from mq.mesh.driver import Driver

LOOP_SECONDS: Final = 0.005
"""How long calls of `arecv` and `apublish` that need not wait keep an event loop."""


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
        name: This member's name, unique in its group; default: host, pid and a number.
        rendezvous: Where members meet: None (a directory of this user on this host),
            ``tcp://host:port``, ``file:///shared/path`` or ``env://`` (torchrun).
        listen: Addresses to listen on; default: reachable from this host only.
            ``tcp://host:port`` will do for every transport between hosts.
        attach_to: Addresses of members to connect to. With `listen` or `attach_to`
            and no `rendezvous`, nothing else is looked for.
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


class _Loop(threading.local):
    """Of the thread whose event loop calls.

    Attributes:
        ran_at: When its other tasks last had a turn.
    """

    ran_at = 0.0


_loop = _Loop()


class MQ(BlockingQueue):
    """A member of a group; made by `connect`. Any thread may call any method."""

    async def arecv(self, timeout: float | None = None) -> Message:
        """`recv` for asyncio; cancelled, it has taken nothing."""
        deadline = deadline_after(timeout)
        await _let_others_run()
        box: list[Any] = []  # what is taken is in the inbox or in there
        try:
            if self._inbox.ready:
                with contextlib.suppress(RecvTimeout):  # another thread was faster
                    box.append(self.recv(0))
                    return box[0]  # type: ignore[no-any-return]
            with _Wakeups(self._driver) as wakeups:
                while True:
                    wakeups.event.clear()
                    with contextlib.suppress(RecvTimeout):
                        box.append(self.recv(0))
                        return box[0]  # type: ignore[no-any-return]
                    if not await _wait(wakeups.event, deadline):
                        raise self._nothing_came(timeout)
        except BaseException:
            if box:
                self._stranded.append(box)
                self._driver.put_back()
            raise

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
        deadline_after(timeout)  # a bad one is refused even where nothing is waited for
        await _let_others_run()
        known = None if retain or urgent else self._known.get(topic)
        if known is not None and known.gate.publish(payload, self._lock):
            return
        if payload is CLEAR:
            self.publish(topic, payload, retain=retain)
            return
        if type(topic) is not str or topic not in self._topics:
            topic = self._new_topic(topic)
        frames = self._codec.encode(payload, topic, self._carried(topic, retain))
        driver = self._driver
        with driver.turns(topic, timeout) as turns, _Wakeups(driver) as wakeups:
            while not driver.publish(topic, frames, retain, urgent, 0, turns):
                await _wait(wakeups.event, turns.until())
                wakeups.event.clear()

    async def aflush(self, timeout: float | None = None) -> None:
        """`flush` for asyncio."""
        driver = self._driver
        driver.check()
        deadline = deadline_after(timeout)
        await _let_others_run()
        marks = driver.marks()
        with _Wakeups(driver) as wakeups:
            while True:
                wakeups.event.clear()
                if driver.wait_until(
                    lambda: not driver.mesh.publisher.unsettled(marks), 0
                ):
                    return
                if not await _wait(wakeups.event, deadline):
                    raise self._not_flushed(marks, timeout)

    async def __aiter__(self) -> AsyncIterator[Message]:
        """Messages until the queue is closed."""
        while True:
            try:
                message = await self.arecv()
            except Closed:
                return
            yield message

    async def __aenter__(self) -> MQ:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        import asyncio
        from concurrent.futures import ThreadPoolExecutor

        # Not asyncio's own threads: calls that this is to end may have them all.
        executor = ThreadPoolExecutor(1, "mq-close")
        closing = asyncio.get_running_loop().run_in_executor(executor, self.close)
        try:
            await closing
        finally:
            executor.shutdown(wait=not closing.cancelled())


class _Wakeups:
    """Sets an event of the running loop whenever something changes, while entered.

    Attributes:
        event: It.
    """

    def __init__(self, driver: Driver) -> None:
        import asyncio

        self._driver = driver
        self._loop = asyncio.get_running_loop()
        self._is_due = False  # the loop has been told, and has not come to it
        self._is_over = False
        self.event = asyncio.Event()

    def __enter__(self) -> Self:
        try:
            self._driver.listen(self._wake)
        except BaseException:
            self._is_over = True  # an interrupt came as that ended
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._is_over = True
        # Else this is what is left of a task, freed under the lock by chance.
        if not self._driver.is_in_the_middle():
            self._driver.unlisten(self._wake)

    def _wake(self) -> bool:
        if not self._is_due and not self._is_over:
            self._is_due = True
            try:
                self._loop.call_soon_threadsafe(self._set)
            except RuntimeError:  # the loop is closed: nobody waits any more
                self._is_over = True
        return not self._is_over

    def _set(self) -> None:
        self._is_due = False
        self.event.set()


async def _let_others_run() -> None:
    """Now and then, as asyncio changes tasks, and cancels them, only where one waits.

    A task that always finds a message would be the only one, and deaf to a Ctrl-C.
    """
    before = _loop.ran_at
    if time.monotonic() - before > LOOP_SECONDS:
        import asyncio

        await asyncio.sleep(0)
        _note_turn(before)


def _note_turn(before: float) -> None:
    """Of several tasks that go on in one turn of the loop the first counts."""
    if _loop.ran_at == before:
        _loop.ran_at = time.monotonic()


async def _wait(event: asyncio.Event, deadline: float | None) -> bool:
    """Wait for the event or the deadline; False if that had passed already."""
    timer = None
    if deadline is not None:
        left = deadline - time.monotonic()
        if left <= 0.0:
            return False
        import asyncio

        # Not `asyncio.wait_for`, which up to Python 3.11 returns in spite of `cancel`
        # where the event was set just before.
        timer = asyncio.get_running_loop().call_later(left, event.set)
    before = _loop.ran_at
    try:
        await event.wait()
    finally:
        if timer is not None:
            timer.cancel()
    _note_turn(before)
    return True
