"""What links that encrypt do with certificates, names and what travels."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import itertools
import os
import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from nng_links import nng_runs
from tls_files import CERTIFICATES, tls_options

import mq
from mq.addresses import split
from mq.testing.link_world import PATIENCE, World
from mq.transport import Conn, Event, Link, What
from transports.nng_tls import NngTlsLink
from transports.tls import TlsConn, TlsLink

__all__ = ["nng_runs"]

Make = Callable[..., Link]
ENGINES: dict[str, Make] = {"tls": TlsLink, "nng:tls": NngTlsLink}
tls = functools.partial(TlsLink, **tls_options())


@pytest.fixture(params=ENGINES)
def make(request: pytest.FixtureRequest) -> Make:
    """Every class of link that encrypts."""
    return ENGINES[request.param]


def other(member: str, authority: str, **options: Any) -> dict[str, Any]:
    return {**tls_options(member, authority), **options}


@contextmanager
def facing(inside: Make, outside: Make) -> Iterator[tuple[World, World]]:
    """Two members, each in a world of its own, both of which are pumped."""
    with World(inside, 1) as one, World(outside, 1) as two:
        one.nap = two.nap = 0.01
        yield one, two


@contextmanager
def pumped(world: World) -> Iterator[None]:
    """A world that another thread pumps meanwhile."""
    done = threading.Event()

    def pump() -> None:
        world.until(done.is_set, "the end")

    world.nap = 0.01
    with concurrent.futures.ThreadPoolExecutor() as pool:
        pumping = pool.submit(pump)
        try:
            yield
        finally:
            done.set()
            pumping.result()


def lost_at(world: World, beside: World, conn: Conn) -> Event:
    """Wait for LOST of this connection, while the other world is pumped, too."""
    events = world.members[0].events

    def lost() -> list[Event]:
        beside.members[0].pump()
        return [e for e in events if e.conn is conn and e.what is What.LOST]

    world.until(lambda: bool(lost()), "LOST")
    return lost()[0]


def test_members_with_certificates_of_another_authority_are_kept_out(
    make: Make,
) -> None:
    """Both ends refuse, whoever dialled; nothing is ever a connection."""
    with facing(
        functools.partial(make, **tls_options()),
        functools.partial(make, **other("stranger", "other_authority")),
    ) as (world, outside):
        (inside,), (stranger,) = world.members, outside.members
        lost_at(outside, world, stranger.link.dial(inside.addresses[0]))
        lost_at(world, outside, inside.link.dial(stranger.addresses[0]))
        for member in (inside, stranger):
            assert not member.conns(What.ACCEPTED)
            assert not member.conns(What.OPENED)


def test_the_name_in_a_certificate_must_be_the_one_asked_for(make: Make) -> None:
    """`server_name` is compared with what the dialled member shows."""
    picky = functools.partial(make, **tls_options(), server_name="somebody.example")
    with World(picky) as world:
        conn = world.members[0].link.dial(world.members[1].addresses[0])
        world.lost(0, conn)
        assert not world.members[1].conns(What.ACCEPTED)


def test_the_name_in_a_certificate_may_be_another_than_the_host(make: Make) -> None:
    """`server_name` in place of the address that is dialled."""
    named = functools.partial(make, **tls_options(), server_name="localhost")
    with World(named) as world:
        dialled, accepted = world.connect()
        world.send(dialled, b"well met")
        world.arrive(world.members[1].received.setdefault(accepted, []), 1)


def test_what_travels_is_encrypted(make: Make) -> None:
    """A word that is sent many times is nowhere in the bytes on the wire."""
    seen = bytearray()
    with (
        World(functools.partial(make, **tls_options())) as world,
        socket.create_server(("127.0.0.1", 0)) as server,
    ):
        scheme, _, rest = world.members[1].addresses[0].partition("://")
        port = int(rest.rpartition(":")[2])
        done = threading.Thread(target=_tap, args=(server, port, seen))
        done.start()
        conn = world.members[0].link.dial(
            f"{scheme}://127.0.0.1:{server.getsockname()[1]}"
        )
        ours, theirs = world.members[:2]
        world.until(lambda: conn in ours.conns(What.OPENED), "OPENED")
        world.until(lambda: bool(theirs.conns(What.ACCEPTED)), "ACCEPTED")
        accepted = theirs.conns(What.ACCEPTED)[0]
        for _ in range(20):
            world.send(conn, b"a secret word", b"a secret word" * 100)
        world.arrive(world.members[1].received.setdefault(accepted, []), 20)
        conn.close()
        world.lost(1, accepted)
        done.join(PATIENCE)
    assert len(seen) > 20 * 1300
    assert b"secret" not in seen


def _tap(server: socket.socket, port: int, seen: bytearray) -> None:
    """Pass bytes on, one connection, and keep those of the dialler."""
    client, _ = server.accept()
    with client, socket.create_connection(("127.0.0.1", port)) as behind:
        answers = threading.Thread(target=_copy, args=(behind, client, None))
        answers.start()
        _copy(client, behind, seen)
        answers.join(PATIENCE)


def _copy(source: socket.socket, sink: socket.socket, seen: bytearray | None) -> None:
    try:
        while data := source.recv(65536):
            if seen is not None:
                seen += data
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except OSError:  # the other end has left
        pass


# -- the words of `tls` ----------


@pytest.mark.parametrize(
    ("theirs", "ours", "words"),
    [
        (
            ("stranger", "authority"),
            ("member", "authority"),
            "refused: .*authorities= must hold the certificate that signed it",
        ),
        (
            ("member", "authority"),
            ("stranger", "authority"),
            "the peer refuses this member's certificate.*: unknown ca",
        ),
    ],
    ids=["theirs is foreign", "ours is foreign"],
)
def test_a_refused_certificate_is_explained_to_who_dialled(
    theirs: tuple[str, str], ours: tuple[str, str], words: str
) -> None:
    """By the end that refused it, or by its alert."""
    with facing(
        functools.partial(TlsLink, **other(*theirs)),
        functools.partial(TlsLink, **other(*ours)),
    ) as (listening, dialling):
        conn = dialling.members[0].link.dial(listening.members[0].addresses[0])
        event = lost_at(dialling, listening, conn)
        assert re.search(words, event.reason)
        assert listening.members[0].link.malformed == 1


def test_whom_a_listener_refuses_is_in_its_log(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever only looks whether somebody listens is not."""
    strange = other("stranger", "other_authority")
    with facing(
        functools.partial(make, **tls_options()), functools.partial(make, **strange)
    ) as (listening, dialling):
        address = listening.members[0].addresses[0]
        with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))):
            pass
        conn = dialling.members[0].link.dial(address)
        lost_at(dialling, listening, conn)
        listening.until(lambda: bool(caplog.messages), "a line in the log")
        (line,) = caplog.messages
        assert re.search(r"refused .*127\.0\.0\.1:\d+: ", line)
        assert re.search(r"authorities=|refuses this member's certificate", line)


