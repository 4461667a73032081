"""The handshake proves the secret both ways, and nothing gets past it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import Parcel, ScriptedConn, ScriptedLink
from world import World

from mq import log
from mq.mesh import handshake as hs
from mq.mesh import wire
from mq.mesh.handshake import Greeting, Handshake, Refusal, VersionMismatch
from mq.mesh.wire import Malformed
from mq.process import ProcessId
from mq.transport import Event, What

GREETING = World().config("someone").greeting()
Frames = tuple[bytes, bytes, bytes, bytes]

SETTINGS = settings(deadline=None, max_examples=300)


def pair(secret: bytes = b"s", other: bytes = b"s") -> tuple[Handshake, Handshake]:
    """A dialler and a listener."""
    return Handshake(secret, dialler=True), Handshake(other, dialler=False)


def exchange(dialler: Handshake, listener: Handshake) -> Frames:
    """All four frames of an exchange in which all goes well."""
    hello = dialler.hello()
    challenge = listener.challenge(hello)
    assert dialler.check_challenge(challenge)
    greeting = dialler.seal(wire.GREETING, GREETING)
    assert listener.greeting(greeting) == GREETING
    welcome = listener.seal(wire.WELCOME, GREETING)
    assert dialler.greeting(welcome) == GREETING
    return hello, challenge, greeting, welcome


def mutate(frame: bytes, at: int, flip: int) -> bytes:
    """The frame with one byte changed."""
    at %= len(frame)
    return frame[:at] + bytes([frame[at] ^ flip]) + frame[at + 1 :]


def test_both_sides_prove_the_secret() -> None:
    """After the exchange each knows that the other knows it."""
    dialler, listener = pair()
    exchange(dialler, listener)
    assert dialler.proven
    assert listener.proven


def test_no_secret_works_the_same() -> None:
    """An empty secret is a secret that everybody knows."""
    exchange(*pair(b"", b""))


@pytest.mark.parametrize("mine", [b"", b"other"])
def test_a_wrong_secret_proves_nothing(mine: bytes) -> None:
    """Neither side is taken in, and the content is not looked at."""
    dialler, listener = pair(mine, b"s")
    challenge = listener.challenge(dialler.hello())
    assert not dialler.check_challenge(challenge)
    assert listener.greeting(dialler.seal(wire.GREETING, GREETING)) is None
    assert dialler.greeting(listener.seal(wire.WELCOME, GREETING)) is None
    assert not dialler.proven
    assert not listener.proven


def test_a_proof_cannot_be_played_back_to_another_connection() -> None:
    """Frames recorded on one connection are worth nothing on the next."""
    _, challenge, greeting, welcome = exchange(*pair())
    dialler, listener = pair()
    assert not dialler.check_challenge(challenge)
    listener.challenge(dialler.hello())
    assert listener.greeting(greeting) is None
    assert dialler.greeting(welcome) is None


def test_a_proof_cannot_be_reflected() -> None:
    """What a side sent, or its peer's other frame, does not pass as an answer."""
    dialler, listener = pair()
    challenge = listener.challenge(dialler.hello())
    assert dialler.check_challenge(challenge)
    greeting = dialler.seal(wire.GREETING, GREETING)
    assert dialler.greeting(bytes([wire.WELCOME]) + greeting[1:]) is None
    welcome = listener.seal(wire.WELCOME, GREETING)
    assert listener.greeting(bytes([wire.GREETING]) + welcome[1:]) is None
    mirror = Handshake(b"s", dialler=True)
    hello = mirror.hello()
    reflected = hello[:9] + hello[9:] + challenge[-hs.PROOF_BYTES :]
    assert not mirror.check_challenge(bytes([wire.CHALLENGE]) + reflected[1:])


