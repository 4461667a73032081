"""Tensors that stay on their device: from the codec through areas and back."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from make_golden import PAYLOADS
from payload_checks import CODEC, bits, same

from mq import devices
from mq import extensions as ext
from mq.devices import Area, Landing, Piece
from mq.errors import CodecError
from mq.frames import Frames, Spread, align_area, assemble

CARRIED = frozenset({"cpu"})
Ext = msgspec.msgpack.Ext
pack = msgspec.msgpack.encode


def host_of(frames: Frames) -> bytearray:
    """What of a message is in host memory, pads included."""
    host = bytearray(frames.nbytes - sum(area.nbytes for area in frames.areas))
    for start, piece in frames.segments():
        host[start : start + len(piece)] = piece
    return host


def spread_of(frames: Frames, most: int = 1000) -> Spread:
    """What a receiver holds where tensors arrive on a device."""
    landings = []
    for area in frames.areas:
        pieces = area.pieces(most)
        landing = pieces[0].begin(area.nbytes)
        start = 0
        for piece in pieces:
            landing.add(start, piece)
            start += len(piece)
        landings.append(landing)
    return Spread(memoryview(host_of(frames)), tuple(landings))


def staged_of(frames: Frames, most: int = 1000) -> memoryview:
    """The same message in host memory."""
    whole = host_of(frames)
    for area in frames.areas:
        for piece in area.pieces(most):
            copy = bytearray(len(piece))
            piece.copy_to(memoryview(copy))
            whole += copy
    return memoryview(whole)


@pytest.mark.parametrize("name", sorted(PAYLOADS))
@pytest.mark.parametrize("arrival", [spread_of, staged_of])
def test_every_payload_arrives_the_same_by_both_ways(
    name: str, arrival: Callable[[Frames], Any]
) -> None:
    """On a device, and staged for those who do not get it there."""
    payload = PAYLOADS[name]
    frames = CODEC.encode(payload, "t", CARRIED)
    assert len(staged_of(frames)) == frames.nbytes
    assert same(CODEC.decode(arrival(frames)), CODEC.decode(staged_of_plain(payload)))


def staged_of_plain(payload: Any) -> memoryview:
    """A payload as it travels without devices."""
    return memoryview(bytearray(CODEC.encode(payload).pack()))


DTYPES = (torch.bool, torch.uint8, torch.bfloat16, torch.float32, torch.complex64)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(DTYPES), st.lists(st.integers(0, 9), max_size=3), st.text()
        ),
        max_size=6,
    ),
    st.integers(1, 3000),
)
def test_any_tensors_fit_into_pieces_of_any_size(
    described: list[tuple[torch.dtype, list[int], str]], most: int
) -> None:
    """They come back bit by bit, and the caller's may be changed at once."""
    payload = [
        (torch.testing.make_tensor(shape, dtype=dtype, device="cpu"), text)
        for dtype, shape, text in described
    ]
    before = [bits(tensor) for tensor, _ in payload]
    frames = CODEC.encode(payload, "t", CARRIED)
    for area in frames.areas:
        assert area.nbytes == align_area(area.nbytes) > 0
        assert all(len(p) == most for p in area.pieces(most)[:-1])
    for tensor, _ in payload:
        tensor.zero_()
    found = CODEC.decode(spread_of(frames, most))
    assert [bits(tensor) for tensor, _ in found] == before
    assert [tensor.shape for tensor, _ in found] == [t.shape for t, _ in payload]


