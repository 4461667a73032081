"""The mesh: sessions with all peers, and what travels over them.

Pure logic over any `Link`: it never waits, starts no thread and reads no clock but the
one it was given. The driver's calls and its keeper use it under one lock.

An exception that leaves it in the middle of a frame, a KeyboardInterrupt for example,
is answered with `recover`: the connection concerned is dropped and the session resumed,
which repeats whatever was not finished.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final

from mq.borrowing import Returns
from mq.log import Log, printable
from mq.mesh import wire
from mq.mesh.burial import bury
from mq.mesh.config import Config
from mq.mesh.cutting import Cutting
from mq.mesh.dial import Dial
from mq.mesh.dialling import Dialling
from mq.mesh.faults import Faults
from mq.mesh.greeting import Greetings
from mq.mesh.handshake import Greeting
from mq.mesh.large import Take
from mq.mesh.liveness import Liveness
from mq.mesh.publisher import Publisher
from mq.mesh.reader import Reader
from mq.mesh.recovery import let_go, recover
from mq.mesh.session import Fate, Session
from mq.mesh.setbacks import Setbacks
from mq.mesh.subscriber import Subscriber
from mq.stats import MeshStats
from mq.transport import LINGER_SECONDS, Event, What

if TYPE_CHECKING:
    from mq.mesh.feed import Feed
    from mq.transport import Conn, Link

logger = Log(__name__)

ROUNDS_PER_POLL: Final = 16
"""How often `poll` looks again after it has sent something, before it returns."""


class Mesh:
    """All sessions of one member.

    Attributes:
        changed: Grows whenever something happened that a waiting call may wait for.
        replaced: Why this member must stop: another took its name over, or its link
            has ended.
        forgotten: Peers that the rendezvous is told of, and if they are proven gone.
    """

    def __init__(
        self,
        config: Config,
        links: Sequence[Link],
        *,
        take: Take,
        clock: Callable[[], float],
    ) -> None:
        self.config = config
        self.links = list(links)
        self.clock = clock
        self._take = take
        self.stats = MeshStats()
        self.faults = Faults(self.replace)
        self.publisher = Publisher(take, Cutting.of(links))
        self.subscriber = Subscriber(take, config.max_message_bytes, Returns())
        self.sessions: dict[str, Session] = {}
        self.conns: dict[Conn, Session] = {}
        self.setbacks = Setbacks(self)
        self.reader = Reader(self)
        self.dialling = Dialling(self)
        self.greetings = Greetings(self)
        self.liveness = Liveness(self)
        self.changed = 0
        self.replaced = self.leaving = ""  # why
        self._next_tick = self._show_at = self._last_poll = clock()
        self.forgotten: list[tuple[Greeting, bool]] = []
        self._polling = self._unfinished = self._shown = False
        self.wake: Callable[[], None] = lambda: None
        self.wake_fd = -1  # does the same when it is written to
        self.watch_added: Callable[[int], None] = lambda fd: None
        self.watch_removed: Callable[[int], None] = lambda fd: None

    # -- the loop ----------

    def poll(
        self,
        ready: Iterable[int] = (),
        *,
        flush: bool = False,
        until_message: bool = False,
    ) -> None:
        """Handle what the links have, and whatever is due; send what can be sent.

        Sending may take in what was about to be reported, so it is followed by another
        look; when that goes on for long, `next_deadline` is over at once. So a caller
        that minds `next_deadline` may sleep on the poller.

        Args:
            ready: Descriptors that the poller found readable, for process watches.
            flush: Send batches that wait for more messages at once, and answers that
                somebody may wait for.
            until_message: Return as soon as there is something to `take`; the rest is
                left to the next call, which `next_deadline` then asks for at once.
        """
        self._polling = True
        watches = self.liveness.watches
        for fd in ready:
            session = watches.get(fd)
            if session is not None:
                self.liveness.check_process(session)
        reader, copies = self.reader, self.subscriber.copies
        self._show_at = self._next_tick
        reader.until_message = until_message
        reader.had_its_fill = False
        for _ in range(ROUNDS_PER_POLL):
            reader.stopped_early = self._shown = False
            if self._take_events():
                self._unfinished = True
                break
            now = self.clock()
            if now >= self._next_tick:
                self._tick(now)
            elif self.dialling.dials:
                self.dialling.attempt_due(now)
            self._last_poll = now
            sent = self.pump(now, flush)
            self._unfinished = sent or self._shown or reader.stopped_early
            if copies.waiting and copies.go_on(now, at_once=until_message):
                self.changed += 1
                self._unfinished = True
                break  # there may be something to take now
            if not self._unfinished or reader.had_its_fill:
                break
            if any(session.had_its_fill for session in self.sessions.values()):
                break
        self._polling = False

    def _take_events(self) -> bool:
        """Handle what the links report; whether that ended at a message for `recv`."""
        inbox, copies = self.subscriber.inbox, self.subscriber.copies
        until_message = self.reader.until_message
        for link in () if self.faults.deaf else self.links:
            ours = False  # whether what raises is none of the link's
            try:
                for event in link.poll():
                    if not isinstance(event, Event):
                        raise TypeError(f"it yielded {event!r}, which is no Event")
                    ours = True
                    self._handle(event)
                    now = self.clock()
                    if now >= self._show_at:
                        self._show(now)
                    if until_message and inbox.fifo and now < self._next_tick:
                        if copies.waiting:
                            copies.go_on(now)
                        return True
                    ours = False
            except Exception as error:
                if ours:
                    raise
                self.faults.deafen(link, error)
        return False

    def _show(self, now: float) -> None:
        """Have peers hear of this member, as the rest of what arrives may take long."""
        self._show_at = now + self.liveness.tick_seconds
        self.liveness.show(now)
        self.pump(now)
        self._shown = True  # an engine may have taken up news meanwhile

    def pump(self, now: float, flush: bool = False) -> bool:
        """Send what is due in every session; whether anything was sent.

        Args:
            now: The time by the mesh's clock.
            flush: As for `poll`.
        """
        sent, send = False, self.setbacks.send
        if self.subscriber.returns.queue:
            self.subscriber.give_back()
        for session in list(self.sessions.values()):
            if (
                session.busy
                or session.batch_at is not None
                or session.answer_at is not None
                or session.sent < len(session.frames)
                or session.fault is not None
            ):
                sent |= send(session, now, flush)
        return sent

    def next_deadline(self) -> float:
        """When `poll` must be called again at the latest."""
        if self._unfinished:
            return self._last_poll
        deadline = self.subscriber.copies.next_deadline(self._next_tick)
        for session in self.sessions.values():
            # Most have neither, and nothing else of them is looked at.
            for at in (session.answer_at, session.batch_at):
                if at is not None and at < deadline and session.can_send():
                    deadline = at
        return self.dialling.next_deadline(deadline)

    def batch_deadline(self) -> float:
        """When the first batch that is held must leave; infinity where none is."""
        deadline = float("inf")
        for session in self.sessions.values():
            if session.batch_at is not None and session.can_send():
                deadline = min(deadline, session.batch_at)
        return deadline

    def replace(self, reason: str) -> None:
        """This member must stop: nothing is published any more."""
        self.replaced = self.replaced or reason
        self.publisher.close_gates()
        self.changed += 1

    def _handle(self, event: Event) -> None:
        conn = event.conn
        session = self.conns.get(conn)
        if session is None:
            self.greetings.handle(event)
        elif event.what is What.READABLE:
            self.reader.read(session, conn)
        elif event.what is What.WRITABLE:
            session.blocked = session.fault is not None
            self.changed += 1
        elif event.what is What.LOST:
            reason = printable(event.reason or "connection lost")
            if event.malformed:
                self.setbacks.broke_rules(session, reason)
            self.disconnect(session, reason)

    def _tick(self, now: float) -> None:
        self._next_tick = self.liveness.next_tick(now)
        self.liveness.tick(now, now - self._last_poll)
        self.greetings.tick(now)
        self.subscriber.tick()

    def recover(self) -> None:
        """An exception left the mesh: make it consistent and go on."""
        polling, self._polling = self._polling, False
        recover(self, polling=polling)

    # -- sessions ----------

    def establish(
        self, greeting: Greeting, conn: Conn, session_id: str, dial: Dial | None
    ) -> Session:
        """Begin a session on a connection whose handshake is done."""
        now = self.clock()
        session = Session(
            session_id,
            greeting,
            dialler=dial is not None,
            timeout=self.config.timeout_with(greeting.peer_timeout),
            now=now,
            take=self._take,
            faults=self.faults,
        )
        session.dialled = "" if dial is None else dial.address
        session.pace.is_bounded = not self.config.is_near(greeting.process)
        if accepts := sorted(self.config.accepts()):  # more since the greeting, maybe
            session.control(wire.ACCEPTS, accepts)
        self.subscriber.introduce(session)
        if self.leaving:
            session.control(wire.BYE, self.leaving)
        session.attach(conn, 0, now)
        self.conns[conn] = session
        # Only now does it exist: an interrupt before this leaves no half session.
        self.sessions[greeting.incarnation] = session
        self.liveness.watch(session)
        self.changed += 1
        more = "".join(f", {k} {v}" for k, v in conn.describe().items())
        logger.info("session with %s over %s%s", session.name, conn.address, more)
        return session

    def resume(self, session: Session, conn: Conn, received: int) -> None:
        """Go on with a session over a new connection.

        Raises:
            Malformed: The peer claims frames that were never sent.
        """
        self.cut(session)
        session.attach(conn, received, self.clock())
        self.conns[conn] = session
        self.changed += 1
        logger.debug("resumed the session with %s over %s", session.name, conn.address)

    def cut(self, session: Session) -> None:
        """Close the connection of a session, if it has one."""
        conn = session.detach()
        if conn is not None:
            self.faults.close(conn)  # first: after an interrupt it must be found
            self.conns.pop(conn, None)

    def disconnect(self, session: Session, reason: str) -> None:
        """The connection of a session is broken; resume it, unless the peer is dead."""
        self.cut(session)
        self.stats.lost_connections += session.received > 0  # else not of both yet
        self.changed += 1
        if session.watch is not None and session.watch.ended():
            self.forget(session, "its process ended", proven=True)
        elif self.leaving and session.is_done():
            self.forget(session, "its connection broke after BYE", proven=True)
        elif session.dialler and session.alive:
            logger.debug("connection to %s broke: %s", session.name, reason)
            self.dialling.redial(session)

    def forget(
        self,
        session: Session,
        reason: str,
        *,
        proven: bool = False,
        superseded: bool = False,
    ) -> None:
        """Give a peer up: nobody waits for it any more.

        Args:
            proven: It has left or is dead. Otherwise it may only be stalled or cut
                off, and is dialled again in case it comes back.
            superseded: The peer goes on in another session.
        """
        if session.fate is None:
            session.fate = Fate(reason, proven, superseded)
            bury(self, session)

    def hurry(self) -> None:
        """See whether some peer waits for its memory to be given back."""
        waits = any(session.peer_waits for session in self.sessions.values())
        self.subscriber.returns.bell.fd = self.wake_fd if waits else -1
        if waits and self.subscriber.returns.queue:
            self.wake()

    def dismiss(self, session: Session, reason: str) -> None:
        """A peer has left, or must; it closes once it has read what was sent."""
        conn = session.detach()
        if conn is not None:
            self.greetings.linger(conn)
            self.conns.pop(conn, None)
        self.forget(session, reason, proven=True)

    def by_name(self, name: str) -> Session | None:
        """The session with the member of this name."""
        return next((s for s in self.sessions.values() if s.name == name), None)

    def marks(self) -> list[tuple[Feed, int]]:
        """What `flush` waits for: every feed and the last message committed to it.

        However many topics this member has used: most have no feed, maybe.
        """
        return [
            (feed, feed.mark())
            for session in self.sessions.values()
            for feed in session.feeds.values()
        ]

    # -- leaving ----------

    def leave(self, reason: str) -> None:
        """Say BYE to everyone; new connections are refused from now on."""
        self.leaving = reason
        now = self.clock()
        for session in list(self.sessions.values()):
            session.control(wire.BYE, reason)
            self.setbacks.send(session, now, flush=True)

    def has_left(self) -> bool:
        """Whether every peer has received the BYE, also who only knows of a session."""
        if self.greetings.has_granted():
            return False
        # What follows its BYE a peer never answers: the session is over for it.
        return not any(session.owes_bye() for session in self.sessions.values())

    def close(self, linger: float = LINGER_SECONDS) -> None:
        """Close all connections and links; they send what they have for so long."""
        for session in self.sessions.values():
            self.liveness.unwatch(session)
        let_go(self)
        self.subscriber.returns.close()
        self.conns.clear()
        self.sessions.clear()
        for link in self.links:
            self.faults.close(link, linger)
