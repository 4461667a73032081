"""Small messages by what is compiled, and by what stands in for it."""

from __future__ import annotations

import contextlib
import gc
import struct
import sys
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from payload_checks import same
from torch.overrides import TorchFunctionMode

from mq import repeated, speed
from mq.codec import Codec
from mq.errors import CodecError
from mq.frames import ALIGNMENT, Frames
from mq.mappings import address
from mq.mesh import wire
from mq.mesh.incoming import Arrivals, Run, Source
from mq.mesh.large import INLINE_BYTES
from mq.mesh.session import ANSWER_FRAMES, ANSWER_SECONDS
from mq.stats import PeerStats

CODEC = Codec()
CODEC.encode([torch.zeros(1), np.zeros(1)])  # what knows them is loaded by their first
needs_compiled = pytest.mark.skipif(
    not speed.COMPILED,
    reason="mq._speed is not there: installed without a compiler, or MQ_COMPILED=0",
)
UNPACKS = [
    repeated.unpack,
    pytest.param(speed.unpack_repeated, id="compiled", marks=needs_compiled),
]

shapes = st.lists(st.integers(1, 5), max_size=3).map(tuple)
tensors = st.builds(
    lambda shape, dtype: torch.randn(shape).to(dtype),
    shapes,
    st.sampled_from([torch.float32, torch.float16, torch.int64, torch.complex64]),
)
arrays = st.builds(
    lambda shape, dtype: np.random.default_rng(1).normal(size=shape).astype(dtype),
    shapes,
    st.sampled_from(["f4", ">f8", "i2", "?", "c16"]),
)
dicts = st.dictionaries(st.text(max_size=5), tensors | arrays, min_size=1, max_size=16)
payloads = tensors | arrays | dicts


def encoded(payload: Any) -> Frames:
    """As by a codec that has seen none like it; afterwards its header is known."""
    repeated.headers.clear()
    return CODEC.encode(payload)


def unpacked(unpack: Callable[..., Any], area: bytes) -> Any:
    """From memory of its own."""
    return unpack(memoryview(bytearray(area)), repeated.known, False)


@needs_compiled
@given(payloads)
def test_what_is_packed_at_once_is_what_is_encoded(payload: Any) -> None:
    """Byte by byte, pads included."""
    area = encoded(payload).pack()
    assert speed.pack_repeated(payload, repeated.headers) == area


def _without_memory() -> torch.Tensor:
    tensor = torch.zeros(6)
    tensor.untyped_storage().resize_(0)
    return tensor


@needs_compiled
@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(3, 2).T,
        torch.zeros(12).reshape(2, 6)[:, ::2],
        torch.zeros(2, 3, requires_grad=True),
        torch.nn.Parameter(torch.zeros(2, 3)),
        torch.zeros(2, 3, device="meta"),
        torch.zeros(2, 3).to_sparse(),
        torch.zeros(3, 2),
        torch.zeros(2, 3, dtype=torch.float64),
        _without_memory().reshape(6),
        np.zeros((2, 3), "f4"),
        np.zeros((3, 2), "f8").T,
        [torch.zeros(2, 3)],
        {},
        {"a": 1.0},
        {1: torch.zeros(2, 3)},
        {"b": torch.zeros(2, 3)},
        {"a": torch.zeros(2, 3), "b": torch.zeros(2, 3)},
        {str(n): torch.zeros(2, 3) for n in range(17)},
        None,
        "text",
    ],
    ids=lambda other: "",
)
def test_what_is_not_as_one_before_is_left_to_the_codec(other: Any) -> None:
    """Whatever it is, and nothing is raised."""
    repeated.headers.clear()
    for known in (
        torch.zeros(2, 3),
        torch.zeros(6),
        np.zeros((2, 3)),
        {"a": torch.zeros(2, 3)},
    ):
        CODEC.encode(known)
    if isinstance(other, dict) and list(other) == ["a", "b"]:
        repeated.headers.clear()
    assert speed.pack_repeated(other, repeated.headers) is None


