"""What `docs/wire.md` says is enough to subscribe from another implementation."""

from __future__ import annotations

import contextlib
import inspect
import json
import multiprocessing
import struct
from collections import deque
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import foreign_member
import foreign_wires
import pytest
import torch
from foreign_member import Refused, Session, Tensor

import mq
from mq.rendezvous.tcp import serve

SMALL, LARGE = 300, 3
FLOATS = 700_001
"""Of a large message: three chunks, the last of them short."""
SECRET = "a secret of the test"
Options = dict[str, Any]


def publish(backend: str, group: str, options: Options, pipe: Connection) -> None:
    """A publisher: tells where it listens, publishes, and tells who is there."""
    options = {"connect_timeout": 60.0, "peer_timeout": 60.0, **options}
    with mq.connect(backend, group=group, name="publisher", **options) as queue:
        pipe.send(queue.describe()["addresses"])
        queue.wait_for_subscribers("t", 1, timeout=60)
        for number in range(SMALL):
            queue.publish("t", {"number": number, "pair": (number, "two")}, timeout=60)
        for number in range(LARGE):
            tensor = torch.arange(FLOATS, dtype=torch.float32) + number
            payload = {"tensor": tensor, "raw": bytes(70_000), "number": number}
            queue.publish("t", payload, timeout=60)
        names = [member.name for member in queue.members()]
        mesh = queue.stats()["mesh"]
        pipe.send((names, mesh["malformed"], mesh["unauthenticated"]))
        pipe.recv()  # the subscriber has left
        pipe.send([member.name for member in queue.members()])


@contextlib.contextmanager
def publisher(backend: str, group: str, options: Options) -> Iterator[Connection]:
    """`publish` in a process of its own."""
    context = multiprocessing.get_context("forkserver")
    here, there = context.Pipe()
    process = context.Process(target=publish, args=(backend, group, options, there))
    process.start()
    there.close()
    try:
        yield here
    finally:
        here.close()
        process.join(60)
        if process.is_alive():
            process.kill()
            process.join()
    assert process.exitcode == 0


def hear(pipe: Connection) -> Any:
    assert pipe.poll(60), "the publisher said nothing"
    return pipe.recv()


def subscribe(backend: str, address: str, group: str, secret: bytes) -> Session:
    """A connection and the greeting."""
    wire = foreign_wires.WIRES[backend.partition(":")[0]](address)
    hello = foreign_member.greeting(group, "foreigner", backend)
    return Session(wire, hello, secret)


def check(session: Session, pipe: Connection, unauthenticated: int = 0) -> None:
    """Receive all, leave, and see that the publisher found nothing wrong."""
    window = (20, 1 << 20)  # far less than all of it: credit must be granted
    total = SMALL + LARGE
    received = session.messages(7, "t", window, total)
    for expected in range(total):
        sequence, area = next(received)
        assert sequence == expected
        payload = foreign_member.decode(area)
        if expected < SMALL:
            assert payload == {"number": expected, "pair": (expected, "two")}
            continue
        number = expected - SMALL
        content = struct.pack(f"<{FLOATS}f", *range(number, FLOATS + number))
        assert payload == {
            "tensor": Tensor("float32", (FLOATS,), content),
            "raw": bytes(70_000),
            "number": number,
        }
    received.close()
    assert hear(pipe) == (["foreigner", "publisher"], 0, unauthenticated)
    session.leave("enough")
    pipe.send("left")
    assert hear(pipe) == ["publisher"]


def test_the_foreign_member_knows_nothing_of_the_project() -> None:
    """Else it would prove nothing."""
    source = inspect.getsource(foreign_member) + inspect.getsource(foreign_wires)
    lines = [line.split() for line in source.splitlines()]
    modules = {words[1] for words in lines if words[:1] in (["import"], ["from"])}
    assert "struct" in modules
    assert not {name.partition(".")[0] for name in modules} & {"mq", "transports"}


@pytest.mark.parametrize(
    ("backend", "listen"),
    [
        ("tcp", "tcp://127.0.0.1:0"),
        ("nng:tcp", "tcp://127.0.0.1:0"),
        ("zmq:tcp", "tcp://127.0.0.1:0"),
        ("shm", "shm://{}/s"),
        ("nng:ipc", "ipc://{}/s"),
        ("zmq:ipc", "ipc://{}/s"),
    ],
)
def test_a_subscriber_written_from_the_page(
    backend: str, listen: str, tmp_path: Path
) -> None:
    """Without a secret: small messages, large ones, credit, and the farewell."""
    options = {"listen": listen.format(tmp_path)}
    with publisher(backend, "g", options) as pipe:
        (address,) = hear(pipe)
        check(subscribe(backend, address, "g", b""), pipe)


