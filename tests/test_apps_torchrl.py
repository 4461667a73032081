"""TorchRL's own inference server and clients, over mq."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import time
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import mq
from bench.apps.app import AppCell
from bench.apps.seeding import initialize
from bench.peer import Metrics, Peer
from bench.runner import run_cell

pytest.importorskip("torchrl", reason="the integration needs torchrl")

from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.modules.inference_server import InferenceServer

from mq.integrations.torchrl import REQUESTS as REQUEST_TOPIC
from mq.integrations.torchrl import (
    SERVING,
    Answer,
    InferenceFailed,
    MqTransport,
    replies,
)
from mq.testing.waiting import wait_until

REQUESTS = 20


def policy() -> TensorDictModule:
    layer = nn.Linear(4, 2)
    initialize(layer, 0)
    return TensorDictModule(layer, in_keys=["observation"], out_keys=["action"])


def request(number: int) -> TensorDict:
    return TensorDict({"observation": torch.full((4,), float(number))})


def serve(peer: Peer) -> Metrics | None:
    """Rank 0 serves the policy; the others ask and compare."""
    name = f"rank{peer.rank}"
    with mq.connect(peer.cell.transport, group=peer.group, name=name) as queue:
        if peer.rank == 0:
            transport = MqTransport(queue, serves=True)
            with InferenceServer(policy(), transport, max_batch_size=4):
                peer.meet()
                peer.meet()
            return None
        peer.meet()
        client = MqTransport(queue).client()
        own = policy()
        numbers = [peer.rank * 100 + place for place in range(REQUESTS)]
        answers = [client.submit(request(number)) for number in numbers]
        for number, answer in zip(numbers, answers, strict=True):
            expected = own(request(number))["action"]
            torch.testing.assert_close(answer.result(timeout=60)["action"], expected)
            torch.testing.assert_close(client(request(number))["action"], expected)
        peer.meet()
    return {"value": float(len(answers))}


@pytest.mark.parametrize("backend", ["inproc", "shm", "zmq", "torchrpc:cpu"])
def test_actors_are_answered_by_the_server(backend: str) -> None:
    """Each gets the answers to its own requests, batched or not."""
    cell = AppCell(backend, "torchrl", 0, limit=90.0)
    threads = backend == "inproc"
    result = run_cell(cell, f"{__name__}:serve", 3, threads=threads)
    assert result.status == "ok", f"{result.reason}\n{result.detail}"
    assert result.metrics["value"] == REQUESTS


def test_an_error_of_the_model_reaches_the_actor() -> None:
    """By name and text; the server goes on."""
    with (
        mq.connect("inproc", group="torchrl-error", name="server") as one,
        mq.connect("inproc", group="torchrl-error", name="actor") as two,
        InferenceServer(policy(), MqTransport(one, serves=True)),
    ):
        client = MqTransport(two).client()
        with pytest.raises(InferenceFailed, match="observation"):
            client(TensorDict({"wrong": torch.zeros(4)}))
        assert client(request(1))["action"].shape == (2,)


def test_an_error_that_cannot_be_sent_does_not_end_the_server() -> None:
    """Its text is changed, so that it can be."""

    def failing(observation: torch.Tensor) -> torch.Tensor:
        if observation.sum():
            raise FileNotFoundError("no file '\udcff'" + "." * 2_000_000)
        return observation

    model = TensorDictModule(failing, in_keys=["observation"], out_keys=["action"])
    limit = {"max_message_bytes": 100_000}
    with (
        mq.connect("inproc", group="torchrl-text", name="server") as one,
        mq.connect("inproc", group="torchrl-text", name="actor", **limit) as two,
        InferenceServer(model, MqTransport(one, serves=True)),
    ):
        client = MqTransport(two).client()
        with pytest.raises(InferenceFailed, match=r"no file '\\udcff'"):
            client.submit(request(1)).result(timeout=60)
        assert client.submit(request(0)).result(timeout=60)["action"].shape == (4,)


def test_a_result_that_one_actor_cannot_take_leaves_others_theirs() -> None:
    """They are of one batch, whose requests all fail when one answer raises."""
    group = "torchrl-large"

    def grown(observation: torch.Tensor) -> torch.Tensor:
        return observation.repeat(1, 100_000)

    model = TensorDictModule(grown, in_keys=["observation"], out_keys=["action"])
    small = {"max_message_bytes": 100_000}
    with (
        mq.connect("inproc", group=group, name="server") as one,
        mq.connect("inproc", group=group, name="small", **small) as two,
        mq.connect("inproc", group=group, name="large") as three,
    ):
        end = MqTransport(one, serves=True)
        answers = [MqTransport(queue).submit(request(1)) for queue in (two, three)]
        with InferenceServer(model, end, min_batch_size=2, timeout=60):
            with pytest.raises(InferenceFailed, match="100000"):
                answers[0].result(timeout=60)
            assert answers[1].result(timeout=60)["action"].shape == (400_000,)


def test_a_server_without_requests_can_be_shut_down() -> None:
    """However long it would wait for the next; its thread needs the queue no more."""
    with mq.connect("inproc", group="torchrl-rest", name="server") as queue:
        end = MqTransport(queue, serves=True)
        server = InferenceServer(policy(), end, timeout=600).start()
        server.shutdown(timeout=30)
        threads = [one.name for one in threading.enumerate()]
        assert "InferenceServer-worker" not in threads


def test_a_server_that_was_shut_down_is_not_there() -> None:
    """Though its queue is, until another one is started on it."""
    with (
        mq.connect("inproc", group="torchrl-ended", name="server") as one,
        mq.connect("inproc", group="torchrl-ended", name="actor") as two,
    ):
        end = MqTransport(one, serves=True)
        client = MqTransport(two, timeout=0.2).client()
        with InferenceServer(policy(), end):
            assert client(request(1))["action"].shape == (2,)
        with pytest.raises(mq.MembersTimeout):
            client(request(1))
        with InferenceServer(policy(), end):
            assert MqTransport(two).client()(request(1))["action"].shape == (2,)


@pytest.mark.parametrize("again", [False, True])
def test_a_request_that_comes_as_the_server_ends_is_not_waited_for(
    again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its actor is told, unless another server is there before, which takes it."""
    with (
        mq.connect("inproc", group="torchrl-late", name="server") as one,
        mq.connect("inproc", group="torchrl-late", name="actor") as two,
    ):
        end, actor = MqTransport(one, serves=True), MqTransport(two)
        late = []

        def unsubscribe(topic: str) -> None:
            late.append(actor.submit(request(1)))
            real(topic)

        real = one.unsubscribe
        monkeypatch.setattr(one, "unsubscribe", unsubscribe)
        end.wait_for_work(0)
        assert [end.drain(1), end.drain(1)] == [([], []), ([], [])]
        monkeypatch.undo()
        if not again:
            with pytest.raises(mq.PeerLost, match="is gone"):
                late[0].result(timeout=30)
            return
        with InferenceServer(policy(), end):
            assert late[0].result(timeout=30)["action"].shape == (2,)


