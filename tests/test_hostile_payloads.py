"""Whatever arrives, decoding raises CodecError at worst and takes little memory."""

from __future__ import annotations

import random
import threading
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from make_golden import PAYLOADS
from payload_checks import CODEC, area_of, same, travel

from mq import extensions as ext
from mq.codec import Codec, add_safe_types
from mq.errors import CodecError
from mq.frames import PLAIN, assemble

Ext = msgspec.msgpack.Ext
pack = msgspec.msgpack.encode


@pytest.mark.parametrize("wrap", [list, tuple], ids=["lists", "tuples"])
def test_nesting_is_limited_to_256_levels_on_both_sides(wrap: type) -> None:
    """256 containers travel, 257 are refused by either side."""
    payload: Any = wrap([1])
    for _ in range(ext.MAX_DEPTH - 1):
        payload = wrap([payload])
    assert same(travel(payload), payload)
    with pytest.raises(CodecError, match="256 levels"):
        CODEC.encode(wrap([payload]))
    raw = pack(payload) if wrap is list else bytes(CODEC.encode(payload).header[12:])
    if wrap is list:
        area = PLAIN + b"\x91" + raw
    else:
        area = assemble(pack(Ext(ext.TUPLE, b"\x91" + raw)), (), frozenset()).pack()
    with pytest.raises(CodecError, match="256 levels"):
        CODEC.decode(memoryview(area))


def test_ordered_dicts_may_be_nested_as_deep() -> None:
    """As deep as is sent, on a stack as deep as any program's."""
    payload: Any = OrderedDict(a=1)
    for _ in range(ext.MAX_DEPTH - 1):
        payload = OrderedDict(a=payload)
    assert same(travel(payload), payload)


def test_cycles_are_refused() -> None:
    """A payload that contains itself is an error, not an endless loop."""
    loop: list[Any] = [1]
    loop.append({"again": (loop,)})
    with pytest.raises(CodecError, match="contains itself") as caught:
        CODEC.encode(loop)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "skeleton",
    [b"\x91" * 100_000, b"\x81\xc0" * 100_000, b"\x81\x91" * 50_000],
)
def test_bottomless_messages_are_refused(skeleton: bytes) -> None:
    """No nesting from outside overflows the stack, in threads neither."""
    outcomes: list[str] = []

    def decode() -> None:
        for area in (PLAIN + skeleton, assemble(skeleton, (), frozenset()).pack()):
            with pytest.raises(CodecError, match=r"nested|hashable") as caught:
                CODEC.decode(memoryview(area))
            outcomes.append(str(caught.value))

    decode()
    thread = threading.Thread(target=decode)
    thread.start()
    thread.join(60)
    assert len(outcomes) == 4


def always(value: Any) -> Callable[[Any], Any]:
    """A function that ignores what it is given."""
    return lambda _: value


def test_singletons_do_not_multiply_the_work_of_the_depth_check(
    decode_within_bounds: Callable[[bytes], None],
) -> None:
    """Each singleton's state holds the one before twice; the check stays linear."""
    state: Any = None
    for number in range(20):
        kind = type(f"Only{number}", (), {"__module__": __name__})
        only = kind()
        name = f"test:Only{number}"
        add_safe_types(kind, name=name, encode=id, decode=always(only))
        whole = Ext(ext.OBJECT, pack([name, state]))
        again = Ext(ext.OBJECT, pack([name, None]))
        state = [whole, again]
    area = assemble(pack(state), (), frozenset()).pack()
    assert len(area) < 4000
    assert CODEC.decode(memoryview(area)) == [only, only]
    decode_within_bounds(area)


@pytest.mark.parametrize("readonly", [False, True])
def test_bools_from_outside_are_zero_or_one(readonly: bool) -> None:
    """NumPy and torch trust them: other bytes would make masks overrun memory."""
    record = np.zeros(3, [("a", "<f4"), ("b", "?", (2,)), ("c", [("d", "?")])])
    for sent in (np.zeros(9, bool), torch.zeros(9, dtype=torch.bool), record):
        area = area_of(CODEC.encode(sent))
        start = area.nbytes - (record.nbytes if sent is record else 9)
        area[start:] = b"\xff" * (area.nbytes - start)
        found = CODEC.decode(area.toreadonly() if readonly else area)
        if sent is record:
            parts = [found["b"], found["c"]["d"]]
        else:
            parts = [np.asarray(found)]
        assert all((part.view(np.uint8) == 1).all() for part in parts)
        assert (area[-1] == 255) == readonly  # the last byte is a bool in each
    raw = pack(Ext(ext.SCALAR, pack(["|b1", b"\x02"])))
    scalar = CODEC.decode(memoryview(assemble(raw, (), frozenset()).pack()))
    assert np.array(scalar).tobytes() == b"\x01"


