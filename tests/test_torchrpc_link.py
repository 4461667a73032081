"""What torchrpc's link does with strangers, deaths, forks, and torch itself."""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import os
import random
import re
import resource
import signal
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from link_world import PATIENCE, Member, World

import mq
from mq import registry
from mq.errors import TransportUnavailable
from mq.mesh.poller import Poller
from mq.testing.proxy import Proxy
from mq.transport import Conn, What
from transports import _torchrpc_agent as rpc_agent
from transports import _torchrpc_calls as calls
from transports import _torchrpc_net as net
from transports._torchrpc_conns import RpcConn
from transports._torchrpc_control import Greeting
from transports.torchrpc import TorchRpcLink, _release
from transports.torchrpc_cuda import TorchRpcCudaLink

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["mq.testing.preload"])


def endpoint(address: str) -> tuple[str, int]:
    """Where the socket behind an address listens."""
    host, port, _ = net.split(address)
    return host, port


def rpc_conn(conn: Conn) -> RpcConn:
    """The same object, for the type checker."""
    assert isinstance(conn, RpcConn)
    return conn


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


def test_routable_addresses_need_a_trusted_network() -> None:
    """A secret does not help against whoever reaches TensorPipe's port."""
    poller, link = Poller(), TorchRpcLink()
    with pytest.raises(ValueError, match="trusted_network=True"):
        link.open(poller, ["torchrpc://0.0.0.0:0"], None)
    poller.close()
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
    assert rpc_agent._current is None


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
        torch=_release(torch.__version__),
        agent="0" * 32,
        url="uv://127.0.0.1:1",
        worker="",
        channels=("basic",),
        token="0" * 32,
    )
    return {"greeting": {**asdict(good), **changes}}


@pytest.mark.parametrize(
    ("note", "words"),
    [
        (greeting(protocol=2), "version 2"),
        (greeting(torch="1.9"), "torch 1.9"),
        (greeting(channels=["xth"]), "no TensorPipe channel in common"),
        (greeting(url="uv://somewhere"), "no URL"),
        (greeting(url="uv://127.0.0.1:0"), "no URL"),
        (greeting(url="shm://name"), "'shm' is not used here"),
        (greeting(worker="worker1"), "its application started"),
        (greeting(link="abcdef"), "does not listen here any more"),
        (greeting(token="x" * 32), "token"),
        (greeting(cuda_devices=-1), "other types"),
        (greeting(url=7), "other types"),
        (greeting(more=1), "other fields"),
        ({"greeting": []}, "no greeting"),
        ({"goodbye": 0}, "no greeting"),
    ],
)
def test_a_peer_that_tensorpipe_must_not_meet_is_told_why(
    note: dict[str, Any], words: str
) -> None:
    """Versions, channels and addresses are compared before it would abort."""
    with World(TorchRpcLink, 1) as world:
        (member,) = world.members
        with Pumped(world):
            answer = say(member.addresses[0], note)
        assert words in answer["refused"]
        assert not member.events
        assert member.link.malformed == 1


