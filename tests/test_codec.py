"""Payloads arrive as they were sent."""

from __future__ import annotations

import datetime
import pathlib
import re
import subprocess
import sys
import threading
import zoneinfo
from collections import OrderedDict
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from make_golden import FOLDER, NAN, PAYLOADS
from payload_checks import CODEC, area_of, same, travel

from mq import plain, unpacking
from mq.codec import Codec, add_safe_types
from mq.errors import CodecError
from mq.frames import PLAIN, Frames
from mq.packing import APART_BYTES, MOST_APART_BYTES
from mq.plain import decode_several


def has_titles(dtype: Any) -> bool:
    """Whether fields have a second name, which does not travel."""
    if dtype.subdtype is not None:
        return has_titles(dtype.subdtype[0])
    fields = (dtype.fields or {}).values()
    return any(len(field) > 2 or has_titles(field[0]) for field in fields)


SURROGATES = re.compile("[\ud800-\udfff]")
ARRAY_DTYPES = (
    npst.scalar_dtypes()
    | npst.complex_number_dtypes(endianness=">")
    | npst.byte_string_dtypes()
    | npst.unicode_string_dtypes()
    | npst.array_dtypes(npst.scalar_dtypes(), allow_subarrays=True).filter(
        lambda dtype: not has_titles(dtype)
    )
)


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**80), 2**80)
    | st.floats()
    | st.complex_numbers()
    | st.text()
    | st.binary()
    | st.binary().map(bytearray)
    | st.dates()
    | st.timedeltas()
    | st.datetimes()
    | st.datetimes(timezones=st.just(datetime.timezone(datetime.timedelta(hours=-3))))
    | st.times()
)
keys: Any = st.recursive(
    st.none() | st.integers() | st.text() | st.binary() | st.dates(),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
payloads: Any = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=3).map(OrderedDict)
        | st.sets(keys, max_size=4)
    ),
    max_leaves=20,
)


def test_a_zone_arrives_as_its_offset() -> None:
    """The instant and the offset are kept, not the rules of the zone."""
    sent = datetime.datetime(2024, 7, 1, tzinfo=zoneinfo.ZoneInfo("Europe/Paris"))
    assert travel(sent) == sent
    assert travel(sent).utcoffset() == datetime.timedelta(hours=2)
    assert type(travel(sent).tzinfo) is datetime.timezone


@given(payloads)
@settings(max_examples=300, deadline=None)
def test_nested_payloads_arrive_as_they_were_sent(payload: Any) -> None:
    """Every value keeps its type, its bits and its place."""
    assert same(travel(payload), payload)


@given(npst.arrays(ARRAY_DTYPES, npst.array_shapes(min_dims=0, min_side=0, max_dims=4)))
@settings(max_examples=300, deadline=None)
def test_arrays_of_every_dtype_and_shape_arrive_bit_by_bit(array: Any) -> None:
    """Byte order, units of time, field offsets and NaN payloads are kept."""
    assert same(travel(array), array)
    transposed = array.T
    assert same(travel(transposed), np.array(transposed, order="C"))


@given(npst.arrays(ARRAY_DTYPES, (1,)))
@settings(max_examples=200, deadline=None)
def test_numpy_scalars_stay_numpy_scalars(array: Any) -> None:
    """A np.float64 is no float, although Python says it is."""
    scalar = array[0]
    assume(not isinstance(scalar, str) or not SURROGATES.search(scalar))
    assert same(travel(scalar), scalar)


@pytest.mark.parametrize("nest", [list, lambda fields: [("b", fields, (2,))]])
def test_titles_of_fields_are_refused_with_a_remedy(nest: Any) -> None:
    """Without them it is another dtype, and a field is not found by its title."""
    titled = np.zeros(2, nest([(("a title", "a"), "i4")]))
    plain = titled.view(nest([("a", "i4")]))
    for payload in (titled, titled[0], [titled]):
        with pytest.raises(CodecError, match=r"titles of fields.*send array\.view"):
            travel(payload)
        assert same(travel(payload, Codec(allow_pickle=True)), payload)
    assert same(travel(plain), plain)


