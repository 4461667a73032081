"""The choice that `auto` makes for each peer, and what proves that memory is shared."""

from __future__ import annotations

import errno
import logging
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from meeting import eventually, held_elsewhere, runtime
from nng_links import nng_runs

import mq
from mq.auto import AutoLink
from mq.mesh.poller import Poller
from mq.testing.proxy import Proxy
from mq.transport import Conn, What
from transports.shm import ShmLink

__all__ = ["nng_runs", "runtime"]

STEP = 30.0


LARGE = np.arange(100_000, dtype=np.int64)


def join(name: str, backend: str = "auto") -> mq.MQ:
    return mq.connect(backend, group="auto", name=name, connect_timeout=STEP)


def wire_of(queue: mq.MQ, peer: str) -> str:
    """The address by which a peer is reached."""
    return str(queue.describe()["peers"][peer]["wire"])


def shown_wire(queue: mq.MQ, peer: str) -> str:
    """The same, as `stats()` has it."""
    return str(queue.stats()["peers"][peer]["wire"])


def exchange(a: mq.MQ, b: mq.MQ) -> None:
    """A large and a small message go both ways."""
    for sender, receiver in ((a, b), (b, a)):
        topic = f"from {sender.name}"
        receiver.subscribe(topic, timeout=STEP)
        sender.publish(topic, LARGE, timeout=STEP)
        sender.publish(topic, {"n": 1}, timeout=STEP)

        large, small = receiver.recv(STEP), receiver.recv(STEP)

        assert np.array_equal(large.payload, LARGE)
        assert small.payload == {"n": 1}


