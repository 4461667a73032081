"""What torchrpc's link does with options, strangers and calls."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import random
import re
import socket
import struct
import threading
from typing import Any

import pytest
import torch
from msgspec import structs
from torchrpc_links import endpoint, rpc_conn

import mq
from mq import registry
from mq.mesh.poller import Poller
from mq.testing.link_world import PATIENCE, World
from mq.transport import What
from transports import _torchrpc_calls as calls
from transports import _torchrpc_control as control
from transports import _torchrpc_net as net
from transports import _torchrpc_shared as shared
from transports._torchrpc_conns import RpcConn
from transports._torchrpc_control import Greeting
from transports.torchrpc import TorchRpcLink

# -- options and addresses ----------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"transports": ("tcp",)}, "'uv'"),
        ({"transports": ("shm",)}, "'uv'"),
        ({"transports": ("uv", "uv")}, "each once"),
        ({"transports": ("ibv", "uv")}, "infiniband=True"),
        ({"channels": ("cma",)}, "'basic'"),
        ({"channels": ("basic", "xth")}, "xth"),
        ({"threads": 0}, "threads"),
        ({"greeting_timeout": 0}, "greeting_timeout"),
    ],
)
def test_options_that_would_abort_the_process_are_refused(
    options: dict[str, Any], words: str
) -> None:
    """Before TensorPipe sees them, by what is wrong."""
    with pytest.raises(ValueError, match=words):
        TorchRpcLink(**options)


def test_a_misspelt_option_names_the_nearest() -> None:
    """As on every transport."""
    with pytest.raises(TypeError, match="'channels'"):
        registry.create("torchrpc", {"chanels": ("basic",)})


def test_aliases_are_the_same_backend() -> None:
    """`torchrpc` is `torchrpc:cpu`, and members that use either meet."""
    assert registry.canonical("torchrpc") == "torchrpc:cpu"
    assert registry.canonical("cuda") == "torchrpc:cuda"
    assert registry.load("torchrpc") is TorchRpcLink
    with (
        mq.connect("torchrpc", group="alias", name="a") as a,
        mq.connect("torchrpc:cpu", group="alias", name="b") as b,
    ):
        b.subscribe("t")
        a.publish("t", torch.arange(3), timeout=PATIENCE)
        assert b.recv(timeout=PATIENCE).payload.tolist() == [0, 1, 2]
        assert a.backend == b.backend == "torchrpc:cpu"


@pytest.mark.parametrize(
    "address",
    ["torchrpc://host", "torchrpc://h:1/NO", "torchrpc://h:99999", "tcp://h:1"],
)
def test_a_malformed_address_is_a_value_error(address: str) -> None:
    """It names the address and the form."""
    with pytest.raises(ValueError, match=re.escape(repr(address))):
        net.split(address)


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("torchrpc://[::1]:5/ab", "torchrpc://[::1]:5"),
        ("tcp://h:5/ab", "torchrpc://h:5"),
        ("torchrpc://h:5", "torchrpc://h:5"),
        ("torchrpc://abcd", "torchrpc://abcd"),
        ("torchrpc://h:1/NO", "torchrpc://h:1/NO"),
        ("ipc:///tmp/ab", "ipc:///tmp/ab"),
    ],
)
def test_an_address_that_is_given_is_that_of_any_link(given: str, taken: str) -> None:
    """Else who is begun anew there would never be met; what is none is named so."""
    assert TorchRpcLink().given(given) == taken


def test_routable_addresses_need_to_be_called_insecure() -> None:
    """A secret does not help against whoever reaches TensorPipe's port."""
    link = TorchRpcLink()
    with pytest.raises(ValueError, match=r"or without the secret.*insecure=True"):
        mq.connect(
            "torchrpc",
            group="routable",
            secret="known to all",
            listen="torchrpc://0.0.0.0:0",
        )
    assert link.is_routable("torchrpc://10.0.0.1:5/ab")
    assert not link.is_routable("torchrpc://localhost:5/ab")
    candidates = ["torchrpc://10.0.0.1:5/ab", "torchrpc://127.0.0.1:5/cd", "tcp://h:1"]
    assert link.rank(candidates, same_host=True) == candidates[:2]
    assert link.rank(candidates, same_host=False) == candidates[:1]