def test_an_aligned_dtype_arrives_as_one_that_is_equal() -> None:
    """How it was made does not travel."""
    aligned = np.dtype([("a", "i1"), ("b", "f8")], align=True)
    assert travel(np.zeros(2, aligned)).dtype == aligned


def test_a_record_can_be_in_a_set_where_it_could_be_before() -> None:
    """NumPy hashes those that are read-only: all are, once they have arrived."""
    for dtype in ([("a", "?"), ("b", ">f4")], [("a", [("b", "S2")])], []):
        records = np.zeros(1, dtype)
        assert not travel(records[0]).flags.writeable
        records.flags.writeable = False
        payload = [{records[0]}, {records[0]: 1}]
        assert travel(payload) == payload


@pytest.mark.parametrize(
    "value", [np.str_("a\0"), np.bytes_(b"a\0"), np.str_(""), np.bytes_()]
)
def test_numpy_strings_keep_their_nul_characters(value: Any) -> None:
    """NumPy's own view of them drops NULs at the end."""
    assert same(travel(value), value)
    assert len(travel(value)) == len(value)


TORCH_DTYPES = [
    getattr(torch, name)
    for name in (
        "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 "
        "float32 float64 complex32 complex64 complex128 float8_e4m3fn float8_e4m3fnuz "
        "float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2"
    ).split()
    if hasattr(torch, name)
]


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_tensors_of_every_dtype_arrive_bit_by_bit(dtype: torch.dtype) -> None:
    """Whatever the bits mean, they arrive; 0-d, empty and strided ones too."""
    pattern = torch.arange(48 * dtype.itemsize, dtype=torch.int64) * 37
    raw = (pattern % (2 if dtype is torch.bool else 256)).to(torch.uint8)
    tensor = raw.view(dtype).reshape(6, 8)
    for sent in (tensor, tensor[2:, 1::3], tensor.T, tensor[0, 0], tensor[:0]):
        assert same(travel(sent), sent)
    assert travel(tensor.T).is_contiguous()


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("shape", [(0,), (0, 2), (3, 0, 2), (2, 3, 0)], ids=str)
@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_a_tensor_without_elements_has_the_strides_of_one_made_here(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """Else it could not be seen as another dtype."""
    here = torch.empty(shape, dtype=torch.uint8).to(dtype)
    for found in (travel(here), travel([1, here])[1]):
        assert same(found, here)
        assert found.stride() == here.stride()
        if found.shape[-1]:
            assert found.view(torch.uint8).stride() == here.view(torch.uint8).stride()


@given(st.lists(st.integers(0, 2**64 - 1), max_size=8))
def test_nans_keep_their_bits(words: list[int]) -> None:
    """Floats in lists, arrays and tensors are never converted."""
    array = np.array(words, "<u8").view("<f8")
    assert same(travel(array), array)
    assert same(travel(torch.from_numpy(array)), torch.from_numpy(array))
    assert same(travel(array.tolist()), array.tolist())


def test_lazy_and_trained_tensors_arrive_as_plain_numbers() -> None:
    """Conjugation and negation are carried out; history and storage stay behind."""
    z = torch.tensor([1 + 2j, 3 - 4j])
    assert same(travel(z.conj()), torch.tensor([1 - 2j, 3 + 4j]))
    assert same(travel(z.conj().imag), torch.tensor([-2.0, 4.0]))
    parameter = torch.nn.Parameter(torch.ones(3))
    for sent in (parameter, parameter * 1.0):
        assert same(travel(sent), torch.ones(3))
        assert not travel(sent).requires_grad
    base = torch.zeros(4)
    first, second = travel([base[:2], base[1:]])
    first.fill_(1.0)
    assert second.tolist() == [0.0, 0.0, 0.0]
    assert same(travel(torch.zeros(2, 3).shape), (2, 3))
    assert same(travel(torch.zeros(1).expand(3)), torch.zeros(3))


def test_a_state_dict_can_be_loaded() -> None:
    """It arrives as an OrderedDict, in order, with its metadata."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    state: Any = model.state_dict()
    found = travel(state)
    assert type(found) is OrderedDict
    assert list(found) == list(state)
    assert vars(found)["_metadata"] == vars(state)["_metadata"]
    twin = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    twin.load_state_dict(found)
    assert same(list(twin.state_dict().values()), list(state.values()))
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.step(lambda: model(torch.ones(2, 3)).sum().backward())
    torch.optim.Adam(twin.parameters()).load_state_dict(travel(optimizer.state_dict()))


def test_large_data_is_referred_to_and_arrives_as_writable_views() -> None:
    """Encoding views the caller's memory; decoding views the message."""
    array, tensor, raw = np.arange(9), torch.arange(9), bytearray(100_000)
    frames = CODEC.encode([array, tensor, raw])
    array[0] = tensor[0] = 7
    raw[0] = 7
    area = area_of(frames)
    got_array, got_tensor, got_raw = CODEC.decode(area)
    assert (got_array[0], got_tensor[0], got_raw[0]) == (7, 7, 7)
    area[64], area[192] = 9, 9
    assert (got_array[0], got_tensor[0]) == (9, 9)
    got_array += 1
    got_tensor += 1
    assert (area[64], area[192]) == (10, 10)
    assert got_array.flags.aligned


def test_views_keep_the_message_alive() -> None:
    """An array or tensor is valid as long as it is referenced."""
    for payload in (np.arange(1000.0), torch.arange(1000.0)):
        area = area_of(CODEC.encode(payload))
        owner = area.obj
        held = sys.getrefcount(owner)
        view = CODEC.decode(area)[10:]
        del area
        assert sys.getrefcount(owner) >= held
        assert float(view[0]) == 10.0


def test_read_only_messages_give_read_only_arrays_and_copied_tensors() -> None:
    """Nobody can write to memory that others read."""
    frames = CODEC.encode([np.arange(3), torch.arange(3)])
    array, tensor = CODEC.decode(area_of(frames).toreadonly())
    assert not array.flags.writeable
    tensor[0] = 5
    assert frames.pack() == CODEC.encode([np.arange(3), torch.arange(3)]).pack()


def test_a_mapped_file_arrives_as_an_array(tmp_path: pathlib.Path) -> None:
    """`numpy.memmap` is how large arrays are often read."""
    (tmp_path / "data").write_bytes(bytes(range(16)))
    mapped = np.memmap(tmp_path / "data", np.uint8, "r")
    assert same(travel(mapped), np.arange(16, dtype=np.uint8))


def test_tensors_go_to_the_device_asked_for() -> None:
    """`device` moves every tensor and no array."""
    tensor, array = CODEC.decode(
        area_of(CODEC.encode([torch.zeros(3), np.zeros(3)])), device="meta"
    )
    assert (tensor.device.type, type(array)) == ("meta", np.ndarray)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_tensors_are_staged_through_host_memory() -> None:
    """They arrive on the CPU, or on the device asked for."""
    sent = {"a": torch.arange(1000.0, device="cuda"), "b": torch.ones(8, 8).cuda().T}
    for device, place in ((None, "cpu"), ("cuda:0", "cuda:0")):
        found = CODEC.decode(area_of(CODEC.encode(sent)), device=device)
        assert {str(t.device) for t in found.values()} == {place}
        assert all(torch.equal(found[k].cpu(), sent[k].cpu()) for k in sent)


def test_long_strings_and_wide_ints_travel() -> None:
    """What msgpack cannot hold, or would copy, takes another way."""
    long = "é" * 40_000
    for payload in (
        long,
        {"a": long, "n": 2**70},
        [long, [1.5, 2**64, -(2**63) - 1]],
        {"b": b"x" * 70_000, 2**90: (long,)},
        {"mixed": [float(n) for n in range(20_000)], "text": "é" * 65_535},
    ):
        assert same(travel(payload), payload)
    assert [b.nbytes for b in CODEC.encode({"a": long}).buffers] == [80_000]
    assert CODEC.encode([b"x" * (APART_BYTES - 1)] * 20).buffers == ()
    for kind in (bytes, bytearray):
        images = [kind(b"x" * APART_BYTES)] * 20
        found = CODEC.encode(images)
        assert [buffer.nbytes for buffer in found.buffers] == [APART_BYTES] * 5
        assert same(travel(images), images)
    many = [b"x" * 60_000] * 200
    assert len(CODEC.encode(many).buffers) == MOST_APART_BYTES // 60_000 - 1
    assert same(travel(many), many)


@pytest.mark.parametrize(
    "other",
    [[b"x" * 30_000] * 4, 2**70, "x" * 70_000, ("é" * 40_000, -(2**80))],
    ids=["bytes", "int", "str", "both"],
)
def test_what_is_registered_is_encoded_once_whatever_is_beside_it(other: Any) -> None:
    """Its `encode` may take what it sends from where it is."""

    class Taken:
        def __init__(self, items: list[int]) -> None:
            self.items = items

        def take(self) -> list[int]:
            taken, self.items = self.items, []
            return taken

    add_safe_types(Taken, encode=Taken.take, decode=Taken)
    twice = Taken([3, 2**70])
    payload = [Taken([1, 2]), other, twice, twice]
    found = CODEC.decode(area_of(CODEC.encode(payload)))
    assert [one.items for one in (found[0], *found[2:])] == [[1, 2], [3, 2**70], []]
    assert same(found[1], other)


class Counted:
    """Knows how often it was pickled."""

    pickled = 0

    def __reduce__(self) -> tuple[type, tuple[()]]:
        Counted.pickled += 1
        return Counted, ()


def test_what_is_pickled_is_pickled_once() -> None:
    """Whatever is beside it."""
    codec = Codec(allow_pickle=True)
    for other in (2**70, "x" * 70_000, [b"x" * 30_000] * 4):
        Counted.pickled = 0
        found = codec.decode(area_of(codec.encode([Counted(), other, Counted()])))
        assert Counted.pickled == 2
        assert [type(one) for one in (found[0], found[2])] == [Counted] * 2


def test_plain_data_takes_the_short_prefix() -> None:
    """Four bytes go before a small dict, nested or not."""
    for payload in ({"a": 1, "b": [1, {"c": b"x"}]}, {"a": 1.5}, "text", None):
        assert CODEC.encode(payload).header == PLAIN + msgspec.msgpack.encode(payload)


MALFORMED = [b"", PLAIN, PLAIN[:2], PLAIN + b"\x01\x01", PLAIN + b"\xc1", b"x" * 9]
"""Areas of which none is a plain message, nor becomes one by what is around it."""
TOO_DEEP = PLAIN + b"\x91" * 300 + b"\xc0"


@given(st.lists(payloads | st.sampled_from(MALFORMED).map(memoryview), max_size=6))
@settings(max_examples=300)
def test_plain_messages_are_decoded_together_up_to_the_first_other(
    mixed: list[Any],
) -> None:
    """What many give at once is what each gives alone."""
    areas, expected = [], []
    ended = False
    for item in mixed:
        area = item if type(item) is memoryview else area_of(CODEC.encode(item))
        areas.append(area)
        ended = ended or type(item) is memoryview or area[:4] != PLAIN
        if not ended:
            expected.append(CODEC.decode(area))
    assert same(decode_several(areas), expected)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_message_that_is_nested_too_deep_does_not_spoil_those_before_it(
    place: int,
) -> None:
    """It ends what is decoded together, as it does alone."""
    areas = [area_of(CODEC.encode({"n": n, "note": "x" * 300})) for n in range(3)]
    areas[place] = memoryview(TOO_DEEP)
    assert [found["n"] for found in decode_several(areas)] == list(range(place))


@pytest.mark.parametrize("name", sorted(PAYLOADS))
def test_golden_files_hold_the_format(name: str) -> None:
    """Bytes written by an earlier version decode, and are what we write today."""
    stored = (FOLDER / f"{name}.v1.bin").read_bytes()
    area = area_of(Frames(stored, (), len(stored), frozenset()))
    assert same(CODEC.decode(area), PAYLOADS[name])
    assert CODEC.encode(PAYLOADS[name]).pack() == stored


def test_every_golden_file_has_its_payload() -> None:
    """No file is left behind that nothing checks."""
    stored = {path.name for path in FOLDER.iterdir()}
    assert stored == {f"{name}.v1.bin" for name in PAYLOADS}


def test_threads_share_a_codec() -> None:
    """A codec holds no state that two calls could disturb."""
    wrong: list[Any] = []

    def work(mark: int) -> None:
        payload = {"t": torch.full((3,), mark), "n": (mark, [mark])}
        wrong.extend(1 for _ in range(300) if not same(travel(payload), payload))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


def test_plain_payloads_load_neither_numpy_nor_torch() -> None:
    """A program that sends dicts does not pay for tensors."""
    program = (
        "import sys, types, pathlib, msgspec\n"
        "package = types.ModuleType('mq')\n"  # mq itself is another test's subject
        f"package.__path__ = [{str(pathlib.Path(sys.modules['mq'].__path__[0]))!r}]\n"
        "sys.modules['mq'] = package\n"
        "from mq.codec import Codec\n"
        "codec = Codec()\n"
        "sent = {'a': (1, {2}), 'b': 2**70, 'c': 1j}\n"
        "assert codec.decode(memoryview(codec.encode(sent).pack())) == sent\n"
        "try: codec.encode(object())\n"
        "except ValueError: pass\n"
        "sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))\n"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


def test_odd_floats_stay_what_they_are() -> None:
    """NaN payloads, infinities and signed zeros in plain data."""
    values = [NAN, float("inf"), float("-inf"), -0.0, 5e-324]
    assert same(travel(values), values)
    assert same(travel({"x": values[0], "y": -0.0}), {"x": values[0], "y": -0.0})


def test_bools_ints_and_strings_are_not_mixed_up() -> None:
    """Types that compare equal stay apart."""
    payload = [
        True,
        1,
        1.0,
        "1",
        b"1",
        (1,),
        [1],
        {1: 1, "1": 1, b"1": 1, None: 1, 1.5: 1},
    ]
    assert same(travel(payload), payload)
    assert same(travel({True: 0, 0: 1}), {True: 0, 0: 1})


@pytest.mark.parametrize("scalar", [False, True])
def test_a_dtype_that_receivers_refuse_is_not_sent(scalar: bool) -> None:
    """Nested once more than they take; what they take arrives."""
    dtype = np.dtype("f4")
    for _ in range(16):
        dtype = np.dtype([("a", dtype)])
    array = np.zeros((), dtype)[()] if scalar else np.zeros(2, dtype)
    assert same(travel(array), array)
    deeper = np.dtype([("a", dtype)])
    array = np.zeros((), deeper)[()] if scalar else np.zeros(2, deeper)
    with pytest.raises(CodecError, match=r"receivers refuse.* one by one"):
        CODEC.encode(array)


@pytest.mark.parametrize("error", [msgspec.MsgspecError, TypeError])
def test_an_error_of_msgspec_is_a_codec_error_whatever_it_derives_from(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before 0.21 its errors were no ValueErrors; 0.21 has TypeErrors of odd keys."""

    def refuse(*args: object, **kwargs: object) -> object:
        raise error("the data is malformed")

    monkeypatch.setattr(unpacking, "_decode", refuse)
    monkeypatch.setattr(plain, "_decode", refuse)
    areas = [area_of(CODEC.encode(payload)) for payload in ({"step": 1}, {1, 2})]
    assert decode_several(areas[:1] * 2) == []
    for area in areas:
        with pytest.raises(CodecError, match="the data is malformed"):
            CODEC.decode(area)
