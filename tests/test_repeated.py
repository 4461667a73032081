"""Tensors, and dicts of them, by the short way and by the long one."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from payload_checks import same

from mq import arrays, frames, repeated, speed, tensors
from mq.codec import Codec, add_safe_types
from mq.errors import CodecError

CODEC = Codec()
_numbers = count()
DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
]


def forget() -> None:
    """What there was before."""
    for memory in (
        repeated.headers,
        repeated.known,
        repeated._strange,
        tensors._known,
        repeated.described,
        arrays._known,
    ):
        memory.clear()


@pytest.fixture(autouse=True)
def _nothing_known() -> Iterator[None]:
    forget()
    yield
    forget()


def known_header(payload: Any) -> frames.Frames | None:
    """What is remembered of it."""
    found = repeated.tensors_of(payload)
    return None if found is None else repeated.encode(payload, found)


def unpacked(payload: Any) -> Any:
    """What it is decoded to where it is as one before."""
    return speed.unpack_repeated(area_of(payload), repeated.known, False)


def area_of(payload: Any) -> memoryview:
    """A message as it arrives."""
    return memoryview(bytearray(CODEC.encode(payload).pack()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0), (4, 5, 6)], ids=str)
def test_the_second_is_as_the_first(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Bytes and values, though they differ from those of the first."""
    first = torch.ones(shape, dtype=dtype)
    second = torch.randn(shape).to(dtype)
    long = CODEC.encode(second).pack()
    for tensor in (first, second, second):
        area = area_of(tensor)
        found = CODEC.decode(area)
        assert same(found, tensor)
        assert found.is_contiguous()
        if found.numel():
            found.view(-1)[0] = 0  # writable, and of this message alone
    assert CODEC.encode(second).pack() == long


