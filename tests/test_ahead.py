"""Messages with tensors and the like join batches, and are decoded ahead by `recv`."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from fresh_python import output_of
from payload_checks import CODEC, area_of, same
from test_devices import CARRIED, staged_of
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

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
    assert CODEC.decode_ahead([area_of(CODEC.encode(torch.ones(3)))]) == []


class Mode(TorchFunctionMode):
    """What an application has torch call in place of its functions."""

    called = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.called += 1
        return func(*args, **(kwargs or {}))


class Dispatch(TorchDispatchMode):
    """What an application has torch call in place of its kernels."""

    called = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.called += 1
        return func(*args, **(kwargs or {}))


class Seen(TorchFunctionMode):
    """Has torch see numbers as others than those asked for."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") == "view":
            args = (args[0], torch.uint8)
        return func(*args, **(kwargs or {}))


def test_a_mode_of_the_first_receiver_is_not_that_of_later_ones() -> None:
    """What makes such tensors is remembered."""
    payload = torch.ones(41, dtype=torch.bfloat16)
    area = area_of(CODEC.encode(payload))
    with Seen():
        assert torch.ones(2, dtype=torch.int16).view(torch.bfloat16).numel() == 4
        first = CODEC.decode(area)
    for found in (first, CODEC.decode(area), *CODEC.decode_ahead([area])):
        assert same(found, payload)


@pytest.mark.parametrize("kind", [Mode, Dispatch])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_torch_calls_nothing_of_the_application_ahead(
    dtype: torch.dtype, kind: Callable[[], Any]
) -> None:
    """What it calls could call the queue, whose lock is taken."""
    payloads = (torch.ones(3).to(dtype), {"n": 1, "x": torch.ones(3).to(dtype)})
    areas = [area_of(CODEC.encode(payload)) for payload in payloads]
    staged = staged_of(CODEC.encode(payloads[0], "t", CARRIED))
    for area in (*areas, staged):
        CODEC.decode(area)
    with kind() as mode:
        ahead = [CODEC.decode_ahead([area]) for area in areas]
        assert CODEC.decode_ahead([staged]) == []
        assert mode.called == 0
    assert all(ahead)


def in_context(context: Callable[[], Any]) -> Callable[[Callable[[], Any]], Any]:
    """What calls a function in a context."""

    def call(function: Callable[[], Any]) -> Any:
        with context():
            return function()

    return call


def in_transform(transform: Callable[..., Any]) -> Callable[[Callable[[], Any]], Any]:
    """What calls a function in a transform of torch.func."""

    def call(function: Callable[[], Any]) -> Any:
        found: list[Any] = []

        def inside(tensor: torch.Tensor) -> torch.Tensor:
            found.append(function())
            return tensor.sum()

        transform(inside)(torch.ones(3))
        return found[0]

    return call


MODES = {
    "inference": in_context(torch.inference_mode),
    "fake": in_context(FakeTensorMode),
    "dispatch": in_context(Dispatch),
    "grad": in_transform(torch.func.grad),
    "functionalize": in_transform(torch.func.functionalize),
    "vmap": in_transform(torch.func.vmap),
}


def is_usual(tensor: torch.Tensor) -> bool:
    """Whether it is the application's own, to be used in and outside of all modes."""
    weight = torch.ones(tensor.shape, dtype=tensor.dtype, requires_grad=True)
    tensor.add_(0)
    (weight * tensor).sum().backward()  # type: ignore[no-untyped-call]
    return (
        type(tensor) is torch.Tensor
        and not tensor.is_inference()
        and not torch._is_functional_tensor(tensor)
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


@pytest.mark.parametrize("inside", MODES.values(), ids=MODES)
def test_a_mode_of_torch_changes_no_tensor_that_is_received(
    queues: tuple[mq.MQ, mq.MQ], inside: Callable[[Callable[[], Any]], Any]
) -> None:
    """Neither that of the call in the mode, nor of those that were decoded with it."""
    writer, reader = queues
    kinds: list[Callable[[torch.Tensor], Any]] = [
        lambda tensor: tensor,
        lambda tensor: {"x": tensor},
        lambda tensor: [1, {"x": tensor}],
    ]
    for kind in kinds:
        writer.publish("t", kind(torch.ones(3)))
        reader.recv(timeout=20.0)
        for n in range(60):
            writer.publish("t", kind(torch.full((3,), float(n))))
        writer.flush(timeout=20.0)
        for n in range(60):

            def take() -> Any:
                return reader.recv(timeout=20.0).payload

            payload = inside(take) if n % 25 == 0 else take()
            assert same(payload, kind(torch.full((3,), float(n))))
            tensor = payload[1] if isinstance(payload, list) else payload
            assert is_usual(tensor["x"] if isinstance(tensor, dict) else tensor)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("inside", MODES.values(), ids=MODES)
def test_each_way_of_decoding_is_outside_of_modes(
    inside: Callable[[Callable[[], Any]], Any], compiled: bool
) -> None:
    """Also the first time, on a device, and of a dtype that NumPy does not have."""
    tensors = [torch.ones(3), torch.ones(3, dtype=torch.bfloat16), torch.ones(9000)]
    areas = [
        area_of(CODEC.encode(one)) for tensor in tensors for one in (tensor, [tensor])
    ]
    areas.append(staged_of(CODEC.encode(tensors[0], "t", CARRIED)))
    with contextlib.ExitStack() as stack:
        if not compiled:
            for name in ("unpack_mixed", "unpack_repeated"):
                stack.enter_context(mock.patch(f"mq.codec.{name}", return_value=None))
        for area in areas:
            for device in (None, "cpu"):
                for _ in range(3):
                    found = inside(partial(CODEC.decode, area, device=device))
                    tensor = found[0] if isinstance(found, list) else found
                    assert is_usual(tensor)


def test_torch_is_not_loaded_ahead() -> None:
    """That takes seconds; the rest of the queue would wait."""
    area = bytes(area_of(CODEC.encode({"n": 1, "x": torch.ones(3)})))
    program = (
        "import sys; from mq.codec import Codec\n"
        f"area = memoryview(bytearray({area!r}))\n"
        "print(Codec().decode_ahead([area]), 'torch' in sys.modules)"
    )
    assert output_of(program) == "[] False\n"
