"""What torchrpc's link does about breaks, deaths and forks."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import resource
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
from fresh_python import output_of
from torchrpc_links import context, dial, echoed, peer_process

import mq
from mq.errors import TransportUnavailable
from mq.testing.link_world import PATIENCE, World
from mq.testing.proxy import Proxy
from mq.testing.waiting import wait_until
from mq.transport import Conn, What
from transports import _torchrpc_agent as rpc_agent
from transports import _torchrpc_reading
from transports import _torchrpc_shared as shared
from transports._torchrpc_agent import private, rpc
from transports.torchrpc import TorchRpcLink


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


def test_what_cannot_be_taken_in_breaks_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At once, and with the reason; the next dial begins afresh."""

    def failing(*args: object) -> int:
        raise RuntimeError("out of order")

    with World(TorchRpcLink) as world:
        dialled, accepted = world.connect()
        with monkeypatch.context() as patch:
            patch.setattr(_torchrpc_reading, "weight_of", failing)
            world.send(dialled, b"head")
            world.lost(1, accepted)
            world.lost(0, dialled)
        reasons = [event.reason for event in world.members[1].events if event.reason]
        assert reasons == ["what the peer has sent cannot be taken in: out of order"]
        again, accepted = world.connect()
        world.send(again, b"new")
        world.until(lambda: accepted in world.members[1].received, "the new message")


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


def test_a_killed_peer_is_lost_at_once_and_the_others_go_on() -> None:
    """With calls under way; later peers are reached, and the close does not hang."""
    with World(TorchRpcLink, 1) as world:
        with peer_process() as (doomed, process), peer_process() as (other, _):
            conn, lively = dial(world, doomed), dial(world, other)
            echoed(world, conn, b"hello")
            body = memoryview(bytearray(world.members[0].link.chunk_bytes))
            for _ in range(3):
                conn.try_send(b"large", body)
            begin = time.monotonic()
            process.kill()
            world.lost(0, conn)
            assert time.monotonic() - begin < 5
            echoed(world, lively, b"still here")
            with peer_process() as (late, _):
                echoed(world, dial(world, late), b"welcome")
            world.lost(0, _dial_nobody(world, doomed))


def _dial_nobody(world: World, address: str) -> Conn:
    return world.members[0].link.dial(address)


def test_a_stopped_peer_is_refused_and_does_not_hold_up_the_close() -> None:
    """Bounded bytes are under way; close gives them half a second."""
    with peer_process() as (address, process), World(TorchRpcLink, 1) as world:
        conn = dial(world, address)
        echoed(world, conn, b"hello")
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
        conn = dial(world, address)
        echoed(world, conn, b"hello")
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


def test_queues_outlive_a_shutdown_of_their_agent_by_the_application() -> None:
    """Those that are open start another agent, and so does the next `connect`."""
    options: dict[str, Any] = {"group": "shut down", "connect_timeout": PATIENCE}
    with (
        mq.connect("torchrpc", name="a", **options) as a,
        mq.connect("torchrpc", name="b", **options) as b,
    ):
        a.subscribe("t", timeout=PATIENCE)
        b.publish("t", bytes(500_000), timeout=PATIENCE)
        first = shared._current
        rpc.shutdown(graceful=False)
        with mq.connect("torchrpc", name="c", **options) as c:
            assert shared._current not in (None, first)
            c.wait_for_subscribers("t", 1, timeout=PATIENCE)
            b.publish("t", "old", timeout=PATIENCE)
            c.publish("t", "new", timeout=PATIENCE)
            sizes = [a.recv(timeout=PATIENCE).payload for _ in range(3)]
            assert sorted(map(len, sizes)) == [3, 3, 500_000]
    assert shared._current is None
    assert not private._is_current_rpc_agent_set()