def test_a_dialler_learns_why_it_was_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason is that of LOST, at the end that dialled."""
    with World(TorchRpcLink) as world:
        ours = world.members[0].link
        assert isinstance(ours, TorchRpcLink)
        greet = ours._greeting

        def old(conn: RpcConn, link: str = "") -> Greeting:
            return replace(greet(conn, link), torch="1.9")

        monkeypatch.setattr(ours, "_greeting", old)
        conn = ours.dial(world.members[1].addresses[0])
        world.lost(0, conn)
        assert "torch 1.9" in world.members[0].events[0].reason
        assert not world.members[1].events


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
        expected = "a note of" if answer else "no greeting within 0.3 s"
        assert expected in world.members[0].events[0].reason


def test_silent_strangers_are_closed() -> None:
    """Their number and their time are bounded."""
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
        world.until(lambda: len(link._strangers) == 5, "five strangers")
        world.until(lambda: not link._strangers, "all of them to be closed")
        assert all(end.recv(1) == b"" for end in ends)


# -- calls ----------


def call(link: TorchRpcLink, *args: Any) -> Any:
    """What this process answers to a call of its own."""
    peer = link.agent.peer(link.agent.id, link.agent.url, "")
    answered = threading.Event()
    answers: list[Any] = []

    def note(future: Any) -> None:
        answers.append(calls.failure(future) or future.value())
        answered.set()

    peer.call(calls.deliver, args, note)
    assert answered.wait(PATIENCE)
    return answers[0]


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
        ([b"a"], [torch.zeros(8 * 1024 * 1024 + 1, dtype=torch.uint8)]),
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
        world.lost(1, hostile)
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
            rpc_conn(accepted).arrive(number, [b"%d" % number], [b"body"])
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


# -- breaks and deaths ----------


def test_a_cut_socket_is_lost_at_both_ends_and_what_arrived_is_a_prefix() -> None:
    """TensorPipe's own connections live on; the next dial begins afresh."""
    with World(TorchRpcLink) as world:
        ours, theirs = world.members
        behind = theirs.addresses[0].rpartition("/")[0]
        with contextlib.closing(Proxy(behind, "")) as proxy:
            dialled = ours.link.dial(proxy.address)
            world.until(lambda: dialled in ours.conns(What.OPENED), "OPENED")
            (accepted,) = theirs.conns(What.ACCEPTED)
            for index in range(50):
                world.send(dialled, b"%d" % index, bytes(100_000))
            world.until(lambda: bool(theirs.received), "the first message")
            proxy.cut()
            world.lost(0, dialled)
            world.lost(1, accepted)
        heads = [head for head, _ in theirs.received[accepted]]
        assert heads == [b"%d" % index for index in range(len(heads))]
        again, accepted_again = world.connect()
        world.send(again, b"new")
        world.until(lambda: accepted_again in theirs.received, "the new message")
        assert theirs.received[accepted_again] == [(b"new", b"")]


def test_a_break_of_tensorpipes_own_connections_is_lost_and_mended() -> None:
    """The lifeline tells of it; the next dial takes new connections."""
    with World(TorchRpcLink) as world:
        ours, theirs = world.members
        assert isinstance(ours.link, TorchRpcLink)
        agent = ours.link.agent  # the same at both ends, so both go by the proxy
        with contextlib.closing(Proxy(agent.url, "")) as proxy:
            agent.url = proxy.address
            for _ in range(3):
                dialled, accepted = world.connect()
                world.send(dialled, b"head", bytes(1_000_000))
                world.until(lambda: accepted in theirs.received, "a message")  # noqa: B023
                assert proxy.cut() >= 1
                world.lost(0, dialled)
                world.lost(1, accepted)


def test_a_queue_resumes_after_its_socket_was_cut() -> None:
    """Nothing is lost or doubled, although the calls under way were given up."""
    options: dict[str, Any] = {"group": "cut", "secret": "a secret", "peer_timeout": 20}
    with mq.connect(
        "torchrpc", name="a", listen="torchrpc://127.0.0.1:0", **options
    ) as a:
        behind = a.describe()["addresses"][0].rpartition("/")[0]
        with (
            contextlib.closing(Proxy(behind, "")) as proxy,
            mq.connect("torchrpc", name="b", attach_to=proxy.address, **options) as b,
        ):
            for sender, receiver in ((a, b), (b, a)):
                receiver.subscribe("t", timeout=PATIENCE)
                got = []
                for number in range(60):
                    payload = bytes(3_000_000 if number % 5 == 0 else 10)
                    sender.publish("t", [number, payload], timeout=PATIENCE)
                    if number % 20 == 10:
                        assert proxy.cut() >= 1
                    got.append(receiver.recv(timeout=PATIENCE).payload[0])
                assert got == list(range(60))
            assert b.stats()["peers"]["a"]["connections"] > 2


def _peer_main(pipe: Connection) -> None:
    """A process with a link: echoes what it gets until it is ended."""
    with World(TorchRpcLink, 1) as world:
        (member,) = world.members
        pipe.send(member.addresses[0])
        while not pipe.poll(0):
            member.pump()
            for conn, messages in list(member.received.items()):
                while messages:
                    conn.try_send(messages.pop(0)[0])
            world.poller.wait(0.05)