def test_an_address_in_use_is_an_os_error_and_leaves_nothing() -> None:
    """It names the address; the agent stops with the last link."""
    with World(TorchRpcLink, 1) as world:
        taken = world.members[0].addresses[0].rpartition("/")[0]
        poller = Poller()
        with pytest.raises(OSError, match=str(endpoint(taken)[1])):
            TorchRpcLink().open(poller, [taken], None)
        poller.close()
    assert shared._current is None


def test_links_of_a_process_share_an_agent_and_so_its_options() -> None:
    """Other options are refused while it runs, and fine afterwards."""
    basic = functools.partial(TorchRpcLink, channels=("basic",))
    with World(TorchRpcLink, 1):
        poller = Poller()
        with pytest.raises(ValueError, match="one TensorPipe agent"):
            basic().open(poller, [], None)
        poller.close()
    with World(basic) as world:
        dialled, accepted = world.connect()
        world.send(dialled, b"head", bytes(1_000_000))
        world.until(lambda: accepted in world.members[1].received, "a message by TCP")


# -- strangers ----------


def test_garbage_on_the_socket_disturbs_nobody() -> None:
    """Strangers are dropped and counted; TensorPipe never hears of them."""
    with World(TorchRpcLink) as world:
        dialled, accepted = world.connect()
        member = world.members[1]
        chance = random.Random(3)
        for number in range(60):
            piece = chance.randbytes(1 << (number % 15))
            if number % 2:
                piece = struct.pack(">I", min(len(piece), 9000)) + piece
            with socket.create_connection(endpoint(member.addresses[0])) as stranger:
                with contextlib.suppress(OSError):  # it has heard enough
                    stranger.sendall(piece)
            world.send(dialled, b"%d" % number, b"body")
        world.until(lambda: member.link.malformed == 60, "sixty strangers")
        received = member.received.setdefault(accepted, [])
        world.arrive(received, 60)
        assert [head for head, _ in received] == [b"%d" % n for n in range(60)]
        assert member.conns(What.ACCEPTED) == [accepted]
        assert not member.conns(What.LOST)


def say(address: str, note: object) -> dict[str, Any]:
    """Send one note to a listener that somebody else pumps; its answer."""
    text = json.dumps(note).encode()
    with socket.create_connection(endpoint(address), PATIENCE) as stranger:
        stranger.sendall(struct.pack(">I", len(text)) + text)
        with stranger.makefile("rb") as file:
            (length,) = struct.unpack(">I", file.read(4))
            answer: dict[str, Any] = json.loads(file.read(length))
    return answer


