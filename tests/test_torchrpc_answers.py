"""A call may wait for a batch the other way, which is then its answer."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

import pytest
import torch
from torchrpc_links import rpc_conn

import mq
from mq.testing.link_world import World
from mq.transport import Conn, What
from transports import _torchrpc_calls as calls
from transports._torchrpc_arrivals import KEPT_BYTES, Arrivals
from transports._torchrpc_conns import CALLS
from transports._torchrpc_native import Heap
from transports.torchrpc import TorchRpcLink

MOST = 100


class Agent:
    def __init__(self) -> None:
        self.alive = True
        self.heap = Heap()


def arrivals() -> Any:
    """The receiving side of a connection, of which 100 bytes may be unread."""
    agent: Any = Agent()
    return Arrivals(agent, MOST, lambda: None)


def batch(number: int, *heads: bytes) -> tuple[int, list[bytes], list[None]]:
    return number, list(heads), [None] * len(heads)


def answers(*futures: Any) -> list[Any]:
    """What the futures of calls have come to; None: they wait."""
    return [future.value() if future.done() else None for future in futures]


# -- of the calls of a peer ----------


@pytest.mark.parametrize(("nbytes", "keep"), [(1, True), (MOST + 1, False)])
def test_nothing_is_made_while_the_meshs_thread_may_wait(
    monkeypatch: pytest.MonkeyPatch, nbytes: int, keep: bool
) -> None:
    """It may begin a collection of garbage, in which a destructor calls the queue."""
    side = arrivals()
    made: list[bool] = []

    def future(*arguments: Any) -> Any:
        made.append(side._lock.locked())
        return torch.futures.Future()

    monkeypatch.setattr(calls, "Future", {Any: future})
    assert not side.take(batch(0, b"a"), nbytes, keep).done()
    assert made == [False]


def test_the_newest_call_waits_for_a_batch() -> None:
    """The next call answers the one before; one that does not wait does so, too."""
    side = arrivals()
    first = side.take(batch(0, b"a"), 1, keep=True)
    assert side.keeps
    assert answers(first) == [None]
    second = side.take(batch(1, b"b"), 1, keep=True)
    assert answers(first, second) == [True, None]
    assert side.answer(batch(0, b"answer"))
    assert not side.keeps
    assert answers(second) == [batch(0, b"answer")]
    assert not side.answer(batch(1, b"nobody waits"))
    third = side.take(batch(2, b"c"), 1, keep=True)
    fourth = side.take(batch(3, b"d"), 1, keep=False)
    assert answers(third, fourth) == [True, True]
    assert [side.next() for _ in range(5)] == [
        *((head, None) for head in (b"a", b"b", b"c", b"d")),
        None,
    ]


def test_the_end_of_the_connection_answers_all_calls() -> None:
    """Those that wait for room, for a batch, and those that still come."""
    side = arrivals()
    held = side.take(batch(0, bytes(MOST + 1)), MOST + 1, keep=True)
    assert answers(held) == [None]
    assert side.next() is not None
    assert answers(held) == [True]
    kept = side.take(batch(1, b"a"), 1, keep=True)
    assert answers(kept) == [None]
    side.close()
    late = side.take(batch(2, b"b"), 1, keep=True)
    assert answers(kept, late) == [False, False]
    assert side.next() is None


def test_what_is_unread_holds_calls_that_would_wait() -> None:
    """They are answered once there is room, and not by a batch."""
    side = arrivals()
    assert side.has_room  # for batches that are answers
    waits = side.take(batch(0, bytes(MOST)), MOST, keep=True)
    assert not side.has_room
    held = [side.take(batch(n, b"h"), 1, keep=True) for n in (1, 2)]
    assert answers(waits, *held) == [True, None, None]
    assert not side.answer(batch(0, b"answer"))
    assert side.next() is not None
    assert answers(*held) == [True, True]


def test_the_batch_of_an_answer_counts_once() -> None:
    """It is noted again where an interrupt came before its call was done with."""
    side = arrivals()
    for _ in range(2):
        side.answered(batch(1, b"later"), 5)
    side.take(batch(0, b"first"), 5, keep=False)
    assert [side.next() for _ in range(2)] == [(b"first", None), (b"later", None)]
    side.answered(batch(1, b"later"), 5)
    assert side.next() is None
    assert side._backlog == 0


def test_an_agent_that_is_dead_is_not_used() -> None:
    """torch would end the process."""
    side = arrivals()
    waiting = side.take(batch(0, b"a"), 1, keep=True)
    side._agent.alive = False
    assert not side.answer(batch(0, b"answer"))
    side.close()
    assert answers(waiting) == [None]


@pytest.fixture
def _in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where nothing is compiled."""
    monkeypatch.setattr(calls, "SIGNALS_WAIT", False)