def test_strides_history_and_lazy_bits_are_carried_out() -> None:
    """A tensor arrives contiguous, by its values, without `requires_grad`."""
    base = torch.arange(12).to(torch.complex64).reshape(3, 4)
    odd = torch.empty(1).as_strided((1, 0, 2), (7, 0, 0))
    sent = [base.T.conj(), base[:, 1], torch.ones(3, requires_grad=True), odd]
    sent.append(torch.nn.Parameter(torch.ones(1).as_strided((1, 1), (5, 9))))
    found = CODEC.decode(spread_of(CODEC.encode(sent, "t", CARRIED)))
    assert all(torch.equal(a, b.detach()) for a, b in zip(found, sent, strict=True))
    assert all(t.is_contiguous() and not t.requires_grad for t in found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_has_no_elements_has_the_strides_of_a_tensor_made_here(
    dtype: torch.dtype,
) -> None:
    """Alone, between others and as the last."""
    shapes = [(0,), (0, 2), (3, 0, 2), (2, 3, 0)]
    sent = [torch.empty(shape, dtype=torch.uint8).to(dtype) for shape in shapes]
    sent.insert(2, torch.ones(3))
    found = CODEC.decode(spread_of(CODEC.encode(sent, "t", CARRIED)))
    assert [tensor.stride() for tensor in found] == [t.stride() for t in sent]


def test_pads_between_tensors_are_zero() -> None:
    """What the device's memory held before stays here."""
    area = Area(torch.device("cpu"))
    for _ in range(3):
        area.append(torch.full((10,), 255, dtype=torch.uint8))
    whole = torch.cat([piece.tensor for piece in area.pieces(100)])
    assert int(whole.sum()) == 3 * 10 * 255


def test_tensors_of_other_devices_travel_as_ever() -> None:
    """Only what is carried stays where it is."""
    frames = CODEC.encode(torch.arange(3), "t", frozenset({"cuda:0"}))
    assert not frames.areas
    assert frames.buffers


def test_areas_go_to_the_device_asked_for() -> None:
    """`device` of a subscription comes after the device map."""
    frames = CODEC.encode([torch.ones(2)], "t", CARRIED)
    for arrived in (spread_of(frames), staged_of(frames)):
        (tensor,) = CODEC.decode(arrived, device="meta")
        assert (tensor.device.type, tensor.shape) == ("meta", (2,))


# -- what anybody may send ----------


def area_of(content: bytes) -> Landing:
    """An area that has arrived."""
    piece = Piece(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    landing = piece.begin(len(content))
    landing.add(0, piece)
    return landing


def message(skeleton: object, nbytes: int) -> Spread:
    """A message with one area of zeros."""
    area = Area(torch.device("cpu"))
    area.append(torch.zeros(nbytes, dtype=torch.uint8))
    frames = assemble(pack(skeleton), (), frozenset(), (area,))
    return Spread(memoryview(host_of(frames)), (area_of(bytes(area.nbytes)),))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (["float32", 0, 0, 64], None),
        (["float32", 1, 0, 64], "area 1 of 1"),
        (["float32", -1, 0, 64], "area -1"),
        (["float32", "0", 0, 64], "area '0'"),
        (["float32", True, 0, 64], "area True"),
        (["float32", 0, 4, 63], "out of place"),
        (["float32", 0, -256, 64], "out of place"),
        (["float32", 0, 0.0, 64], "out of place"),
        (["float32", 0, 0, 65], "ends at 260"),
        (["float32", 0, 0, 2**40], "ends at"),
        (["float32", 0, 0, -1], "no dimension"),
        (["float32", 0, 0, 2**62, 2], "does not fit"),
        (["float33", 0, 0, 64], "float33"),
        ([["float32"], 0, 0, 64], "does not have here"),
        (["float32", 0], "malformed"),
    ],
)
def test_a_reference_that_is_wrong_is_a_codec_error(
    body: list[object], words: str | None
) -> None:
    """Wrong index, place, size or type: nothing is looked at beyond the area."""
    arrived = message(Ext(ext.ON_DEVICE, pack(body)), 256)
    if words is None:
        assert CODEC.decode(arrived).tolist() == [0.0] * 64
        return
    with pytest.raises(CodecError, match=words):
        CODEC.decode(arrived)


def test_bytes_of_an_area_belong_to_one_tensor_each() -> None:
    """None is used twice, and none is left over."""
    tensor = Ext(ext.ON_DEVICE, pack(["uint8", 0, 0, 10]))
    with pytest.raises(CodecError, match="out of place"):
        CODEC.decode(message([tensor, tensor], 10))
    with pytest.raises(CodecError, match="the skeleton refers to 10"):
        CODEC.decode(message([tensor], 257))
    with pytest.raises(CodecError, match="the skeleton refers to 0"):
        CODEC.decode(message([], 257))