@contextlib.contextmanager
def _ending(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Exception]]:
    """The application is in the middle of `rpc.shutdown`, which ends with the block."""
    begun, goes_on = threading.Event(), threading.Event()
    errors: list[Exception] = []

    def destroy(ignore_leak: bool) -> None:
        begun.set()
        goes_on.wait(PATIENCE)

    def shut_down() -> None:
        try:
            rpc.shutdown(graceful=False)
        except RuntimeError as error:
            errors.append(error)

    monkeypatch.setattr(rpc.api, "_destroy_rref_context", destroy)
    thread = threading.Thread(target=shut_down)
    thread.start()
    try:
        assert begun.wait(PATIENCE)
        yield errors
    finally:
        goes_on.set()
        thread.join(PATIENCE)


def test_the_application_and_the_last_queue_never_end_an_agent_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That would hang, or end the process: who comes second finds none, or waits."""
    queue = mq.connect("torchrpc", group="both", connect_timeout=PATIENCE)
    closing = threading.Thread(target=queue.close)
    with _ending(monkeypatch) as errors:
        closing.start()
        wait_until(lambda: not private._is_current_rpc_agent_set(), "the queue's part")
        assert closing.is_alive()
    closing.join(PATIENCE)
    assert not closing.is_alive()
    assert len(errors) == 1
    mq.connect("torchrpc", group="both", connect_timeout=PATIENCE).close()


NEVER = """
import logging, os, threading
import mq
from torch.distributed import rpc
from transports import _torchrpc_agent as rpc_agent

rpc_agent.ENDING_SECONDS = 0.1
begun, never, told = threading.Event(), threading.Event(), threading.Event()
log = logging.getLogger(rpc_agent.__name__)
log.addFilter(lambda record: "its threads" not in record.getMessage() or told.set())
rpc.api._destroy_rref_context = lambda ignore_leak: begun.set() or never.wait()
queue = mq.connect("torchrpc", group="never")
threading.Thread(target=rpc.shutdown, args=(False,), daemon=True).start()
begun.wait()
queue.close()
mq.connect("torchrpc", group="never").close()
print("closed", told.wait(60), flush=True)
os._exit(0)
"""


def test_a_shutdown_of_the_application_that_never_ends_keeps_no_queue() -> None:
    """Its agent is let go of, which the log tells of, and there may be another."""
    assert output_of(NEVER) == "closed True\n"


def test_an_agent_is_gone_with_its_last_user() -> None:
    """With its threads, and without a garbage collection, in the oldest thread, too."""
    gc.collect()
    gc.disable()
    try:
        with World(TorchRpcLink, 1):
            agent = shared._current
            assert agent is not None
            gone = weakref.ref(agent._agent)
            del agent
        assert gone() is None
    finally:
        gc.enable()


def _late_main(told: Any, pipe: Connection) -> None:
    """A process that calls the one that dialled it once told to, until that is lost."""
    with World(TorchRpcLink, 1) as world:
        (member,) = world.members
        pipe.send(member.addresses[0])
        world.until(lambda: bool(member.received), "a message")
        (conn,) = member.received
        world.send(conn, b"heard")
        assert told.wait(PATIENCE)
        while conn not in member.conns(What.LOST):
            conn.try_send(b"late")
            member.pump()
            world.poller.wait(0.05)


def test_a_call_that_comes_as_an_agent_ends_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It fails where it came from; torch would write a traceback of C++ here."""
    told = context.Event()
    main = functools.partial(_late_main, told)
    with peer_process(main) as (address, process), World(TorchRpcLink, 1) as world:
        (member,) = world.members
        link = member.link
        assert isinstance(link, TorchRpcLink)
        world.send(dial(world, address), b"hello")
        world.until(lambda: bool(member.received), "the answer of who will call")

        def comes_late(*_: object) -> bool:
            told.set()
            process.join(PATIENCE)
            return True

        monkeypatch.setattr(rpc_agent, "ends_within", comes_late)
        link.agent.stop()
        assert process.exitcode == 0
    assert "RPC agent" not in capfd.readouterr().err


