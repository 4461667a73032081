"""Who may become a peer: dials, handshakes, and what happens when names collide."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from mq.addresses import origin
from mq.log import printable
from mq.mesh import handshake as hs
from mq.mesh import wire
from mq.mesh.admission import claim, crowded, objection
from mq.mesh.dial import Dial, Granted, Greeter
from mq.mesh.faults import LinkFault, Message
from mq.mesh.handshake import Greeting, Refusal
from mq.transport import MAX_HEAD_BYTES, Event, What

if TYPE_CHECKING:
    from mq.mesh.mesh import Mesh
    from mq.transport import Conn

GREET_SECONDS: Final = 5.0
"""How long an accepted connection may take to greet."""
STRANGER_BYTES: Final = 2 * MAX_HEAD_BYTES
"""What an accepted connection may send before its peer has proven who it is: its two
frames, which have no body."""
FATAL: Final = frozenset(
    {hs.VERSION, hs.SECRET, hs.GROUP, hs.BACKEND, hs.NAME_TAKEN, hs.REPLACED, hs.SELF}
)
"""Refusals that no repetition changes."""
FINAL: Final = frozenset({hs.SELF, hs.LEAVING, hs.RESET})
"""Refusals after which there is nothing more to reach."""


class Greetings:
    """Connections in their handshake, those dialled and those accepted."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._faults = mesh.faults
        self._dialling = mesh.dialling
        self._greeters = mesh.dialling.greeters

    # -- events ----------

    def handle(self, event: Event) -> None:
        """Something happened on a connection that belongs to no session."""
        conn, mesh = event.conn, self._mesh
        if event.what is What.ACCEPTED:
            self._dialling.make_room(conn)
            conn.guard(STRANGER_BYTES)
            deadline = mesh.clock() + GREET_SECONDS
            come = origin(conn.address)
            self._greeters[conn] = Greeter(
                mesh.config.secret, None, deadline, origin=come
            )
            return
        greeter = self._greeters.get(conn)
        if greeter is None:
            self._faults.close(conn)
            return
        try:
            if event.what is What.OPENED:
                greeter.opened = True
                if greeter.dial is not None and greeter.dial.opened_at is None:
                    greeter.dial.opened_at = mesh.clock()
                self._send(conn, greeter, greeter.handshake.hello())
            elif event.what is What.LOST:
                reason = printable(event.reason or "connection lost")
                dial = greeter.dial
                if event.refused and dial is not None:
                    self._dialling.end(conn, greeter, dial, hs.LINK, reason)
                else:
                    self._dialling.fail(conn, greeter, reason)
            elif event.what is What.READABLE:
                self._read(conn, greeter)
        except LinkFault as error:
            self.handle(Event(What.LOST, conn, str(error), refused=True))

    def _read(self, conn: Conn, greeter: Greeter) -> None:
        message = self._faults.received(conn)
        if message is None:
            return
        head, nbody = message
        if greeter.granted is not None:
            self._begin(conn, greeter.granted, message)
            return
        if greeter.refused:
            if nbody:
                self._faults.asked(conn.discard_body)
            return
        try:
            if nbody or len(head) > hs.MAX_GREETING_BYTES + 256:
                raise wire.Malformed("handshake frame with a body or too large")
            self._step(conn, greeter, bytes(head))
        except hs.VersionMismatch as error:
            reason = f"{conn.address}: {error}"
            if greeter.dial is None:
                self._mesh.setbacks.strange(hs.VERSION, "", conn.address, error)
                self._refuse(conn, greeter, hs.VERSION, str(error))
            else:
                self._dialling.end(conn, greeter, greeter.dial, hs.VERSION, reason)
        except wire.Malformed as error:
            self._mesh.stats.malformed += 1
            self._mesh.setbacks.complain("a handshake", "", conn.address, error)
            self._dialling.fail(conn, greeter, f"malformed handshake: {error}")

    def _step(self, conn: Conn, greeter: Greeter, raw: bytes) -> None:
        if greeter.dial is None:
            self._hear_dialler(conn, greeter, raw)
        else:
            self._hear_listener(conn, greeter, greeter.dial, raw)

    def _hear_dialler(self, conn: Conn, greeter: Greeter, raw: bytes) -> None:
        shake, kind = greeter.handshake, raw[0] if raw else 0
        if kind == wire.HELLO and not greeter.greeted:
            greeter.greeted = True
            self._send(conn, greeter, shake.challenge(raw))
        elif kind == wire.GREETING and greeter.greeted:
            greeting = shake.greeting(raw)
            if greeting is None:
                self._unproven(conn, greeter)
            else:
                self._accept(conn, greeter, greeting)
        elif kind == wire.REFUSED and greeter.greeted:
            shake.check_distrust(raw)
            self._unproven(conn, greeter, "it says that its secret is another")
        else:
            raise wire.Malformed(f"handshake frame {kind} out of place")

    def _hear_listener(
        self, conn: Conn, greeter: Greeter, dial: Dial, raw: bytes
    ) -> None:
        shake, kind = greeter.handshake, raw[0] if raw else 0
        if kind == wire.CHALLENGE and not greeter.greeted:
            if not shake.check_challenge(raw):
                # For who listens to learn of it.
                self._faults.asked(conn.try_send, shake.distrust())
                self._unproven(conn, greeter)
                return
            greeter.greeted = True
            session = dial.session
            greeting = self._mesh.config.greeting(
                "" if session is None else session.id,
                0 if session is None else session.received,
                probe=dial.probe or not dial.incarnation,
                leaving=bool(self._mesh.leaving),
                to=dial.incarnation,
            )
            self._send(conn, greeter, shake.seal(wire.GREETING, greeting))
        elif kind == wire.WELCOME and greeter.greeted:
            welcome = shake.greeting(raw)
            if welcome is None:
                self._unproven(conn, greeter)
            else:
                self._welcomed(conn, greeter, dial, welcome)
        elif kind == wire.REFUSED:
            refusal, proven = shake.refusal(raw)
            self._refused(conn, greeter, dial, refusal, proven)
        else:
            raise wire.Malformed(f"handshake frame {kind} out of place")

    def _send(self, conn: Conn, greeter: Greeter, frame: bytes) -> None:
        if not self._faults.is_true(conn.try_send, frame):
            self._dialling.fail(conn, greeter, "cannot send the handshake")

    def _unproven(
        self,
        conn: Conn,
        greeter: Greeter,
        why: str = "it does not know the group's secret",
    ) -> None:
        self._mesh.stats.unauthenticated += 1
        self._mesh.setbacks.strange(hs.SECRET, "", conn.address, why)
        if greeter.dial is None:
            self._refuse(conn, greeter, hs.SECRET, "the secrets of the members differ")
            return
        reason = f"{conn.address}: {why}"
        self._dialling.end(conn, greeter, greeter.dial, hs.SECRET, reason)

    # -- the listener's decision ----------

    def _accept(self, conn: Conn, greeter: Greeter, greeting: Greeting) -> None:
        mesh, shake = self._mesh, greeter.handshake
        refusal = objection(mesh, greeting) or self._other_session(conn, greeting)
        if refusal is not None:
            code, text = refusal.code, refusal.text
            mesh.setbacks.strange(code, greeting.name, conn.address, text)
            self._refuse(conn, greeter, code, text)
            return
        if greeting.probe:
            greeter.refused = True
            welcome = mesh.config.greeting(probe=True)
            self._send(conn, greeter, shake.seal(wire.WELCOME, welcome))
            return
        conn.guard(None)
        old = mesh.sessions.get(greeting.incarnation)
        if old is not None and greeting.session == old.id:
            if mesh.clock() < old.rests_until:
                self._dialling.close(conn)  # it dials again
                return
            if old.lends and not conn.lends:
                mesh.cut(old)  # what it still holds comes again, under other numbers
            old.last_heard = mesh.clock()  # what follows may take a round trip
            greeter.granted = Granted(greeting, old.id, old)
            answer = mesh.config.greeting(old.id, old.received)
        else:
            greeter.granted = Granted(greeting, os.urandom(8).hex(), None)
            answer = mesh.config.greeting(greeter.granted.session_id)
        self._send(conn, greeter, shake.seal(wire.WELCOME, answer))

    def _other_session(self, conn: Conn, greeting: Greeting) -> Refusal | None:
        """Why no new session can begin with this peer, where it needs one."""
        mesh = self._mesh
        old = mesh.sessions.get(greeting.incarnation)
        if greeting.probe or (old is not None and greeting.session == old.id):
            return None
        if greeting.leaving:
            text = "the session was given up; what was not delivered is lost"
            return Refusal(hs.RESET, text)
        if mesh.leaving:
            return Refusal(hs.LEAVING, f"{mesh.config.name!r} is leaving the group")
        if self._dialling.goes_on(greeting.incarnation):
            return Refusal(hs.DUPLICATE, "this member is dialling you already")
        if old is None and (why := crowded(conn)):
            text = f"of {mesh.config.name!r} {why}; raise `ulimit -n` there"
            return Refusal(hs.FULL, text)
        return None

    def _begin(self, conn: Conn, granted: Granted, message: Message) -> None:
        """The peer goes on after WELCOME: the session is on this connection now."""
        mesh = self._mesh
        greeting, session_id, session = granted
        if session is not None:
            if not session.alive:
                self._dialling.close(conn)
                return
            try:
                mesh.resume(session, conn, greeting.received)
            except wire.Malformed as error:
                self._dialling.close(conn)
                mesh.setbacks.malformed(session, error)
                return
        else:
            if claim(mesh, greeting) is not None:
                self._dialling.close(conn)
                return
            old = mesh.sessions.get(greeting.incarnation)
            if old is not None:
                mesh.forget(old, "it began a new session", superseded=True)
            session = mesh.establish(greeting, conn, session_id, None)
            self._dialling.tell_of_failures(greeting)
        del self._greeters[conn]
        self._dialling.cancel_all(greeting.incarnation)
        mesh.reader.read(session, conn, message)

    def has_granted(self) -> bool:
        """Whether some peer may have begun a session of which nothing has come yet."""
        return any(greeter.granted for greeter in self._greeters.values())

    def _refuse(self, conn: Conn, greeter: Greeter, code: str, text: str) -> None:
        if code not in hs.UNCOUNTED:
            self._mesh.stats.refused += 1
        frame = greeter.handshake.seal(wire.REFUSED, Refusal(code, text))
        self._faults.asked(conn.try_send, frame)
        # The dialler closes when it has read this; else the deadline does.
        greeter.refused = True

    def linger(self, conn: Conn) -> None:
        """Keep a connection until the peer has read what was sent and closes it."""
        deadline = self._mesh.clock() + GREET_SECONDS
        greeter = Greeter(self._mesh.config.secret, None, deadline)
        greeter.refused = True
        self._greeters[conn] = greeter

    # -- the dialler's part ----------

    def _welcomed(
        self, conn: Conn, greeter: Greeter, dial: Dial, welcome: Greeting
    ) -> None:
        mesh = self._mesh
        self._dialling.answered(dial)
        dial.welcome = welcome
        dial.address = greeter.address  # the last attempt may be by another
        mesh.changed += 1
        if dial.probe or not dial.incarnation:
            dial.identified(welcome.incarnation)
            dial.done = dial.probe
            self._dialling.close(conn)
            self._dialling.attempt(dial, mesh.clock())
            return
        if welcome.incarnation != dial.incarnation:
            self._dialling.fail(
                conn, greeter, f"{conn.address}: another member answers there"
            )
            return
        old = mesh.sessions.get(welcome.incarnation)
        if old is None and (why := crowded(conn)):
            self._dialling.fail(conn, greeter, f"here {why}; raise `ulimit -n`")
            return
        conn.guard(None)
        try:
            if old is not None and old is dial.session and welcome.session == old.id:
                mesh.resume(old, conn, welcome.received)
            elif (refusal := self._begin_dialled(conn, dial, welcome)) is not None:
                reason = f"{conn.address}: {refusal.text}"
                if dial.blind and refusal.code == hs.NAME_TAKEN:  # by another peer
                    self._dialling.refuse(dial, refusal.code, reason)
                else:
                    self._dialling.fail(conn, greeter, reason)
                return
        except wire.Malformed as error:
            self._dialling.close(conn)
            dial.done = True
            assert old is not None
            mesh.setbacks.malformed(old, error)
            return
        del self._greeters[conn]
        dial.conn = None
        dial.error = ""
        dial.done = True
        self._dialling.cancel_all(welcome.incarnation)

    def _begin_dialled(
        self, conn: Conn, dial: Dial, welcome: Greeting
    ) -> Refusal | None:
        """Begin the session that WELCOME grants; else why it does not begin."""
        mesh = self._mesh
        granted = [
            other
            for other, greeter in self._greeters.items()
            if greeter.granted is not None
            and greeter.granted.greeting.incarnation == welcome.incarnation
        ]
        if granted and mesh.config.incarnation > welcome.incarnation:
            return Refusal(hs.DUPLICATE, "it dials this member")  # and that one wins
        if (refusal := claim(mesh, welcome)) is not None:
            return refusal
        for other in granted:
            self._dialling.close(other)
        old = mesh.sessions.get(welcome.incarnation)
        if old is not None:
            dial.session = None  # this dial goes on, in another session
            mesh.forget(old, "it has forgotten the session", superseded=True)
        mesh.establish(welcome, conn, welcome.session, dial)
        return None

    def _refused(
        self, conn: Conn, greeter: Greeter, dial: Dial, refusal: Refusal, proven: bool
    ) -> None:
        mesh = self._mesh
        self._dialling.answered(dial)
        mesh.changed += 1
        code = refusal.code
        reason = f"{conn.address}: {refusal.text}"
        # Without a rendezvous nobody's life is a later one of this member's.
        named = mesh.config.generation and code == hs.REPLACED
        if proven and (named or (code == hs.NAME_TAKEN and dial.returning)):
            mesh.replace(refusal.text)
            self._dialling.refuse(dial, code, reason)
        elif not dial.returning and (code == hs.SECRET or (code in FATAL and proven)):
            self._dialling.end(conn, greeter, dial, code, reason, proven=proven)
        elif code in FINAL and proven:
            self._dialling.refuse(dial, "", reason)
            if dial.session is not None:
                mesh.forget(dial.session, refusal.text, proven=True)
        else:
            self._dialling.fail(conn, greeter, reason)

    # -- time ----------

    def tick(self, now: float) -> None:
        """Close what takes too long; dial again what failed."""
        for conn, greeter in list(self._greeters.items()):
            if now < greeter.deadline:
                continue
            if not (greeter.dial or greeter.refused or greeter.granted):
                self._mesh.stats.refused += 1
                why = "it did not greet in time"
                self._mesh.setbacks.complain("a connection", "", conn.address, why)
            self._dialling.time_out(conn, greeter, now)
        self._dialling.attempt_due(now)

    def recover(self) -> None:
        """An exception left the mesh: begin all handshakes anew."""
        conns = self._mesh.conns
        for conn, greeter in list(self._greeters.items()):
            if conn in conns:
                del self._greeters[conn]
                if greeter.dial is not None:
                    greeter.dial.conn = None
                    greeter.dial.done = True
            else:
                self._dialling.fail(conn, greeter, "interrupted")
        for dial in self._dialling.dials:
            if dial.conn is not None:
                self._faults.close(dial.conn)
                dial.failed("interrupted", self._mesh.clock())
