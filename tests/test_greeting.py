"""What happens between a WELCOME and the first frame after it."""

from __future__ import annotations

import re
from typing import Any

import pytest
from scripted import Parcel, ScriptedConn
from world import World

from mq.log import MOST_STRANGERS
from mq.mesh import handshake as hs
from mq.mesh import wire
from mq.mesh.greeting import GREET_SECONDS, STRANGER_BYTES
from mq.mesh.handshake import Handshake


@pytest.mark.parametrize("dials", ["they", "it"])
def test_of_two_of_one_name_that_greet_at_once_one_gets_a_session(dials: str) -> None:
    """Neither was there yet when the other was welcomed."""
    world = World("a")
    a = world["a"]
    for key in ("x1", "x2"):
        other = world.add(key, name="x")
        if dials == "they":
            other.dial(a)
        else:
            a.dial(other)
    world.advance(1.0)
    assert a.peers() == ["x"]
    assert len(a.mesh.conns) == 1


def test_what_was_granted_ends_with_the_session_that_it_was_to_resume() -> None:
    """The listener gave the session up before the dialler went on with it."""
    world = World("a", "b", peer_timeout=4.0)
    a, b = world["a"], world["b"]
    for member in (a, b):
        member.subscribe("t")
    world.settle()
    session = a.session(b)
    assert b.session(a).dialler
    world.cut("a", "b")
    greeters = a.mesh.dialling.greeters
    while not any(greeter.granted for greeter in greeters.values()):
        b.poll()
        world.net.deliver_all()
        a.poll()
        world.now += 0.001
    a.mesh.forget(session, "given up")
    world.advance(2.0)
    assert [s.conn for s in a.mesh.sessions.values()] == list(a.mesh.conns)
    for member, other in ((a, b), (b, a)):
        assert member.publish("t", b"x")
        world.settle()
        assert other.payloads() == [b"x"]


@pytest.mark.parametrize("secret", [b"secret", b"a wrong one"])
def test_only_who_proves_the_secret_may_send_any_amount(
    monkeypatch: pytest.MonkeyPatch, secret: bytes
) -> None:
    """Engines that bound nothing by themselves are told to."""
    said: list[int | None] = []
    monkeypatch.setattr(ScriptedConn, "guard", lambda conn, most: said.append(most))
    world = World("a")
    world.join("b", secret=secret)
    world.advance(0.1)

    # Of both ends of a connection, as who is dialled may be a stranger, too.
    assert said == [STRANGER_BYTES, None, None][: 3 if secret == b"secret" else 1]


def test_a_wrong_proof_is_no_refusal_for_another_reason() -> None:
    """It is counted once."""
    world = World("a")
    a, x = world["a"], world.add("x")
    world.stall("x")
    conn = x.link.dial(a.link.address)
    shake = Handshake(b"another", dialler=True)
    assert conn.try_send(shake.hello())
    assert conn.try_send(shake.seal(wire.GREETING, x.mesh.config.greeting()))
    world.pump()
    stats = a.mesh.stats
    assert (stats.unauthenticated, stats.refused, stats.malformed) == (1, 0, 0)


