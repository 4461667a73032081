"""The rendezvous service: who may talk to it, and what follows when its host dies."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import socket
import struct
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from meeting import (
    DEADLINE,
    eventually,
    free_port,
    freeze,
    names,
    process_of,
    record,
    runtime,
)
from refusals import no_descriptor

import mq
from mq.errors import (
    AuthenticationFailed,
    ConnectRefused,
    ConnectTimeout,
    MQError,
    PeerLost,
    TransportUnavailable,
)
from mq.rendezvous import (
    Record,
    Rendezvous,
    memory,
    open_rendezvous,
    service,
    tcp,
    wire,
)
from mq.rendezvous.channel import Address, Channel

__all__ = ["runtime"]  # fixtures

SECRET = b"the group's secret"


def meet(port: int, secret: bytes | None = SECRET, timeout: float = 20.0) -> Rendezvous:
    spec = f"tcp://127.0.0.1:{port}"
    return open_rendezvous(spec, group="g", secret=secret, timeout=timeout)


@pytest.fixture
def served() -> Iterator[service.Service]:
    with contextlib.closing(tcp.serve("127.0.0.1", 0, SECRET)) as running:
        yield running


def port_of(running: service.Service) -> int:
    return int(running.address.rpartition(":")[2])


def dial(running: service.Service, source: str = "") -> socket.socket:
    sock = socket.create_connection(
        ("127.0.0.1", port_of(running)), DEADLINE, source_address=(source, 0)
    )
    sock.settimeout(DEADLINE)
    return sock


def is_dropped(sock: socket.socket) -> bool:
    """Read to the end, which comes when the service has closed the connection."""
    try:
        while sock.recv(4096):
            pass
    except ConnectionError:
        pass
    return True


def has_ended(sock: socket.socket) -> bool:
    """Whether the service has closed the connection by now."""
    sock.settimeout(0)
    try:
        return is_dropped(sock)
    except BlockingIOError:
        return False


def channel_to(running: service.Service) -> Channel:
    address = Address(socket.AF_INET, ("127.0.0.1", port_of(running)))
    deadline = time.monotonic() + DEADLINE
    return Channel(address, SECRET, deadline, threading.Event())


@contextlib.contextmanager
def program(talk: Callable[[socket.socket], None]) -> Iterator[int]:
    """Another program, which talks to whoever connects first; yields its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(DEADLINE)

        def run() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.settimeout(DEADLINE)
                talk(sock)
                is_dropped(sock)

        thread = threading.Thread(target=run)
        thread.start()
        yield listener.getsockname()[1]
        thread.join(DEADLINE)
        assert not thread.is_alive()


def test_random_bytes_disturb_nobody(
    served: service.Service, caplog: pytest.LogCaptureFixture
) -> None:
    """Strangers are dropped, and logged once, while members go on."""
    chance = random.Random(7)
    with caplog.at_level(logging.WARNING):
        with contextlib.closing(meet(port_of(served))) as member:
            for i in range(300):
                with dial(served) as sock, contextlib.suppress(ConnectionError):
                    sock.sendall(b"G" + chance.randbytes(chance.choice([8, 72, 5000])))
                    assert is_dropped(sock)
                if i % 50 == 0:
                    member.claim(record(f"m{i}"))
            assert len(names(member)) == 6
    assert caplog.text.count("another protocol") == 1


def test_frames_after_authentication_are_checked_too(
    served: service.Service, caplog: pytest.LogCaptureFixture
) -> None:
    """A forged, altered or oversized frame ends its connection and nothing else."""
    request = {"do": "version", "group": "g"}
    with contextlib.closing(meet(port_of(served))) as member:
        for place in (*range(36), 40, -1):
            channel = channel_to(served)
            frame = bytearray(channel._frames.seal(request))
            frame[place] ^= 0x80
            channel.sock.settimeout(DEADLINE)
            with contextlib.suppress(ConnectionError):  # it did not read to the end
                channel.sock.sendall(frame + bytes(1 << 17))
            assert is_dropped(channel.sock)
            channel.close()
        assert member.claim(record("x")).holder is None
    assert caplog.text.count("it sent a forged frame") == 1
    assert "it announced a frame of" in caplog.text