class Swallowing:
    """A future as torch's: what is raised while it is set is kept from the caller."""

    value: object = None
    handler: Any = None

    def set_result(self, value: object) -> None:
        try:
            self.handler = signal.getsignal(signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            self.value = value
        except KeyboardInterrupt:
            pass


@pytest.mark.usefixtures("_in_python")
def test_an_interrupt_while_a_call_is_answered_comes_afterwards() -> None:
    """Else the user's Ctrl-C would be the peer's."""
    before = signal.getsignal(signal.SIGINT)
    future = Swallowing()
    with pytest.raises(KeyboardInterrupt):
        calls.resolve(future, "answer")
    assert future.value == "answer"
    assert signal.getsignal(signal.SIGINT) is before
    # Where another signal's handler has raised before it was put back.
    with pytest.raises(KeyboardInterrupt):
        future.handler(signal.SIGINT, sys._getframe())


@pytest.mark.usefixtures("_in_python")
def test_whose_interrupts_are_handled_otherwise_gets_them_once() -> None:
    """By a handler of the application's."""
    seen: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        seen.append(number)

    before = signal.signal(signal.SIGINT, handler)
    try:
        future = Swallowing()
        calls.resolve(future, "answer")
        assert signal.getsignal(signal.SIGINT) is handler
        assert (future.value, seen) == ("answer", [signal.SIGINT])
    finally:
        signal.signal(signal.SIGINT, before)


# -- between two links ----------


def acquainted(world: World) -> tuple[Conn, Conn]:
    """Both ends of a connection on which calls may wait."""
    dialled, accepted = world.connect()
    ends = (rpc_conn(dialled), rpc_conn(accepted))
    for end in ends:
        world.send(end, b"a call")
    world.until(lambda: all(end._may_call_wait() for end in ends), "both to be known")
    world.until(lambda: all(of.received for of in world.members), "the first calls")
    return dialled, accepted


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The token of every call of `deliver`, as it is made."""
    tokens: list[bytes] = []
    call = calls.Peer.call

    def counting(peer: Any, function: Any, args: Any, *more: Any, **named: Any) -> Any:
        if function is calls.deliver:
            tokens.append(args[0])
        return call(peer, function, args, *more, **named)

    monkeypatch.setattr(calls.Peer, "call", counting)
    return tokens


@pytest.mark.parametrize("size", [0, 1000, 1_000_000])
def test_a_message_and_its_answer_are_one_call(counted: list[bytes], size: int) -> None:
    """Whatever comes with the message, as long as its answer is small."""
    with World(TorchRpcLink) as world:
        dialled, accepted = acquainted(world)
        ours, theirs = (member.received for member in world.members)
        del counted[:]
        for number in range(5):
            world.send(dialled, b"message %d" % number, bytes(size))
            world.arrive(theirs[accepted], number + 2)
            world.send(accepted, b"answer %d" % number, b"body")
            world.arrive(ours[dialled], number + 2)
        assert [head for head, _ in theirs[accepted][1:]] == [
            b"message %d" % n for n in range(5)
        ]
        assert ours[dialled][1:] == [(b"answer %d" % n, b"body") for n in range(5)]
        assert counted == [rpc_conn(accepted).token] * 5


def test_a_large_answer_is_a_call_of_its_own(counted: list[bytes]) -> None:
    """Nobody would hear when an answer's tensors were read."""
    with World(TorchRpcLink) as world:
        dialled, accepted = acquainted(world)
        received = world.members[0].received[dialled]
        del counted[:]
        world.send(dialled, b"message")
        world.arrive(world.members[1].received[accepted], 2)
        world.send(accepted, b"answer", bytes(1_000_000))
        world.arrive(received, 2)
        assert received[1] == (b"answer", bytes(1_000_000))
        assert counted == [rpc_conn(end).token for end in (accepted, dialled)]


def test_a_call_that_waits_lets_nothing_out_but_its_answer() -> None:
    """Tensors wait until fewer calls are under way, as they do without it."""
    with World(TorchRpcLink) as world:
        dialled, accepted = acquainted(world)
        ours, theirs = (member.received for member in world.members)
        conn, body = rpc_conn(accepted), bytes(200_000)
        under_way = [calls.Future[Any]() for _ in range(CALLS)]
        for future in under_way:
            conn._calls.add(future, 0)
        assert conn.try_send(b"small")
        assert conn.try_send(b"large", memoryview(body))
        assert len(conn._unsent) == 2
        world.send(dialled, b"message")
        world.arrive(ours[dialled], 2)
        assert ours[dialled][1:] == [(b"small", b"")]
        world.send(dialled, b"another")
        world.arrive(theirs[accepted], 3)
        world.members[1].pump()
        assert conn._arrivals.keeps
        assert len(conn._unsent) == 1
        for future in under_way:
            future.set_result(True)
        conn.notice()
        world.arrive(ours[dialled], 3)
        assert ours[dialled][2:] == [(b"large", body)]


def test_a_call_that_waits_takes_no_room() -> None:
    """Or else who only listens could hold up its peer for ever."""
    assert KEPT_BYTES + TorchRpcLink().largest <= TorchRpcLink.max_ahead
    with World(TorchRpcLink) as world:
        dialled, accepted = acquainted(world)
        received = world.members[1].received[accepted]
        largest = TorchRpcLink.chunk_bytes
        size = KEPT_BYTES - 1000
        rounds = 2 * TorchRpcLink.max_ahead // largest
        for number in range(rounds):
            world.send(dialled, b"%d" % (2 * number), bytes(size))
            world.send(dialled, b"%d" % (2 * number + 1), bytes(largest))
        world.arrive(received, 1 + 2 * rounds)
        assert [head for head, _ in received[1:]] == [
            b"%d" % n for n in range(2 * rounds)
        ]


def test_answers_in_any_order_make_room() -> None:
    """Several threads of the peer may take calls in one after another's turn."""
    with World(TorchRpcLink) as world:
        dialled, _ = acquainted(world)
        conn = rpc_conn(dialled)
        futures = [calls.Future[Any]() for _ in range(3)]
        world.until(lambda: not conn.unanswered, "quiet")
        for number, future in enumerate(futures):
            conn._calls.add(future, 10**number)
        conn._ahead = 111
        futures[2].set_result(True)
        futures[1].set_result((0, [b"late"], [None]))
        conn._settle()
        assert (len(conn._calls), conn._ahead) == (1, 1)
        futures[0].set_result(True)
        conn._settle()
        assert (len(conn._calls), conn._ahead) == (0, 0)


def test_closing_waits_for_no_call_that_waits() -> None:
    """It ends with the connection, and the goodbye ends that."""
    with World(TorchRpcLink) as world:
        dialled, accepted = acquainted(world)
        world.send(dialled, b"last")
        world.arrive(world.members[1].received[accepted], 2)
        assert rpc_conn(accepted)._arrivals.keeps
        assert rpc_conn(dialled).unanswered
        dialled.close()
        world.lost(1, accepted)
        world.until(lambda: not rpc_conn(dialled).unanswered, "the answer")


def test_closing_waits_until_an_answer_was_read() -> None:
    """Nobody else tells that it has left; the agent may go with the link."""
    with World(TorchRpcLink) as world:
        dialled, accepted = acquainted(world)
        ours, theirs = world.members
        world.send(dialled, b"message")
        world.arrive(theirs.received[accepted], 2)
        assert rpc_conn(accepted)._arrivals.keeps
        assert accepted.try_send(b"answer", memoryview(bytes(60_000)))
        assert not rpc_conn(accepted)._unsent
        accepted.close()
        assert rpc_conn(accepted).unanswered
        assert ours.received[dialled][1:] == []
        world.lost(0, dialled)
        assert ours.received[dialled][1:] == [(b"answer", bytes(60_000))]
        world.until(lambda: not rpc_conn(accepted).unanswered, "the last answer")


@pytest.mark.parametrize(
    "answer",
    [
        "text",
        torch.zeros(2),
        (2, [b"head"], [None], "more"),
        (2, "no list", []),
        (2, [b""], [None]),
        (2, [b"head"], [torch.zeros(3, dtype=torch.uint8)]),
        ("no number", [b"head"], [None]),
    ],
)
def test_a_malformed_answer_breaks_its_connection(answer: Any) -> None:
    """As a malformed call does."""
    with World(TorchRpcLink) as world:
        dialled, accepted = acquainted(world)
        world.send(dialled, b"message")
        world.arrive(world.members[1].received[accepted], 2)
        assert rpc_conn(accepted)._arrivals.answer(answer)
        world.lost(0, dialled)
        assert world.members[0].link.malformed == 1
        assert len(world.members[0].received[dialled]) == 1


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("more", [False, True])
def test_an_answer_that_is_interrupted_breaks_its_connection(
    monkeypatch: pytest.MonkeyPatch, after: bool, more: bool
) -> None:
    """Whether it was given is not known, so the stream must not go on.

    Neither with the next message, nor with those that the link still has.
    """
    with World(TorchRpcLink) as world:
        dialled, accepted = acquainted(world)
        world.send(dialled, b"message")
        world.arrive(world.members[1].received[accepted], 2)
        answer = Arrivals.answer

        def interrupt(*args: Any) -> None:
            if after:
                answer(*args)
            if more:
                rpc_conn(accepted)._unsent.append((b"more", None, 4))
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Arrivals, "answer", interrupt)
            with pytest.raises(KeyboardInterrupt):
                accepted.try_send(b"answer")
        if more:
            rpc_conn(accepted).notice()  # as when a call of its own is answered
        else:
            assert accepted.try_send(b"next")
        world.lost(1, accepted)
        world.lost(0, dialled)
        # As at any break, what was last may be lost, but nothing comes in its place.
        possible = [(b"answer", b"")] if after else []
        assert world.members[0].received[dialled][1:] in ([], possible)
        world.until(lambda: not rpc_conn(dialled).unanswered, "the answer")
        assert len(world.members[1].conns(What.LOST)) == 1


# -- memory ----------


def test_what_glibc_keeps_of_tensors_is_given_back_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where many came since, and not soon again."""
    side = arrivals()
    heap, given = side._agent.heap, []
    monkeypatch.setattr(heap, "_trim", given.append)
    side.take(batch(0, b"a"), 1000, keep=False)
    heap.trim(0.0)
    side.take(batch(1, b"b"), 1 << 30, keep=False)
    heap.trim(3600.0)
    assert not given
    heap.trim(0.0)
    heap.trim(0.0)
    assert given == [0]


def test_the_upkeep_of_a_queue_gives_back_what_glibc_keeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every half a minute at most."""
    monkeypatch.setattr("mq.join.IDLE_MEMORY_SECONDS", 0.0)
    with mq.connect("torchrpc", group="heap", name="one") as queue:
        heap, given = queue._joined.link.agent.heap, threading.Event()
        monkeypatch.setattr(heap, "_trim", lambda kept: given.set())
        heap.received = 1 << 30
        queue._lead.upkeep_soon()
        assert given.wait(60.0)