class Pumped:
    """A world that a thread pumps, so that the test may wait for a socket."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._pump)

    def _pump(self) -> None:
        while not self._done.is_set():
            for member in self._world.members:
                member.pump()
            self._world.poller.wait(1.0)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._world.poller.wake()
        self._thread.join(PATIENCE)


def greeting(**changes: Any) -> dict[str, Any]:
    """A greeting that would be accepted, but for the changes."""
    good = Greeting(
        torch=control.release(torch.__version__),
        agent="0" * 32,
        url="uv://127.0.0.1:1",
        worker="",
        channels=("basic",),
        token="0" * 32,
    )
    return {"greeting": {**structs.asdict(good), **changes}}


@pytest.mark.parametrize(
    ("note", "words", "final"),
    [
        (greeting(protocol=1), "version 1", True),
        (greeting(torch="1.9"), "torch 1.9", True),
        (greeting(channels=["xth"]), "no TensorPipe channel in common", True),
        (greeting(url="uv://somewhere"), "no URL", True),
        (greeting(url="uv://127.0.0.1:0"), "no URL", True),
        (greeting(url="uv://127.0.0.1%x:1234"), "no URL", True),
        (greeting(url="uv://127.0.0.1:\u0661"), "no URL", True),
        (greeting(url="uv://0.0.0.0:1234"), "no URL", True),
        (greeting(url="uv://224.0.0.1:1234"), "no URL", True),
        (greeting(url="uv://[fe80::1%none]:1234"), "no URL", True),
        (greeting(url="uv://255.255.255.255:1234"), "no connection can be", True),
        (greeting(url="shm://name"), "'shm' is not used here", True),
        (greeting(worker="worker1"), "its application started", True),
        (greeting(link="abcdef", torch="1.9"), "does not listen here any more", False),
        (greeting(token="x" * 32), "token", False),
        (greeting(token="0" * 31), "other types", False),
        (greeting(token="0" * 32 + "\n"), "other types", False),
        (greeting(cuda_devices=-1), "other types", False),
        (greeting(cuda_devices=1024), "other types", False),
        (greeting(cuda_devices=True), "other types", False),
        (greeting(gpus=[0]), "other types", False),
        (greeting(cuda_devices=2, gpus=[-1]), "other types", False),
        (greeting(cuda_devices=2, gpus=[True]), "other types", False),
        (greeting(cuda_devices=2, gpus=0), "other types", False),
        (greeting(url=7), "other types", False),
        (greeting(torch="1" * 1025), "other types", False),
        (greeting(channels="basic"), "other types", False),
        (greeting(channels=["basic", 7]), "other types", False),
        (greeting(channels="\ud800"), "other types", False),
        (greeting(outboxes=[[0, "id", "0g", 1]]), "other types", False),
        (greeting(outboxes=[[0, "id", "00\n", 1]]), "other types", False),
        (greeting(outboxes=[[0, "id", "00"]]), "other types", False),
        (greeting(outboxes=[[False, "id", "00", 1]]), "other types", False),
        (greeting(outboxes=7), "other types", False),
        (greeting(more=1), "other fields", False),
        ({"greeting": []}, "no greeting", False),
        ({"goodbye": 0}, "no greeting", False),
    ],
)
def test_a_peer_that_tensorpipe_must_not_meet_is_told_why(
    note: dict[str, Any], words: str, final: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Versions, channels and addresses are compared before it would abort.

    The log has it, too, but for who dials a member that listened there before.
    """
    with World(TorchRpcLink, 1) as world:
        (member,) = world.members
        with Pumped(world):
            answer = say(member.addresses[0], note)
        assert words in answer["refused"]
        # Whoever has the port of another, or talks nonsense, may be gone soon.
        assert answer["final"] is final
        assert not member.events
        assert member.link.malformed == 1
    told = re.findall(r"refused torchrpc://127\.0\.0\.1:[0-9]+: (.*)", caplog.text)
    assert told == ([] if "any more" in words else [answer["refused"]])


def test_a_dialler_learns_why_it_was_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason is that of LOST, at the end that dialled."""
    with World(TorchRpcLink) as world:
        ours = world.members[0].link
        assert isinstance(ours, TorchRpcLink)
        greet = ours._greeting

        def old(conn: RpcConn, link: str = "") -> Greeting:
            return structs.replace(greet(conn, link), torch="1.9")

        monkeypatch.setattr(ours, "_greeting", old)
        conn = ours.dial(world.members[1].addresses[0])
        world.lost(0, conn)
        assert "torch 1.9" in world.members[0].events[0].reason
        assert not world.members[1].events


def test_tensorpipe_is_not_led_to_who_has_ended() -> None:
    """Another program may have its port by now, at whose words it would abort."""
    with (
        World(TorchRpcLink, 1) as world,
        socket.create_server(("127.0.0.1", 0)) as other,
    ):
        (member,) = world.members
        port = other.getsockname()[1]
        text = json.dumps(greeting(url=f"uv://127.0.0.1:{port}")).encode()
        with socket.create_connection(endpoint(member.addresses[0])) as peer:
            peer.sendall(struct.pack(">I", len(text)) + text)
            peer.shutdown(socket.SHUT_WR)
            # Until the other end's kernel has heard of that: TCP_FIN_WAIT2.
            while peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1) != b"\5":
                os.sched_yield()
        world.until(lambda: member.link.malformed == 1, "the refusal")
        assert not member.events
        other.setblocking(False)
        with pytest.raises(BlockingIOError):
            other.accept()


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b""])
def test_a_dialled_stranger_is_lost_in_time(answer: bytes) -> None:
    """Whether it answers nonsense or nothing at all."""
    hasty = functools.partial(TorchRpcLink, greeting_timeout=0.3)
    with World(hasty, 1) as world, socket.create_server(("127.0.0.1", 0)) as server:
        world.nap = 0.1
        port = server.getsockname()[1]
        conn = world.members[0].link.dial(f"torchrpc://127.0.0.1:{port}")
        server.settimeout(PATIENCE)
        other, _ = server.accept()
        with other:
            other.sendall(answer)
            world.lost(0, conn)
        expected = (
            "not the protocol of torchrpc" if answer else "no greeting within 0.3 s"
        )
        assert expected in world.members[0].events[0].reason


def test_accepting_goes_on_after_descriptors_ran_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The listener rests for a while in place of failing without end, and says so."""
    monkeypatch.setattr("transports._torchrpc_sockets.DEAF_SECONDS", 0.01)
    with World(TorchRpcLink) as world:
        link: Any = world.members[1].link
        sockets = link._sockets
        ((fd, listener),) = sockets._listeners.items()

        class Exhausted:
            fileno = listener.fileno
            refused = 0

            def accept(self) -> Any:
                if self.refused == 3:
                    return listener.accept()
                self.refused += 1
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        sockets._listeners[fd] = Exhausted()
        conn = world.members[0].link.dial(world.members[1].addresses[0])
        world.until(lambda: conn in world.members[0].conns(What.OPENED), "OPENED")
        sockets._listeners[fd] = listener
    assert caplog.text.count("cannot accept") == 1
    assert "raise `ulimit -n`" in caplog.text