def test_bools_of_an_area_are_sound() -> None:
    """Any byte but 0 counts as True, as one byte 1."""
    area = Area(torch.device("cpu"))
    area.append(torch.tensor([0, 1, 2, 255], dtype=torch.uint8))
    body = pack(["bool", 0, 0, 4])
    frames = assemble(pack(Ext(ext.ON_DEVICE, body)), (), frozenset(), (area,))
    for arrived in (spread_of(frames), staged_of(frames)):
        found = CODEC.decode(arrived).view(torch.uint8)
        assert found.tolist() == [0, 1, 1, 1]


def test_a_device_without_room_for_sound_bools_lacks_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are copied where they arrived."""
    arrived = spread_of(CODEC.encode([torch.ones(2).bool()], "t", CARRIED))

    def full(tensor: torch.Tensor, other: int) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(torch.Tensor, "ne", full)
    with pytest.raises(MemoryError, match="2 bytes cannot be put on cpu: no memory;"):
        CODEC.decode(arrived)


def test_areas_must_be_those_that_the_message_announces() -> None:
    """Others, fewer, or some that nobody announced are refused."""
    frames = CODEC.encode(torch.arange(100), "t", CARRIED)
    host = memoryview(host_of(frames))
    good, other = area_of(bytes(frames.areas[0].nbytes)), area_of(bytes(256))
    assert CODEC.decode(Spread(host, (good,))).shape == (100,)
    for areas in ((other,), (good, good)):
        with pytest.raises(CodecError, match="areas of"):
            CODEC.decode(Spread(host, areas))
    with pytest.raises(CodecError):
        CODEC.decode(host)
    plain = memoryview(bytearray(CODEC.encode(list(range(9))).pack()))
    with pytest.raises(CodecError):
        CODEC.decode(Spread(plain, (other,)))


def test_any_change_of_a_message_with_areas_decodes_or_is_a_codec_error() -> None:
    """No other exception comes of it."""
    random_ = random.Random(3)
    payload = {"a": torch.arange(50), "b": [torch.ones(3, 3), b"x" * 70_000], "c": 1}
    frames = CODEC.encode(payload, "t", CARRIED)
    host, area = host_of(frames), bytes(frames.areas[0].nbytes)
    for turn in range(3000):
        changed = bytearray(host)
        for _ in range(random_.randint(1, 3)):
            changed[random_.randrange(min(len(changed), 300))] = random_.randrange(256)
        arrived = Spread(memoryview(changed), (area_of(area),))
        with contextlib.suppress(CodecError):
            CODEC.decode(arrived if turn % 2 else memoryview(changed + area))


# -- the order of what happens on a GPU ----------


class Streams:
    """Stands in for CUDA: notes what waits for what on which stream."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.noted: list[tuple[str, object]] = []
        self.current = "application"
        self._events = 0
        monkeypatch.setattr(devices, "filled", self._filled)
        monkeypatch.setattr(devices, "wait_for", self._await)
        monkeypatch.setattr(devices, "used_here", self._used)
        monkeypatch.setattr(devices, "aside", self._aside)

    def _filled(self, device: torch.device) -> object:
        self._events += 1
        self.noted.append((self.current, f"record {self._events}"))
        return self._events

    def _await(self, ready: object, device: torch.device) -> None:
        if ready is not None:
            self.noted.append((self.current, f"wait for {ready}"))

    def _used(self, tensor: torch.Tensor) -> None:
        self.noted.append((self.current, f"uses {tensor.numel()}"))

    @contextlib.contextmanager
    def _aside(self, devices: object, streams: object = None) -> Iterator[None]:
        before, self.current = self.current, "aside"
        yield
        self.current = before


