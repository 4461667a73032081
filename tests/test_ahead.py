"""Messages with tensors and the like join batches, and are decoded ahead by `recv`."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fresh_python import output_of
from payload_checks import CODEC, area_of, same
from test_devices import CARRIED, staged_of
from torch.overrides import TorchFunctionMode

import mq
from mq.mesh.incoming import Run
from mq.mesh.outgoing import Outgoing


class Answer:
    """What only the application can decode."""

    seen_by: mq.MQ

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Answer) and self.number == other.number

    @staticmethod
    def make(number: int) -> Answer:
        """Calls the queue; that would never end if this thread had its lock."""
        assert Answer.seen_by.stats()
        if number < 0:
            raise LookupError(f"no answer {number}")
        return Answer(number)


@pytest.fixture
def queues(request: pytest.FixtureRequest) -> Iterator[tuple[mq.MQ, mq.MQ]]:
    mq.add_safe_types(Answer, encode=lambda answer: answer.number, decode=Answer.make)
    group = f"ahead-{request.node.name}"[:60]
    with (
        mq.connect("inproc", group=group, name="writer") as writer,
        mq.connect("inproc", group=group, name="reader") as reader,
    ):
        reader.subscribe("t")
        Answer.seen_by = reader
        yield writer, reader


def payload(kind: int, number: int) -> Any:
    """One of all ways that a message can go."""
    kinds: list[Any] = [
        {"step": number, "note": [number, {"raw": b"x"}]},
        torch.full((3,), number),
        {"a": torch.full((2,), number), "b": torch.ones(1)},
        {"a": torch.full((2,), number), "reward": 0.5},
        np.full(3, number),
        (number, 2.0),
        np.float32(number),
        Answer(number),
        torch.full((9000,), float(number)),
        np.full(30_000, number),
    ]
    return kinds[kind]


@pytest.mark.parametrize("kinds", [range(10), (0, 1, 2, 3, 4, 5, 6, 8), (1, 5)])
def test_a_burst_of_all_kinds_arrives_as_it_was_sent(
    queues: tuple[mq.MQ, mq.MQ], kinds: Sequence[int]
) -> None:
    """In order, each in memory of its own."""
    writer, reader = queues
    chance = random.Random(7)
    sent = [payload(chance.choice([*kinds, 1, 1]), n) for n in range(300)]
    for one in sent:
        writer.publish("t", one)
    got = [reader.recv(timeout=20.0) for _ in sent]
    assert [message.sequence for message in got] == list(range(300))
    assert all(same(m.payload, one) for m, one in zip(got, sent, strict=True))
    tensors = [m.payload for m in got if isinstance(m.payload, torch.Tensor)]
    for tensor in tensors:
        assert tensor.data_ptr() % 64 == 0
        tensor.fill_(-1)  # which changes no other
    assert len({tensor.data_ptr() for tensor in tensors}) == len(tensors) > 50


def test_what_cannot_be_decoded_is_told_in_its_place(
    queues: tuple[mq.MQ, mq.MQ],
) -> None:
    """Neither before nor after, and once; nor is an application's code run ahead."""
    writer, reader = queues
    for n in range(60):
        writer.publish("t", Answer(-1) if n % 20 == 9 else (n, torch.ones(1)))
    for n in range(60):
        if n % 20 == 9:
            with pytest.raises(mq.CodecError, match=f"message {n} .*no answer -1"):
                reader.recv(timeout=20.0)
        else:
            assert reader.recv(timeout=20.0).payload[0] == n
    assert reader.stats()["topics"]["t"]["refused"] == 3


def test_small_tensors_only_join_the_batch(
    queues: tuple[mq.MQ, mq.MQ], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As plain messages do; nearly none takes the long way."""
    writer, reader = queues
    publisher = writer._mesh.publisher
    long_way = publisher.publish
    took_it: list[Outgoing] = []

    def publish(*args: Any) -> Outgoing:
        took_it.append(long_way(*args))
        return took_it[-1]

    monkeypatch.setattr(publisher, "publish", publish)
    for n in range(500):
        writer.publish("t", torch.tensor([n]))
    writer.flush(timeout=20.0)
    got, most = list[int](), 0
    for _ in range(500):
        got.append(int(reader.recv(timeout=20.0).payload))
        most = max(most, len(reader._inbox.ready))
    assert got == [*range(500)]
    assert most > 2  # others were decoded along with it
    assert len(took_it) < 250


def test_it_is_tried_again_after_what_could_not_be(
    queues: tuple[mq.MQ, mq.MQ],
) -> None:
    """Ever more rarely, while that fails."""
    _, reader = queues
    session = SimpleNamespace(peer=SimpleNamespace(name="w", incarnation="life"))
    subscription = SimpleNamespace(topic="t", device=None)
    source: Any = SimpleNamespace(
        ahead=(0, 1), session=session, subscription=subscription
    )
    others, tensors = (
        Run(source, 0, (0.0,) * 20, [memoryview(CODEC.encode(one).pack())] * 20)
        for one in (Answer(1), torch.ones(3))
    )
    CODEC.decode(area_of(CODEC.encode(torch.ones(3))))
    tried = list[int]()
    for n in range(300):
        before = source.ahead[0]
        assert not reader._prepare(others, 0, 20)
        if before == 0:
            tried.append(n)
    assert tried == [0, 1, 3, 7, 15, 31, 63, 127, 191, 255]
    waits = source.ahead[0]
    for _ in range(waits):
        assert not reader._prepare(tensors, 0, 20)
    assert [message.sequence for message in reader._prepare(tensors, 0, 20)] == [
        *range(16)
    ]
    assert len(reader._prepare(tensors, 16, 20)) == 4
    assert not reader._prepare(others, 0, 20)
    assert len(reader._prepare(tensors, 0, 20)) == 16


def test_nothing_but_a_message_is_to_blame_for_what_it_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is raised when the message's turn comes, and so once."""

    def fail(*_: object) -> None:
        raise RuntimeError("out of something")

    monkeypatch.setattr("mq.codec.unpack_repeated", fail)
    assert CODEC.decode_ahead(area_of(CODEC.encode(torch.ones(3)))) == ()


class Mode(TorchFunctionMode):
    """What an application has torch call in place of its functions."""

    called = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.called += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_torch_calls_nothing_of_the_application_ahead(dtype: torch.dtype) -> None:
    """What it calls could call the queue, whose lock is taken."""
    payloads = (torch.ones(3).to(dtype), {"n": 1, "x": torch.ones(3).to(dtype)})
    areas = [area_of(CODEC.encode(payload)) for payload in payloads]
    staged = staged_of(CODEC.encode(payloads[0], "t", CARRIED))
    for area in (*areas, staged):
        CODEC.decode(area)
    with Mode() as mode:
        ahead = [CODEC.decode_ahead(area) for area in areas]
        assert CODEC.decode_ahead(staged) == ()
        assert mode.called == 0
    assert all(ahead) == (dtype is torch.float32)


def test_torch_is_not_loaded_ahead() -> None:
    """That takes seconds; the rest of the queue would wait."""
    area = bytes(area_of(CODEC.encode({"n": 1, "x": torch.ones(3)})))
    program = (
        "import sys; from mq.codec import Codec\n"
        f"area = memoryview(bytearray({area!r}))\n"
        "print(Codec().decode_ahead(area), 'torch' in sys.modules)"
    )
    assert output_of(program) == "() False\n"