@SETTINGS
@given(at=st.integers(0, 2000), flip=st.integers(1, 255), which=st.integers(0, 3))
def test_a_changed_frame_never_authenticates(at: int, flip: int, which: int) -> None:
    """Any changed byte: Malformed, or no proof."""
    dialler, listener = pair()
    hello = dialler.hello()
    if which == 0:
        hello = mutate(hello, at, flip)
    try:
        challenge = listener.challenge(hello)
        if which == 1:
            challenge = mutate(challenge, at, flip)
        if not dialler.check_challenge(challenge):
            assert which in (0, 1)
            return
        greeting = dialler.seal(wire.GREETING, GREETING)
        if which == 2:
            greeting = mutate(greeting, at, flip)
        if listener.greeting(greeting) is None:
            assert which == 2
            return
        welcome = mutate(listener.seal(wire.WELCOME, GREETING), at, flip)
        assert dialler.greeting(welcome) is None
    except Malformed:
        pass


@SETTINGS
@given(cut=st.integers(0, 2000), which=st.integers(0, 3), tail=st.binary(max_size=40))
def test_a_truncated_or_longer_frame_never_authenticates(
    cut: int, which: int, tail: bytes
) -> None:
    """Any other length: Malformed, or no proof."""
    dialler, listener = pair()
    hello, challenge, greeting, welcome = exchange(dialler, listener)
    frame = (hello, challenge, greeting, welcome)[which]
    changed = frame[: cut % len(frame)] + tail
    if changed == frame:
        return
    try:
        if which == 0:
            Handshake(b"s", dialler=False).challenge(changed)
            assert len(changed) == len(hello)
        elif which == 1:
            assert not dialler.check_challenge(changed)
        elif which == 2:
            assert listener.greeting(changed) is None
        else:
            assert dialler.greeting(changed) is None
    except Malformed:
        pass


_prefixes = st.integers(0, 9).map(lambda kind: bytes([kind]) + wire.MAGIC + b"\1\0")
_proofs = st.binary(min_size=hs.PROOF_BYTES, max_size=hs.PROOF_BYTES)
_contents = st.sampled_from((GREETING, Refusal(hs.GROUP, "no"), None)).map(
    msgspec.msgpack.encode
)
_frames = st.binary(max_size=200) | st.one_of(
    st.tuples(_prefixes, st.binary(max_size=200)),
    st.tuples(_prefixes, _proofs, _contents),
    st.tuples(_prefixes, _proofs, _proofs),  # a nonce and a proof
).map(b"".join)


@SETTINGS
@given(raw=_frames)
def test_random_bytes_are_malformed_or_unproven(raw: bytes) -> None:
    """No random frame raises anything but Malformed, and none authenticates."""
    dialler, listener = pair()
    assert dialler.check_challenge(listener.challenge(dialler.hello()))
    for side in (dialler, listener, *pair()):
        for read in (side.greeting, side.refusal, side.check_challenge):
            side.proven = False
            with contextlib.suppress(Malformed):
                result = read(raw)
                assert not result or (isinstance(result, tuple) and not result[1])
            assert not side.proven


@SETTINGS
@given(body=st.binary(max_size=300))
def test_whoever_knows_the_secret_can_still_send_nonsense(body: bytes) -> None:
    """Proven content that is no greeting or refusal is Malformed, nothing worse."""
    dialler, listener = pair()
    assert dialler.check_challenge(listener.challenge(dialler.hello()))
    raw = msgspec.Raw(body)
    with pytest.raises(Malformed):
        listener.greeting(dialler.seal(wire.GREETING, raw))  # type: ignore[arg-type]
    try:
        listener.refusal(dialler.seal(wire.REFUSED, raw))  # type: ignore[arg-type]
    except Malformed:
        pass


def test_a_refusal_tells_whether_it_is_proven() -> None:
    """A refusal from outside of the group is a hint, from inside a fact."""
    refusal = Refusal(hs.GROUP, "no")
    dialler, listener = pair()
    assert dialler.check_challenge(listener.challenge(dialler.hello()))
    assert dialler.refusal(listener.seal(wire.REFUSED, refusal)) == (refusal, True)
    stranger = Handshake(b"x", dialler=False)
    stranger.challenge(dialler.hello())
    assert dialler.refusal(stranger.seal(wire.REFUSED, refusal)) == (refusal, False)


def test_another_version_of_the_protocol_is_named() -> None:
    """The message says which versions there are and what to do."""
    dialler, listener = pair()
    hello = bytearray(dialler.hello())
    hello[7] = 9
    with pytest.raises(VersionMismatch, match=r"version 9.*install the same"):
        listener.challenge(bytes(hello))


