"""torchrpc:cuda with real GPUs: what tensors on the CPU cannot stand in for."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
import torch
from torchrpc_links import context

import mq
from mq import tensors
from mq.testing.link_world import PATIENCE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
DTYPES = [dtype for dtype in tensors._BY_DTYPE if dtype is not torch.complex32]
"""Those that can be sent; torch warns of whatever is done with the one left out."""


def bits(tensor: torch.Tensor) -> list[int]:
    values: list[int] = tensor.contiguous().view(torch.uint8).tolist()
    return values


def test_queues_of_one_process_exchange_tensors_on_a_gpu() -> None:
    """Of every dtype, on another stream, retained too; nothing stays on the CPU."""
    raw = torch.randint(0, 2, (64,), dtype=torch.uint8, device="cuda:0")
    sent = {str(dtype): raw.view(dtype) for dtype in DTYPES}
    sent["every second"] = raw[::2]
    sent["from the middle"] = raw.float()[5:9].requires_grad_()
    sent["none"] = raw[:0].double()
    torch.cuda.synchronize()
    with (
        mq.connect("cuda", group="one gpu", name="a") as a,
        mq.connect("cuda", group="one gpu", name="b") as b,
    ):
        a.publish("t", {"sent": sent, "one": raw[3]}, retain=True, timeout=PATIENCE)
        b.subscribe("t")
        with torch.cuda.stream(torch.cuda.Stream()):
            payload = b.recv(timeout=PATIENCE).payload
            found = payload["sent"]
            assert {str(t.device) for t in found.values()} == {"cuda:0"}
            assert int(payload["one"]) == int(raw[3])
            for name, tensor in sent.items():
                assert found[name].dtype == tensor.dtype
                assert bits(found[name]) == bits(tensor.detach())
        connection = a.describe()["peers"]["b"]["connection"]
        assert connection["tensors"].startswith("cuda:0 to cuda:0")


def test_what_is_still_to_be_computed_is_published_as_it_will_be() -> None:
    """Only streams wait for it; what is written afterwards does not count."""
    size = 80_000_000  # three pieces
    x = torch.zeros(size, dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
    computing, reading = torch.cuda.Stream(), torch.cuda.Stream()
    with (
        mq.connect("cuda", group="late values", name="a") as a,
        mq.connect("cuda", group="late values", name="b") as b,
    ):
        b.subscribe("t")
        for cycles in (1, 1_000_000_000):  # the first time kernels and memory are got
            with torch.cuda.stream(computing):
                torch.cuda._sleep(cycles)
                x.fill_(7)
                a.publish("t", {"x": x, "n": cycles}, timeout=PATIENCE)
                assert cycles == 1 or not computing.query()
                x.fill_(9)
            with torch.cuda.stream(reading):
                payload = b.recv(timeout=PATIENCE).payload
                assert payload["n"] == cycles
                assert int(payload["x"].sum(dtype=torch.int64)) == 7 * size


# -- between processes ----------

Main = Callable[[mq.MQ, Connection], None]
LARGE = 40_000_000
ENGINE = {"gpu_shared_bytes": 0, "channels": "cma,basic,cuda_basic"}
WAYS = {"memory of a GPU": {}, "host": {"gpu_shared_bytes": 0}, "TensorPipe": ENGINE}
"""By memory that both processes map, by host memory, by channels of TensorPipe's."""
each_way = pytest.mark.parametrize("way", WAYS)


def _run(main: Main, pipe: Connection, options: dict[str, Any]) -> None:
    with mq.connect("cuda", **options) as queue:
        main(queue, pipe)