def test_silent_strangers_are_closed() -> None:
    """Their number and their time are bounded; they count as on every link."""
    hasty = functools.partial(TorchRpcLink, greeting_timeout=0.3)
    with World(hasty, 1) as world, contextlib.ExitStack() as stack:
        world.nap = 0.1
        (member,) = world.members
        ends = [
            stack.enter_context(socket.create_connection(endpoint(a), PATIENCE))
            for a in member.addresses * 5
        ]
        link = member.link
        assert isinstance(link, TorchRpcLink)
        world.until(lambda: len(link._sockets.strangers) == 5, "five strangers")
        world.until(lambda: not link._sockets.strangers, "all of them to be closed")
        assert all(end.recv(1) == b"" for end in ends)
        assert link.malformed == 5


# -- calls ----------


def call(
    link: TorchRpcLink, token: bytes, sequence: int, heads: Any, bodies: Any
) -> Any:
    """What this process answers to a call of its own."""
    peer = link.agent.peer(link.agent.id, link.agent.url, "")
    tensors = any(isinstance(body, torch.Tensor) for body in bodies)
    args = (token, sequence, heads, bodies, False)
    future = peer.call(calls.deliver, args, tensors)
    answered = threading.Event()
    future.add_done_callback(lambda _: answered.set())
    assert answered.wait(PATIENCE)
    return calls.failure(future) or future.value()


@pytest.mark.parametrize(
    ("heads", "bodies"),
    [
        ("no list", []),
        ([b"a"], []),
        ([b""], [None]),
        ([bytes(128 * 1024 + 1)], [None]),
        (["text"], [None]),
        ([b"a"], [b""]),
        ([b"a"], ["text"]),
        ([b"a"], [torch.zeros(3)]),
        ([b"a"], [torch.zeros((2, 2), dtype=torch.uint8)]),
        ([b"a"], [torch.zeros(TorchRpcLink.chunk_bytes + 1, dtype=torch.uint8)]),
    ],
)
def test_a_malformed_batch_breaks_only_its_connection(heads: Any, bodies: Any) -> None:
    """It is counted, its connection is LOST, the others do not notice."""
    with World(TorchRpcLink) as world:
        first, hostile = world.connect()
        dialled, accepted = world.connect()
        member = world.members[1]
        world.send(first, b"well-formed")
        world.until(lambda: hostile in member.received, "the message before")
        assert isinstance(member.link, TorchRpcLink)
        assert call(member.link, rpc_conn(hostile).token, 1, heads, bodies) is False
        assert world.lost(1, hostile).malformed
        assert member.link.malformed == 1
        world.send(dialled, b"undisturbed", b"body")
        world.until(lambda: accepted in member.received, "the others' message")
        assert member.conns(What.LOST) == [hostile]