def test_links_that_do_not_fit_end_a_first_dial_but_no_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A joiner is told at once; who was in session may yet be reached again."""
    world = World("a", "b")

    def misfit(link: ScriptedLink, what: What, conn: ScriptedConn, _: str = "") -> None:
        if what is What.LOST:
            link._events.append(Event(what, conn, "they do not fit", refused=True))

    with monkeypatch.context() as patch:
        patch.setattr(ScriptedLink, "report", misfit)
        patch.setattr(world.net, "on_dial", lambda near, far: "fail")
        dial = world.add("c").dial(world["a"])
        world.cut("a", "b")
        world.advance(2.0)
        assert dial.done
        assert (dial.refusal, dial.error) == (hs.LINK, "they do not fit")
        assert len(world["a"].mesh.sessions) == len(world["b"].mesh.sessions) == 1
    world.advance(2.0)
    assert world["a"].peers() == ["b"]
    assert world["a"].session(world["b"]).stats.connections == 2


@pytest.mark.parametrize("kinds", ["hello hello", "greeting", "hello challenge"])
def test_a_dialler_out_of_step_is_cut_off(kinds: str) -> None:
    """A member answers each frame of the handshake once, and in its place only."""
    world = World("a")
    other = world.add("b")
    world.stall("b")
    conn = other.link.dial(world["a"].link.address)
    shake = Handshake(b"secret", dialler=True)
    frames = {
        "hello": shake.hello(),
        "greeting": shake.seal(wire.GREETING, other.mesh.config.greeting()),
        "challenge": Handshake(b"secret", dialler=False).challenge(shake.hello()),
    }
    for kind in kinds.split():
        assert conn.try_send(frames[kind])
    world.settle()
    assert conn.broken
    assert world["a"].mesh.stats.malformed == 1


@pytest.mark.parametrize("kinds", ["challenge challenge", "welcome", "challenge hello"])
def test_a_listener_out_of_step_is_cut_off(kinds: str) -> None:
    """Likewise who is dialled: a second nonce of its is not answered."""
    world = World("a")
    other = world.add("b")
    world.stall("b")
    world["a"].dial(other)
    world.pump()
    (conn,) = other.link.conns
    hello, _ = conn.arrived[0]
    shake = Handshake(b"secret", dialler=False)
    frames = {
        "hello": hello,
        "challenge": shake.challenge(hello),
        "welcome": shake.seal(wire.WELCOME, other.mesh.config.greeting()),
    }
    for kind in kinds.split():
        assert conn.try_send(frames[kind])
    world.pump()
    assert conn.broken
    assert world["a"].mesh.stats.malformed == 1


def _liar(code: str) -> Callable[[ScriptedConn, Parcel], Parcel]:
    """Refusals of somebody who does not know the secret, in place of CHALLENGE."""

    def lie(conn: ScriptedConn, parcel: Parcel) -> Parcel:
        head, body = parcel
        if head[0] != wire.CHALLENGE:
            return parcel
        liar = Handshake(b"x", dialler=False)
        return liar.seal(wire.REFUSED, Refusal(code, "go away")), body

    return lie


@pytest.mark.parametrize("code", [hs.RESET, hs.SELF, hs.REPLACED, hs.NAME_TAKEN])
def test_an_unproven_refusal_ends_no_session_and_no_member(code: str) -> None:
    """Whoever answers at a peer's address without the secret is not believed."""
    world = World("a", "b")
    world.net.tamper = _liar(code)
    world.cut("a", "b")
    world.advance(2.0)
    assert len(world["a"].mesh.sessions) == len(world["b"].mesh.sessions) == 1
    assert not world["a"].mesh.replaced
    assert not world["b"].mesh.replaced
    world.net.tamper = lambda conn, parcel: parcel
    world.advance(2.0)
    assert world["a"].peers() == ["b"]
    assert world["a"].session(world["b"]).stats.connections == 2


