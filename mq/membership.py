"""What a queue is to its group: who is there, how it stands itself, how it leaves."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from typing import TYPE_CHECKING, Any, Final, NoReturn

from mq import exits, forks, log, settings, stats
from mq.errors import Closed, ForkedProcess, MembersTimeout, RecvTimeout
from mq.log import Log
from mq.members import Member
from mq.mesh import wire
from mq.message import check_topic
from mq.options import whole
from mq.seconds import seconds
from mq.speed import has_other_locks
from mq.transport import LINGER_SECONDS, Capabilities
from mq.undisturbed import Stopper, undisturbed

if TYPE_CHECKING:
    from typing_extensions import Self

    from mq.buffers import Pool
    from mq.codec import Codec
    from mq.join import Joined
    from mq.mesh.handshake import Greeting

logger = Log(__name__)

CLOSE_SECONDS: Final = 30.0
"""For so long `close` delivers, unless it is told otherwise."""
HURRIED_SECONDS: Final = 0.1
"""For so long engines send what they have, the farewell, after a Ctrl-C in `close`."""
PAUSE_SECONDS: Final = 0.01
"""Between looks whether another thread has closed the queue."""


class Membership:
    """The calls of `mq.MQ` that neither publish nor receive."""

    def __init__(
        self, resolved: settings.Settings, joined: Joined, codec: Codec, pool: Pool
    ) -> None:
        self._settings = resolved
        self._joined = joined
        self._driver = joined.driver
        self._lead = joined.driver.lead
        self._mesh = joined.driver.mesh
        self._codec = codec
        self._pool = pool
        self._close_lock = threading.Lock()
        self._closed = False
        self._closer = self._freer = 0  # threads
        self._freed = threading.Event()
        exits.register(self)
        forks.register(self)

    def __repr__(self) -> str:
        return f"<MQ {self.backend} {self.name!r} in group {self._settings.group!r}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self!r} cannot be copied or sent to another process: call mq.connect "
            "there, with the same group and another name"
        )

    @property
    def name(self) -> str:
        """This member's name."""
        return self._settings.name

    @property
    def backend(self) -> str:
        """The backend string."""
        return self._settings.backend

    @property
    def capabilities(self) -> Capabilities:
        """What the transport can do."""
        return self._joined.link.capabilities

    # -- members ----------

    def members(self) -> list[Member]:
        """Who is in the group, this member included, by name."""
        self._lead.check()

        def present() -> list[Greeting]:
            peers = [s.peer for s in self._mesh.sessions.values() if s.introduced]
            peers.append(self._mesh.config.greeting())
            return peers

        members = [
            Member(
                peer.name,
                peer.process.host,
                peer.process.pid,
                tuple(peer.labels),
                peer.since,
                peer.incarnation,
            )
            for peer in self._driver.look(present)
        ]
        return sorted(members, key=lambda member: member.name)

    def wait_for_members(self, n: int, timeout: float | None = None) -> None:
        """Wait until the group has at least `n` members, this one included.

        Raises:
            MembersTimeout: There were fewer; names those that are there.
        """

        n = whole("n", n, 0)

        def enough() -> bool:
            return sum(s.introduced for s in self._mesh.sessions.values()) + 1 >= n

        if not self._driver.wait_until(enough, timeout):
            names = [member.name for member in self.members()]
            raise MembersTimeout(
                f"{self!r}: {len(names)} of {n} members within {timeout:g} s: {names}; "
                f"rendezvous: {self._meets_at}"
            )

    def subscribers(self, topic: str) -> list[str]:
        """Names of the other members subscribed to a topic."""
        topic = check_topic(topic)
        self._lead.check()
        return self._driver.look(lambda: self._mesh.publisher.subscribers(topic))

    def wait_for_subscribers(
        self, topic: str, n: int = 1, timeout: float | None = None
    ) -> None:
        """Wait until at least `n` other members are subscribed to a topic.

        Raises:
            MembersTimeout: There were fewer; names those that are there.
        """
        topic, n = check_topic(topic), whole("n", n, 0)
        publisher = self._mesh.publisher
        if not self._driver.wait_until(
            lambda: len(publisher.subscribers(topic)) >= n, timeout
        ):
            names = self.subscribers(topic)
            raise MembersTimeout(
                f"{self!r}: {len(names)} of {n} subscribers of {topic!r} within "
                f"{timeout:g} s: {names}; rendezvous: {self._meets_at}"
            )

    def _nothing_came(self, timeout: float | None) -> RecvTimeout:
        """What `recv` raises when its time is up."""
        hint = "" if self._mesh.subscriber.topics else "; it is subscribed to nothing"
        return RecvTimeout(f"{self!r}: no message within {timeout:g} s{hint}")

    @property
    def _meets_at(self) -> str:
        """Where this member meets others; who does not come may meet elsewhere."""
        meeting = self._joined.meeting
        return "explicit" if meeting is None else meeting.description

    # -- state ----------

    def stats(self) -> dict[str, Any]:
        """Counters, as plain dictionaries: see `mq.stats` and `mq.buffers.PoolStats`.

        `topics` by topic, `peers` by member, `mesh` for the member as a whole, `pool`
        for its own memory, `shared` for what it shares with peers (a list, empty where
        the transport shares none), `inbox` for the number of messages that wait for
        `recv`.
        """
        driver = self._driver
        counters = driver.look(lambda: stats.of_mesh(self._mesh, driver.waits.waited()))
        return {**counters, "pool": self._pool.stats()._asdict()}

    def describe(self) -> dict[str, Any]:
        """What was chosen and why, as plain dictionaries, lists and values.

        `backend`, `group`, `name`, `labels`, `peer_timeout` and `max_message_bytes` as
        resolved, and `sources`: by argument, which argument, variable or default said
        so. `incarnation` of this member; `addresses` that it listens on; `engine`: what
        the transport chose; `rendezvous`: where members meet; `versions` of Python and
        packages; `compiled`: whether hot functions are. `peers` by member: `wire` as in
        `stats`, `connection`: what the transport says of it, the `peer_timeout` that
        counts for both, and `versions`, `host` and `pid` of the peer.
        """
        from mq import speed

        resolved, joined = self._settings, self._joined

        def read() -> tuple[dict[str, Any], dict[str, str], dict[str, str]]:
            peers = {
                s.name: {
                    "wire": s.wire,
                    "connection": {} if s.conn is None else dict(s.conn.describe()),
                    "peer_timeout": s.timeout,
                    "versions": s.peer.versions,
                    "host": s.peer.process.host,
                    "pid": s.peer.process.pid,
                }
                for s in self._mesh.sessions.values()
            }
            engine = {} if self._closed else dict(joined.link.describe())
            return peers, self._mesh.config.greeting().versions, engine

        peers, versions, engine = self._driver.look(read)
        sources = dict(resolved.sources)
        if not self._mesh.config.secret:  # nor has the rendezvous given one
            sources["secret"] = "none"
        return {
            "backend": resolved.backend,
            "group": resolved.group,
            "name": resolved.name,
            "incarnation": self._mesh.config.incarnation,
            "addresses": list(joined.addresses),
            "engine": engine,
            "rendezvous": self._meets_at,
            "labels": list(resolved.labels),
            "peer_timeout": resolved.peer_timeout,
            "max_message_bytes": resolved.max_message_bytes,
            "versions": versions,
            "compiled": speed.COMPILED,
            "peers": peers,
            "sources": sources,
        }

    # -- end ----------

    def close(self, linger: float | None = CLOSE_SECONDS) -> None:
        """Deliver what was published, leave the group, free everything. Idempotent.

        Called in the middle of a queue's own work, by a destructor or a handler of a
        signal that did not wait, it is done by another thread once that work has ended.
        The log's handlers have been told what was said when it returns, unless they
        take over a second.

        Args:
            linger: Seconds to deliver at most; what then remains is counted in a
                warning. None: as long as it takes.
        """
        self._close(linger, Stopper())

    def _close(self, linger: float | None, stopper: Stopper) -> None:
        """As `close`, which delivers no longer than until it is stopped."""
        linger = float("inf") if linger is None else linger
        driver, lead = self._driver, self._lead
        if lead.forked:
            return
        linger, begin = seconds("linger", linger), time.monotonic()
        lead.end_calls()
        me = threading.get_ident()
        if self._freer == me or (self._close_lock.locked() and self._closer == me):
            return  # this is a handler, in the middle of doing so
        if lead.is_in_the_middle() or has_other_locks(lead.lock):
            threading.Thread(target=self.close, args=(linger,), daemon=True).start()
            return
        while not self._freed.is_set() and not lead.forked:
            if self._closed or self._close_lock.locked():
                # Another thread closes it, maybe one that an interrupt left it to. Not
                # every signal ends a wait for a lock, and a handler that came into one
                # for an event could not wait for that, too: it is looked for.
                time.sleep(PAUSE_SECONDS)
                continue
            with self._close_lock:
                self._closer = me
                if not self._closed:
                    # Only now: what another thread delivers is not to be cut short.
                    stopper.on_stop(functools.partial(driver.hurry, begin))
                    self._end(linger, begin)
        log.flush()

    def close_at_exit(self, linger: float) -> None:
        """As `close`, which the caller of a call that it ends did not call."""
        if not self._lead.closing:
            self._lead.ender = "the process ends"
        self._driver.hurry(time.monotonic() + linger)  # another thread's close, too
        self.close(linger)

    def _end(self, linger: float, begin: float) -> None:
        driver, lead = self._driver, self._lead
        to_send = HURRIED_SECONDS
        # A signal's handler may fork meanwhile: the parent goes on.
        with contextlib.suppress(ForkedProcess):
            try:
                left = driver.leave("closed", begin + linger)
                to_send = LINGER_SECONDS
                if left:
                    logger.warning(
                        "%r closed with messages undelivered after %g s: %s",
                        self,
                        min(linger, round(time.monotonic() - begin, 3)),
                        driver.look(lambda: driver.describe_feeds(left)),
                    )
            finally:
                if not lead.forked:
                    undisturbed(functools.partial(self._free, to_send))

    def _free(self, to_send: float) -> None:
        self._freer = threading.get_ident()
        self._closed = True
        try:
            self._driver.taking.discard_inbox()
            self._joined.close(to_send)
        finally:
            self._freer = 0
            self._freed.set()
            # Last: exit waits for what another thread closes, and a forked child must
            # know of it, or that it is closed.
            exits.unregister(self)

    def types_changed(self) -> None:
        """Tell the others which types this member accepts now."""

        def announce() -> None:
            accepts = sorted(self._codec.accepts())
            for session in self._mesh.sessions.values():
                session.control(wire.ACCEPTS, accepts)

        with contextlib.suppress(Closed):
            self._driver.run(announce)

    def abandon(self) -> None:
        """In a forked child: it is not this process's to close."""
        exits.unregister(self)

    def __enter__(self) -> Self:
        self._lead.check()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