def test_an_agent_that_is_shut_down_as_it_starts_is_told_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever of it failed for that."""
    for error in (None, TransportUnavailable("it has no port"), ValueError("odd")):

        def shut_down(*_: object, error: Exception | None = error) -> None:
            rpc.shutdown(graceful=False)
            if error is not None:
                raise error

        monkeypatch.setattr(shared.net, "check_url", shut_down)
        with pytest.raises(TransportUnavailable, match="has shut the RPC agent down"):
            mq.connect("torchrpc", group="ended", connect_timeout=PATIENCE)
    monkeypatch.undo()
    mq.connect("torchrpc", group="ended", connect_timeout=PATIENCE).close()


FORKED = """
import os, warnings
import mq
from torch.distributed import rpc

warnings.simplefilter("ignore")  # Python 3.12 warns of a fork beside threads
queue = mq.connect("torchrpc", group="forked")
rpc.shutdown(graceful=False)
os.dup2(1, 2)  # where a handler of `fork` is told of
child = os.fork()
if child == 0:
    try:
        mq.connect("torchrpc", group="forked")
    except mq.ForkedProcess:
        print("refused", flush=True)
    os._exit(0)
os.waitpid(child, 0)
queue.close()
"""


def test_a_child_forked_after_a_shutdown_by_the_application_is_told_so() -> None:
    """There is no agent any more that it would have to let go of."""
    assert output_of(FORKED) == "refused\n"


AFTERWARDS = """
import mq
from torch.distributed import autograd
autograd._init(1)  # as `init_rpc` does with rank=1; it stays so
with mq.connect("torchrpc", group="afterwards") as queue:
    print(queue.name == queue.members()[0].name)
"""


def test_a_queue_may_come_after_a_group_of_the_applications() -> None:
    """Whatever rank the process had in that."""
    assert output_of(AFTERWARDS) == "True\n"


def test_a_link_reaches_other_processes_by_another_agent() -> None:
    """Their connections were lost with the first; calls to it do not go astray."""
    with peer_process() as (address, _), World(TorchRpcLink, 1) as world:
        (member,) = world.members
        conn = dial(world, address)
        echoed(world, conn, b"hello")
        (peer,) = member.link.agent._peers.values()  # type: ignore[attr-defined]
        rpc.shutdown(graceful=False)
        world.lost(0, conn)
        echoed(world, dial(world, address), b"hello again")
        with pytest.raises(RuntimeError, match="shut the RPC agent down"):
            peer.call(rpc_agent.echo, (1,))


def test_an_agent_that_was_shut_down_takes_no_peer() -> None:
    """Not even one whose greeting was under way."""
    with World(TorchRpcLink, 1) as world:
        first = world.members[0].link.agent  # type: ignore[attr-defined]
        rpc.shutdown(graceful=False)
        world.lost(0, world.members[0].link.dial("torchrpc://127.0.0.1:1"))
        assert world.members[0].link.agent is not first  # type: ignore[attr-defined]
        with pytest.raises(OSError, match="shut the RPC agent down"):
            first.peer("0" * 32, "uv://127.0.0.1:1", "")


def test_a_url_that_torch_refuses_is_an_os_error() -> None:
    """As any peer that the agent does not take, though C++ raises another kind."""
    with World(TorchRpcLink, 1) as world:
        agent = world.members[0].link.agent  # type: ignore[attr-defined]
        with pytest.raises(OSError, match="does not take the peer: In createInet"):
            agent.peer("0" * 32, "uv://127.0.0.1%x:1234", "")


def _limit_to(free: int) -> None:
    """Leave this process so many descriptors."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + free, most))