@pytest.mark.parametrize("code", [hs.GROUP, hs.NAME_TAKEN, hs.RESET])
def test_an_unproven_refusal_does_not_end_a_first_dial(code: str) -> None:
    """Nor does it keep a member from joining, once the right one answers."""
    world = World("a")
    world.net.tamper = _liar(code)
    dial = world.add("c").dial(world["a"])
    world.advance(2.0)
    assert not dial.done
    world.net.tamper = lambda conn, parcel: parcel
    world.advance(2.0)
    assert world["c"].peers() == ["a"]


@SETTINGS
@given(data=st.data())
def test_a_member_survives_any_handshake_from_the_wire(data: st.DataObject) -> None:
    """Random and mutated first frames end their connection and nothing else."""
    world = World("a", "b")
    a = world["a"]
    stranger = world.add("x")
    del world.members["x"]
    for _ in range(3):
        conn = stranger.link.dial(a.link.address)
        assert isinstance(conn, ScriptedConn)
        hello = Handshake(b"secret", dialler=True).hello()
        frames = data.draw(
            st.lists(st.one_of(st.binary(max_size=80), st.just(hello)), max_size=4)
        )
        for frame in frames:
            conn.try_send(frame or b"\0")
        world.pump()
    world.advance(6.0)
    assert a.peers() == ["b"]
    assert len(a.link.conns) == 1


def test_greetings_tell_all_that_a_peer_needs() -> None:
    """A greeting survives its encoding."""
    dialler, listener = pair()
    assert dialler.check_challenge(listener.challenge(dialler.hello()))
    full: Greeting = msgspec.structs.replace(
        GREETING, session="id", received=7, leaving=True, peer_timeout=None, to="b-1"
    )
    assert listener.greeting(dialler.seal(wire.GREETING, full)) == full


@pytest.mark.parametrize(
    "change",
    [
        {"name": ""},
        {"name": "n" * 256},
        {"name": "a\nb"},
        {"incarnation": ""},
        {"incarnation": "0" * 33},
        {"incarnation": "0" * 32 + "\n"},
        {"incarnation": "\0" * 32},
        {"labels": ["\x1b[2J"]},
        {"addresses": ["tcp://\0"]},
        {"accepts": ["a type\n"]},
        {"versions": {"codec": "1\n"}},
        {"versions": {"\x1b[2J": "1"}},
        {"process": ProcessId("a\rb", 1, "", 0, 0, 0)},
    ],
)
def test_a_greeting_that_nobody_could_print_is_malformed(change: Any) -> None:
    """Logs and errors show it, and sessions are known by it."""
    dialler, listener = pair()
    assert dialler.check_challenge(listener.challenge(dialler.hello()))
    odd: Greeting = msgspec.structs.replace(GREETING, **change)
    with pytest.raises(Malformed):
        listener.greeting(dialler.seal(wire.GREETING, odd))


FORGED = "no\n2026-01-01 CRITICAL forged\x1b[31m"


def test_what_others_say_is_told_in_one_line() -> None:
    """Whoever listens somewhere can say anything: it forges no lines of a log."""
    dialler, listener = pair(b"s", b"another")
    refused = listener.seal(wire.REFUSED, Refusal(hs.SECRET, FORGED + 1000 * "x"))
    refusal, _ = dialler.refusal(refused)
    assert refusal.text.isprintable()
    assert "forged" in refusal.text
    refused = listener.seal(wire.REFUSED, Refusal(hs.SECRET, 400 * "\U000e0001"))
    assert len(dialler.refusal(refused)[0].text) <= log.MOST_CHARACTERS
    for kind in (wire.BYE, wire.FENCED):
        told = wire.decode(kind, memoryview(wire.encode(FORGED)))
        assert told == repr(FORGED)


def test_what_a_link_tells_of_a_peer_is_told_in_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It may quote what the peer has sent."""
    caplog.set_level(logging.DEBUG)
    world = World("a", "b")
    world.net.on_dial = lambda near, far: "hang"
    dial = world.add("c").dial(world["a"])
    for member in world.members.values():
        for conn in list(member.link.conns):
            member.link.report(What.LOST, conn, FORGED)
    world.pump()
    log.flush()
    assert dial.error == repr(FORGED)
    (broke,) = [text for text in caplog.messages if "broke" in text]
    assert broke.endswith(repr(FORGED))