@needs_compiled
def test_conjugates_and_transforms_are_left_to_the_codec() -> None:
    """They look like the tensor that they are not."""
    repeated.headers.clear()
    plain = torch.ones(4, dtype=torch.complex64)
    CODEC.encode(plain)
    CODEC.encode(torch.ones(4))
    assert speed.pack_repeated(plain, repeated.headers) is not None
    assert speed.pack_repeated(plain.conj(), repeated.headers) is None
    assert speed.pack_repeated(plain.conj().imag, repeated.headers) is None
    seen = []

    def look(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(speed.pack_repeated(tensor, repeated.headers))
        return tensor

    torch.func.vmap(look)(torch.ones(3, 4))
    assert seen == [None]


@needs_compiled
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_left_to_the_codec() -> None:
    """They have no shape."""
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    assert speed.pack_repeated(nested, repeated.headers) is None


@needs_compiled
def test_large_ones_are_not_copied() -> None:
    """They are sent from where they lie."""
    most = (INLINE_BYTES - 64) // 4
    for count, packed in ((most, True), (most + 1, False)):
        tensor = torch.ones(count)
        frames = encoded(tensor)
        assert (frames.nbytes <= INLINE_BYTES) is packed
        found = speed.pack_repeated(tensor, repeated.headers)
        assert (found is not None) is packed
        assert bool(CODEC.encode(tensor).buffers) is not packed


@needs_compiled
@pytest.mark.parametrize(
    "entry",
    [
        (b"short", 10_000),
        (b"x" * 64, 64),
        (b"x" * 64, 64 + 25),
        (b"x" * 64, 64 + 23),
        (b"x" * 64, 0),
    ],
)
def test_a_header_that_does_not_fit_its_tensor_is_not_used(
    entry: tuple[bytes, int],
) -> None:
    """Nothing is written beyond the message."""
    tensor = torch.ones(6)
    key = (tensor.dtype, tensor.shape)
    assert speed.pack_repeated(tensor, {key: (b"x" * 64, 64 + 24)}) is not None
    assert speed.pack_repeated(tensor, {key: entry}) is None


@pytest.mark.parametrize("unpack", UNPACKS)
@given(payload=payloads)
def test_what_is_known_is_unpacked_as_it_was(
    unpack: Callable[..., Any], payload: Any
) -> None:
    """The first of its kind is not."""
    repeated.known.clear()
    area = encoded(payload).pack()
    assert unpacked(unpack, area) is None
    CODEC.decode(memoryview(bytearray(area)))
    found = unpacked(unpack, area)
    assert found is None if not repeated.known else same(found, payload)


@pytest.mark.parametrize("unpack", UNPACKS)
def test_what_is_not_as_one_before_is_not_unpacked(unpack: Callable[..., Any]) -> None:
    """Nor is what can be no message."""
    area = encoded({"a": torch.ones(3), "b": np.ones(2)}).pack()
    CODEC.decode(memoryview(bytearray(area)))
    assert unpacked(unpack, area) is not None
    for other in (
        b"",
        area[:11],
        area[:-1],
        area + b"\0",
        b"MQ\1\0" + area[4:],
        area[:4] + struct.pack("<I", 2**32 - 1) + area[8:],
        area[:8] + struct.pack("<I", 2**32 - 1) + area[12:],
        area[:8] + struct.pack("<I", 0) + area[12:],
        area.replace(b"a", b"c", 1),
    ):
        assert unpacked(unpack, other) is None


@pytest.mark.parametrize("unpack", UNPACKS)
def test_of_what_is_read_only_a_copy_is_unpacked(unpack: Callable[..., Any]) -> None:
    """At any address; each time another, aligned and writable."""
    area = encoded({"a": torch.ones(3), "b": np.ones(2)}).pack()
    CODEC.decode(memoryview(bytearray(area)))
    for shift in range(3):
        moved = memoryview(bytes(shift) + area)[shift:]
        one, other = (unpack(moved, repeated.known, False) for _ in range(2))
        assert one["a"].data_ptr() % ALIGNMENT == 0
        one["a"] += 1
        one["b"] += 1
        assert bytes(moved) == area
        assert same(other, {"a": torch.ones(3), "b": np.ones(2)})


@needs_compiled
def test_only_bytes_in_a_row_are_unpacked() -> None:
    """Nothing beside them is read."""
    area = encoded(torch.ones(4)).pack()
    CODEC.decode(memoryview(bytearray(area)))
    spread = bytearray(2 * len(area))
    spread[::2] = area
    back = memoryview(bytearray(area[::-1]))[::-1]
    wide = memoryview(bytearray(area)).cast("I")
    for view in (memoryview(spread)[::2], back, wide):
        assert bytes(view) == area
        assert speed.unpack_repeated(view, repeated.known, False) is None


@pytest.mark.parametrize("unpack", UNPACKS)
def test_arrays_are_made_read_only_on_demand(unpack: Callable[..., Any]) -> None:
    """As for who reads in place."""
    area = encoded(np.ones(4)).pack()
    CODEC.decode(memoryview(bytearray(area)))
    view = memoryview(bytearray(area))
    for read_only in (False, True):
        found = unpack(view, repeated.known, read_only)
        assert found.flags.writeable is not read_only


# -- tensors among other values ----------

keys = st.text(max_size=5) | st.integers(-(2**63), 2**64 - 1) | st.booleans()
plain = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=300)
    | st.binary(max_size=300)
)
mixed = st.recursive(
    plain | tensors | arrays,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=20,
)