@pytest.mark.parametrize("python", [False, True])
def test_what_has_no_elements_is_made_alike_each_time(
    python: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it would lie in the message."""
    if python:
        monkeypatch.setattr("mq.codec.unpack_repeated", repeated.unpack)
        monkeypatch.setattr("mq.codec.unpack_mixed", speed._nothing)
    for length in range(frames.ALIGNMENT):
        payload = {"a" * length: torch.ones(16), "e": torch.empty(0, 2)}
        for _ in range(3):
            found = CODEC.decode(area_of(payload))
            assert same(found, payload)
            assert found["e"].stride() == (2, 1)


DICTS: list[dict[Any, Any]] = [
    {"a": torch.ones(3)},
    {"a": torch.ones(3), "b": torch.ones((), dtype=torch.int64)},
    {"b": torch.ones((), dtype=torch.int64), "a": torch.ones(3)},
    {"a": torch.ones(3), "b": torch.ones(4, 5, dtype=torch.float64)},
    {"a": torch.ones(3), "c": torch.ones(4, 5, dtype=torch.float64)},
    {str(n): torch.full((n + 1,), n) for n in range(repeated.MOST_TENSORS)},
    {str(n): torch.full((n + 1,), n) for n in range(repeated.MOST_TENSORS + 1)},
    {"a": torch.ones(3), "empty": torch.ones(0)},
    {"a": torch.ones(3), "mask": torch.tensor([True, False])},
    {"a": torch.ones(3), "low": torch.ones(3, dtype=torch.bfloat16)},
    {"a": torch.ones(3), "b": torch.ones(4, 5).T},
    {"a": torch.ones(3), "b": torch.ones(3, requires_grad=True)},
    {"a": torch.ones(3), "b": 1},
    {"a": torch.ones(3), "b": np.ones(3)},
    {"a": torch.ones(3), "b": {"c": torch.ones(3)}},
    {"a": torch.ones(3), 1: torch.ones(3)},
    {"x" * 5000: torch.ones(3)},
    {"é": torch.ones(3)},
]


@pytest.mark.parametrize("number", range(len(DICTS)))
def test_a_dict_arrives_the_second_time_as_the_first(number: int) -> None:
    """With its own names in their order, after all the others, too."""
    for payload in (*DICTS, DICTS[number]):
        CODEC.decode(area_of(payload))
    payload = DICTS[number]
    expected = {k: v.detach() if type(v) is torch.Tensor else v
                for k, v in payload.items()}  # fmt: skip
    for _ in range(2):
        found = CODEC.decode(area_of(payload))
        assert list(found) == list(expected)
        assert same(found, expected)
        found["a" if "a" in found else next(iter(found))] *= 5  # its own memory
    both = torch.ones(3)
    for _ in range(2):
        twice = CODEC.decode(area_of({"a": both, "b": both}))
        twice["a"][0] = 7
        assert twice["b"][0] == 1


def test_it_is_the_short_way() -> None:
    """Else nothing here would test it."""
    for _ in range(2):
        CODEC.decode(area_of(DICTS[3]))
    again = {name: torch.zeros_like(tensor) for name, tensor in DICTS[3].items()}
    assert known_header(again) is not None
    assert unpacked(again) is not None
    assert known_header(DICTS[4]) is None
    assert unpacked(DICTS[4]) is None
    for _ in range(2):
        CODEC.decode(area_of(torch.ones(7)))
    assert known_header(torch.zeros(7)) is not None
    assert known_header(torch.zeros(8)) is None
    assert unpacked(torch.zeros(7)) is not None
    assert unpacked(torch.zeros(8)) is None
    for _ in range(2):
        CODEC.decode(area_of(np.ones(7)))
    assert known_header(np.zeros(7)) is not None
    assert known_header(np.zeros(7, ">f8")) is None
    assert unpacked(np.zeros(7)) is not None
    assert unpacked(np.zeros(7, ">f8")) is None


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(3, 4).T,
        torch.arange(12.0)[::2],
        torch.arange(12.0, requires_grad=True),
        torch.arange(4) * 1j,
        (torch.arange(4) * 1j).conj(),
        (torch.arange(4) * 1j).conj().imag,
        torch.nn.Parameter(torch.arange(12.0)),
        torch.arange(12.0).expand(2, 12),
    ],
    ids=[
        "transposed",
        "strided",
        "grad",
        "complex",
        "conj",
        "neg",
        "parameter",
        "view",
    ],
)
def test_what_is_not_sent_as_it_lies_there_takes_the_long_way(
    tensor: torch.Tensor,
) -> None:
    """Even after a plain one of the same dtype and shape."""
    plain = torch.zeros(tensor.shape, dtype=tensor.dtype)
    for payload in (plain, tensor, tensor, plain):
        assert same(CODEC.decode(area_of(payload)), payload.detach().resolve_conj())


def test_a_subclass_takes_the_long_way() -> None:
    """Its type is refused, or registered, by name."""

    class Special(torch.Tensor):
        pass

    CODEC.encode(torch.zeros(3))
    with pytest.raises(CodecError, match="Special"):
        CODEC.encode(torch.zeros(3).as_subclass(Special))


@pytest.mark.parametrize("damage", [-1, 1, 64])
def test_a_known_header_with_another_size_is_malformed(damage: int) -> None:
    """As it is when the header is not known."""
    area = area_of(torch.ones(40))
    other = memoryview(bytearray(area.tobytes()[: len(area) + min(damage, 0)]
                                 + bytes(max(damage, 0))))  # fmt: skip
    for _ in range(2):
        with pytest.raises(CodecError):
            CODEC.decode(other)
        assert same(CODEC.decode(area), torch.ones(40))


def test_memory_that_is_read_only_is_copied() -> None:
    """Torch has no read-only tensors."""
    area = area_of(torch.ones(40))
    CODEC.decode(area)
    found = CODEC.decode(memoryview(bytes(area)))
    found[0] = 2
    assert bytes(area) == bytes(area_of(torch.ones(40)))


def test_what_is_known_is_bounded() -> None:
    """A peer that sends ever other shapes costs no memory."""
    for n in range(1, 3 * repeated.MOST_HEADERS):
        CODEC.decode(area_of(torch.zeros(n, dtype=torch.uint8)))
    assert len(repeated.headers) <= repeated.MOST_HEADERS
    assert len(repeated.known) <= repeated.MOST_HEADERS
    CODEC.decode(area_of({"x" * 5000: torch.zeros(1)}))
    assert max(map(len, repeated.known)) <= repeated.LONGEST_HEADER
    assert max(len(h) for h, _ in repeated.headers.values()) <= repeated.LONGEST_HEADER


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    "decode",
    [
        lambda state: -state,
        lambda state: state.T,
        lambda state: state.requires_grad_(),
        lambda state: state.to_sparse(),
        lambda state: torch.quantize_per_tensor(state, 0.1, 0, torch.qint8),
        lambda state: {"w": -state},
    ],
    ids="negative transposed grad sparse quantised dict".split(),
)
@pytest.mark.parametrize("wrap", [lambda box: box, lambda box: {"w": box}])
def test_a_registered_type_that_decodes_to_tensors_is_decoded_each_time(
    decode: Callable[[torch.Tensor], Any], wrap: Callable[[Any], Any]
) -> None:
    """What it travels as is not what it is."""

    class Boxed:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

    name = f"test:{next(_numbers)}"
    add_safe_types(Boxed, name=name, encode=lambda box: box.tensor, decode=decode)
    state = torch.arange(6.0).reshape(2, 3)
    boxed = wrap(Boxed(state))
    shown = [repr(CODEC.decode(area_of(boxed))) for _ in range(3)]
    assert shown == [repr(wrap(decode(state.clone())))] * 3


def test_a_header_that_changes_meanwhile_is_not_remembered() -> None:
    """The memory of a message that is read in place is its publisher's."""
    area, other = area_of({"x": torch.ones(4)}), area_of({"y": torch.ones(4)})
    payload = CODEC.decode(area)
    repeated.known.clear()
    repeated.learn(other, payload, CODEC._encode_plainly)
    assert not repeated.known
    repeated.learn(area, payload, CODEC._encode_plainly)
    assert repeated.known


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0), (4, 5, 6)], ids=str)
def test_so_it_is_among_other_values(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """There each tensor's description is remembered, not the header."""
    first = {"n": 1, "x": torch.ones(shape, dtype=dtype), "l": [torch.ones(1)]}
    second = {"n": 2.5, "x": torch.randn(shape).to(dtype), "l": [torch.zeros(1)]}
    long = CODEC.encode(second).pack()
    for payload in (first, second, second):
        area = area_of(payload)
        found = CODEC.decode(area)
        assert same(found, payload)
        assert same(CODEC.decode(area.toreadonly()), payload)
        found["x"].zero_()  # in memory of its own
        found["l"][0].zero_()
    assert area_of(second) == long
    assert tensors._known.read


def test_a_description_that_is_known_takes_no_other_buffer() -> None:
    """One from outside is checked as the first was."""
    sent = {"n": 1, "x": torch.ones(4)}
    area = area_of(sent)
    CODEC.decode(area)
    assert tensors._known.read
    skeleton, _, _ = frames.split(area)
    for buffers in ([], [bytes(15)], [bytes(17)], [bytes(16), bytes(16)]):
        views = tuple(map(memoryview, buffers))
        with pytest.raises(CodecError, match="buffer"):
            CODEC.decode(
                memoryview(frames.assemble(skeleton, views, frozenset()).pack())
            )


def test_few_descriptions_are_remembered_and_short_ones() -> None:
    """However many shapes come."""
    for n in range(1, 3 * repeated.MOST_HEADERS):
        CODEC.decode(area_of([1, torch.ones(n)]))
    CODEC.decode(area_of([1, torch.ones([1] * 64)]))
    read = tensors._known.read
    for memory in (repeated.described, read):
        assert 0 < len(memory) <= repeated.MOST_HEADERS
    assert max(map(len, read)) <= repeated.LONGEST_DESCRIPTION


ARRAYS = [
    *(np.arange(6).astype(kind) for kind in ("u1", "<i4", ">i4", "f2", ">f8", "c8")),
    *(np.arange(6).astype(kind) for kind in ("M8[s]", "M8[2s]", "m8[us]", "bool")),
    *(np.arange(6).astype(kind) for kind in ("U3", "S3", "V4", "i4,f8")),
    np.ones(()),
    np.ones((2, 0)),
    np.arange(6.0).reshape(2, 3),
    np.arange(6.0).reshape(2, 3).T,
    np.arange(6.0)[::-1],
    np.arange(6.0).reshape(2, 3, order="F"),
    np.ones([1] * 40),
]


@pytest.mark.parametrize("number", range(len(ARRAYS)))
@pytest.mark.parametrize(
    "wrap",
    [
        lambda array: array,
        lambda array: {"a": array, "b": torch.ones(2)},
        lambda array: {"n": 1, "l": [array]},
    ],
    ids=["alone", "dict", "among others"],
)
def test_arrays_too(wrap: Callable[[Any], Any], number: int) -> None:
    """Whatever came before; read-only where they must be, and else writable."""
    for array in (*ARRAYS, ARRAYS[number]):
        payload = wrap(array)
        for read_only in (False, True, True, False):
            area = area_of(payload)
            found = CODEC.decode(area, read_only=read_only)
            assert same(found, payload)
            if isinstance(found, dict):
                found = found["a"] if "a" in found else found["l"][0]
            if array.nbytes and array.dtype.kind != "b":
                assert found.flags.writeable is not read_only
            else:
                assert not (array.size and read_only and found.flags.writeable)


def test_a_file_in_memory_takes_no_other_way(tmp_path: pathlib.Path) -> None:
    """It arrives as an array."""
    mapped = np.memmap(tmp_path / "file", np.float32, "w+", shape=(4,))
    mapped[:] = 3
    for _ in range(2):
        for payload in (mapped, [1, mapped]):
            found = CODEC.decode(area_of(payload))
            array = found[1] if type(found) is list else found
            assert same(array, np.full(4, 3, np.float32))