@contextlib.contextmanager
def another(
    main: Main, name: str, **options: Any
) -> Iterator[tuple[Connection, BaseProcess]]:
    """A member in a process of its own, and a pipe to it; killed at the end."""
    ours, theirs = context.Pipe()
    arguments = (main, theirs, {"name": name, "connect_timeout": PATIENCE, **options})
    process = context.Process(target=_run, args=arguments, daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours, process
    finally:
        process.kill()
        process.join(PATIENCE)
        process.close()
        ours.close()


def heard(pipe: Connection) -> Any:
    assert pipe.poll(PATIENCE)
    return pipe.recv()


def is_done_in_time() -> bool:
    """Whether the GPU gets done with what the current stream was given."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    end = time.monotonic() + PATIENCE
    while not event.query() and time.monotonic() < end:
        time.sleep(0.001)  # the GPU tells nobody
    return bool(event.query())


def _sender(queue: mq.MQ, pipe: Connection) -> None:
    """Sends what it is told to: a value, a size, and for how long it is computed."""
    queue.wait_for_subscribers("t", 1, timeout=PATIENCE)
    while True:
        value, nbytes, cycles = pipe.recv()
        x = torch.zeros(nbytes, dtype=torch.uint8, device="cuda:0")
        torch.cuda.synchronize()
        if cycles:
            torch.cuda._sleep(cycles)
        x.fill_(value)
        queue.publish("t", {"x": x, "value": value}, timeout=PATIENCE)
        x.fill_(255)
        pipe.send("published")


def received(queue: mq.MQ) -> int:
    """The value of the next message, all of which must be of it."""
    payload = queue.recv(timeout=PATIENCE).payload
    assert str(payload["x"].device) == "cuda:0"
    same = (payload["x"] == payload["value"]).all()
    assert is_done_in_time()
    assert bool(same)
    return int(payload["value"])


@each_way
def test_what_another_process_sends_is_what_it_was(way: str) -> None:
    """Of one piece and of many, though it is overwritten at once."""
    options = {"group": "overwritten", **WAYS[way]}
    with mq.connect("cuda", name="b", **options) as b:
        b.subscribe("t")
        with another(_sender, "a", **options) as (pipe, _):
            for value, nbytes in enumerate((1, 1000, 300_000, LARGE, 250_000_000)):
                pipe.send((value, nbytes, 50_000_000))
                assert received(b) == value
            connection = b.describe()["peers"]["a"]["connection"]
            assert connection["by"].startswith(way)


@each_way
def test_many_messages_of_several_threads_keep_their_content(way: str) -> None:
    """From streams of their own to a stream of its own, in order."""
    options = {"group": "many", **WAYS[way]}
    with mq.connect("cuda", name="b", **options) as b:
        b.subscribe("t")
        with another(_threads, "a", **options), torch.cuda.stream(torch.cuda.Stream()):
            last = [-1, -1, -1]
            for _ in range(3 * 60):
                payload = b.recv(timeout=PATIENCE).payload
                thread, number = payload["of"]
                assert bool((payload["x"] == number).all())
                assert number == last[thread] + 1
                last[thread] = number


def _threads(queue: mq.MQ, pipe: Connection) -> None:
    def work(thread: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            x = torch.empty(20_000_000, dtype=torch.uint8, device="cuda:0")
            for number in range(60):
                x.fill_(number)
                part = x[: (100, 400_000, 20_000_000)[number % 3]]
                queue.publish(
                    "t", {"x": part, "of": (thread, number)}, timeout=PATIENCE
                )

    queue.wait_for_subscribers("t", 1, timeout=PATIENCE)
    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    queue.flush(timeout=PATIENCE)
    heard(pipe)


@each_way
def test_a_sender_that_is_killed_as_it_computes_stops_nobody(way: str) -> None:
    """Neither the receiver nor its GPU waits for what will never be there."""
    options = {"group": "killed sender", "peer_timeout": 2.0, **WAYS[way]}
    with mq.connect("cuda", name="b", **options) as b:
        b.subscribe("t")
        for life in range(2):
            with another(_sender, f"a{life}", **options) as (pipe, process):
                pipe.send((1, LARGE, 0))
                assert received(b) == 1
                pipe.send((2, LARGE, 8_000_000_000))  # some 4 s
                assert heard(pipe) == "published"
                assert heard(pipe) == "published"
                process.kill()
                process.join(PATIENCE)
        with another(_sender, "c", **options) as (pipe, _):
            pipe.send((3, LARGE, 0))
            assert received(b) == 3
        torch.cuda.synchronize()


def _closes(queue: mq.MQ, pipe: Connection) -> None:
    """Closes as soon as it has published what is still to be computed."""
    queue.wait_for_subscribers("t", 1, timeout=PATIENCE)
    x = torch.zeros(LARGE, dtype=torch.uint8, device="cuda:0")
    torch.cuda._sleep(4_000_000_000)  # some 2 s
    x.fill_(5)
    queue.publish("t", {"x": x, "value": 5}, timeout=PATIENCE)


@each_way
def test_close_waits_for_what_is_still_to_be_computed(way: str) -> None:
    """What was published before arrives."""
    options = {"group": "closes", **WAYS[way]}
    with mq.connect("cuda", name="b", **options) as b:
        b.subscribe("t")
        with another(_closes, "a", **options):
            assert received(b) == 5


def _receiver(queue: mq.MQ, pipe: Connection) -> None:
    """Receives as often as it is told to, while its GPU is busy if it is told so."""
    queue.subscribe("t")
    pipe.send("subscribed")
    for cycles in iter(pipe.recv, None):
        if cycles:
            for _ in range(64):  # all streams that there are
                with torch.cuda.stream(torch.cuda.Stream()):
                    torch.cuda._sleep(cycles)
        payload = queue.recv(timeout=PATIENCE).payload
        pipe.send(0 if cycles else int(payload["x"].double().mean()))


@each_way
def test_a_receiver_that_is_killed_as_it_copies_stops_nobody(way: str) -> None:
    """What it had of the sender's memory is used again, and waits for nothing of it."""
    options = {"group": "killed receiver", "peer_timeout": 2.0, **WAYS[way]}
    with mq.connect("cuda", name="a", **options) as a:
        for life in range(2):
            with another(_receiver, f"b{life}", **options) as (pipe, process):
                assert heard(pipe) == "subscribed"
                for cycles in (0, 4_000_000_000):
                    pipe.send(cycles)
                    x = torch.full((LARGE,), 3, dtype=torch.uint8, device="cuda:0")
                    a.publish("t", {"x": x}, timeout=PATIENCE)
                    if not cycles:
                        assert heard(pipe) == 3
                process.kill()
                process.join(PATIENCE)
        with another(_receiver, "c", **options) as (pipe, _):
            assert heard(pipe) == "subscribed"
            for value in range(20):
                pipe.send(0)
                x = torch.full((LARGE,), value, dtype=torch.uint8, device="cuda:0")
                a.publish("t", {"x": x}, timeout=PATIENCE)
                assert heard(pipe) == value
        assert is_done_in_time()


def test_memory_of_peers_that_are_gone_is_given_back() -> None:
    """Each has had some of its own mapped here."""
    options: dict[str, Any] = {"group": "gone", "peer_timeout": 2.0}
    with mq.connect("cuda", name="b", **options) as b:
        b.subscribe("t")
        least = 0
        for life in range(4):
            with another(_sender, f"a{life}", **options) as (pipe, process):
                pipe.send((life, 1_000_000, 0))
                assert received(b) == life
                process.kill()
                process.join(PATIENCE)
            end = time.monotonic() + PATIENCE
            while len(b.members()) > 1 or free() < least:
                assert time.monotonic() < end
                time.sleep(0.01)  # nobody tells when the driver has cleared up
            least = least or free() - (20 << 20)


def free() -> int:
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def test_a_receiver_whose_gpu_is_full_goes_on_when_there_is_room() -> None:
    """What found no room comes later, or is told of; the process lives."""
    options: dict[str, Any] = {"group": "full"}
    x = torch.full((2, LARGE), 7, dtype=torch.uint8, device="cuda:0")
    x[1] = 8
    torch.cat([x[0], x[1]])  # torch keeps room for what `publish` copies
    with (
        mq.connect("cuda", name="a", **options) as a,
        another(_full, "b", **options) as (pipe, _),
    ):
        assert heard(pipe) == "full"
        for value in (7, 8):
            a.publish("t", {"x": x[value - 7], "value": value}, timeout=PATIENCE)
            assert heard(pipe) == ("roomy" if value == 7 else 8)


def _full(queue: mq.MQ, pipe: Connection) -> None:
    queue.subscribe("t")
    room = free() - (24 << 20)
    hog = [torch.empty(room, dtype=torch.uint8, device="cuda:0")]
    pipe.send("full")
    with pytest.raises((mq.RecvTimeout, mq.MessagesLost)):
        queue.recv(timeout=3.0)
    hog.clear()
    torch.cuda.empty_cache()
    pipe.send("roomy")
    value = 0
    while value != 8:
        with contextlib.suppress(mq.MessagesLost):
            value = received(queue)
    pipe.send(value)
    heard(pipe)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
def test_a_map_leads_from_each_gpu_to_its_own() -> None:
    """In one message with host memory, whichever GPU is the current one."""
    sent = {
        "x": torch.arange(1000, device="cuda:0"),
        "y": torch.arange(20_000_000, device="cuda:1"),
        "z": torch.arange(5),
    }
    options: dict[str, Any] = {"group": "gpus", "device_map": {"b": {0: 1, 1: 0}}}
    with (
        mq.connect("cuda", name="a", **options) as a,
        mq.connect("cuda", name="b", **options) as b,
        torch.cuda.device(1),
    ):
        b.subscribe("t")
        a.publish("t", sent, timeout=PATIENCE)
        found = b.recv(timeout=PATIENCE).payload
    assert [str(t.device) for t in found.values()] == ["cuda:1", "cuda:0", "cpu"]
    assert all(torch.equal(found[key].cpu(), sent[key].cpu()) for key in sent)