def in_python(payload: Any) -> bytes:
    """As it is encoded where nothing is compiled."""
    return CODEC._encode_plainly(payload).pack()


def has_any(payload: Any) -> int:
    """How many tensors and arrays there are in it."""
    if isinstance(payload, dict):
        return sum(map(has_any, payload.values()))
    if isinstance(payload, list):
        return sum(map(has_any, payload))
    return isinstance(payload, torch.Tensor | np.ndarray)


@needs_compiled
@given(mixed)
def test_tensors_among_plain_data_are_packed_as_the_codec_does(payload: Any) -> None:
    """Byte by byte; only what has none of them is left to it, or has too many."""
    area = in_python(payload)
    found = speed.pack_mixed(payload, repeated.described)
    assert found == (area if 0 < has_any(payload) <= 16 else None)


@needs_compiled
@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(3, 2).T,
        torch.zeros(2, 3, requires_grad=True),
        torch.zeros(2, 3, device="meta"),
        torch.zeros(0, 3),
        torch.zeros(4, 3),
        np.zeros((3, 2)).T,
        np.zeros((2, 3), "S4"),
        np.float32(1),
        torch.zeros(200, 200),
        bytearray(3),
        (1, 2),
        2**64,
        "\ud800",
        {torch.zeros(1): 1},
        [[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]],
        [torch.zeros(2, 3)] * 16,
        "x" * 70_000,
    ],
    ids=lambda value: "",
)
def test_other_values_are_left_to_the_codec(value: Any) -> None:
    """Also where they come after a tensor that could be packed."""
    repeated.described.clear()
    first = torch.zeros(2, 3)
    in_python([first, torch.zeros(200, 200), np.zeros((2, 3))])
    assert speed.pack_mixed([first, 1], repeated.described) is not None
    for payload in ([first, value], {"a": first, "b": value}, [value, first]):
        assert speed.pack_mixed(payload, repeated.described) is None