def test_an_actor_whose_server_is_gone_is_told() -> None:
    """It neither hangs nor asks a server that was never there."""
    with mq.connect("inproc", group="torchrl-gone", name="actor") as queue:
        transport = MqTransport(queue, timeout=0.2)
        with pytest.raises(mq.MembersTimeout):
            transport.submit(request(0))
        with mq.connect("inproc", group="torchrl-gone", name="server") as server:
            MqTransport(server, serves=True)
            answer = transport.submit(request(0))
            assert not answer.done()
            with pytest.raises(TimeoutError):
                answer.result(timeout=0.01)
        with pytest.raises(mq.PeerLost):
            answer.result(timeout=60)


def test_an_actor_whose_server_was_replaced_is_told() -> None:
    """Also by one of the same name, which knows nothing of the request."""
    group, name = "torchrl-replaced", "server"
    with mq.connect("inproc", group=group, name="actor") as queue:
        transport = MqTransport(queue)
        with mq.connect("inproc", group=group, name=name) as first:
            MqTransport(first, serves=True)
            answer = transport.submit(request(0))
        with (
            mq.connect("inproc", group=group, name=name) as second,
            InferenceServer(policy(), MqTransport(second, serves=True)),
        ):
            with pytest.raises(mq.PeerLost):
                answer.result(timeout=60)
            assert transport.client()(request(1))["action"].shape == (2,)


