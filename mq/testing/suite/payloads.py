"""Ownership, Sizes, Payloads and Devices."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import numpy as np

import mq
from mq.testing import programs, samples
from mq.testing.cases import case
from mq.testing.harness import Group, expect
from mq.testing.waiting import STEP

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30


@case("Sizes")
def every_size_from_nothing_to_many_chunks_arrives(group: Group) -> None:
    """Around each boundary that an implementation may have."""
    a, b = group.members("a", "b")
    b.subscribe("t")
    edges = (64, 32 * KIB, 64 * KIB, 120 * KIB, 128 * KIB, MIB, 4 * MIB)
    sizes = [0, 1] + [n + d for n in edges for d in (-65, -64, -1, 0, 1, 64)]
    running = a.begin(programs.publish_patterns, "t", [max(n, 0) for n in sizes])
    got = b.run(programs.receive, len(sizes))
    assert [m.digest for m in got] == running.result()


_WORDS = 64 * KIB // 8
"""One word of so many is written: what nobody has touched takes no memory."""


def _publish_beyond_two_gib(queue: mq.MQ, nbytes: int) -> None:
    import torch

    words = torch.empty(nbytes // 8, dtype=torch.int64)
    words[::_WORDS] = torch.arange(0, len(words), _WORDS)
    words[-1] = 7
    queue.publish("t", words.view(torch.uint8), timeout=300)


def _receive_beyond_two_gib(queue: mq.MQ) -> tuple[int, bool, int]:
    words = queue.recv(timeout=300).payload.numpy().view(np.int64)
    expected = np.arange(0, len(words), _WORDS)
    in_place = bool((words[::_WORDS] == expected).all())
    return words.nbytes, in_place, int(words[-1])


@case("Sizes", memory=7 * GIB)
def messages_beyond_two_gib_arrive(group: Group) -> None:
    """No size is kept in 31 bits, and each 64 KiB arrives in its place."""
    a, b = group.members("a", "b", max_message_bytes=4 * GIB)
    b.subscribe("t", window_bytes=4 * GIB)
    nbytes = 2 * GIB + 5000
    running = a.begin(_publish_beyond_two_gib, nbytes)
    got = b.begin(_receive_beyond_two_gib).result(300)
    running.result(300)
    assert got == (nbytes, True, 7)


@case("Sizes")
def too_large_message_is_refused_before_anything_is_sent(group: Group) -> None:
    """One subscriber that takes less is named; the other gets nothing either."""
    a, large = group.members("a", "large")
    small = group.member("small", max_message_bytes=MIB)
    for member in (large, small):
        member.subscribe("t")
    with expect(mq.MessageTooLarge, "small", "'t'"):
        a.publish("t", programs.pattern(0, MIB + 1))
    a.publish("t", programs.pattern(1, MIB - KIB))
    for member in (large, small):
        message = member.recv()
        assert message.payload == programs.pattern(1, MIB - KIB)
        assert message.sequence == 0
    a.call("flush", timeout=STEP)
    assert large.run(programs.nothing_waits)


def _check_samples(queue: mq.MQ) -> list[str]:
    wrong = []
    for name, sample in samples.all_samples().items():
        for time in ("first", "second"):
            got = queue.recv(timeout=STEP).payload
            if list(got) != [name] or not samples.same(got[name], sample):
                wrong.append(f"{name}, {time} time: sent {sample!r}, got {got!r}")
        for time in ("first", "second"):
            got = queue.recv(timeout=STEP).payload
            if not samples.same(got, sample):
                wrong.append(f"{name} alone, {time} time: {sample!r}, got {got!r}")
    return wrong


def _publish_samples(queue: mq.MQ) -> int:
    everything = samples.all_samples()
    for name, sample in everything.items():
        for payload in ({name: sample}, {name: sample}, sample, sample):
            queue.publish("t", payload, timeout=STEP)
    return len(everything)


def _publish_complex(queue: mq.MQ, sizes: list[int]) -> None:
    import torch

    for size in sizes:
        numbers = torch.arange(size).to(torch.complex128)
        queue.publish("t", numbers, timeout=STEP)
        queue.publish("t", {"odd": b"odd", "numbers": numbers}, timeout=STEP)


def _use_complex(queue: mq.MQ, sizes: list[int]) -> list[int]:
    """Of each message, at how many bytes beyond a multiple of 16 its numbers lie."""
    import torch

    skews = []
    for size in sizes:
        for _ in range(2):
            payload = queue.recv(timeout=STEP).payload
            numbers = payload if torch.is_tensor(payload) else payload["numbers"]
            skews.append(numbers.data_ptr() % 16)
            chosen = torch.tensor([0, size // 2, size - 1])
            if not skews[-1]:  # else torch may end this process
                assert numbers[chosen].real.tolist() == chosen.tolist()
    return skews


@case("Payloads")
def received_tensors_are_aligned(group: Group) -> None:
    """As PyTorch takes for granted: it reads complex numbers by 16 bytes at a time."""
    a, b = group.members("a", "b")
    b.subscribe("t")
    sizes = [3, 64, 600, 3 * KIB, 10 * KIB, 100 * KIB, MIB]
    using = b.begin(_use_complex, sizes)
    a.run(_publish_complex, sizes)
    assert using.result() == [0] * (2 * len(sizes))


@case("Payloads")
def every_kind_of_payload_arrives_unchanged(group: Group) -> None:
    """Python values, NumPy arrays and scalars, tensors of every dtype and shape.

    Each in a dict and alone, and twice: what repeats may be treated otherwise.
    """
    a, b = group.members("a", "b")
    b.subscribe("t")
    checking = b.begin(_check_samples)
    assert a.run(_publish_samples) > 60
    wrong = checking.result()
    assert not wrong, "\n".join(wrong)


@dataclasses.dataclass
class Point:
    """A type that the library does not know."""

    x: int
    y: list[int]


def _publish_point(queue: mq.MQ, topic: str) -> None:
    queue.publish(topic, {"points": [0, Point(1, [2])]}, timeout=STEP)


@case("Payloads")
def unknown_type_is_refused_by_publish(group: Group) -> None:
    """With its name, its place and both remedies; nobody gets anything."""
    a, b = group.members("a", "b")
    b.subscribe("t")
    with expect(
        mq.CodecError, "Point", "['points'][1]", "add_safe_types", "allow_pickle"
    ):
        a.run(_publish_point, "t")
    a.publish("t", "next")
    message = b.recv()
    assert (message.payload, message.sequence) == ("next", 0)


@case("Payloads")
def arbitrary_objects_need_allow_pickle_on_both_sides(group: Group) -> None:
    """What a receiver would refuse is refused by `publish`."""
    a, b = group.members("a", "b", allow_pickle=True)
    c = group.member("c")
    b.subscribe("both")
    c.subscribe("one")
    a.run(_publish_point, "both")
    assert b.recv().payload == {"points": [0, Point(1, [2])]}
    with expect(mq.CodecError, "c", "allow_pickle"):
        a.run(_publish_point, "one")
    assert c.run(programs.nothing_waits)


@dataclasses.dataclass
class Known:
    """A type that becomes known."""

    x: Any
    y: Any


def _register(queue: mq.MQ) -> None:
    mq.add_safe_types(Known)


def _known() -> list[Any]:
    import torch

    steps = [Known(torch.full((3,), n), {"n": n}) for n in range(32)]
    return [[Known(1, [2])], steps, steps[1], {"large": Known(torch.ones(100_000), "")}]


def _publish_known(queue: mq.MQ) -> None:
    for payload in _known():
        for _ in range(2):  # the second time it is known what the tensors are like
            queue.publish("t", payload, timeout=STEP)


def _check_known(queue: mq.MQ) -> bool:
    return all(
        samples.same(queue.recv(timeout=STEP).payload, payload)
        for payload in _known()
        for _ in range(2)
    )


@case("Payloads")
def registered_types_arrive_as_themselves(group: Group) -> None:
    """Registered on both sides, also after `connect`."""
    a, b = group.members("a", "b")
    b.subscribe("t")
    for member in (a, b):
        member.run(_register)
    a.subscribe("ready")
    b.publish("ready", 0)  # what b accepts reaches a before b's next message
    a.recv()
    a.run(_publish_known)
    assert b.run(_check_known), "what arrived is not what was sent"


class Fragile:
    """A type whose content cannot be decoded."""


def _cannot(content: Any) -> Fragile:
    raise OverflowError("cannot be decoded")


def _register_fragile(worker: Any = None) -> None:
    mq.add_safe_types(Fragile, encode=lambda fragile: [1], decode=_cannot)


def _publish_fragile(queue: mq.MQ) -> None:
    queue.publish("t", Fragile(), timeout=STEP)
    queue.publish("t", "next", timeout=STEP)


def _receive_fragile(queue: mq.MQ) -> tuple[mq.CodecError, Any]:
    try:
        queue.recv(timeout=STEP)
    except mq.CodecError as error:
        return error, queue.recv(timeout=STEP).payload
    raise AssertionError("a payload that cannot be decoded raised nothing")


@case("Payloads")
def undecodable_message_raises_once_and_the_queue_goes_on(group: Group) -> None:
    """`recv` says topic and sender; the message counts as consumed."""
    a, b = group.unconnected("a"), group.unconnected("b")
    for member in (a, b):
        member.ask(_register_fragile).result()
        group.connecting(member).result()
    b.subscribe("t")
    a.run(_publish_fragile)
    error, following = b.run(_receive_fragile)
    assert (error.sender, error.topic) == ("a", "t"), error
    assert "'t'" in str(error), error
    assert "'a'" in str(error), error
    assert following == "next"
    assert b.run(programs.topic_stats, "t")["refused"] == 1


def _publish_arrays(queue: mq.MQ) -> list[bool]:
    import torch

    array = np.arange(5000, dtype=np.float32)
    tensor = torch.arange(500_000, dtype=torch.int32)
    queue.publish("t", [array, tensor], timeout=STEP)
    queue.publish("t", [array * 0, tensor * 0], timeout=STEP)
    queue.recv(timeout=STEP)  # the subscribers have written to theirs
    return [bool((array == np.arange(5000)).all()), int(tensor[-1]) == 499_999]


def _write_to_own(queue: mq.MQ, value: int) -> list[Any]:
    array, tensor = queue.recv(timeout=STEP).payload
    before = [float(array[-1]), int(tensor[-1])]
    array[:] = value
    tensor.fill_(value)
    second = queue.recv(timeout=STEP).payload
    del second
    gc.collect()
    queue.close()
    return [*before, float(array.min()), float(array.max()), int(tensor.sum())]


@case("Ownership")
def received_payload_is_private_writable_and_stays_valid(group: Group) -> None:
    """Each receiver writes to its own; it outlives later messages and the queue."""
    a, b, c = group.members("a", "b", "c")
    a.subscribe("done")
    for member in (b, c):
        member.subscribe("t")
    publishing = a.begin(_publish_arrays)
    b_writes = b.begin(_write_to_own, 3)
    c_writes = c.begin(_write_to_own, 4)
    assert b_writes.result() == [4999.0, 499_999, 3.0, 3.0, 1_500_000]
    assert c_writes.result() == [4999.0, 499_999, 4.0, 4.0, 2_000_000]
    group.member("d").publish("done", True)
    assert publishing.result() == [True, True]


LARGE_COUNT = 1_000_000
"""Numbers of 8 bytes: a large message, where 1000 are a small one."""


def _publish_on_devices(queue: mq.MQ) -> int:
    import torch

    devices = ["cpu"] + ["cuda:0"] * torch.cuda.is_available()
    for device in devices:
        for count in (1000, LARGE_COUNT):
            queue.publish("t", torch.arange(count, device=device), timeout=STEP)
    return 2 * len(devices)


def _devices(queue: mq.MQ, count: int) -> list[tuple[str, int]]:
    tensors = [queue.recv(timeout=STEP).payload for _ in range(count)]
    return [(str(tensor.device), int(tensor.sum())) for tensor in tensors]


@case("Devices")
def tensors_arrive_on_the_cpu_or_on_the_device_asked_for(group: Group) -> None:
    """Wherever they come from, on a transport that stages through host memory."""
    a, b, c = group.members("a", "b", "c")
    b.subscribe("t")
    c.subscribe("t", device="cpu")
    count = a.run(_publish_on_devices)
    sums = [n * (n - 1) // 2 for n in (1000, LARGE_COUNT)]
    staged = [("cpu", total) for total in sums] * (count // 2)
    expected = list(staged)
    if "cuda" in group.capabilities.devices:
        expected[2:] = [("cuda:0", total) for total in sums][: count - 2]
    assert b.run(_devices, count) == expected
    assert c.run(_devices, count) == staged