@needs_compiled
def test_what_is_packed_so_is_bounded() -> None:
    """A large message is sent from where it lies, or as chunks."""
    one = torch.zeros(INLINE_BYTES // 8)
    in_python([one])
    assert speed.pack_mixed([one], repeated.described) is not None
    assert speed.pack_mixed([one, one], repeated.described) is None
    assert CODEC.encode([one, one]).buffers


class Meddler(TorchFunctionMode):
    """Changes a payload when it is first asked about the tensors of it."""

    def __init__(self, change: Callable[[], object]) -> None:
        super().__init__()
        self._changes = [change]

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if self._changes:
            self._changes.pop()()
        return func(*args, **(kwargs or {}))


def _change(payload: Any, grows: bool) -> None:
    if isinstance(payload, list):
        payload.append(1) if grows else payload.pop()
    elif grows:
        payload["new"] = 1
    else:
        payload.popitem()


@needs_compiled
@pytest.mark.parametrize("grows", [True, False])
@pytest.mark.parametrize("kind", [list, dict])
def test_what_changes_while_it_is_packed_is_left_to_the_codec(
    kind: type, grows: bool
) -> None:
    """A count that does not fit its elements would be nobody's message."""
    tensors = [torch.zeros(2, 3) for _ in range(4)]
    payload = tensors if kind is list else dict(enumerate(tensors))
    in_python([payload])
    assert speed.pack_mixed([payload], repeated.described) is not None
    with Meddler(lambda: _change(payload, grows)):
        assert speed.pack_mixed([payload], repeated.described) is None


def decoded_in_python(area: bytes) -> Any:
    """As it is decoded where nothing is compiled; None: it is malformed."""
    with (
        mock.patch("mq.codec.unpack_mixed", return_value=None),
        mock.patch("mq.codec.unpack_repeated", return_value=None),
        contextlib.suppress(CodecError),
    ):
        return CODEC.decode(memoryview(area), own=True)
    return None


@needs_compiled
@given(mixed)
def test_tensors_among_plain_data_are_unpacked_as_the_codec_does(payload: Any) -> None:
    """Once their descriptions are known; those of bools are not."""
    area = in_python(payload)
    expected = decoded_in_python(area)
    view = memoryview(bytearray(area))
    found = speed.unpack_mixed(view, False)
    assert same(expected, payload)
    if found is not None:
        assert same(found, payload)
    elif len(area) <= repeated.LONGEST_HEADER:
        assert not has_any(payload) or has_bools(payload)


def has_bools(payload: Any) -> bool:
    """Whether there is an array of bools in it, whose bytes are looked at."""
    if isinstance(payload, dict):
        return any(map(has_bools, payload.values()))
    if isinstance(payload, list):
        return any(map(has_bools, payload))
    return isinstance(payload, np.ndarray) and payload.dtype.kind == "b"


@needs_compiled
@given(
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=3),
    st.integers(0, 3),
    st.integers(0, 3),
)
def test_what_is_damaged_is_unpacked_as_the_codec_does_or_not_at_all(
    damage: list[tuple[int, int]], cut: int, more: int
) -> None:
    """Whatever a peer sends."""
    payload = {"a": torch.ones(3), "n": [1, {"b": np.ones(2)}, "é"], "c": torch.ones(3)}
    area = bytearray(in_python(payload))
    decoded_in_python(bytes(area))
    for place, value in damage:
        area[place % len(area)] = value
    damaged = bytes(area[: len(area) - cut]) + bytes(more)
    found = speed.unpack_mixed(memoryview(damaged), False)
    expected = decoded_in_python(damaged)
    assert found is None or same(found, expected)


@needs_compiled
def test_nobody_sees_a_list_that_is_being_unpacked() -> None:
    """It has places without elements until its last is made."""
    payload = [torch.zeros(2, 3), *range(100)]
    area = in_python(payload)
    decoded_in_python(area)
    calls = 0
    seen: list[str] = []

    def look(frame: object, event: str, called: object) -> None:
        nonlocal calls
        calls += 1
        seen.extend(
            repr(found)
            for found in gc.get_objects()
            if type(found) is list and len(found) == len(payload)
        )

    sys.setprofile(look)
    try:
        found = speed.unpack_mixed(memoryview(bytearray(area)), False)
    finally:
        sys.setprofile(None)
    assert calls > 2  # of it, of what makes the tensor, and of what ends the profile
    assert same(found, payload)
    assert repr(payload) in seen
    assert not any("<NULL>" in shown for shown in seen)
    assert gc.is_tracked(found)