def ask_again_and_again(answer: Answer, end: float) -> None:
    while time.monotonic() < end:
        with contextlib.suppress(TimeoutError):
            answer.result(timeout=0.01)


def test_who_asks_again_and_again_is_told_that_the_server_is_gone() -> None:
    """As one is that waits: the answer is done, and raises."""
    with mq.connect("inproc", group="torchrl-polled", name="actor") as queue:
        transport = MqTransport(queue)
        with mq.connect("inproc", group="torchrl-polled", name="server") as server:
            MqTransport(server, serves=True)
            answers = [transport.submit(request(number)) for number in range(2)]
        end = time.monotonic() + 60
        while not answers[0].done():
            assert time.monotonic() < end
        with pytest.raises(mq.PeerLost):
            ask_again_and_again(answers[1], end)


def test_answers_that_nobody_waits_for_are_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of requests that were given up, and of which the answers came later."""
    came = []
    with (
        mq.connect("inproc", group="torchrl-kept", name="server") as one,
        mq.connect("inproc", group="torchrl-kept", name="actor") as two,
        InferenceServer(policy(), MqTransport(one, serves=True)),
    ):
        real = two.recv

        def recv(timeout: float | None = None) -> mq.Message:
            message = real(timeout)
            came.append(weakref.ref(message.payload["result"]))
            return message

        monkeypatch.setattr(two, "recv", recv)
        transport = MqTransport(two)
        for number in range(10):
            transport.submit(request(number))
        assert transport.client()(request(1))["action"].shape == (2,)
        gc.collect()
        assert [one() for one in came] == [None] * 11


def lose_first(queue: mq.MQ, sender: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lose what the queue receives first, as after a long stall."""
    real, errors = queue.recv, [mq.MessagesLost(sender, ["some topic"], 3)]

    def recv(timeout: float | None = None) -> mq.Message:
        message = real(timeout)
        if errors:
            raise errors.pop()
        return message

    monkeypatch.setattr(queue, "recv", recv)