def _poor_main(pipe: Connection) -> None:
    """Meet one peer, then several at once with descriptors for few of them."""
    first, *others = pipe.recv()
    with World(TorchRpcLink, 1) as world:
        (member,) = world.members
        conn = dial(world, first)
        echoed(world, conn, b"hello")
        _limit_to(50)
        conns = [member.link.dial(address) for address in others]
        world.until(lambda: len(member.events) > len(conns), "OPENED or LOST of each")
        for opened in member.conns(What.OPENED):
            echoed(world, opened, b"still here")
        pipe.send([event.reason for event in member.events if event.reason])


def test_a_process_without_descriptors_refuses_peers_and_lives_on() -> None:
    """TensorPipe would end it, some time later: `connectFromLoop: too many open files`.

    So what a peer will take counts from before it is met.
    """
    with contextlib.ExitStack() as peers:
        addresses = [peers.enter_context(peer_process())[0] for _ in range(6)]
        poor = peers.enter_context(_process(_poor_main))
        poor.send(addresses)
        assert poor.poll(PATIENCE)
        reasons = poor.recv()
    assert 0 < len(reasons) < 5, reasons
    assert all("raise it with `ulimit -n`" in reason for reason in reasons)


def _poor_listener_main(pipe: Connection) -> None:
    """Be met by several at once with descriptors for few of them."""
    with World(TorchRpcLink, 1) as world:
        (member,) = world.members
        _limit_to(50)
        pipe.send(member.addresses[0])
        while not pipe.poll(0):
            member.pump()
            for conn, messages in member.received.items():
                while messages:
                    conn.try_send(messages.pop()[0])
            world.poller.wait(0.05)


def test_a_process_without_descriptors_tells_those_who_dial_it() -> None:
    """They may try again, for some may be free by then."""
    with (
        peer_process(_poor_listener_main) as (address, _),
        World(TorchRpcLink) as world,
    ):
        member = world.members[0]
        conns = [member.link.dial(address) for _ in range(6)]
        world.until(lambda: len(member.events) == len(conns), "OPENED or LOST of each")
        lost = [event for event in member.events if event.what is What.LOST]
        assert 0 < len(lost) < 6
        assert all("refused: [Errno 24] " in event.reason for event in lost)
        assert not any(event.refused for event in lost)
        for opened in member.conns(What.OPENED):
            echoed(world, opened, b"hello")


def _member_main(pipe: Connection) -> None:
    """A member until it is told to leave; the process cannot have been ended then."""
    with mq.connect("torchrpc", group=pipe.recv(), name=f"m{os.getpid()}"):
        pipe.send(None)
        pipe.recv()
    pipe.send("left")


def _poor_member_main(pipe: Connection) -> None:
    """Connect with descriptors for a queue, but not for all of its peers."""
    group = pipe.recv()
    _limit_to(66)
    try:
        mq.connect("torchrpc", group=group, name="poor", connect_timeout=2)
    except mq.MQError as error:
        pipe.send((type(error).__name__, str(error)))


@contextlib.contextmanager
def _process(main: Callable[[Connection], None]) -> Iterator[Connection]:
    """A process and the pipe to it; killed at the end."""
    ours, theirs = context.Pipe()
    process = context.Process(target=main, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        process.kill()
        process.join(PATIENCE)
        process.close()
        ours.close()


def test_a_member_that_is_poor_in_descriptors_is_told_what_to_do() -> None:
    """`connect` ends by an error, and neither its process nor another one does."""
    group = f"poor-{os.getpid()}"
    with contextlib.ExitStack() as stack:
        mains = [_member_main] * 4 + [_poor_member_main]
        pipes = [stack.enter_context(_process(main)) for main in mains]
        *members, poor = pipes
        for member in members:
            member.send(group)
            assert member.poll(PATIENCE)
            member.recv()
        poor.send(group)
        assert poor.poll(PATIENCE)
        kind, text = poor.recv()
        assert kind == "ConnectTimeout"
        assert "raise it with `ulimit -n`" in text
        for member in members:
            member.send("leave")
            assert member.poll(PATIENCE)
            assert member.recv() == "left"
