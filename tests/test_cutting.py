"""How messages are cut into chunks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from world import World

from mq.codec import Codec
from mq.frames import Frames
from mq.mesh import cutting, outgoing
from mq.mesh.cutting import Cutting, cut
from mq.mesh.large import Chunk, Large

CODEC = Codec()
CHUNK, JOINED, GATHERED = 16_384, 4_096, 1_024


@pytest.fixture(autouse=True, scope="module")
def _small_sizes() -> object:
    """So that a few KB have many chunks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cutting, "JOINED_BYTES", JOINED)
        patch.setattr(cutting, "GATHER_BYTES", GATHERED)
        yield


def take(nbytes: int) -> memoryview:
    """Memory in which there was something before."""
    return memoryview(bytearray(b"\xaa" * nbytes))


def encoded(sizes: list[int]) -> Frames:
    """Arrays of these sizes in bytes, not packed although they are few."""
    random = np.random.default_rng(1)
    return CODEC._encode_plainly([random.integers(1, 255, n, np.uint8) for n in sizes])


def chunks_of(found: Large) -> list[Chunk]:
    """All of them are still there."""
    chunks = [chunk for chunk in found.chunks if chunk is not None]
    assert len(chunks) == len(found.chunks)
    return chunks


def put_together(found: Large) -> bytes:
    """As a receiver does."""
    area = bytearray(len(found))
    end = 0
    for chunk in chunks_of(found):
        assert end <= chunk.offset < end + 64
        assert chunk.part or chunk.view
        end = chunk.offset + len(chunk.part)
        area[chunk.offset : end] = chunk.part
        if chunk.view is not None:
            start = chunk.offset_of(0)
            end = start + len(chunk.view)
            area[start:end] = chunk.view
    return bytes(area)


@given(st.lists(st.integers(0, 3 * JOINED) | st.integers(0, 4 * CHUNK), max_size=20))
def test_what_is_put_together_is_the_message(sizes: list[int]) -> None:
    """Wherever it is cut; no chunk is larger than a link carries."""
    frames = encoded([*sizes, CHUNK])
    found = cut(frames, Cutting(CHUNK, CHUNK), take=take)
    assert put_together(found) == frames.pack()
    for chunk in chunks_of(found):
        assert chunk.body_nbytes <= CHUNK
        assert len(chunk.part) <= GATHERED


@given(st.lists(st.integers(900, 1600) | st.integers(0, 5000), max_size=20))
def test_what_is_gathered_is_bounded_where_chunks_are_small(sizes: list[int]) -> None:
    """The rest of a large piece may be as small as what is gathered."""
    frames = encoded(sizes)
    found = cut(frames, Cutting(1500, 1500))
    assert put_together(found) == frames.pack()
    for chunk in chunks_of(found):
        assert chunk.body_nbytes <= 1500
        assert len(chunk.part) <= GATHERED


def test_pieces_stay_where_they_are_as_long_as_there_is_no_memory() -> None:
    """They leave from there, one by one."""
    frames = encoded([GATHERED] * 39)
    given = iter([memoryview(bytearray(CHUNK))])

    def take_once(nbytes: int) -> memoryview:
        for memory in given:
            return memory[:nbytes]
        raise MemoryError

    found = cut(frames, Cutting(CHUNK, CHUNK), take=take_once)
    assert put_together(found) == frames.pack()
    owned = [chunk.owned for chunk in chunks_of(found)]
    assert owned == [True] + [False] * (len(owned) - 1)
    assert len(owned) > 20


def test_what_nobody_gets_and_what_is_very_large_is_not_copied_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others wait for the lock meanwhile."""
    frames = encoded([GATHERED] * 39)
    world = World("a", "b")
    world.settle()
    taken: list[int] = []

    def taking(nbytes: int) -> memoryview:
        taken.append(nbytes)
        return take(nbytes)

    topic = world["a"].mesh.publisher.topic("t")
    topic.cut(frames, Cutting(CHUNK, CHUNK), taking, retain=False)
    assert not taken
    topic.cut(frames, Cutting(CHUNK, CHUNK), taking, retain=True)
    assert taken
    world["b"].subscribe("t")
    world.settle()
    assert topic.feeds
    taken.clear()
    topic.cut(frames, Cutting(CHUNK, CHUNK), taking, retain=False)
    assert taken
    taken.clear()
    monkeypatch.setattr(outgoing, "MOST_JOINED_BYTES", frames.nbytes - 1)
    topic.cut(frames, Cutting(CHUNK, CHUNK), taking, retain=False)
    assert not taken


@given(st.lists(st.integers(GATHERED, JOINED // 2), min_size=2, max_size=40))
def test_pieces_that_are_small_travel_together(sizes: list[int]) -> None:
    """One more chunk takes longer than to copy them."""
    frames = encoded(sizes)
    found = cut(frames, Cutting(CHUNK, CHUNK), take=take)
    assert put_together(found) == frames.pack()
    assert len(found.chunks) <= 1 + frames.nbytes // (CHUNK - JOINED)


def test_large_pieces_are_not_copied() -> None:
    """They leave from the caller's memory, what is small between them with the next."""
    frames = encoded([JOINED, 10, JOINED + 1, 900, JOINED, 5])
    chunks = chunks_of(cut(frames, Cutting(CHUNK, CHUNK), take=take))
    bodies = [frames.buffers[index] for index in (0, 2, 4)]
    for chunk, body in zip(chunks, bodies, strict=False):
        assert chunk.view is not None
        assert chunk.part
        assert not chunk.owned
        assert chunk.view.obj is body.obj
    assert chunks[-1].view is None


def test_what_was_copied_together_is_nobodys_to_change() -> None:
    """The caller's memory is free at once."""
    frames = encoded([GATHERED] * 39)
    expected = frames.pack()
    found = cut(frames, Cutting(CHUNK, CHUNK), take=take)
    for buffer in frames.buffers:
        buffer[:] = bytes(len(buffer))
    assert put_together(found) == expected
    assert all(chunk.owned for chunk in chunks_of(found))
    assert len(found.chunks) == 3