@contextlib.contextmanager
def peer_process(
    main: Callable[[Connection], None] = _peer_main,
) -> Iterator[tuple[str, Any]]:
    """Another process and its address; killed at the end."""
    ours, theirs = context.Pipe()
    process = context.Process(target=main, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        assert ours.poll(PATIENCE)
        yield ours.recv(), process
    finally:
        process.kill()
        process.join(PATIENCE)
        process.close()
        ours.close()


def _dial(world: World, address: str) -> Conn:
    member = world.members[0]
    conn = member.link.dial(address)
    world.until(lambda: conn in member.conns(What.OPENED), "OPENED")
    return conn


def _echoed(world: World, conn: Conn, head: bytes) -> None:
    received = world.members[0].received.setdefault(conn, [])
    known = len(received)
    world.send(conn, head)
    world.until(lambda: len(received) > known, "the echo")
    assert received[-1] == (head, b"")


def test_a_killed_peer_is_lost_at_once_and_the_others_go_on() -> None:
    """With calls under way; later peers are reached, and the close does not hang."""
    with World(TorchRpcLink, 1) as world:
        with peer_process() as (doomed, process), peer_process() as (other, _):
            conn, lively = _dial(world, doomed), _dial(world, other)
            _echoed(world, conn, b"hello")
            body = memoryview(bytearray(world.members[0].link.chunk_bytes))
            for _ in range(3):
                conn.try_send(b"large", body)
            begin = time.monotonic()
            process.kill()
            world.lost(0, conn)
            assert time.monotonic() - begin < 5
            _echoed(world, lively, b"still here")
            with peer_process() as (late, _):
                _echoed(world, _dial(world, late), b"welcome")
            world.lost(0, _dial_nobody(world, doomed))


def _dial_nobody(world: World, address: str) -> Conn:
    return world.members[0].link.dial(address)


def test_a_stopped_peer_is_refused_and_does_not_hold_up_the_close() -> None:
    """Bounded bytes are under way; close gives them half a second."""
    with peer_process() as (address, process), World(TorchRpcLink, 1) as world:
        conn = _dial(world, address)
        _echoed(world, conn, b"hello")
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        body = memoryview(bytearray(world.members[0].link.chunk_bytes))
        sent = 0
        while conn.try_send(b"large", body):
            sent += 1
            assert sent < 20, "a stopped peer must be refused"
        begin = time.monotonic()
        world.members[0].link.close()
        assert time.monotonic() - begin < 2


def _mother_main(pipe: Connection) -> None:
    """Dial, fork a child that stays, and wait to be killed."""
    address = pipe.recv()
    with World(TorchRpcLink, 1) as world:
        conn = _dial(world, address)
        _echoed(world, conn, b"hello")
        child = os.fork()
        if child == 0:
            world.members[0].link.abandon()
            signal.pause()
        pipe.send(child)
        signal.pause()


def test_a_forked_child_does_not_hide_the_death_of_its_parent() -> None:
    """It holds TensorPipe's connections open, but not the socket beside them."""
    ours, theirs = context.Pipe()
    with World(TorchRpcLink, 1) as world:
        (member,) = world.members
        mother = context.Process(target=_mother_main, args=(theirs,), daemon=True)
        mother.start()
        theirs.close()
        ours.send(member.addresses[0])
        child = 0
        try:
            world.until(lambda: bool(member.conns(What.ACCEPTED)), "ACCEPTED")
            (accepted,) = member.conns(What.ACCEPTED)
            world.until(lambda: bool(member.received.get(accepted)), "the greeting")
            world.send(accepted, b"hello")
            assert ours.poll(PATIENCE)
            child = ours.recv()
            mother.kill()
            world.lost(0, accepted)
        finally:
            mother.kill()
            mother.join(PATIENCE)
            mother.close()
            ours.close()
            if child:
                os.kill(child, signal.SIGKILL)


def _poor_main(pipe: Connection) -> None:
    """Meet one peer, then a second with hardly a descriptor left."""
    first, second = pipe.recv()
    with World(TorchRpcLink, 1) as world:
        conn = _dial(world, first)
        _echoed(world, conn, b"hello")
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        used = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 2, most))
        refused = world.members[0].link.dial(second)
        world.lost(0, refused)
        _echoed(world, conn, b"still here")
        pipe.send(world.members[0].events[-1].reason)