@needs_compiled
def test_what_is_unpacked_so_is_a_view_or_a_copy() -> None:
    """Of memory that is the message's own, or that nobody may write to."""
    area = in_python([torch.ones(3), 1, np.ones(2)])
    decoded_in_python(area)
    view = memoryview(bytearray(area))
    tensor, _, array = speed.unpack_mixed(view, False)
    tensor += 1
    assert bytes(view) != area
    assert array.flags.writeable
    assert not speed.unpack_mixed(view, True)[2].flags.writeable
    tensor, _, _ = speed.unpack_mixed(memoryview(area), False)
    tensor += 1
    assert tensor.data_ptr() % ALIGNMENT == 0
    assert area == in_python([torch.ones(3), 1, np.ones(2)])


# -- arrival ----------

AREA = b"MQ\1\0\xc0"
ID = 3


class Session:
    """What `arrive_alone` sees to of a session whose peer has sent nothing yet."""

    def __init__(self) -> None:
        self.received = self.unanswered = self.number = 0
        self.answer_at: float | None = None
        self.frames: deque[Any] = deque()
        self.stats = PeerStats()


class Inbox:
    """What `arrive_alone` puts a message into, and where it looks before."""

    def __init__(self, **changed: Any) -> None:
        self.session: Any = Session()
        self.fifo: deque[Any] = deque()
        self.subscription: Any = SimpleNamespace(keep=None, id=ID, sources={})
        self.source = Source(self.subscription, self.session)
        self.subscription.sources[self.session] = self.source
        self.source.active = True
        self.source.granted_messages, self.source.granted_bytes = 8, 1000
        self.source.arrivals.append(Arrivals(6, 5, 100))
        for name, value in changed.items():
            setattr(self.source, name, value)

    def arrive(self, head: Any, limit: int = 1000) -> bool:
        """Whether it did."""
        by_id = {ID: self.subscription}
        return bool(speed.arrive_alone(by_id, limit, self, self.session, head, 1000.0))


def data(
    first: int = 7,
    *areas: bytes,
    subscription: int = ID,
    more: bytes = b"",
    header: tuple[int, int, int, int, int] = (wire.DATA, 0, 0, 1, 0),
) -> bytes:
    """A DATA frame of one run."""
    areas = areas or (AREA,)
    run = wire.pack_run(subscription, first, [1.5] * len(areas), areas)
    return wire.HEADER.pack(*header) + b"".join(run) + more


@needs_compiled
def test_the_next_message_arrives_as_if_not_alone() -> None:
    """The run that `Source.arrived` would have put there, and the same counts."""
    inbox, other = Inbox(), Inbox()
    assert inbox.arrive(data())
    (run,) = inbox.fifo
    view = memoryview(AREA)
    other.source.arrived(other.fifo, Run(inbox.source, 7, (1.5,), [view]))
    assert type(run) is Run
    for name in Run.__slots__:
        assert getattr(run, name) == getattr(other.fifo[0], name)
    assert run.areas[0].readonly
    assert inbox.source.arrivals == other.source.arrivals
    assert type(inbox.source.arrivals[0]) is Arrivals
    session = inbox.session
    assert (session.received, session.unanswered) == (1, 1)
    assert session.answer_at == 1000.0 + ANSWER_SECONDS
    assert session.stats.received_bytes == len(data())
    assert inbox.arrive(data(8, header=(wire.DATA, 0, 0, 2, 0)))
    assert [run.first for run in inbox.fifo] == [7, 8]
    assert (session.received, session.stats.received_frames) == (2, 2)