def test_who_has_another_secret_is_counted_and_told_of_at_both_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also by who was dialled, though the dialler is the first to see it."""
    world = World("a")
    a, x = world["a"], world.add("x", secret=b"another")
    for _ in range(3):
        dial = x.dial_blindly(a.link.address)
        world.advance(1.0)
        assert dial.refusal == hs.SECRET
    for member in (a, x):
        stats = member.mesh.stats
        assert (stats.unauthenticated, stats.refused, stats.malformed) == (3, 0, 0)
        assert len(member.link.conns) == 0
    texts = [record.getMessage() for record in caplog.records]
    told = [text for text in texts if f"at {x.link.address}?" in text]
    assert len(told) == 3, "each connection may be of another stranger"
    assert len(texts) == 4, "the dialler has one address to tell of"
    assert all("another secret" in text for text in texts)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"group": "h"}, "group of x at .*: this is group 'g', not 'h'; check the"),
        ({"backend": "other"}, "backend of x at .*: group 'g' uses backend 'script'"),
        ({}, "version of an unknown peer at .*: it speaks version 99 of the protocol"),
    ],
    ids=["group", "backend", "version"],
)
def test_who_is_no_member_of_the_group_is_told_of_by_who_was_dialled(
    options: dict[str, Any],
    told: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Once, though it tries again: its own log may be read by nobody here."""
    world = World("a")
    a, x = world["a"], world.add("x", **options)
    ours = wire.PROTOCOL_VERSION

    def of_another_version(conn: ScriptedConn, parcel: Parcel) -> Parcel:
        head = bytearray(parcel[0])
        assert head[7:9] == ours.to_bytes(2, "little")
        head[7:9] = (99).to_bytes(2, "little")
        return bytes(head), parcel[1]

    if not options:
        world.net.tamper = of_another_version
    for _ in range(2):
        x.dial(a)
        world.advance(1.0)
    assert a.mesh.stats.refused == 2
    texts = [record.getMessage() for record in caplog.records]
    assert texts
    assert all(re.match(f"dropped a handshake with another {told}", t) for t in texts)
    assert len(texts) == (1 if options else 2)


def test_a_flood_of_strangers_fills_the_log_with_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nor does it keep those out of it who do something else, or are known."""
    world = World("a")
    a, x = world["a"], world.add("x")
    world.stall("x")
    for _ in range(2 * MOST_STRANGERS):
        conn = x.link.dial(a.link.address)
        assert conn.try_send(Handshake(b"another", dialler=True).hello())
        assert conn.try_send(Handshake.distrust())
        world.pump()
    assert a.mesh.stats.unauthenticated == 2 * MOST_STRANGERS
    assert len(caplog.records) == MOST_STRANGERS
    assert x.link.dial(a.link.address).try_send(b"noise")
    world.pump()
    a.mesh.setbacks.complain("a handshake with another secret", "b", "there", "why")
    noise, known = (record.getMessage() for record in caplog.records[MOST_STRANGERS:])
    assert noise.startswith("dropped a handshake of an unknown peer at")
    assert known.startswith("dropped a handshake with another secret of b at there")


def test_noise_before_it_does_not_keep_a_wrong_secret_out_of_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each stranger is told of, for an offence of each kind."""
    world = World("a")
    a, x = world["a"], world.add("x", secret=b"another")
    for _ in range(2):
        assert x.link.dial(a.link.address).try_send(b"noise")
        world.settle()
    before = len(caplog.records)
    assert before == 2
    x.dial(a)
    world.advance(1.0)
    texts = [record.getMessage() for record in caplog.records[before:]]
    assert any(f"at {x.link.address}?" in text for text in texts)


def test_noise_before_it_does_not_keep_who_says_nothing_out_of_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It sent no frame that could be dropped: the text says what it did not do."""
    world = World("a")
    a, x = world["a"], world.add("x")
    world.stall("x")
    assert x.link.dial(a.link.address).try_send(b"noise")
    for _ in range(2):
        x.link.dial(a.link.address)
    world.advance(2 * GREET_SECONDS)
    noise, silence, _ = (record.getMessage() for record in caplog.records)
    assert noise.startswith("dropped a handshake of an unknown peer at")
    assert silence.startswith("dropped a connection of an unknown peer at")
    assert "did not greet in time" in silence


def test_a_dialler_that_hangs_up_after_the_challenge_has_said_nothing_of_its_secret(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Scanners do, and members whose other dial was faster, or that end."""
    world = World("a")
    a, x = world["a"], world.add("x")
    world.stall("x")
    conn = x.link.dial(a.link.address)
    assert conn.try_send(Handshake(b"secret", dialler=True).hello())
    world.pump()
    assert conn.is_readable(), "the challenge"
    conn.close()
    world.settle()
    assert not a.link.conns
    assert a.mesh.stats.unauthenticated == 0
    assert not caplog.records