@pytest.mark.parametrize(
    "request_",
    [
        *({}, {"group": "g"}, {"group": 7, "do": "claim"}, {"group": "g", "do": "no"}),
        *(
            {"group": "g", "do": "claim", "record": "{}"},
            {"group": "g", "do": "remove"},
        ),
    ],
)
def test_a_mistaken_request_is_answered(
    served: service.Service, request_: dict[str, object]
) -> None:
    """A member with a bug learns what was wrong, and stays connected."""
    channel = channel_to(served)
    for _ in range(2):
        answer = channel.call(request_, time.monotonic() + DEADLINE)
        assert answer["error"]
    channel.close()


def claim_at(channel: Channel, group: str, **fields: Any) -> dict[str, Any]:
    """The answer to a claim of `m` in a group."""
    text = record("m", **fields).to_json()
    request = {"do": "claim", "group": group, "record": text}
    return channel.call(request, time.monotonic() + DEADLINE)


def test_groups_of_the_dead_make_room(
    served: service.Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose leases have all ended counts no more; one with a live member does."""
    monkeypatch.setattr(service, "MAX_GROUPS", 2)
    with contextlib.closing(channel_to(served)) as channel:
        claim_at(channel, "living")
        claim_at(channel, "killed", lease=1e-6)
        assert "record" in claim_at(channel, "new")
        assert "2 groups" in claim_at(channel, "too many")["error"]
        assert "holder" in claim_at(channel, "living", incarnation="b")


def test_names_given_back_make_room_and_their_generations_grow(
    served: service.Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So do those of the dead; that of who lives stays taken."""
    monkeypatch.setattr(memory, "MAX_NAMES", 2)
    with contextlib.closing(meet(port_of(served))) as member:
        assert member.claim(record("lives")).holder is None
        for generation in (1, 3, 5):
            won = member.claim(record(f"left {generation}")).record
            assert won.generation == generation
            member._store.remove(won.name, won.incarnation)
        member.claim(record("dead", lease=1e-6))
        assert member.claim(record("new")).holder is None
        with pytest.raises(ConnectRefused, match=r"2 names already$"):
            member.claim(record("too many"))
        assert names(member) == ["lives", "new"]


def test_requests_sent_ahead_are_answered_in_turn(served: service.Service) -> None:
    """A client need not wait for an answer before it sends the next request."""
    channel = channel_to(served)
    asked = [f"m{number}" for number in range(50)]
    *ahead, last = [
        {"do": "claim", "group": "g", "record": record(name).to_json()}
        for name in asked
    ]
    channel.sock.setblocking(True)
    channel.sock.sendall(b"".join(map(channel._frames.seal, ahead)))
    channel.sock.setblocking(False)
    answers = [channel.call(last, time.monotonic() + DEADLINE)]
    while len(answers) < len(asked):
        if (answer := channel._frames.open(channel._received)) is not None:
            answers.append(answer)
        else:
            channel._receive(1 << 20, time.monotonic() + DEADLINE)
    assert [Record.from_json(answer["record"]).name for answer in answers] == asked
    channel.close()


def test_silent_strangers_are_dropped(
    served: service.Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who connects and says nothing is dropped soon, and delays no member."""
    monkeypatch.setattr(service, "GREETING_SECONDS", 0.5)
    silent = [dial(served) for _ in range(20)]
    with contextlib.closing(meet(port_of(served))) as member:
        member.claim(record("x"))
        for sock in silent:
            assert is_dropped(sock)
            sock.close()
        assert names(member) == ["x"]


def test_a_flood_of_strangers_cannot_keep_members_out(
    served: service.Service,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Beyond a number of strangers one of the host that has most makes room."""
    monkeypatch.setattr(service, "GREETING_SECONDS", 2 * DEADLINE)
    slow = dial(served)
    silent = [dial(served, "127.0.0.2") for _ in range(service.MAX_STRANGERS + 20)]
    with contextlib.closing(meet(port_of(served))) as member:
        member.claim(record("x"))
    ended = [sock for sock in silent if has_ended(sock)]
    assert len(ended) > 20
    assert not has_ended(slow)
    slow.close()
    assert caplog.text.count("too many others had not introduced themselves") == 1
    for sock in silent:
        sock.close()


def test_a_wrong_secret_is_refused_at_once(served: service.Service) -> None:
    """The error says what to compare."""
    begin = time.monotonic()
    with pytest.raises(AuthenticationFailed, match="the same secret= or MQ_SECRET"):
        meet(port_of(served), b"another secret")
    assert time.monotonic() - begin < 10
    with contextlib.closing(meet(port_of(served))) as member:
        assert names(member) == []


def test_a_service_that_does_not_know_the_secret_is_refused() -> None:
    """The proof is mutual: nothing is told to an impostor."""
    seen: list[bytes] = []

    def pose(sock: socket.socket) -> None:
        sock.sendall(wire.MAGIC + bytes(wire.NONCE_BYTES))
        seen.append(sock.recv(4096))
        sock.sendall(b"\1" * wire.PROOF_BYTES)

    with program(pose) as port, pytest.raises(AuthenticationFailed):
        meet(port)
    assert len(seen[0]) == wire.CLIENT_HELLO_BYTES
    assert SECRET not in seen[0]


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"records": 7},
        {"records": [None]},
        {"records": [{}]},
        {"records": [{"record": record("x").to_json(), "age": 0.0}], "more": True},
    ],
    ids=str,
)
def test_a_service_that_answers_nonsense_ends_nothing(
    served: service.Service, answer: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knows the secret, so it may be any member's; records never end, perhaps."""
    with contextlib.closing(meet(port_of(served))) as ours:
        mine = ours.claim(record("a")).record
        monkeypatch.setattr(served, "_answer", lambda request: answer)
        with pytest.raises(ValueError, match="the rendezvous service sent"):
            ours.records()
        ours.renew(mine)
        monkeypatch.undo()
        eventually(lambda: names(ours) == ["a"])
        ours.renew(mine)
        eventually(lambda: [entry.record.name for entry in ours.recent()] == ["a"])


def test_another_program_at_the_address_is_named() -> None:
    """A port in use by something else is told apart from a wrong secret."""

    def greet(sock: socket.socket) -> None:
        sock.sendall(b"220 mail.example ESMTP\r\n")

    with program(greet) as port:
        with pytest.raises(PeerLost, match=f"another program listens on .*:{port}"):
            meet(port)


def test_another_version_of_the_service_is_named() -> None:
    """Not as another program; and it is told of the member's version."""
    said: list[bytes] = []

    def greet(sock: socket.socket) -> None:
        sock.sendall(b"mq-rdv2\n" + bytes(wire.NONCE_BYTES))
        said.append(sock.recv(4096))

    with program(greet) as port:
        told = f":{port} speaks version 2 of its protocol and this member version 1; "
        with pytest.raises(ConnectRefused, match=f"{told}install the same version"):
            meet(port)
    assert said == [wire.MAGIC]


def test_another_version_of_a_client_is_named(
    served: service.Service, caplog: pytest.LogCaptureFixture
) -> None:
    """In the log of whoever serves."""
    with caplog.at_level(logging.WARNING), dial(served) as sock:
        sock.sendall(b"mq-rdv2\n")
        assert is_dropped(sock)
    assert "it speaks version 2 of this protocol" in caplog.text


def test_a_silent_program_at_the_address_is_given_up_in_time() -> None:
    """`timeout` bounds the wait for a greeting."""
    begin = time.monotonic()
    with program(lambda sock: None) as port, pytest.raises(ConnectTimeout) as caught:
        meet(port, timeout=0.5)
    assert 0.5 <= time.monotonic() - begin < 10
    assert f"tcp://127.0.0.1:{port}" in str(caught.value)


def test_an_address_that_nobody_serves_is_given_up_in_time() -> None:
    """Where we can neither connect nor bind, the error says what to start, and why."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))  # taken, but nobody listens
        with pytest.raises(
            ConnectTimeout, match="refused; start a member or `mq rendezvous`"
        ):
            meet(holder.getsockname()[1], timeout=0.5)


def test_a_host_that_does_not_reach_itself_is_told_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No firewall is to be looked at where `lo` is down, as in a new namespace."""
    monkeypatch.setattr("mq.addresses._ask", lambda *_: bytes(2))
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        with pytest.raises(ConnectTimeout, match="set up the interface lo"):
            meet(holder.getsockname()[1], timeout=0.5)


def test_ctrl_c_ends_a_wait() -> None:
    """It does not last until its deadline."""
    begin, main = time.monotonic(), threading.get_ident()
    asked: list[bytes] = []

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def talk(sock: socket.socket) -> None:
        sock.sendall(wire.MAGIC + bytes(wire.NONCE_BYTES))
        asked.append(sock.recv(1))  # from now on the other end waits for an answer
        signal.pthread_kill(main, signal.SIGALRM)

    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        with program(talk) as port, pytest.raises(KeyboardInterrupt):
            meet(port, timeout=DEADLINE)
        assert asked == [wire.MAGIC[:1]]
        assert time.monotonic() - begin < DEADLINE / 2
    finally:
        signal.signal(signal.SIGALRM, previous)


@pytest.mark.parametrize("host", ["a..b", "a" * 64])
def test_what_can_be_no_host_is_named(host: str) -> None:
    """As any other host that is not known."""
    spec = f"tcp://{host}:5"
    with pytest.raises(TransportUnavailable, match=f"host '{host}' cannot be looked"):
        open_rendezvous(spec, group="g", secret=SECRET, timeout=DEADLINE)


def test_members_choose_the_same_of_the_addresses_of_a_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In whatever order a name server gives them; else each hosts its own service."""
    port, orders = (
        free_port(),
        [("127.0.0.10", "127.0.0.9"), ("127.0.0.9", "127.0.0.10")],
    )
    found = []
    with contextlib.ExitStack() as stack:
        for name, hosts in zip("ab", orders, strict=True):
            answer = [
                (socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port))
                for host in hosts
            ]
            with monkeypatch.context() as patch:
                patch.setattr(
                    socket, "getaddrinfo", lambda *a, found=answer, **k: found
                )
                spec = f"tcp://head.cluster:{port}"
                member = open_rendezvous(spec, group="g", secret=SECRET, timeout=20.0)
            stack.enter_context(contextlib.closing(member))
            member.claim(record(name))
            found = names(member)
    assert found == ["a", "b"]


@pytest.mark.parametrize("host", ["0.0.0.0", "*"])
def test_routable_addresses_need_a_secret(host: str) -> None:
    """Without a secret only loopback is served, as host and as member."""
    with pytest.raises(TransportUnavailable, match=r"needs a secret.*MQ_SECRET"):
        open_rendezvous("tcp://192.0.2.1:5", group="g", secret=None, timeout=1.0)
    with pytest.raises(TransportUnavailable, match=r"needs a secret.*MQ_SECRET"):
        tcp.serve(host, 0)


def test_a_service_without_members_serves_this_user(runtime: Path) -> None:
    """`serve` needs no secret on loopback: members find the key in their directory."""
    with contextlib.closing(tcp.serve("127.0.0.1", 0)) as running:
        one, two = (meet(port_of(running), None) for _ in range(2))
        assert one.secret == two.secret
        assert len(one.secret) == 32
        one.claim(record("x"))
        assert names(two) == ["x"]
        one.close()
        two.close()
    assert list(runtime.iterdir()) == []


def test_an_occupied_address_cannot_be_served(served: service.Service) -> None:
    """`serve` never joins a service that runs already."""
    with pytest.raises(
        TransportUnavailable, match=r"cannot serve a rendezvous at .* member hosts it"
    ):
        tcp.serve("127.0.0.1", port_of(served), SECRET)


def _host(port: int, forks: bool, pipe: Connection) -> None:
    """Host the service with a member of its own, until killed."""
    rendezvous = meet(port)
    rendezvous.claim(record("host", "f"))
    if forks:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            rendezvous.close()
            pipe.send("forked")
            pipe.close()
            signal.pause()
        pipe.send(child)
    pipe.send("hosting")
    pipe.recv()


def test_survivors_take_over_from_a_killed_host() -> None:
    """Without any call by them, and a newcomer then finds every survivor."""
    port = free_port()
    with process_of(_host, port, False) as (host, pipe):
        assert pipe.recv() == "hosting"
        with (
            contextlib.closing(meet(port)) as one,
            contextlib.closing(meet(port)) as two,
        ):
            mine = one.claim(record("one", "1")).record
            theirs = two.claim(record("two", "2")).record
            assert names(one) == ["host", "one", "two"]
            host.kill()
            host.join(DEADLINE)
            with contextlib.closing(meet(port)) as newcomer:
                newcomer.claim(record("three", "3"))
                eventually(lambda: names(newcomer) == ["one", "three", "two"])
                assert one.renew(mine)
                assert two.renew(theirs)
                eventually(
                    lambda: (
                        any(e.record.name == "three" for e in two.recent())
                        or not two.renew(theirs)
                    )
                )


def _refuse_thread(_thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize(
    ("place", "refusal"),
    [
        ("selectors.DefaultSelector", no_descriptor),
        ("os.pipe", no_descriptor),
        ("threading.Thread.start", _refuse_thread),
    ],
)
def test_who_cannot_host_for_a_while_does_so_later(
    place: str,
    refusal: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The system refuses it a descriptor or a thread; the address stays free."""
    port = free_port()
    with process_of(_host, port, False) as (host, pipe):
        assert pipe.recv() == "hosting"
        with contextlib.closing(meet(port, timeout=0.5)) as survivor:
            mine = survivor.claim(record("survivor", "1")).record
            with monkeypatch.context() as patch:
                patch.setattr(place, refusal)
                host.kill()
                host.join(DEADLINE)
                eventually(lambda: "nor can this process host one" in caplog.text)
                with socket.socket() as other:
                    other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    eventually(lambda: _binds(other, port))
            eventually(lambda: survivor.renew(mine) and bool(survivor.recent()))
            with contextlib.closing(meet(port)) as newcomer:
                assert names(newcomer) == ["survivor"]


def _binds(sock: socket.socket, port: int) -> bool:
    try:
        sock.bind(("127.0.0.1", port))
    except OSError:  # just being tried again
        return False
    return True


class _NoThread(threading.Thread):
    def start(self) -> None:
        if self.name == "mq-rendezvous" and type(self._target) is types.MethodType:
            raise RuntimeError("can't start new thread")
        super().start()


@pytest.mark.parametrize(
    ("place", "instead", "limit"),
    [
        ("selectors.DefaultSelector", no_descriptor, "n"),
        ("os.pipe", no_descriptor, "n"),
        ("threading.Thread", _NoThread, "u"),
    ],
)
def test_a_service_that_cannot_start_leaves_nothing_open(
    place: str,
    instead: Any,
    limit: str,
    runtime: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor does the directory with the key stay."""
    monkeypatch.setattr(place, instead)
    port = free_port()
    said = rf"cannot serve.*raise `ulimit -{limit}`"
    with pytest.raises(TransportUnavailable, match=said):
        tcp.serve("127.0.0.1", port)
    assert list(runtime.iterdir()) == []
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_an_unforeseen_error_ends_no_thread_of_a_rendezvous(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is told with its traceback, and what comes next is done."""
    with contextlib.closing(meet(free_port())) as member:
        mine = member.claim(record("x")).record
        with monkeypatch.context() as patch:
            patch.setattr(member._store, "renew", lambda _: 1 // 0)
            assert member.renew(mine)
            eventually(lambda: "ZeroDivisionError" in caplog.text)
        assert member.renew(mine)
        eventually(lambda: [e.record for e in member.recent()] == [mine])


def test_who_joins_during_a_hand_over_misses_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A newcomer that hosts the next service waits for clients of the one before.

    Nor does it get the name of one of them.
    """
    monkeypatch.setattr(service, "HAND_OVER_SECONDS", 2.0)
    port, found = free_port(), list[object]()
    with process_of(_host, port, False) as (host, pipe):
        assert pipe.recv() == "hosting"
        # Of the survivor's process only this connection is there when the host ends.
        with socket.create_connection(("127.0.0.1", port), DEADLINE):
            host.kill()
            host.join(DEADLINE)
            with contextlib.closing(meet(port)) as newcomer:

                def join() -> None:
                    holder = newcomer.claim(record("survivor", "1")).holder
                    newcomer.claim(record("newcomer", "1"))
                    found.extend([holder and holder.record.name, names(newcomer)])

                joining = threading.Thread(target=join)
                joining.start()
                joining.join(0.2)
                with contextlib.closing(meet(port)) as survivor:
                    assert survivor.renew(record("survivor", "2", generation=1))
                    joining.join(DEADLINE)
                    assert found == ["survivor", ["newcomer", "survivor"]]


def test_who_takes_over_tells_of_those_who_cannot_announce_themselves() -> None:
    """A member whose interpreter stands still is there, and would hear of newcomers."""
    port = free_port()
    with process_of(_host, port, False) as (host, pipe):
        assert pipe.recv() == "hosting"
        with contextlib.closing(meet(port)) as survivor:
            survivor.present = lambda: [record("stalled", "2", generation=1)]
            survivor.claim(record("survivor", "1"))
            host.kill()
            host.join(DEADLINE)
            eventually(lambda: survivor._store._service is not None)
            with contextlib.closing(meet(port)) as newcomer:
                assert names(newcomer) == ["stalled", "survivor"]


def test_a_member_is_not_held_up_while_others_take_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It looks who is new, gives its name back and closes, as at any time."""
    monkeypatch.setattr(service, "HAND_OVER_SECONDS", DEADLINE)
    port, begin = free_port(), time.monotonic()
    host, member = meet(port), meet(port)
    with contextlib.closing(member), contextlib.closing(host):
        mine = member.claim(record("member")).record
        host.claim(record("host"))
        host.close()
        assert member.renew(mine)
        eventually(lambda: [e.record for e in member.recent()] == [mine])
        member.close()
    assert time.monotonic() - begin < DEADLINE / 2


def test_a_service_whose_end_left_no_trace_has_a_successor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who was connected to it, without an answer, holds its own for other clients."""
    monkeypatch.setattr(service, "HAND_OVER_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = int(silent.getsockname()[1])
        found: list[float] = []

        def join() -> None:
            with contextlib.closing(meet(port)) as newcomer:
                begin = time.monotonic()
                newcomer.claim(record("newcomer"))
                found.append(time.monotonic() - begin)

        joining = threading.Thread(target=join)
        joining.start()
        accepted, _ = silent.accept()
    with accepted:  # closed with a reset, after which no system knows of it
        linger = struct.pack("ii", 1, 0)
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    joining.join(DEADLINE)
    assert found[0] > 0.3


def test_connect_has_no_time_for_a_hand_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It says so as about any other lack of time."""
    monkeypatch.setattr(service, "HAND_OVER_SECONDS", DEADLINE)
    monkeypatch.setattr(tcp, "listen", lambda *at: (service.listen(*at)[0], True))
    options = {"rendezvous": f"tcp://127.0.0.1:{free_port()}", "group": "hurried"}
    with pytest.raises(ConnectTimeout, match=r"within 0\.3 s: .*does not answer"):
        mq.connect("tcp", name="a", connect_timeout=0.3, **options)


def test_a_fresh_group_does_not_wait_for_earlier_members(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where there was no service that ended before its clients."""
    monkeypatch.setattr(service, "HAND_OVER_SECONDS", 10 * DEADLINE)
    # An address of its own: on that of all, connections of others may have the port.
    spec = f"tcp://127.0.9.9:{free_port()}"
    with contextlib.closing(
        open_rendezvous(spec, group="g", secret=SECRET, timeout=DEADLINE)
    ) as first:
        assert first.claim(record("first")).holder is None
        assert names(first) == ["first"]


def test_a_forked_child_does_not_keep_the_address() -> None:
    """After `abandon` in the child, the death of the parent frees the address."""
    port = free_port()
    with process_of(_host, port, True) as (host, pipe):
        said = [pipe.recv() for _ in range(3)]
        child = next(item for item in said if isinstance(item, int))
        try:
            with contextlib.closing(meet(port)) as survivor:
                survivor.claim(record("survivor"))
                host.kill()
                eventually(lambda: names(survivor) == ["survivor"])
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_host_that_stands_still_stops_no_keeper(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`renew` returns at once; what must wait gives up in time; then all goes on."""
    port = free_port()
    with process_of(_host, port, False) as (host, pipe):
        assert pipe.recv() == "hosting"
        with contextlib.closing(meet(port, timeout=1.0)) as member:
            mine = member.claim(record("x")).record
            freeze(host.pid)
            has_returned = threading.Event()
            asked: list[bool] = []
            renew = member._store.renew

            def ask(mine: Record) -> bool:
                asked.append(has_returned.wait(DEADLINE / 2))
                return renew(mine)

            monkeypatch.setattr(member._store, "renew", ask)
            assert member.renew(mine)
            has_returned.set()
            eventually(lambda: bool(asked))
            assert asked == [True]
            with pytest.raises(PeerLost, match="answer"):
                member.records()
            os.kill(host.pid, signal.SIGCONT)

            def answers() -> bool:
                with contextlib.suppress(MQError):
                    return names(member) == ["host", "x"]
                return False

            eventually(answers)


def test_a_connection_that_went_dead_is_replaced(
    served: service.Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long before the deadline of what is asked, as leases end meanwhile."""
    with contextlib.closing(meet(port_of(served))) as member:
        member.claim(record("x"))
        dead, receive = set(served._connections), served._receive

        def receive_all_but_theirs(connection: Any) -> bool:
            if connection not in dead:
                return receive(connection)
            return bool(connection.sock.recv(65536))

        monkeypatch.setattr(served, "_receive", receive_all_but_theirs)
        assert names(member) == ["x"]


def test_a_displaced_member_cannot_return_to_a_new_service() -> None:
    """After the records were lost the higher generation is right, whoever is first."""
    port = free_port()
    with process_of(_host, port, False) as (host, pipe):
        assert pipe.recv() == "hosting"
        with (
            contextlib.closing(meet(port)) as old,
            contextlib.closing(meet(port)) as new,
        ):
            displaced = old.claim(record("x", "a")).record
            holder = new.claim(record("x", "b"), replaces="a" * 16).record
            host.kill()
            host.join(DEADLINE)
            eventually(lambda: new.renew(holder) and not old.renew(displaced))
            eventually(lambda: names(new) == ["x"])
            assert new.records()[0].record.incarnation == "b" * 16


def test_all_calls_of_a_connect_have_one_deadline() -> None:
    """What one has used is not there for the next, until the member has arrived."""
    port = free_port()
    spec = f"tcp://127.0.0.1:{port}"
    with process_of(_host, port, False) as (host, pipe):
        assert pipe.recv() == "hosting"
        limits = {"timeout": DEADLINE, "until": time.monotonic() + 1.0}
        with contextlib.closing(
            open_rendezvous(spec, group="g", secret=SECRET, **limits)
        ) as member:
            freeze(host.pid)
            for _ in range(2):
                with pytest.raises(PeerLost, match="answer"):
                    member.records()
            assert time.monotonic() < limits["until"] + DEADLINE / 2
            os.kill(host.pid, signal.SIGCONT)
            member.arrived()
            assert names(member) == ["host"]


def test_close_in_one_thread_ends_a_call_in_another() -> None:
    """`close` does not wait for a service that does not answer."""
    port = free_port()
    with process_of(_host, port, False) as (host, pipe):
        assert pipe.recv() == "hosting"
        member = meet(port, timeout=DEADLINE)
        freeze(host.pid)
        errors: list[BaseException] = []

        def list_records() -> None:
            try:
                member.records()
            except MQError as error:
                errors.append(error)

        thread = threading.Thread(target=list_records)
        thread.start()
        begin = time.monotonic()
        member.close()
        thread.join(DEADLINE)
        assert time.monotonic() - begin < 10
        assert isinstance(errors[0], PeerLost)