def test_whoever_uses_a_piece_waits_for_what_filled_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On its own stream: neither this thread nor any device waits."""
    streams = Streams(monkeypatch)
    area = Area(torch.device("cpu"))
    area.append(torch.arange(512).to(torch.uint8))
    pieces = area.pieces(256)
    assert streams.noted == [("application", "record 1")]
    streams.noted.clear()

    with devices.leaving(pieces):
        streams.noted.append((streams.current, "call"))
    assert streams.noted == [*[("aside", "wait for 1")] * 2, ("aside", "call")]
    streams.noted.clear()

    landing = pieces[0].begin(512)
    for start, piece in zip((0, 256), pieces, strict=True):
        landing.add(start, Piece(piece.tensor, f"arrival at {start}"))
    assert streams.noted == [
        ("aside", "wait for arrival at 0"),
        ("aside", "uses 256"),
        ("aside", "record 2"),
        ("aside", "wait for arrival at 256"),
        ("aside", "uses 256"),
        ("aside", "record 3"),
    ]
    streams.noted.clear()
    landing.claim()
    assert streams.noted == [("application", "wait for 3"), ("application", "uses 512")]
    streams.noted.clear()
    pieces[0].copy_to(memoryview(bytearray(256)))
    assert streams.noted == [("aside", "wait for 1")]


@pytest.mark.parametrize("carried", [CARRIED, frozenset[str]()])
def test_a_tensor_is_not_published_into_a_graph_that_is_captured(
    monkeypatch: pytest.MonkeyPatch, carried: frozenset[str]
) -> None:
    """The copy of it would be made at each replay, and not now, on any transport."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    payload = {"x": torch.ones(3, requires_grad=True)}
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
        with pytest.raises(CodecError, match=r"\['x'\].*publish .* after the capture"):
            CODEC.encode(payload, "t", carried)
    assert CODEC.encode(payload, "t", carried)  # on the CPU it is no part of a graph


def test_streams_aside_are_current_on_their_own_devices_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One for each device; without that, torch would take GPU 0 into use as well."""
    noted: list[str] = []

    @contextlib.contextmanager
    def current(what: object) -> Iterator[None]:
        noted.append(f"{what}")
        yield
        noted.append(f"not {what}")

    def new(device: torch.device, priority: int) -> str:
        devices._streams.setdefault(device, "another thread's")
        return "a second one"

    monkeypatch.setattr(torch.cuda, "device", current)
    monkeypatch.setattr(torch.cuda, "stream", current)
    monkeypatch.setattr(torch.cuda, "Stream", new)
    monkeypatch.setattr(devices, "_streams", {torch.device("cuda", 1): "known"})
    with devices.aside([torch.device(name) for name in ("cuda:1", "cpu", "cuda:2")]):
        noted.append("work")
    begun = ["cuda:1", "known", "cuda:2", "another thread's"]
    assert noted == [*begun, "work", *(f"not {what}" for what in reversed(begun))]


def test_a_piece_that_is_the_whole_area_is_not_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`claim` gives the memory in which it arrived, once that is filled."""
    streams = Streams(monkeypatch)
    tensor = torch.zeros(256, dtype=torch.uint8)
    landing = Piece(tensor).begin(256)
    landing.add(0, Piece(tensor, "arrival"))
    assert landing.claim() is tensor
    assert streams.noted == [
        ("application", "wait for arrival"),
        ("application", "uses 256"),
    ]


def test_a_piece_on_another_device_or_without_room_is_refused() -> None:
    """The reason is in the text."""
    whole = torch.zeros(100, dtype=torch.uint8)
    landing = Landing(1 << 62, torch.device("cpu"))
    with pytest.raises(ValueError, match=f"no room for {1 << 62} bytes on cpu"):
        landing.add(0, Piece(whole))
    with pytest.raises(ValueError, match="a piece on meta of an area on cpu"):
        landing.add(0, Piece(whole.to("meta")))


def broken(*args: object, **kwargs: object) -> None:
    """What any call may do once the device has failed."""
    raise RuntimeError("CUDA error: an assert\nCompile with TORCH_USE_CUDA_DSA")


@pytest.mark.parametrize("interrupted", [False, True])
def test_the_stream_of_before_is_current_again(
    monkeypatch: pytest.MonkeyPatch, interrupted: bool
) -> None:
    """Where torch's own means make one current; also after a Ctrl-C right then."""
    device = torch.device("cuda", 1)
    current: list[object] = [(7, 1, 1)]

    def become(*, stream_id: int, device_index: int, device_type: int) -> None:
        current[0] = stream_id, device_index, device_type
        if interrupted and stream_id == 8:
            raise KeyboardInterrupt

    for name, function in (
        ("_cuda_getDevice", lambda: 1),
        ("_cuda_getCurrentStream", lambda index: current[0]),
        ("_cuda_setStream", become),
    ):
        monkeypatch.setattr(torch._C, name, function, raising=False)
    ours = SimpleNamespace(stream_id=8, device_index=1, device_type=1)
    monkeypatch.setattr(devices, "_streams", {device: ours})
    with contextlib.suppress(KeyboardInterrupt), devices.aside([device]):
        assert current == [(8, 1, 1)]
        assert not interrupted
    assert current == [(7, 1, 1)]