def test_who_leaves_in_the_middle_of_the_handshake_is_not_accused(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """As a member does that closes, or was reached by the other's dial meanwhile."""
    ours, theirs = ssl.MemoryBIO(), ssl.MemoryBIO()
    dialler = ssl.create_default_context().wrap_bio(
        theirs, ours, server_hostname="localhost"
    )
    with pytest.raises(ssl.SSLWantReadError):
        dialler.do_handshake()
    with World(functools.partial(make, **tls_options()), 1) as world:
        (member,) = world.members
        port = int(member.addresses[0].rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as sock:
            sock.sendall(ours.read())
        world.until(lambda: member.link.malformed == 1, "its end")
    assert not caplog.messages


def test_nng_tells_who_dialled_that_certificates_do_not_fit() -> None:
    """However soon the end of the connection is seen, which does not say why."""
    for theirs, member in itertools.product(("authority", "other_authority"), range(8)):
        owner = ("member", "stranger")[member % 2]
        if (owner, theirs) == ("member", "authority"):
            continue  # they fit
        with facing(
            functools.partial(NngTlsLink, **tls_options()),
            functools.partial(NngTlsLink, **other(owner, theirs)),
        ) as (listening, dialling):
            conn = dialling.members[0].link.dial(listening.members[0].addresses[0])
            assert "authorities=" in lost_at(dialling, listening, conn).reason


def test_a_certificate_that_names_nobody_will_do(make: Make) -> None:
    """Its name is among the alternative ones; there is no common name to tell."""
    with World(
        functools.partial(make, **tls_options("nameless", "nameless_authority"))
    ) as world:
        for conn in world.connect():
            assert "certificate" not in conn.describe() or make is TlsLink


def test_a_name_that_does_not_match_is_explained() -> None:
    """With the option that says which name to expect."""
    with World(tls) as world:
        address = world.members[1].addresses[0]
        ours: Any = world.members[0].link
        ours._server_name = "somebody.example"
        conn = world.members[0].link.dial(address)
        world.lost(0, conn)
        reason = world.members[0].events[-1].reason
        assert "somebody.example" in reason
        assert "server_name=" in reason


def test_who_is_reached_only_by_the_others_dial_is_told_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A wrong `server_name` costs seconds at each `connect`; only it can say why."""
    wrong = {**tls_options(), "server_name": "somebody.example"}
    with (
        mq.connect("tls", group="named", name="a", **tls_options()),
        mq.connect("tls", group="named", name="b", **wrong) as b,
    ):
        assert [member.name for member in b.members()] == ["a", "b"]
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    refused, told = warnings
    assert "the peer refuses this member's certificate" in refused
    assert "dials of this member to a fail" in told
    assert "Hostname mismatch" in told


def test_a_peer_that_does_not_speak_tls_is_named() -> None:
    """`tls` that dials `tcp` gets no hello, but a reason."""
    with World(tls, 1) as world, socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tls://127.0.0.1:{server.getsockname()[1]}"
        conn = world.members[0].link.dial(address)
        server.settimeout(PATIENCE)
        plain, _ = server.accept()
        with plain:
            plain.sendall(b"MQSTRM\1\n and so on")
            world.lost(0, conn)
        assert "does not speak TLS" in world.members[0].events[-1].reason


def test_a_certificate_that_has_expired_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By its peers, if it has expired since its member connected."""
    lapsed = other("lapsed", "lapsed_authority")
    monkeypatch.setattr("transports.tls.check_dates", lambda *_: None)
    trusting = {**tls_options(), "authorities": lapsed["authorities"]}
    with facing(
        functools.partial(TlsLink, **lapsed), functools.partial(TlsLink, **trusting)
    ) as (listening, dialling):
        conn = dialling.members[0].link.dial(listening.members[0].addresses[0])
        reason = lost_at(dialling, listening, conn).reason
        assert "certificate has expired; it needs a new one" in reason


def test_tls_1_2_is_spoken_only_where_both_ends_allow_it() -> None:
    """By default the oldest version is 1.3."""
    old = functools.partial(TlsLink, **tls_options(), oldest_version="1.2")
    with facing(tls, old) as (modern, lenient):
        ours: Any = lenient.members[0].link
        ours._client.maximum_version = ours._oldest
        conn = ours.dial(modern.members[0].addresses[0])
        assert "version of TLS" in lost_at(lenient, modern, conn).reason
    with World(old) as world:
        ours = world.members[0].link
        ours._client.maximum_version = ours._oldest
        dialled, accepted = world.connect()
        assert isinstance(dialled, TlsConn)
        assert dialled._ssl.version() == "TLSv1.2"
        world.send(dialled, b"head", bytes(100_000))
        world.arrive(world.members[1].received.setdefault(accepted, []), 1)


def test_a_session_of_tls_is_not_resumed() -> None:
    """No ticket is given, and a connection that resumes one by its number is none.

    Version 1.3 has no such numbers.
    """
    old = functools.partial(TlsLink, **tls_options(), oldest_version="1.2")
    with World(old, 1) as world:
        (member,) = world.members
        ours: Any = member.link
        context = ours.context(server=False)
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        host, port = split(member.addresses[0])

        def shake(session: ssl.SSLSession | None) -> ssl.SSLSocket:
            plain = socket.create_connection((host, port), PATIENCE)
            return context.wrap_socket(plain, server_hostname=host, session=session)

        with pumped(world), shake(None) as first:
            first.sendall(TlsLink.hello)
            assert first.recv(100) == TlsLink.hello
            assert not first.session.has_ticket
            # It may be reset before it has said hello, or been told of its end.
            with contextlib.suppress(OSError), shake(first.session) as second:
                second.sendall(TlsLink.hello)
                assert not second.recv(100)
        world.until(lambda: ours.malformed == 1, "the second")
        assert len(member.conns(What.ACCEPTED)) == 1


def test_a_connection_is_given_up_before_its_keys_are_worn_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The session goes on over another, and nothing is lost or doubled."""
    monkeypatch.setattr(TlsConn, "key_bytes", 1_000_000)
    numbers = list(range(40))
    with (
        mq.connect("tls", group="worn", name="a", **tls_options()) as a,
        mq.connect("tls", group="worn", name="b", **tls_options()) as b,
    ):
        b.subscribe("t")
        got = []

        def receive() -> None:
            got.extend(b.recv(timeout=PATIENCE).payload[0] for _ in numbers)

        receiving = threading.Thread(target=receive)
        receiving.start()
        for number in numbers:
            a.publish("t", [number, bytes(100_000)], timeout=PATIENCE)
        receiving.join(PATIENCE)
        assert got == numbers
        assert a.stats()["peers"]["b"]["connections"] > 2


# -- files and options ----------


def test_options_that_make_no_sense_are_refused() -> None:
    """By name, before anything is opened."""
    with pytest.raises(ValueError, match=r"tls needs certificate=.*missing: priv"):
        TlsLink(**{**tls_options(), "private_key": ""})
    with pytest.raises(
        ValueError, match=r"oldest_version is '1.2' or '1.3', not '1.1'"
    ):
        TlsLink(**tls_options(), oldest_version="1.1")
    with pytest.raises(TypeError, match="certificate"):
        mq.connect("tls", group="tls", name="a", certificat="x")


@pytest.mark.parametrize("backend", ENGINES)
def test_the_end_of_a_certificate_is_told_in_time(
    backend: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A member reads the files when it connects, and not again."""
    options = tls_options()
    mq.connect(backend, group="tls", **options).close()
    assert not caplog.messages
    monkeypatch.setattr("mq.credentials.LAST_PART", 1.0)
    mq.connect(backend, group="tls", **options).close()
    (line,) = caplog.messages
    assert re.search(
        r"member.pem' expires in \d+ days, .*, at Oct 28 .* 2126 GMT", line
    )


@pytest.mark.parametrize("backend", ENGINES)
def test_a_server_name_may_end_in_the_dot_of_the_dns(backend: str) -> None:
    """No certificate has it."""
    options = {**tls_options(), "server_name": "localhost."}
    with (
        mq.connect(backend, group="dot", name="a", **options),
        mq.connect(backend, group="dot", name="b", **options) as b,
    ):
        assert [member.name for member in b.members()] == ["a", "b"]


@pytest.mark.parametrize("backend", ENGINES)
@pytest.mark.parametrize(
    ("server_name", "error"),
    [
        (".", ValueError),
        ("localhost..", ValueError),
        (5, TypeError),
        (b"localhost", TypeError),
        ("a\0b", ValueError),
        (".example", ValueError),
        ("a" * 70, ValueError),
        ("a." * 200, ValueError),
    ],
)
def test_a_server_name_that_no_certificate_can_have_is_refused(
    backend: str, server_name: Any, error: type[Exception]
) -> None:
    """Before a member is dialled, where it would end connect, or stop the keeper."""
    options = {**tls_options(), "server_name": server_name}
    with pytest.raises(error, match="server_name is the name in peers' certificates"):
        mq.connect(backend, group="tls", name="a", **options)


@pytest.mark.parametrize("backend", ENGINES)
@pytest.mark.parametrize("option", ["certificate", "private_key", "authorities"])
def test_a_descriptor_is_no_path(backend: str, option: str, tmp_path: Any) -> None:
    """It would be read and closed; and False is a descriptor, too, to `open`."""
    (tmp_path / "file").write_text("of somebody else")
    with open(tmp_path / "file") as file:
        for wrong in (file.fileno(), True, False, 0):
            with pytest.raises(TypeError, match=f"^{option} is the path of a PEM file"):
                mq.connect(backend, group="tls", **{**tls_options(), option: wrong})
        assert file.read() == "of somebody else"


@pytest.mark.parametrize("backend", ENGINES)
@pytest.mark.parametrize("kind", [Path, os.fsencode])
def test_a_path_may_be_of_any_type_that_python_opens(backend: str, kind: Any) -> None:
    """The files are found."""
    options = {name: kind(path) for name, path in tls_options().items()}
    with mq.connect(backend, group="tls-paths", name="a", **options) as a:
        assert a.backend == backend


@pytest.mark.parametrize("backend", ENGINES)
@pytest.mark.parametrize("option", ["certificate", "private_key", "authorities"])
def test_a_file_that_is_missing_or_is_something_else_is_named(
    option: str, backend: str, tmp_path: Any
) -> None:
    """At `connect`; nothing stays open."""
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("this is no certificate")
    broken = tmp_path / "broken.pem"
    text = (CERTIFICATES / "member.pem").read_text()
    text += (CERTIFICATES / "member.key").read_text()
    broken.write_text(text.replace("MI", "##"))
    for path, words in (
        (garbage, rf"{option} .*garbage\.pem' holds no"),
        (broken, r"OpenSSL does not accept.*broken\.pem"),
        (tmp_path / "nowhere", rf"{option} .*nowhere' cannot be read: No such file"),
        (tmp_path, rf"{option} .* cannot be read: Is a directory"),
    ):
        with pytest.raises(OSError, match=words):
            mq.connect(
                backend, group="tls", name="a", **{**tls_options(), option: str(path)}
            )


@pytest.mark.parametrize("backend", ENGINES)
@pytest.mark.parametrize("owner", ["stranger", "rsa"])
def test_a_key_of_another_certificate_is_named(backend: str, owner: str) -> None:
    """OpenSSL compares them when they are loaded; NNG would not before a peer does."""
    stranger = tls_options(owner)["private_key"]
    with pytest.raises(OSError, match="the key is not that of the certificate"):
        mq.connect(
            backend, group="tls", name="a", **{**tls_options(), "private_key": stranger}
        )


@pytest.mark.parametrize("backend", ENGINES)
@pytest.mark.parametrize("server_name", [None, "another.example"])
def test_a_certificate_of_its_own_that_has_expired_is_named(
    backend: str, server_name: str | None
) -> None:
    """Whatever the name in it: dates are for `connect`, names for who dials."""
    lapsed = other("lapsed", "lapsed_authority", server_name=server_name)
    with pytest.raises(OSError, match=r"lapsed\.pem': certificate has expired"):
        mq.connect(backend, group="tls", name="a", **lapsed)


@pytest.mark.parametrize("backend", ENGINES)
def test_a_key_that_tls_does_not_have_is_named(backend: str) -> None:
    """OpenSSL loads it, and then finds nothing that both ends of a connection speak."""
    odd = tls_options("secp256k1", "secp256k1")
    with pytest.raises(OSError, match=r"secp256k1\.pem'.*its key must be .*RSA"):
        mq.connect(backend, group="tls", name="a", **odd)


def test_keys_that_only_openssl_has_are_named(tmp_path: Path) -> None:
    """NNG says "Cryptographic error", and no more, of one among several authorities."""
    edwards = tls_options("ed25519", "ed25519")
    mq.connect("tls", group="tls", name="a", **edwards).close()
    both = tmp_path / "both.pem"
    both.write_bytes(
        (CERTIFICATES / "authority.pem").read_bytes()
        + (CERTIFICATES / "ed25519.pem").read_bytes()
    )
    for options, words in (
        (edwards, r"certificate '.*ed25519\.pem'.*RSA.*transport tls"),
        (
            {**tls_options(), "authorities": str(both)},
            r"authorities '.*both\.pem'.*RSA.*transport tls",
        ),
    ):
        with pytest.raises(OSError, match=words):
            mq.connect("nng:tls", group="tls", name="a", **options)


@pytest.mark.parametrize("option", tls_options())
@pytest.mark.parametrize("backend", ENGINES)
def test_a_file_that_can_be_read_once_only_is_refused(
    backend: str, option: str, tmp_path: Path
) -> None:
    """Such as a shell's `<(command)`: the second to open it would wait for ever."""
    os.mkfifo(tmp_path / "fifo")
    given = {**tls_options(), option: os.fspath(tmp_path / "fifo")}
    with pytest.raises(OSError, match=f"{option} '.*fifo' .*it is a pipe"):
        mq.connect(backend, group="tls", name="a", **given)


@pytest.mark.parametrize("backend", ENGINES)
def test_a_key_with_a_password_is_refused_in_place_of_asking(
    backend: str, tmp_path: Any
) -> None:
    """OpenSSL would ask at the terminal, where there may be nobody."""
    locked = tmp_path / "locked.key"
    locked.write_text(LOCKED)
    with pytest.raises(OSError, match=r"locked\.key' is locked by a password"):
        mq.connect(
            backend,
            group="tls",
            name="a",
            **{**tls_options(), "private_key": os.fspath(locked)},
        )


LOCKED = """-----BEGIN ENCRYPTED PRIVATE KEY-----
MIHsMFcGCSqGSIb3DQEFDTBKMCkGCSqGSIb3DQEFDDAcBAioUViESWw3lAICCAAw
DAYIKoZIhvcNAgkFADAdBglghkgBZQMEASoEEOGabEqGLYmZcJBvkvvfVSUEgZAH
6TeLEoBeLjYYrvnu+f0Z92TRkpsvQgW6CrqDlWck3h2BtD/+Z2DM04m0eukPY7y7
mNpvwiVc/qL/EudPqwtFma+UTOxZ0JO53c+ZTa93Iqi0gzwQcjeMvw/gKEXFo5uJ
8cckk11aYATJsto0D2fJy6fxrkwqWaie9+dtkr7QPfd7w4R30eCQxVFK+Th53fQ=
-----END ENCRYPTED PRIVATE KEY-----
"""
"""A key of which nothing else is known, nor needed."""