@pytest.mark.parametrize(
    ("count", "kind"), [(17, "|b1"), (2, ["subarray", "|b1", 8]), (17, "|u1")], ids=str
)
def test_overlapping_bools_do_not_multiply_the_work(count: int, kind: Any) -> None:
    """Each is looked at: a thousand fields of one byte would be a thousand looks."""
    name = ["struct", 1, *([f"{n}", 0, kind] for n in range(count))]
    if type(kind) is list:
        inner = ["struct", 8, *([f"{n}", 0, kind] for n in range(9))]
        name = ["struct", 8, *([f"{n}", 0, inner] for n in range(count))]
    raw = bytes(8)
    skeleton = pack(Ext(ext.ARRAY, pack([name, 8 // name[1]])))
    area = assemble(skeleton, (memoryview(raw),), frozenset()).pack()
    if kind == "|u1":
        assert len(CODEC.decode(memoryview(bytearray(area)))) == 8
        return
    with pytest.raises(CodecError, match="overlap"):
        CODEC.decode(memoryview(bytearray(area)))


@pytest.mark.parametrize(
    ("first", "second"),
    [("<f4", "?"), ("?", "<f4"), (("?", (2,)), "<f4"), ([("deep", "?")], "u1")],
    ids=str,
)
def test_a_bool_that_shares_bytes_is_refused_when_published(
    first: Any, second: Any
) -> None:
    """To make it 0 or 1 on arrival would change the other field."""
    union = np.dtype(
        {"names": ["x", "y"], "formats": [first, second], "offsets": [0, 0]}
    )
    with pytest.raises(CodecError, match=r"field .[xy]. .*overlaps.*one by one"):
        CODEC.encode(np.zeros(2, union))
    plain = np.dtype({"names": ["x", "y"], "formats": ["<f4", "u1"], "offsets": [0, 0]})
    sent = np.array([(1.5, 7)], plain)
    found = CODEC.decode(area_of(CODEC.encode(sent)))
    assert (found.dtype, found.tobytes()) == (plain, sent.tobytes())


def tensor_ext(*body: Any, code: int = ext.TENSOR) -> bytes:
    """A skeleton of one array, tensor or scalar."""
    return pack(Ext(code, pack(list(body))))


@pytest.mark.parametrize("code", [ext.TENSOR, ext.ARRAY])
@pytest.mark.parametrize(
    "dims",
    [
        [5],
        [3],
        [2, 2, 2],
        [-4],
        [-2, -2],
        [2**62, 4],
        [2**64 - 1],
        [2**32, 2**32],
        [0, 2**63],
        [0, 2**62, 4],
        ["4"],
        [4.0],
        [True, 4],
        [None],
        [[4]],
        [1] * 65,
    ],
    ids=str,
)
def test_shapes_that_do_not_fit_their_buffer_are_refused(
    code: int, dims: list[Any]
) -> None:
    """Dimensions times item size is the buffer's size, computed without overflow."""
    name = "float32" if code == ext.TENSOR else "<f4"
    area = assemble(
        tensor_ext(name, *dims, code=code), (memoryview(bytes(16)),), frozenset()
    )
    with pytest.raises(CodecError):
        CODEC.decode(area_of(area))


@pytest.mark.parametrize(
    "name",
    [
        "|O",
        "O",
        "object",
        "f4,f4",
        "<f3",
        "<U4000000000",
        "<M8[fortnight]",
        "<f4\n",
        "T",
        "(2,)f4",
        "x" * 100,
        4,
        None,
        [],
        ["struct"],
        ["struct", 8, ["a", 0, "|O"]],
        ["struct", 8, ["a", 5, "<f4"]],
        ["struct", 8, ["a", -1, "<f4"]],
        ["struct", 8, ["a", 0]],
        ["struct", 8, ["a", 0, "<f4"], ["a", 4, "<f4"]],
        ["struct", 8, ["a", 0, "<f4", 1]],
        ["struct", 2**40],
        ["struct", -1],
        ["subarray", "<f4", 2**31],
        ["subarray", "<f4", -1],
        ["union", "<f4"],
    ],
    ids=str,
)
def test_dtypes_that_are_none_or_hold_objects_are_refused(name: Any) -> None:
    """A dtype is checked before NumPy sees it."""
    for skeleton in (
        tensor_ext(name, 1, code=ext.ARRAY),
        tensor_ext(name, bytes(8), code=ext.SCALAR),
        tensor_ext(name, 1),
    ):
        area = assemble(skeleton, (memoryview(bytes(8)),), frozenset())
        with pytest.raises(CodecError):
            CODEC.decode(area_of(area))


@pytest.mark.parametrize(
    "skeleton",
    [
        pack([Ext(ext.LARGE_BYTES, b"")] * 2),
        pack([]),
        pack(Ext(ext.TENSOR, b"")),
        pack(Ext(ext.TENSOR, b"\xc0")),
        pack(Ext(ext.TENSOR, b"\x90")),
        pack(Ext(ext.TUPLE, b"\xc0")),
        pack(Ext(ext.SET, b"\x91\x90")),
        tensor_ext("<f4", bytes(8), code=ext.SCALAR),
        tensor_ext("<f4", bytes(3), code=ext.SCALAR),
        tensor_ext("str", b"s", code=ext.SCALAR),
        tensor_ext("bytes", b"s", 1, code=ext.SCALAR),
        pack(Ext(ext.MAP, b"\x91\x01")),
        pack(Ext(ext.MAP, b"\x92\x90\x01")),
        pack(Ext(ext.ORDERED_DICT, b"\x91\x01")),
        pack(Ext(ext.ORDERED_DICT, b"\x93\x90\x01\x01")),
        pack(Ext(ext.COMPLEX, b"1")),
        pack(Ext(ext.DATETIME, bytes(12))),
        pack(Ext(ext.DATETIME, b"")),
        pack(Ext(ext.DATE, b"\xff" * 4)),
        pack(Ext(ext.TIME, b"\x01" * 8 + b"\x7f" * 8)),
        pack(Ext(ext.TIMEDELTA, b"\x7f" * 12)),
        pack(Ext(ext.INT, bytes(ext.MAX_INT_BYTES + 1))),
        pack(Ext(ext.OBJECT, pack([1, 2]))),
        pack(Ext(ext.PICKLE, pack(["x"]))),
        pack(Ext(0, b"")),
        pack(Ext(127, b"")),
        b"",
        b"\xc0\xc0",
        b"\xa2\xff\xff",
        b"\xdd\xff\xff\xff\xff",
        b"\x81\x80\x01",
    ],
    ids=lambda raw: raw.hex()[:24],
)
def test_malformed_skeletons_are_refused(skeleton: bytes) -> None:
    """Buffers are used once and all; bodies have their form; nothing else escapes."""
    for codec in (CODEC, Codec(allow_pickle=True)):
        with pytest.raises(CodecError):
            codec.decode(
                area_of(assemble(skeleton, (memoryview(bytes(8)),), frozenset()))
            )
        if skeleton != pack([]):
            with pytest.raises(CodecError):
                codec.decode(memoryview(assemble(skeleton, (), frozenset()).pack()))


SAMPLES = [
    sample
    for payload in PAYLOADS.values()
    if len(sample := CODEC.encode(payload).pack()) < 1000
]
PIECES = [
    *(b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdc\xff\xff", b"\xc1"),
    *(b"\x80", b"\x90", b"\x91", b"\x92", b"\x94", b"\x82", b"\xa4bool", b"\xa3<f8"),
    *(b"\xd6\xff", b"\xd7\xff", b"\xc7\x0c\xff", b"\xcf", b"\xc6\xff\xff\xff\xff"),
    *(bytes([0xC7, size, code]) for code in range(1, 21) for size in (1, 3, 9)),
]


@pytest.fixture
def decode_within_bounds() -> Iterator[Callable[[bytes], None]]:
    """Decodes hostile bytes; only CodecError may come, and little memory be taken."""
    for sample in SAMPLES:  # what is imported or cached once is no message's doing
        CODEC.decode(memoryview(bytearray(sample)))
    tracemalloc.start()

    def decode(area: bytes) -> None:
        view = memoryview(bytearray(area))
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        try:
            CODEC.decode(view)
        except CodecError:
            assert CODEC.decode_ahead([view]) == []
        else:
            CODEC.decode_ahead([view])
        peak = tracemalloc.get_traced_memory()[1] - before
        assert peak < 120 * len(area) + 64 * 1024, area.hex()

    yield decode
    tracemalloc.stop()


@pytest.mark.parametrize("seed", range(4))
def test_mutated_messages_raise_codec_error_and_take_no_memory(
    seed: int, decode_within_bounds: Callable[[bytes], None]
) -> None:
    """Changed bytes, flipped bits and cut ends in any message."""
    source = random.Random(seed)
    for _ in range(1500):
        area = bytearray(source.choice(SAMPLES))
        for _ in range(source.randrange(6)):
            area[source.randrange(len(area))] = source.randrange(256)
            area[source.randrange(len(area))] ^= 1 << source.randrange(8)
        decode_within_bounds(bytes(area[: len(area) - source.choice((0, 0, 1, 20))]))


@pytest.mark.parametrize("seed", range(4))
def test_random_skeletons_raise_codec_error_and_take_no_memory(
    seed: int, decode_within_bounds: Callable[[bytes], None]
) -> None:
    """Noise behind a valid header, with extension types and long counts in it."""
    source = random.Random(seed)
    for turn in range(1500):
        pieces = [
            source.choice(
                (source.choice(PIECES), source.randbytes(source.randrange(6)))
            )
            for _ in range(source.randrange(30))
        ]
        skeleton = b"".join(pieces)
        if turn % 3 == 0:
            decode_within_bounds(PLAIN + skeleton)
        else:
            blobs = [
                source.randbytes(source.choice((1, 8, 64))) for _ in range(turn % 3)
            ]
            frames = assemble(skeleton, tuple(map(memoryview, blobs)), frozenset())
            decode_within_bounds(frames.pack())


@pytest.mark.parametrize("piece", [b"\x80", b"\x90", b"\xc0", b"\xc7\x01\x01\x90"])
def test_a_message_of_empty_containers_takes_a_bounded_multiple(
    piece: bytes, decode_within_bounds: Callable[[bytes], None]
) -> None:
    """The worst that a message can do is to be full of empty containers."""
    count = 10_000
    skeleton = b"\xdd" + count.to_bytes(4, "big") + piece * count
    decode_within_bounds(assemble(skeleton, (), frozenset()).pack())


def test_encoding_and_decoding_forget_what_they_handled() -> None:
    """Memory does not grow with the number of messages, good or bad."""
    payload = {"t": torch.ones(1000), "s": [np.ones(100), (1, {2})]}
    area = area_of(CODEC.encode(payload))
    bad = bytearray(area)
    bad[-1:] = b""

    def work(times: int) -> None:
        for _ in range(times):
            travel(payload)
            with pytest.raises(CodecError):
                CODEC.decode(memoryview(bad))

    work(50)
    tracemalloc.start()
    try:
        work(50)
        before = tracemalloc.get_traced_memory()[0]
        work(200)
        assert tracemalloc.get_traced_memory()[0] - before < 50_000
    finally:
        tracemalloc.stop()


def test_dimensions_of_many_digits_are_not_multiplied() -> None:
    """That would take longer with each."""
    digits = Ext(ext.INT, b"\x7f" * 60_000)
    body = pack(["|u1", *[digits] * 64])
    area = assemble(pack(Ext(ext.ARRAY, body)), (), frozenset()).pack()
    with pytest.raises(CodecError, match="such dimensions does not fit any memory"):
        CODEC.decode(memoryview(area))


def test_a_date_of_no_unit_is_refused() -> None:
    """NumPy divides by the count."""
    body = pack(["<M8[0s]", 2])
    buffers = (memoryview(bytes(16)),)
    area = assemble(pack(Ext(ext.ARRAY, body)), buffers, frozenset()).pack()
    with pytest.raises(CodecError, match="dtype"):
        CODEC.decode(memoryview(area))