@needs_compiled
@pytest.mark.parametrize(
    ("head", "changed"),
    [
        (memoryview(data()), {}),
        (data(7, AREA, AREA), {}),
        (data(more=data()[wire.HEADER_BYTES :]), {}),
        (data()[:-1], {}),
        (data()[:40], {}),
        (data()[: wire.HEADER_BYTES], {}),
        (data(6), {}),
        (data(8), {}),
        (data(2**63 - 1), {"arrivals": deque([Arrivals(2**63 - 2, 5, 100)])}),
        (data(2**64 - 1), {}),
        (data(subscription=4), {}),
        (data(7, bytes(1001)), {}),
        (data(), {"active": False}),
        (data(), {"granted_messages": 5}),
        (data(), {"granted_bytes": 100}),
        (data(), {"arrivals": deque()}),
        (data(header=(wire.LENT, 0, 0, 1, 0)), {}),
        (data(header=(wire.DATA, wire.FLAG_ANSWER, 0, 1, 0)), {}),
        (data(header=(wire.DATA, 0, 0, 0, 0)), {}),
        (data(header=(wire.DATA, 0, 0, 2, 0)), {}),
        (data(header=(wire.DATA, 0, 0, 2**64 - 1, 0)), {}),
        (data(header=(wire.DATA, 0, 0, 1, 1)), {}),
        (data(header=(wire.DATA, 0, 0, 1, 2**64 - 1)), {}),
    ],
    ids=[
        "no bytes",
        "two",
        "two runs",
        "cut off",
        "no head of a run",
        "no run",
        "again",
        "gap",
        "last",
        "beyond the last",
        "unknown",
        "too large",
        "not active",
        "no messages left",
        "no bytes left",
        "not answered",
        "other kind",
        "asks for an answer",
        "no number",
        "frame left out",
        "frame beyond the last",
        "received what was not sent",
        "received beyond the last",
    ],
)
def test_what_is_not_that_simple_is_left_to_the_mesh(
    head: Any, changed: dict[str, Any]
) -> None:
    """Nothing has changed then, and nothing is raised."""
    inbox = Inbox(**changed)
    before = list(inbox.source.arrivals)
    assert not inbox.arrive(head)
    assert not inbox.fifo
    assert list(inbox.source.arrivals) == before
    assert vars(inbox.session) == vars(Session())


@needs_compiled
def test_who_keeps_the_last_or_is_not_known_is_left_to_the_mesh() -> None:
    """There the newest takes the place of another, or it is an error."""
    inbox = Inbox()
    inbox.subscription.keep = 1
    assert not inbox.arrive(data())
    inbox = Inbox()
    inbox.subscription.sources.clear()
    assert not inbox.arrive(data())
    inbox = Inbox()
    inbox.session.unanswered = ANSWER_FRAMES - 1  # now it is to be answered at once
    assert not inbox.arrive(data())


@pytest.mark.parametrize(
    "take",
    [
        repeated.take_aligned,
        pytest.param(speed.take_aligned, id="compiled", marks=needs_compiled),
    ],
)
def test_small_memory_is_aligned_whatever_its_size(
    take: Callable[[int], memoryview],
) -> None:
    """Writable bytes of exactly that size, at a multiple of 64, of its own."""
    taken = [take(nbytes) for nbytes in (0, 1, 63, 64, 65, 500, 513, 4096, 100_001)]
    for view in taken:
        assert (view.format, view.ndim, view.readonly) == ("B", 1, False)
        assert not view.nbytes or address(view) % ALIGNMENT == 0
        view[:] = bytes([len(view) % 251]) * len(view)
    for view in taken:
        assert set(view) <= {len(view) % 251}
    for wrong in (2**62, "1"):
        with pytest.raises((MemoryError, TypeError)):
            take(wrong)  # type: ignore[arg-type]
