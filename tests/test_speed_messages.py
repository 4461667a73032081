"""Small messages by what is compiled, and by what stands in for it."""

from __future__ import annotations

import contextlib
import gc
import struct
import sys
from collections import OrderedDict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from payload_checks import same
from torch._subclasses.fake_tensor import FakeTensorMode
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
from mq.tensors import _buffer, _known

CODEC = Codec()
CODEC.encode([torch.zeros(1), np.zeros(1)])  # what knows them is loaded by their first
needs_compiled = pytest.mark.skipif(
    not speed.COMPILED,
    reason="mq._speed is not there: installed without a compiler, or MQ_COMPILED=0",
)
HEADER = bytes(12) + (24).to_bytes(8, "little") + bytes(44)
"""Of one tensor of 24 bytes."""
UNPACKS = [
    repeated.unpack,
    pytest.param(speed.unpack_repeated, id="compiled", marks=needs_compiled),
]

shapes = st.lists(st.integers(1, 5), max_size=3).map(tuple)
tensors = st.builds(
    lambda shape, dtype: torch.randn(shape).to(dtype),
    shapes,
    st.sampled_from(
        [
            *(torch.float32, torch.float16, torch.bfloat16),
            *(torch.int64, torch.complex64, torch.bool),
        ]
    ),
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
        assert type(found) is (bytes if packed else tuple)
        again = CODEC.encode(tensor)
        assert again.pack() == frames.pack()
        assert bool(again.buffers) is not packed
    tensor[0] = 5
    assert bytes(again.buffers[0][:4]) == tensor[:1].numpy().tobytes()


@needs_compiled
@pytest.mark.parametrize("python", [False, True])
@pytest.mark.parametrize(
    "one",
    [
        torch.ones(70_000, dtype=torch.bfloat16),
        torch.ones(200, 200, dtype=torch.complex64),
        torch.ones(200, 200, dtype=torch.int32).view(torch.complex32),
        torch.ones(130_000, dtype=torch.bool),
        np.ones((300, 300), ">f2"),
        np.ones((100, 200), "c16"),
        np.ones(20_000, "M8[s]"),
    ],
    ids=lambda one: str(one.dtype),
)
def test_a_large_message_is_packed_as_the_codec_does(
    one: Any, python: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its elements are, alone, in a dict and among other values."""
    if python:
        monkeypatch.setattr("mq.codec.pack_repeated", speed._nothing)
        monkeypatch.setattr("mq.codec.pack_mixed", speed._nothing)
    for payload in (one, {"a": one, "b": one}, {"a": [one, one], "n": 1}):
        expected = in_python(payload)
        assert len(expected) > INLINE_BYTES
        for _ in range(3):
            found = CODEC.encode(payload)
            assert found.buffers
            assert found.nbytes == len(expected)
            assert found.pack() == expected
            area = memoryview(bytearray(expected))
            assert same(CODEC.decode(area, own=True), payload)


def _time_out(*_: object) -> Any:
    raise TimeoutError("the application's alarm")


@needs_compiled
def test_what_a_signal_handler_raises_meanwhile_is_not_lost() -> None:
    """It may be called in whatever here is Python's."""
    tensor = torch.ones(INLINE_BYTES)
    for payload in (tensor, {"a": tensor}, [tensor]):
        encoded(payload)
        assert CODEC.encode(payload).buffers
        speed.know_tensors(torch.Tensor, torch.strided, _known.read, _time_out)
        try:
            with pytest.raises(TimeoutError, match="alarm"):
                CODEC.encode(payload)
        finally:
            speed.know_tensors(torch.Tensor, torch.strided, _known.read, _buffer)
    area = in_python([torch.ones(3), 1])
    decoded_in_python(area)
    makers = {body: (nbytes, _time_out) for body, (nbytes, _) in _known.read.items()}
    speed.know_tensors(torch.Tensor, torch.strided, makers, _buffer)
    try:
        with pytest.raises(TimeoutError, match="alarm"):
            speed.unpack_mixed(memoryview(bytearray(area)), False)
    finally:
        speed.know_tensors(torch.Tensor, torch.strided, _known.read, _buffer)


@needs_compiled
def test_what_changes_its_size_meanwhile_is_left_to_the_codec(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its table and its buffers would not fit together."""
    tensor = torch.ones(INLINE_BYTES)
    encoded(tensor)
    assert speed.pack_repeated(tensor, repeated.headers) is not None
    assert speed.pack_mixed([tensor], repeated.described) is not None
    speed.know_tensors(
        torch.Tensor, torch.strided, _known.read, lambda _: memoryview(bytes(8))
    )
    try:
        assert speed.pack_repeated(tensor, repeated.headers) is None
        assert speed.pack_mixed([tensor], repeated.described) is None
    finally:
        speed.know_tensors(torch.Tensor, torch.strided, _known.read, _buffer)


@needs_compiled
@pytest.mark.parametrize(
    "entry",
    [
        (b"short", 10_000),
        (HEADER, 64),
        (HEADER, 64 + 25),
        (HEADER, 64 + 23),
        (HEADER, 0),
        (bytes(64), 64 + 24),
        (bytes(19), 64 + 24),
    ],
)
def test_a_header_that_does_not_fit_its_tensor_is_not_used(
    entry: tuple[bytes, int],
) -> None:
    """Nothing is written beyond the message."""
    tensor = torch.ones(6)
    key = (tensor.dtype, tensor.shape)
    assert speed.pack_repeated(tensor, {key: (HEADER, 64 + 24)}) is not None
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


def _ordered(items: dict[Any, Any], metadata: Any) -> Any:
    ordered = OrderedDict(items)
    if items:  # its order is no longer that of the dict that it is, too
        ordered.move_to_end(next(iter(items)))
    if metadata is not None:
        ordered._metadata = metadata  # type: ignore[attr-defined]
    return ordered


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(inner, max_size=4)
    dicts = st.dictionaries(keys, inner, max_size=4)
    ordered = st.builds(_ordered, dicts, st.none() | inner)
    return lists | lists.map(tuple) | dicts | ordered


scalars = st.sampled_from(
    [
        *(np.bool_(True), np.bool_(False), np.uint8(7), np.int64(-3), np.float16(2)),
        *(np.float32(1.5), np.float64("nan"), np.complex64(1 + 2j), np.longdouble(3)),
    ]
)
mixed = st.recursive(plain | scalars | tensors | arrays, _containers, max_leaves=30)


def in_python(payload: Any) -> bytes:
    """As it is encoded where nothing is compiled."""
    return CODEC._encode_plainly(payload).pack()


def has_any(payload: Any) -> bool:
    """Whether there is anything in it that is no plain data."""
    if type(payload) is dict:
        return any(map(has_any, payload.values()))
    if type(payload) is list:
        return any(map(has_any, payload))
    return isinstance(
        payload, torch.Tensor | np.ndarray | np.generic | tuple | OrderedDict
    )


@needs_compiled
@given(mixed)
def test_tensors_among_plain_data_are_packed_as_the_codec_does(payload: Any) -> None:
    """Byte by byte; only what has none of them is left to it."""
    area = in_python(payload)
    found = speed.pack_mixed(payload, repeated.described)
    assert found == (area if has_any(payload) else None)


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
        np.str_("a"),
        np.datetime64(1, "s"),
        np.void(b"abc"),
        bytearray(3),
        {1, 2},
        (1, {2}),
        2**64,
        "\ud800",
        {torch.zeros(1): 1},
        [[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]],
        ((((((((((((((((((1,),),),),),),),),),),),),),),),),),),
        "x" * 70_000,
        OrderedDict({(1, 2): 1}),
        OrderedDict({1: {1, 2}}),
        _ordered({1: 2}, {1, 2}),
    ],
    ids=lambda value: "",
)
def test_other_values_are_left_to_the_codec(value: Any) -> None:
    """Also where they come after a tensor that could be packed."""
    repeated.described.clear()
    first = torch.zeros(2, 3)
    in_python([first, np.zeros((2, 3))])
    assert speed.pack_mixed([first, 1], repeated.described) is not None
    for payload in ([first, value], {"a": first, "b": value}, [value, first]):
        assert speed.pack_mixed(payload, repeated.described) is None


@needs_compiled
def test_what_is_packed_so_is_bounded() -> None:
    """A large message is sent from where it lies, or as chunks."""
    one = torch.zeros(INLINE_BYTES // 8)
    in_python([one])
    assert type(speed.pack_mixed([one], repeated.described)) is bytes
    assert type(speed.pack_mixed([one, one], repeated.described)) is tuple
    assert CODEC.encode([one, one]).buffers


@needs_compiled
@pytest.mark.parametrize("count", [15, 16, 17, 33, 1000])
@pytest.mark.parametrize("shape", [(3,), (100, 10)], ids=["small", "large"])
@pytest.mark.parametrize("metadata", [None, {"": {"version": 1}}], ids=["", "metadata"])
def test_the_weights_of_a_model_go_the_short_way(
    count: int, shape: tuple[int, ...], metadata: Any
) -> None:
    """However many they are, alone, in an OrderedDict and beside their version."""
    weights = {f"layers.{n}.weight": torch.full(shape, n) for n in range(count)}
    ordered = _ordered(weights, metadata)
    for payload in ({"w": weights, "version": 3}, ordered, {"a": [ordered], "b": 1}):
        expected = in_python(payload)
        packed = speed.pack_mixed(payload, repeated.described)
        assert type(packed) is (bytes if len(expected) <= INLINE_BYTES else tuple)
        assert CODEC.encode(payload).pack() == expected
        area = memoryview(bytearray(expected))
        CODEC.decode(area)
        found = speed.unpack_mixed(area, False)
        assert same(found, payload)
        assert same(CODEC.decode(area), payload)


@needs_compiled
@pytest.mark.parametrize("kind", [tuple, list, lambda items: OrderedDict(a=items[0])])
def test_what_is_packed_in_c_is_unpacked_there(kind: Callable[[Any], Any]) -> None:
    """However deep it is."""
    payload: Any = (1,)
    for levels in range(1, 20):
        found = speed.pack_mixed(payload, repeated.described)
        assert (found is not None) == (levels <= 16)
        area = memoryview(bytearray(in_python(payload)))
        unpacked = speed.unpack_mixed(area, False)
        assert same(unpacked, payload if levels <= 16 else None)
        payload = kind([payload])


@needs_compiled
def test_extensions_in_one_another_are_left_to_the_codec() -> None:
    """A peer may send thousands of tuples whose body is none."""
    body = b"\x90"
    while len(body) < 100_000:
        body = msgspec.msgpack.encode(msgspec.msgpack.Ext(1, body))
    head = b"MQ\x01\x01" + struct.pack("<II", len(body), 0)
    assert speed.unpack_mixed(memoryview(bytearray(head + body)), False) is None


@needs_compiled
def test_weights_that_are_too_many_go_the_long_way() -> None:
    """Their skeleton would be larger than what is plain data's."""
    payload = [torch.ones(1) for _ in range(10_000)]
    assert speed.pack_mixed(payload, repeated.described) is None
    found = CODEC.decode(memoryview(bytearray(CODEC.encode(payload).pack())))
    assert same(found, payload)


@needs_compiled
@pytest.mark.parametrize("nbytes", [4095, 4096, 60_000])
def test_bytes_beside_a_tensor_are_packed_as_the_codec_does(nbytes: int) -> None:
    """Where many of them would be buffers, too."""
    payload = [torch.zeros(2, 3), b"x" * nbytes]
    expected = in_python(payload)
    assert speed.pack_mixed(payload, repeated.described) == expected
    CODEC.decode(memoryview(bytearray(expected)))
    found = speed.unpack_mixed(memoryview(bytearray(expected)), False)
    assert same(found, payload)
    assert speed.pack_mixed([*payload, b"x" * 65_500], repeated.described) is None


@needs_compiled
@pytest.mark.parametrize("items", [[1, 2, 3], ["ab"], [("a",)], [["a", 1]], 5, None])
def test_items_that_are_none_are_left_to_the_codec(items: Any) -> None:
    """An application may give an OrderedDict anything for a method."""
    tensor = torch.zeros(2, 3)
    ordered = OrderedDict(a=tensor)
    in_python([ordered])
    assert speed.pack_mixed([ordered], repeated.described) is not None
    ordered.items = lambda: items  # type: ignore[method-assign]
    assert speed.pack_mixed([ordered], repeated.described) is None


@needs_compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_a_large_tensor_without_memory_is_refused(dtype: torch.dtype) -> None:
    """NumPy takes some of its own, with anything in it."""
    one = torch.ones(200_000, dtype=dtype)
    for payload in (one, [one], {"a": one}):
        encoded(payload)
        assert CODEC.encode(payload).buffers
    gone = torch.ones(200_000, dtype=dtype)
    gone.untyped_storage().resize_(0)
    for payload in (gone, [gone], {"a": gone}):
        with pytest.raises(CodecError, match="no memory"):
            CODEC.encode(payload)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_a_large_tensor_under_a_mode_is_itself_or_refused(dtype: torch.dtype) -> None:
    """Under this one torch gives NumPy other memory, with anything in it."""
    one = torch.ones(100_000, dtype=dtype)
    for payload in (one, [one], {"a": one}):
        expected = encoded(payload).pack()
        for forgets in (False, True):
            if forgets:
                repeated.headers.clear()
                repeated.described.clear()
            with FakeTensorMode(allow_non_fake_inputs=True):
                try:
                    found = CODEC.encode(payload)
                except CodecError:
                    continue
            assert found.pack() == expected


class Swapper(TorchFunctionMode):
    """Has two tensors change places when the first is asked for its bytes."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        super().__init__()
        self._tensors = tensors

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if self._tensors and getattr(func, "__name__", "") == "numpy":
            (one, other), self._tensors = self._tensors, ()
            one.data, other.data = other.data, one.data
        return func(*args, **(kwargs or {}))


@needs_compiled
def test_tensors_that_change_places_are_left_to_the_codec() -> None:
    """The table of a message tells where each one ends."""
    one, other = torch.ones(64_000), torch.ones(128_000)
    for pack, payload, known in (
        (speed.pack_mixed, [one, other], repeated.described),
        (speed.pack_repeated, {"a": one, "b": other}, repeated.headers),
    ):
        encoded(payload)
        assert pack(payload, known) is not None
        with Swapper(one, other):
            assert pack(payload, known) is None
        one, other = other, one


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
    """Once their descriptions are known."""
    area = in_python(payload)
    expected = decoded_in_python(area)
    view = memoryview(bytearray(area))
    found = speed.unpack_mixed(view, False)
    assert same(expected, payload)
    assert same(found, payload if has_any(payload) else None)


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
    inner = _ordered({"b": np.ones(2), "c": True}, {"": {"version": 1}})
    numbers = (np.float32(2), np.bool_(True), np.int8(3))
    payload = {"a": torch.ones(3), "n": [1, inner, "é", numbers], "c": torch.ones(3)}
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
