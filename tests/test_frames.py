"""Laying messages out and cutting them up again."""

from __future__ import annotations

import contextlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mq.errors import CodecError
from mq.frames import (
    ALIGNMENT,
    PLAIN,
    SPREAD,
    TABLED,
    Frames,
    align,
    assemble,
    has_buffers,
    split,
)

blobs = st.lists(st.binary(max_size=200), max_size=6)


def make(skeleton: bytes, blobs: list[bytes]) -> Frames:
    """Frames of a skeleton and buffers."""
    return assemble(skeleton, tuple(map(memoryview, blobs)), frozenset())


@given(st.binary(max_size=300), blobs)
def test_a_packed_message_splits_into_what_it_was_made_of(
    skeleton: bytes, blobs: list[bytes]
) -> None:
    """`split` undoes `pack`, whatever the sizes."""
    frames = make(skeleton, blobs)
    area = frames.pack()
    assert len(area) == frames.nbytes
    found, buffers, areas = split(memoryview(area))
    assert not areas
    assert bytes(found) == skeleton
    assert [bytes(buffer) for buffer in buffers] == blobs


@given(st.binary(max_size=300), blobs)
def test_segments_and_pack_into_and_pack_agree(
    skeleton: bytes, blobs: list[bytes]
) -> None:
    """The three ways to lay a message out give the same bytes."""
    frames = make(skeleton, blobs)
    by_hand, at_once = bytearray(frames.nbytes), bytearray(frames.nbytes + 3)
    for start, piece in frames.segments():
        assert piece.nbytes > 0
        by_hand[start : start + piece.nbytes] = piece
    frames.pack_into(memoryview(at_once))
    assert bytes(by_hand) == bytes(at_once[:-3]) == frames.pack()


@given(st.binary(max_size=100), blobs)
def test_buffers_are_aligned(skeleton: bytes, blobs: list[bytes]) -> None:
    """Every buffer starts at a multiple of `ALIGNMENT`."""
    starts = [start for start, _ in make(skeleton, blobs).segments()]
    assert all(start % ALIGNMENT == 0 for start in starts)


def test_a_message_without_buffers_packs_without_a_copy() -> None:
    """`pack` of a header alone is the header."""
    frames = Frames(PLAIN + b"\xc0", (), 5, frozenset())
    assert frames.pack() is frames.header
    assert frames.packed() is frames


@given(st.binary(max_size=100), blobs)
def test_in_one_piece_it_is_the_same_message(
    skeleton: bytes, blobs: list[bytes]
) -> None:
    """And without buffers it may lie anywhere."""
    frames = make(skeleton, blobs)
    packed = frames.packed()
    assert packed.pack() is packed.header
    assert (packed.header, packed.nbytes) == (frames.pack(), frames.nbytes)
    assert packed.needs is frames.needs
    assert has_buffers(memoryview(packed.header)) == bool(blobs)
    for end in range(12):
        has_buffers(memoryview(packed.header[:end]))


def test_pack_into_too_small_an_area_is_refused() -> None:
    """Nothing is written where the message does not fit."""
    frames = make(b"\xc0", [b"x" * 10])
    area = bytearray(frames.nbytes - 1)
    with pytest.raises(ValueError, match="does not fit"):
        frames.pack_into(memoryview(area))
    assert not any(area)


@given(st.binary(max_size=100), blobs, st.data())
def test_every_truncated_message_is_refused(
    skeleton: bytes, blobs: list[bytes], data: st.DataObject
) -> None:
    """A tabled message that lost its end, or has more behind it, is malformed."""
    area = make(skeleton, blobs).pack()
    cut = data.draw(st.integers(0, len(area) - 1))
    with pytest.raises(CodecError):
        split(memoryview(area[:cut]))
    with pytest.raises(CodecError, match="ends at byte"):
        split(memoryview(area + b"\0"))


@given(st.binary(max_size=100))
def test_noise_raises_codec_error_and_nothing_else(noise: bytes) -> None:
    """Unless it adds up by chance."""
    for prefix in (b"", TABLED, SPREAD):
        with contextlib.suppress(CodecError):
            split(memoryview(prefix + noise))


@given(
    spread=st.booleans(),
    of_areas=st.integers(0, 5),
    sizes=st.lists(st.integers(0, 130), max_size=4),
    skeleton=st.binary(max_size=40),
    more=st.integers(-2, 2),
)
def test_what_adds_up_is_split_and_all_else_refused(
    spread: bool, of_areas: int, sizes: list[int], skeleton: bytes, more: int
) -> None:
    """Each buffer where its size says, to the last byte."""
    header = struct.pack(
        "<4sII", SPREAD if spread else TABLED, len(skeleton), len(sizes)
    )
    header += struct.pack("<I", of_areas) if spread else b""
    header += struct.pack(f"<{len(sizes)}Q", *sizes) + skeleton
    end, places = len(header), list[tuple[int, int]]()
    for size in sizes:
        start = align(end)
        end = start + size
        places.append((start, end))
    area = (header + bytes(range(256)) * 3)[: end + more]
    adds_up = more == 0 and (not spread or 1 <= of_areas <= len(sizes))
    try:
        found, buffers, areas = split(memoryview(area))
    except CodecError:
        assert not adds_up
        return
    assert adds_up
    assert len(areas) == of_areas * spread
    assert found == skeleton
    assert [*buffers, *areas] == [area[start:end] for start, end in places]


@pytest.mark.parametrize("size", [2**64 - 1, 2**63, 2**63 - 1, 2**32, 100])
def test_a_table_that_promises_more_than_there_is_is_refused(size: int) -> None:
    """Sizes are compared with the bytes that are there; they cannot overflow."""
    area = struct.pack("<4sIIQ", TABLED, 0, 1, size) + bytes(80)
    with pytest.raises(CodecError, match="buffer 0 of 1"):
        split(memoryview(area))


def test_a_table_longer_than_the_message_is_refused() -> None:
    """The number of buffers is compared with the bytes that are there."""
    area = struct.pack("<4sII", TABLED, 2**32 - 1, 2**32 - 1)
    with pytest.raises(CodecError, match="announces a header"):
        split(memoryview(area))


def test_other_formats_and_versions_are_refused_in_words() -> None:
    """The error says whether it is another version or no message at all."""
    with pytest.raises(CodecError, match=r"format 02\.00 is unknown"):
        split(memoryview(b"MQ\x02\x00\xc0"))
    with pytest.raises(CodecError, match="begins with 80 04 95 00"):
        split(memoryview(b"\x80\x04\x95\x00"))
    with pytest.raises(CodecError, match="begins with nothing"):
        split(memoryview(b""))


@given(st.integers(0, 10**6))
def test_align_rounds_up_to_the_next_multiple(offset: int) -> None:
    """`align` never moves back and never by a whole step."""
    assert align(offset) % ALIGNMENT == 0
    assert 0 <= align(offset) - offset < ALIGNMENT