def test_who_has_given_a_session_up_begins_another() -> None:
    """The listener, which still has it, ends it once there is something in the new one.

    Of the first, the list without subscriptions has no answer.
    """
    hello = foreign_member.greeting("g", "foreigner", "tcp")
    with publisher("tcp", "g", {"listen": "tcp://127.0.0.1:0"}) as pipe:
        (address,) = hear(pipe)
        first = Session(foreign_wires.Stream(address), hello, b"")
        with contextlib.closing(first.wire):
            first.send(foreign_member.SUBSCRIBE, [], flags=foreign_member.LAST)
            kinds = _heard(first)
            second = Session(foreign_wires.Stream(address), hello, b"")
            assert second.peer["session"] != first.peer["session"]
            first.send(foreign_member.ACCEPTS, [])
            kinds |= _heard(first)
            assert kinds <= {foreign_member.SUBSCRIBE, foreign_member.RECEIVED}
            second.answer()
            with pytest.raises(AssertionError, match="the stream ended"):
                deque(first.frames(), 0)
        check(second, pipe)


def _heard(session: Session) -> set[int]:
    """Kinds of the frames that come until all that was sent is received."""
    kinds = set()
    for kind, *_ in session.frames():
        kinds.add(kind)
        if session.acknowledged == session.sent:
            break
    return kinds


def test_a_wrong_secret_is_noticed_by_both_sides(tmp_path: Path) -> None:
    """The proofs are as the page says: the right secret then works."""
    options = {"listen": "tcp://127.0.0.1:0", "secret": SECRET}
    with publisher("tcp", "g", options) as pipe:
        (address,) = hear(pipe)
        with pytest.raises(Refused, match="proof is wrong"):
            subscribe("tcp", address, "g", b"another secret")
        with pytest.raises(Refused, match="group"):
            subscribe("tcp", address, "other", SECRET.encode())
        check(subscribe("tcp", address, "g", SECRET.encode()), pipe, unauthenticated=1)


def test_the_directory_is_as_the_page_says(tmp_path: Path) -> None:
    """The publisher's record is found there, and the group's secret."""
    group = "group of the test: ä"
    with publisher("tcp", group, {"rendezvous": f"file://{tmp_path}"}) as pipe:
        addresses = hear(pipe)
        directory = foreign_member.group_directory(tmp_path, group)
        (record,) = foreign_member.records_in(directory)
        assert (record["name"], record["backend"]) == ("publisher", "tcp")
        assert (record["addresses"], record["generation"]) == (addresses, 1)
        secret = (directory / "key").read_bytes()
        check(subscribe("tcp", addresses[0], group, secret), pipe)
    assert not directory.exists()


def test_the_service_is_as_the_page_says() -> None:
    """Claim, renew, records, remove; and a session with who is recorded there."""
    secret = SECRET.encode()
    with contextlib.closing(serve("127.0.0.1", 0, secret)) as service:
        options = {"rendezvous": service.address, "secret": SECRET}
        with pytest.raises(Refused, match="another secret"):
            foreign_member.Service(service.address, b"another secret", "g")
        with publisher("tcp", "g", options) as pipe:
            hear(pipe)
            client = foreign_member.Service(service.address, secret, "g")
            with contextlib.closing(client):
                address = _try_requests(client)
            check(subscribe("tcp", address, "g", secret), pipe)


def _try_requests(client: foreign_member.Service) -> str:
    """All requests of the page; where the publisher listens."""
    answer = client.ask(do="records", after="")
    (found,) = answer["records"]
    assert not answer["more"]
    assert found["age"] >= 0
    other = json.loads(found["record"])
    assert other["name"] == "publisher"
    mine = {
        **other,
        "name": "another",
        "incarnation": "0" * 32,
        "generation": 0,
        "lease": None,
    }
    claimed = client.ask(do="claim", record=json.dumps(mine), replaces=None)
    assert json.loads(claimed["record"]) == {**mine, "generation": 1}
    taken = {**mine, "name": "publisher"}
    refused = client.ask(do="claim", record=json.dumps(taken), replaces=None)
    assert json.loads(refused["holder"]) == other
    assert refused["age"] >= 0
    assert client.ask(do="renew", record=json.dumps(mine))["kept"] is True
    assert client.ask(do="renew", record=json.dumps(taken))["kept"] is False
    before = client.ask(do="version")["version"]
    after = client.ask(do="records", after="another")
    assert [json.loads(r["record"])["name"] for r in after["records"]] == ["publisher"]
    client.ask(do="remove", name="another", incarnation="0" * 32)
    assert client.ask(do="version")["version"] != before
    assert "error" in client.ask(do="nonsense")
    address: str = other["addresses"][0]
    return address