def test_lost_requests_do_not_end_the_server(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are logged with who sent them, who is told; the next one is answered."""
    with (
        mq.connect("inproc", group="torchrl-lost", name="server") as one,
        mq.connect("inproc", group="torchrl-lost", name="actor") as two,
    ):
        lose_first(one, "actor", monkeypatch)
        with InferenceServer(policy(), MqTransport(one, serves=True)):
            client = MqTransport(two).client()
            with pytest.raises(InferenceFailed, match="did not reach the server"):
                client.submit(request(1)).result(timeout=60)
            assert client(request(2))["action"].shape == (2,)
    assert "3 message(s) from 'actor'" in caplog.text


class Fragile:
    """A request that the server cannot read."""

    def to_tensordict(self) -> Fragile:
        return self


def fail(values: list[object]) -> Fragile:
    raise ValueError("no such thing")


def test_a_request_that_cannot_be_decoded_is_waited_for_by_nobody() -> None:
    """Its actor is told; the next request is answered."""
    mq.add_safe_types(Fragile, encode=lambda fragile: [], decode=fail)
    with (
        mq.connect("inproc", group="torchrl-fragile", name="server") as one,
        mq.connect("inproc", group="torchrl-fragile", name="actor") as two,
        InferenceServer(policy(), MqTransport(one, serves=True)),
    ):
        client = MqTransport(two).client()
        with pytest.raises(InferenceFailed, match="did not reach the server"):
            client.submit(Fragile()).result(timeout=60)
        assert client(request(2))["action"].shape == (2,)


@pytest.mark.parametrize("topic", [REQUEST_TOPIC, SERVING])
@pytest.mark.parametrize(
    "junk",
    [
        {"hello": 1},
        None,
        {"number": 1, "input": torch.zeros(4)},
        {"number": "one", "input": request(1)},
    ],
    ids=["other keys", "no dict", "no tensordict", "no number"],
)
def test_what_is_no_request_does_not_end_the_server(
    topic: str, junk: object, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged with who sent it; the next request is answered."""
    with (
        mq.connect("inproc", group="torchrl-junk", name="server") as one,
        mq.connect("inproc", group="torchrl-junk", name="actor") as two,
        mq.connect("inproc", group="torchrl-junk", name="stranger") as three,
        InferenceServer(policy(), MqTransport(one, serves=True)),
    ):
        client = MqTransport(two, timeout=10).client()
        three.publish(topic, junk)
        three.flush(timeout=60)
        found = client.submit(request(1)).result(timeout=20)
        assert found["action"].shape == (2,)
    assert "'stranger'" in caplog.text


def test_lost_answers_are_waited_for_by_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not only who received the notice is told; the next request is answered."""
    with (
        mq.connect("inproc", group="torchrl-gap", name="server") as one,
        mq.connect("inproc", group="torchrl-gap", name="actor") as two,
    ):
        end = MqTransport(one, serves=True)
        client = MqTransport(two).client()
        lose_first(two, "server", monkeypatch)
        answers = [client.submit(request(number)) for number in range(2)]
        inputs, callbacks = end.drain(1)
        end.resolve(callbacks[0], inputs[0])
        for answer in answers:
            with pytest.raises(InferenceFailed, match=r"3 message.* were lost"):
                answer.result(timeout=60)
        with InferenceServer(policy(), end):
            assert client(request(2))["action"].shape == (2,)


def outcome(answer: Answer) -> str:
    try:
        answer.result(timeout=60)
    except InferenceFailed as error:
        return str(error).partition(":")[0]
    return "a result"


def test_an_actor_that_reads_nothing_does_not_end_the_server(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others are answered; it gets what it had room for, and is told of the rest."""
    names = ("server", "idle", "busy")
    queues = [mq.connect("inproc", group="torchrl-idle", name=name) for name in names]
    server, idle, busy = queues
    small = functools.partial(idle.subscribe, depth=4)
    monkeypatch.setattr(idle, "subscribe", small)
    transport = MqTransport(server, serves=True, timeout=0.1)
    with InferenceServer(policy(), transport, max_batch_size=4):
        client = MqTransport(idle).client()
        answers = [client.submit(request(number)) for number in range(6)]
        other = MqTransport(busy).client()
        for number in range(3):
            found = other.submit(request(number)).result(timeout=60)
            expected = policy()(request(number))["action"]
            torch.testing.assert_close(found["action"], expected)
        outcomes = {outcome(answer) for answer in answers}
        assert client(request(1))["action"].shape == (2,)
    for queue in queues:
        queue.close()
    assert outcomes == {"a result", "the answer was dropped"}
    assert caplog.text.count("its answers are dropped") == 1
    assert "'idle'" in caplog.text


def test_a_group_has_one_server_and_it_asks_nothing() -> None:
    """Both mistakes are refused in words."""
    names = ("actor", "first", "second")
    queues = [mq.connect("inproc", group="torchrl-two", name=name) for name in names]
    actor, *servers = queues
    ends = [MqTransport(queue, serves=True) for queue in servers]
    with pytest.raises(RuntimeError, match="'first', 'second'"):
        MqTransport(actor).submit(request(0))
    with pytest.raises(RuntimeError, match="server's end"):
        ends[0].submit(request(0))
    for queue in queues:
        queue.close()


def test_threads_of_an_actor_share_its_end() -> None:
    """Each takes its own answer, whoever received it."""
    found: dict[int, torch.Tensor] = {}
    with (
        mq.connect("inproc", group="torchrl-threads", name="server") as one,
        mq.connect("inproc", group="torchrl-threads", name="actor") as two,
        InferenceServer(policy(), MqTransport(one, serves=True), max_batch_size=4),
    ):
        client = MqTransport(two).client()

        def ask(number: int) -> None:
            found[number] = client(request(number))["action"]

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for number, action in found.items():
        torch.testing.assert_close(action, policy()(request(number))["action"])
    assert len(found) == 8


@contextlib.contextmanager
def asked_by_hand(group: str) -> Iterator[tuple[mq.MQ, mq.MQ, MqTransport]]:
    """The queue of a server that a test answers for, and an actor's with its end."""
    with (
        mq.connect("inproc", group=group, name="server") as server,
        mq.connect("inproc", group=group, name="actor") as queue,
    ):
        server.subscribe(REQUEST_TOPIC)
        server.subscribe(SERVING)
        yield server, queue, MqTransport(queue)


def test_a_thread_of_an_actor_waits_for_its_own_answer_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not for that of another thread, which is there to receive it."""
    with asked_by_hand("torchrl-alone") as (server, queue, transport):
        slow, quick = (transport.submit(request(number)) for number in range(2))
        requests = [server.recv(timeout=30).payload for _ in range(2)]
        receives, goes_on, real = threading.Event(), threading.Event(), queue.recv
        waited = []

        def recv(timeout: float | None = None) -> mq.Message:
            receives.set()
            waited.append(goes_on.wait(timeout=10))
            return real(timeout)

        monkeypatch.setattr(queue, "recv", recv)
        other = threading.Thread(target=slow.result, args=(60.0,))
        other.start()
        assert receives.wait(timeout=30)
        assert not quick.done()
        with pytest.raises(TimeoutError):
            quick.result(timeout=0.01)
        assert not waited  # the other thread is still in its call
        goes_on.set()
        for asked in reversed(requests):
            answer = {"numbers": [asked["number"]], "result": asked["input"]}
            server.publish(replies("actor"), answer)
            if asked is requests[1]:
                assert quick.result(timeout=30)["observation"][0] == 1.0
                assert other.is_alive()
        other.join()
        assert slow.done()


def test_an_answer_counts_from_when_it_is_received(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though the server is gone when another thread looks, before it is passed on."""
    with asked_by_hand("torchrl-received") as (server, queue, transport):
        answer = transport.submit(request(1))
        asked = server.recv(timeout=30).payload
        waits, real = threading.Event(), queue.recv

        def recv(timeout: float | None = None) -> mq.Message:
            waits.set()
            return real(60.0 if timeout else 0)

        monkeypatch.setattr(queue, "recv", recv)
        other = threading.Thread(target=answer.result, args=(60.0,))
        other.start()
        assert waits.wait(timeout=30)
        with transport._changed:  # the other thread has to wait for that
            result = {"numbers": [asked["number"]], "result": asked["input"]}
            server.publish(replies("actor"), result)
            server.close()
            wait_until(lambda: not transport._receives, "what is received")
            transport._look_at = 0.0
            assert answer.done()
        other.join()
        assert answer.result(timeout=30)["observation"][0] == 1.0


def test_what_is_no_answer_keeps_nobody_from_receiving_the_next() -> None:
    """Who has received it is told; the next to wait gets its answer."""
    with asked_by_hand("torchrl-no-answer") as (server, _, transport):
        answer = transport.submit(request(1))
        asked = server.recv(timeout=30).payload
        server.publish(replies("actor"), {"from": "somebody else"})
        with pytest.raises(KeyError, match="numbers"):
            answer.result(timeout=30)
        result = {"numbers": [asked["number"]], "result": asked["input"]}
        server.publish(replies("actor"), result)
        assert answer.result(timeout=30)["observation"][0] == 1.0


def test_an_actor_started_again_gets_no_answer_of_the_one_before() -> None:
    """It has the name of the one that died, whose request was answered later."""
    group, began, go = "torchrl-again", threading.Event(), threading.Event()

    def slow(observation: torch.Tensor) -> torch.Tensor:
        began.set()
        assert go.wait(60)
        return observation

    model = TensorDictModule(slow, in_keys=["observation"], out_keys=["action"])
    with (
        mq.connect("inproc", group=group, name="server") as one,
        InferenceServer(model, MqTransport(one, serves=True), max_batch_size=1),
    ):
        with mq.connect("inproc", group=group, name="actor") as two:
            MqTransport(two).submit(request(1))
            assert began.wait(60)
        with mq.connect("inproc", group=group, name="actor") as three:
            answer = MqTransport(three).submit(request(2))
            go.set()
            found = answer.result(timeout=60)["action"]
    torch.testing.assert_close(found, torch.full((4,), 2.0))