def test_a_process_without_descriptors_refuses_a_peer_and_lives_on() -> None:
    """TensorPipe would end it: `connectFromLoop: too many open files`."""
    ours, theirs = context.Pipe()
    with peer_process() as (first, _), peer_process() as (second, _):
        poor = context.Process(target=_poor_main, args=(theirs,), daemon=True)
        poor.start()
        theirs.close()
        ours.send((first, second))
        try:
            assert ours.poll(PATIENCE)
            assert "RLIMIT_NOFILE" in ours.recv()
        finally:
            poor.join(PATIENCE)
            poor.close()
            ours.close()


# -- torch ----------


def test_a_torch_without_rpc_is_named_with_its_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on builds without it: `TransportUnavailable` with the remedy."""
    monkeypatch.setattr(rpc_agent, "rpc", None)
    with pytest.raises(TransportUnavailable, match=re.escape(torch.__version__)):
        registry.load("torchrpc:cpu")


def test_a_torch_without_the_private_interface_is_named_with_its_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is missing is in the text."""
    monkeypatch.delattr(rpc_agent.private.TensorPipeAgent, "_update_group_membership")
    with pytest.raises(TransportUnavailable, match="_update_group_membership"):
        registry.load("torchrpc:cpu")


@pytest.mark.parametrize("step", ["TensorPipeAgent", "WorkerInfo"])
def test_an_agent_that_does_not_start_is_an_error_and_can_be_tried_again(
    monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Another signature is what another version of torch may well have."""
    monkeypatch.setattr(rpc_agent, "_tested", False)

    def changed(only: object) -> None: ...

    with monkeypatch.context() as patch:
        patch.setattr(rpc_agent.private, step, changed)
        poller = Poller()
        with pytest.raises(TransportUnavailable, match=re.escape(torch.__version__)):
            TorchRpcLink().open(poller, [], None)
        poller.close()
    with World(TorchRpcLink) as world:
        world.connect()


def test_a_wrong_answer_to_the_self_test_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An agent that starts, and does not work, is not used."""
    monkeypatch.setattr(rpc_agent, "_tested", False)
    monkeypatch.setattr(rpc_agent, "echo", calls.hold)
    monkeypatch.setattr(rpc_agent, "SELF_TEST_SECONDS", 0.2)
    poller = Poller()
    with pytest.raises(TransportUnavailable, match="does not start"):
        TorchRpcLink().open(poller, [], None)
    poller.close()


def test_infiniband_is_used_only_where_there_is_a_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else TensorPipe goes on with TCP; what makes fork safe is set before it looks."""
    if os.path.isdir("/sys/class/infiniband"):
        pytest.skip("this host has InfiniBand")
    for name in ("IBV_FORK_SAFE", "RDMAV_FORK_SAFE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    with World(functools.partial(TorchRpcLink, infiniband=True)) as world:
        dialled, accepted = world.connect()
        world.send(dialled, b"head", bytes(1_000_000))
        world.until(lambda: accepted in world.members[1].received, "a message by TCP")
        assert rpc_conn(dialled)._link.agent.url.startswith("uv://")
        assert os.environ["IBV_FORK_SAFE"] == os.environ["RDMAV_FORK_SAFE"] == "1"


def _application_main(rank: int, file: str, pipe: Connection) -> None:
    """A worker of an application's own RPC group, with a link on top."""
    import warnings

    from torch.distributed import rpc

    os.environ["TP_SOCKET_IFNAME"] = "lo"
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{file}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        init: Any = rpc.init_rpc
        init(f"app{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    with World(TorchRpcLink, 1) as world:
        (member,) = world.members
        if rank == 0:
            pipe.send(member.addresses[0])
            world.until(lambda: bool(member.conns(What.ACCEPTED)), "ACCEPTED")
            (conn,) = member.conns(What.ACCEPTED)
        else:
            conn = _dial(world, pipe.recv())
        for number in range(200):
            world.send(conn, b"%d" % number, bytes(200_000 if number % 50 == 0 else 1))
        received = member.received.setdefault(conn, [])
        world.arrive(received, 200)
        assert [head for head, _ in received] == [b"%d" % n for n in range(200)]
        pipe.send("done")
        # The other end may still wait for what this one has not sent.
        world.nap = 0.05
        world.until(pipe.poll, "the word to close")
    assert rpc._is_current_rpc_agent_set()  # type: ignore[attr-defined]
    rpc.shutdown()  # gracefully: nothing of ours is pending
    pipe.send("left")


def test_an_agent_of_the_application_is_used_within_its_group() -> None:
    """Its sixteen threads do not change the order, nor do we hang its shutdown."""
    with tempfile.TemporaryDirectory() as directory:
        pipes, processes = [], []
        for rank in (0, 1):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_application_main,
                args=(rank, f"{directory}/rpc", theirs),
                daemon=True,
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            assert pipes[0].poll(PATIENCE)
            pipes[1].send(pipes[0].recv())
            for expected in ("done", "left"):
                for pipe in pipes:
                    assert pipe.poll(PATIENCE), f"not {expected} in time"
                    assert pipe.recv() == expected
                for pipe in pipes:
                    if expected == "done":
                        pipe.send("close")
        finally:
            for process, pipe in zip(processes, pipes, strict=True):
                process.join(5)
                process.kill()
                process.join(PATIENCE)
                process.close()
                pipe.close()


# -- CUDA, as far as it can be shown without any ----------


def test_cuda_without_cuda_says_so_and_what_to_do() -> None:
    """A typed error, at once, with the remedy."""
    if torch.cuda.is_available():
        pytest.skip("this host has a CUDA device")
    with pytest.raises(TransportUnavailable, match=r"CUDA.* use torchrpc:cpu"):
        mq.connect("cuda", group="none")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device_map": "1_2_0"}, "1_2_0: no GPU 2"),
        ({"device_map": {"1": {1: 0}}, "local_devices": [0]}, "1_1_0: GPU 1"),
        ({"local_devices": ["cuda:5"]}, "names GPU 5"),
    ],
)
def test_a_map_is_checked_against_the_gpus_here(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], words: str
) -> None:
    """At connect, before anything is opened; the entry is named."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    poller = Poller()
    with pytest.raises(ValueError, match=words):
        TorchRpcCudaLink(**options).open(poller, [], None)
    poller.close()


def test_a_map_is_resolved_with_what_the_peer_reports(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By the default, or by the map; what it comes to is in the log."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    made = iter([{"map_name": "a", "device_map": "b_0_1"}, {"map_name": "b"}])
    with (
        caplog.at_level("INFO"),
        World(lambda: TorchRpcCudaLink(**next(made))) as world,
    ):
        world.connect()
        links = [member.link for member in world.members]
        assert isinstance(links[0], TorchRpcCudaLink)
        assert isinstance(links[1], TorchRpcCudaLink)
        assert links[0].resolved == {"b": {0: 1}}
        assert links[1].resolved == {"a": {0: 0, 1: 1}}
    assert "b_0_1" in caplog.text
    assert "a_0_0,a_1_1" in caplog.text


def test_a_map_to_a_gpu_that_the_peer_lacks_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before TensorPipe would abort both processes; the entry is named."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    made = iter([{"map_name": "a", "device_map": "b_0_7"}, {"map_name": "b"}])
    with World(lambda: TorchRpcCudaLink(**next(made))) as world:
        conn = world.members[0].link.dial(world.members[1].addresses[0])
        world.lost(0, conn)
        assert "b_0_7: member 'b' has no GPU 7" in world.members[0].events[0].reason


@pytest.mark.gpu
def test_tensors_on_a_gpu_arrive_on_the_gpu_asked_for() -> None:
    """Staged through host memory, on the device that `subscribe` names."""
    reason = registry.check("torchrpc:cuda")
    if reason is not None:
        pytest.skip(reason)
    with (
        mq.connect("cuda", group="gpu", name="a") as a,
        mq.connect("cuda", group="gpu", name="b") as b,
    ):
        b.subscribe("t", device="cuda:0")
        a.publish("t", torch.arange(1000, device="cuda:0"), timeout=PATIENCE)
        got = b.recv(timeout=PATIENCE).payload
        assert (str(got.device), int(got.sum())) == ("cuda:0", 499_500)


def test_a_member_that_closes_in_the_world_leaves_no_receiver() -> None:
    """What the process-wide table of connections holds goes with each of them."""
    before = set(calls.receivers)
    with World(TorchRpcLink) as world:
        world.connect()
        extra = Member(TorchRpcLink, world.poller)
        extra.link.dial(world.members[0].addresses[0])
        extra.link.close()
    assert set(calls.receivers) == before