def test_a_call_for_nobody_is_answered_so() -> None:
    """A token that no connection has is no error, and no crash."""
    with World(TorchRpcLink, 1) as world:
        link = world.members[0].link
        assert isinstance(link, TorchRpcLink)
        assert call(link, b"nobody", 0, [b"head"], [None]) is False


def test_a_call_that_comes_before_the_greeting_is_kept() -> None:
    """The two travel by different connections, and the accepting end may begin."""
    with World(TorchRpcLink) as world:
        ours, theirs = world.members
        dialled = ours.link.dial(theirs.addresses[0])
        world.members.remove(ours)
        world.until(lambda: bool(theirs.conns(What.ACCEPTED)), "ACCEPTED")
        (accepted,) = theirs.conns(What.ACCEPTED)
        world.nap = 0.01
        world.send(accepted, b"early", b"body")
        world.until(lambda: not rpc_conn(accepted).unanswered, "the answer")
        assert dialled not in ours.conns(What.OPENED)
        world.members.append(ours)
        world.until(lambda: dialled in ours.received, "the message")
        assert ours.events[0].what is What.OPENED
        assert ours.received[dialled] == [(b"early", b"body")]


def test_batches_that_overtake_each_other_are_put_in_order() -> None:
    """As they do with several threads, or an agent of the application."""
    with World(TorchRpcLink) as world:
        _, accepted = world.connect()
        order = list(range(40))
        random.Random(5).shuffle(order)
        for number in order:
            rpc_conn(accepted).arrive(number, [b"%d" % number], [b"body"], False)
        received = world.members[1].received.setdefault(accepted, [])
        world.arrive(received, 40)
        assert [head for head, _ in received] == [b"%d" % n for n in range(40)]


def test_a_message_interrupted_while_it_is_sent_breaks_its_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether the call was made is not known, so the stream must not go on."""
    with World(TorchRpcLink) as world:
        dialled, accepted = world.connect()

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(calls.Peer, "call", interrupt)
            with pytest.raises(KeyboardInterrupt):
                dialled.try_send(b"head")
        assert dialled.try_send(b"next")
        world.lost(0, dialled)
        world.lost(1, accepted)
        assert not world.members[1].received


# -- what mq.connect says ----------


def test_a_member_of_another_protocol_is_named_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`connect` tells what its member has heard, at once."""
    with mq.connect("torchrpc", group="versions", name="old"):
        monkeypatch.setattr(control, "PROTOCOL", control.PROTOCOL + 1)
        with pytest.raises(mq.ConnectRefused) as caught:
            mq.connect("torchrpc", group="versions", name="new")
        assert "'old'" in str(caught.value)
        assert "install the same tensormq everywhere" in str(caught.value)
        assert shared._current is not None  # that of the first queue
    assert shared._current is None


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"rendezvous": "tcp://127.0.0.1"}, ValueError, "tcp://127.0.0.1"),
        ({"rendezvous": "etcd://x"}, ValueError, "etcd://x"),
        ({"rendezvous": "tcp://127.0.0.1:{busy}"}, mq.ConnectTimeout, "{busy}"),
        ({"listen": "torchrpc://127.0.0.1:{busy}"}, OSError, "127.0.0.1:{busy}"),
        ({"listen": "torchrpc://192.0.2.1:0", "insecure": True}, OSError, "192.0.2.1"),
    ],
)
def test_a_wrong_or_busy_address_is_named_and_leaves_nothing(
    options: dict[str, Any], kind: type[Exception], words: str
) -> None:
    """Another program that says nothing listens on it, or nobody ever can."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        busy = str(other.getsockname()[1])
        given = {
            key: value.replace("{busy}", busy) if isinstance(value, str) else value
            for key, value in options.items()
        }
        with pytest.raises(kind, match=re.escape(words.replace("{busy}", busy))):
            mq.connect(
                "torchrpc",
                group="address",
                secret="a secret",
                connect_timeout=1.0,
                **given,
            )
    assert shared._current is None