@pytest.mark.parametrize("backend", ["auto", "auto:nng", "auto:zmq"])
def test_members_of_one_host_share_memory(
    backend: str, runtime: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The choice is in `describe()`, in the log and in `stats()`."""
    with caplog.at_level(logging.INFO, "mq"), join("a", backend) as a:
        with join("b", backend) as b:
            exchange(a, b)

            assert wire_of(b, "a").startswith("shm://")
            assert shown_wire(b, "a") == wire_of(b, "a")
            assert shown_wire(a, "b").startswith("shm://")
            assert a.stats()["shared"][0]["mapped_bytes"] >= LARGE.nbytes
            assert any("session with a over shm://" in line for line in caplog.messages)


@pytest.mark.parametrize(
    ("backend", "wire"),
    [("auto", "tcp"), ("auto:nng", "tcp"), ("auto:zmq", "tcp")],
)
def test_a_member_that_shares_no_memory_is_reached_over_the_wire(
    backend: str, wire: str, runtime: Path
) -> None:
    """As in another container: the socket that its record names is not there."""
    with join("a", backend) as a:
        for path in runtime.rglob("*.shm"):
            path.unlink()
        with join("b", backend) as b, join("c", backend) as c:
            exchange(a, b)
            exchange(b, c)

            assert wire_of(b, "a").startswith(f"{wire}://")
            assert shown_wire(b, "a") == wire_of(b, "a")
            assert wire_of(c, "b").startswith("shm://")
            assert shown_wire(c, "b") == wire_of(c, "b")


def test_memory_that_is_not_shared_is_found_out_by_the_proof(
    runtime: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The unix socket connects, but through a relay that passes bytes only."""
    with join("a") as a:
        (path,) = runtime.rglob("*.shm")
        behind = path.rename(path.with_suffix(".real"))
        relay = Proxy(f"shm://{behind}", str(path), passes_descriptors=False)
        try:
            with caplog.at_level(logging.INFO, "mq"), join("b") as b:
                exchange(a, b)

                assert shown_wire(a, "b").startswith("tcp://")
                assert shown_wire(b, "a").startswith("tcp://")
                assert any(
                    "session with a over tcp://" in line for line in caplog.messages
                )
                assert a.stats()["shared"][0]["mapped_bytes"] == 0
                eventually(lambda: a.stats()["mesh"]["malformed"] > 0)
        finally:
            relay.close()
            behind.unlink()


def test_only_auto_takes_another_wire(runtime: Path) -> None:
    """Members of `shm` that cannot reach each other do not connect."""
    with join("a", "shm") as a:
        a.subscribe("t")
        (path,) = runtime.rglob("*.shm")
        path.unlink()
        reason = re.escape(f"cannot dial shm://{path}: No such file")
        with pytest.raises(mq.ConnectTimeout, match=reason):
            mq.connect("shm", group="auto", name="b", connect_timeout=1.0)

        assert [member.name for member in a.members()] == ["a"]
        assert a.stats()["peers"] == {}
        with pytest.raises(mq.RecvTimeout):
            a.recv(0)


def test_another_user_is_told_that_shared_memory_is_for_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who cannot open the socket file will not by waiting longer."""
    with mq.connect("shm", group="auto", name="a"):
        monkeypatch.setattr(socket.socket, "connect_ex", lambda *_: errno.EACCES)
        told = "Permission denied: .* one user only; use auto or tcp"
        with pytest.raises(mq.ConnectTimeout, match=told):
            mq.connect("shm", group="auto", name="b", connect_timeout=1.0)
        monkeypatch.undo()


def test_an_address_of_neither_is_refused() -> None:
    """The error names the address and what would do."""
    with pytest.raises(ValueError, match=r"udp://.*neither of shm nor of tcp"):
        mq.connect("auto", group="g", listen=["udp://127.0.0.1:1"])
    for backend in ("auto", "auto:zmq"):
        with pytest.raises(ValueError, match=r"h' is not of the form tcp://host:port"):
            mq.connect(backend, group="g", listen="tcp://h", secret="a secret")


def test_each_link_learns_what_the_queue_tells_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of the member's name, and that everyone was greeted."""
    link, poller = AutoLink(), Poller()
    told: list[str] = []
    for inner in link._links:
        monkeypatch.setattr(inner, "connected", lambda: told.append("greeted"))
    link.member_name = "m"
    try:
        link.open(poller, [], str(tmp_path))
        link.connected()
    finally:
        link.close()
        poller.close()
    assert [inner.member_name for inner in link._links] == ["m"] * len(link._links)
    assert told == ["greeted"] * len(link._links)


def test_each_link_gives_back_what_it_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wire's engine may keep memory, too."""
    asked: list[object] = []
    monkeypatch.setattr("mq.transport.Link.trim", lambda *args: asked.append(args))
    link = AutoLink()
    link.trim(3.0)
    assert asked == [(inner, 3.0) for inner in link._links]


def test_each_link_listens_on_the_addresses_that_are_its_own(tmp_path: Path) -> None:
    """`listen=` may have both kinds."""
    poller, link = Poller(), AutoLink()
    path = f"shm://{tmp_path}/x"
    try:
        found = link.open(poller, ["tcp://127.0.0.1:0", path], str(tmp_path))

        assert found[0] == path
        assert found[1].startswith("tcp://127.0.0.1:")
    finally:
        link.close()
        poller.close()


# -- the proof ----------


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[tuple[ShmLink, str]]:
    """A link and the path on which it listens."""
    poller, link = Poller(), ShmLink()
    address = link.open(poller, [], str(tmp_path))[0]
    yield link, address.removeprefix("shm://")
    link.close()
    poller.close()


def reported(link: ShmLink) -> list[What]:
    return [event.what for event in link.poll()]


def test_who_cannot_read_the_memory_that_it_was_sent_is_no_peer(
    listening: tuple[ShmLink, str],
) -> None:
    """Its answer is not the number in that memory."""
    link, path = listening
    reader, writer = os.pipe()
    memory = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.write(memory, bytes(16))
    try:
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(path)
            socket.send_fds(stranger, [b"M"], [memory])
            stranger.sendall(bytes(16) + link.hello)
            eventually(lambda: reported(link) == [] and link.malformed > 0)
    finally:
        for fd in (reader, writer, memory):
            os.close(fd)

    assert not link.conns


@pytest.mark.parametrize("with_pipe", [False, True])
def test_who_passes_no_memory_is_no_peer(
    listening: tuple[ShmLink, str], with_pipe: bool
) -> None:
    """Neither nothing nor a pipe will do in its place."""
    link, path = listening
    reader, writer = os.pipe()
    try:
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(path)
            socket.send_fds(stranger, [b"M"], [reader] if with_pipe else [])
            eventually(lambda: reported(link) == [] and link.malformed > 0)
    finally:
        os.close(reader)
        os.close(writer)

    assert not link.conns


@pytest.mark.parametrize("backend", ["auto", "auto:nng", "auto:zmq"])
@pytest.mark.parametrize("first", ["tcp", "shm"])
def test_a_session_goes_on_over_the_other_kind_of_link(
    runtime: Path, monkeypatch: pytest.MonkeyPatch, backend: str, first: str
) -> None:
    """What was cut for the wire is carried by shared memory, and what was lent there
    is sent over the wire."""
    second = {"tcp": "shm", "shm": "tcp"}[first]
    refused = second
    dial = AutoLink.dial

    def choose(link: AutoLink, address: str) -> Conn:
        if address.startswith("shm") == (refused == "shm"):
            raise OSError("it cannot be reached now")
        return dial(link, address)

    monkeypatch.setattr(AutoLink, "dial", choose)
    with join("a", backend) as a, join("b", backend) as b:
        assert shown_wire(b, "a").startswith(first)
        b.subscribe("t")
        refused = first
        with held_elsewhere(b._lead.lock):
            a.publish("t", np.ones(8 << 20, np.uint8))
            session = b._mesh.by_name("a")
            assert session is not None
            b._mesh.disconnect(session, "as a test wants")
        assert b.recv(timeout=STEP).payload.sum() == 8 << 20
        assert shown_wire(b, "a").startswith(second)
        eventually(lambda: a.stats()["peers"]["b"]["lent_bytes"] == 0)
        for queue in (a, b):
            assert queue.stats()["mesh"]["malformed"] == 0