@pytest.mark.parametrize("step", ["wait_for", "used_here", "filled", "aside"])
def test_a_device_that_fails_as_pieces_land_is_the_reason_that_is_given(
    monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Of one kind for whoever puts them together, wherever torch notices."""
    monkeypatch.setattr(devices, step, broken)
    piece = Piece(torch.zeros(100, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"a piece on cpu .*: CUDA error: an assert$"):
        piece.begin(256).add(0, piece)


def test_a_device_that_fails_as_a_piece_arrives_is_told_of_where_it_lands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who takes it from the wire can tell nobody; small pieces are whole areas."""
    with monkeypatch.context() as patch:
        patch.setattr(devices, "filled", broken)
        piece = Piece.arrived(torch.zeros(256, dtype=torch.uint8))
    for nbytes in (256, 512):
        with pytest.raises(ValueError, match=r"arrive: CUDA error: an assert$"):
            piece.begin(nbytes).add(0, piece)


def test_a_piece_that_finds_no_room_is_a_matter_of_memory() -> None:
    """There may be some later."""
    device = torch.device("cpu")
    error = torch.cuda.OutOfMemoryError("CUDA out of memory. Tried\nand more")
    piece = Piece.missing(100, device, error)
    assert len(piece) == 100
    with pytest.raises(MemoryError, match=r"on cpu did not arrive: CUDA .* Tried$"):
        Landing(256, device).add(0, piece)


def test_a_device_that_fails_as_it_is_copied_from_is_a_codec_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In `publish`; one that is only full has an error of torch's that says so."""
    frames = CODEC.encode(torch.ones(3), "t", CARRIED)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "cat", broken)
        with pytest.raises(CodecError, match=r"tensors on cpu .* an assert; nobody"):
            frames.areas[0].pieces(1000)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "contiguous", broken)
        for carried in (CARRIED, frozenset[str]()):
            with pytest.raises(CodecError, match=r"\['x'\].* CUDA error: an assert"):
                CODEC.encode({"x": torch.ones(3, requires_grad=True)}, "t", carried)

    def full(*args: object) -> None:
        raise torch.cuda.OutOfMemoryError("no memory")

    monkeypatch.setattr(torch, "cat", full)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        frames.areas[0].pieces(1000)


def test_pieces_are_put_together_alike_in_inference_mode_and_out_of_it() -> None:
    """Any thread may come upon them; what they become can be trained with."""
    pieces = [Piece(torch.full((256,), n, dtype=torch.uint8)) for n in (1, 2)]
    landing = pieces[0].begin(512)
    with torch.inference_mode():
        landing.add(0, pieces[0])
    landing.add(256, pieces[1])
    found = landing.claim()
    assert not found.is_inference()
    assert found.tolist() == [1] * 256 + [2] * 256


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_streams_of_a_gpu_are_ordered_without_waiting_for_it() -> None:
    """The sender goes on writing, the receiver reads at once, each on its stream."""
    device = torch.device("cuda:0")
    source = torch.zeros(1 << 26, dtype=torch.uint8, device=device)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream(device)):
        torch.cuda._sleep(200_000_000)  # what follows is not done for a while
        source.fill_(7)
        area = Area(device)
        area.append(source)
        pieces = area.pieces(1 << 24)
        source.fill_(9)
    landing = pieces[0].begin(area.nbytes)
    start = 0
    for piece in pieces:
        landing.add(start, piece)
        start += len(piece)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        assert bool((landing.claim() == 7).all())
    host = bytearray(len(pieces[0]))
    pieces[0].copy_to(memoryview(host))
    assert host == bytes([7]) * len(host)
