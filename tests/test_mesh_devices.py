"""Messages of which a part is on devices, over links that carry some devices."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
from payload_checks import CODEC
from scripted import Parcel, ScriptedConn
from test_devices import staged_of
from world import DEVICES, Got, World, area_of, subscribed, tensors_of

from mq.devices import Landing, Piece
from mq.errors import CodecError, MessagesLost, MessageTooLarge
from mq.frames import Frames
from mq.mesh import wire
from mq.mesh.cutting import Cutting, cut
from mq.mesh.publisher import Publisher

HOST = bytes(range(192))
AREAS = (768, 512)
CONTENT = HOST + bytes(n % 251 for n in range(sum(AREAS)))
ONE = HOST + bytes(n % 249 for n in range(AREAS[0]))


def kinds_sent(world: World) -> list[int]:
    """Notes the kind of each frame that arrives anywhere from now on."""
    kinds: list[int] = []

    def note(conn: ScriptedConn, parcel: Parcel) -> None:
        kinds.append(parcel[0][0])

    world.net.watcher = note
    return kinds


def test_tensors_go_where_they_are_carried_and_through_host_memory_elsewhere() -> None:
    """Each subscriber by its own connection, from one publish."""
    world = subscribed(
        "a", "both", "one", "none", carries={"a": 2, "both": 2, "one": 1, "none": 0}
    )
    kinds = kinds_sent(world)
    assert world["a"].publish("t", CONTENT, areas=AREAS)
    world.settle()
    for name, landed in (("both", 1), ("one", 0), ("none", 0)):
        assert world[name].payloads() == [CONTENT]
        assert world[name].landed == landed
    assert kinds.count(wire.PIECE) == 3 + 2  # pieces of 300 bytes at most
    assert wire.CHUNK in kinds


def test_a_message_of_little_host_memory_is_one_frame() -> None:
    """What describes the tensors travels in the head of the first of them."""
    world = subscribed("a", "b", carries={"a": 2, "b": 1})
    kinds = kinds_sent(world)
    assert world["a"].publish("t", ONE[:64] + ONE[-256:], areas=(256,))
    world.settle()
    assert set(kinds) & {wire.DATA, wire.CHUNK, wire.PIECE} == {wire.PIECE}
    assert kinds.count(wire.PIECE) == 1
    assert world["b"].payloads() == [ONE[:64] + ONE[-256:]]


@pytest.mark.parametrize("nbytes", [1, 100, 70_000])
def test_pads_of_a_message_in_host_memory_are_zero(nbytes: int) -> None:
    """All of it is sent: what the memory held before concerns nobody."""
    payload = [np.ones(nbytes, np.uint8), np.ones(3, np.uint8), torch.ones(5)]
    frames = CODEC.encode(payload, "t", frozenset({"cpu"}))
    large = cut(frames, Cutting(1 << 20))
    large.stage(lambda nbytes: memoryview(bytearray(b"\xaa" * nbytes)))
    assert frames.areas
    assert large.staged is not None
    views = [chunk.view for chunk in large.staged.chunks if chunk is not None]

    assert b"".join(view for view in views if view is not None) == staged_of(frames)


def test_a_message_without_subscribers_is_not_kept() -> None:
    """It counts as what nobody listens to, and holds no memory of the device."""
    world = World("a", "b", carries={"a": 2})
    assert world["a"].publish("t", CONTENT, areas=AREAS)
    topic = world["a"].mesh.publisher.topic("t")
    assert topic.stats.nobody == 1
    assert topic.view[2] == []


@pytest.mark.parametrize("carried", [0, 1, 2])
def test_a_retained_message_reaches_later_subscribers(carried: int) -> None:
    """On the device where the connection carries it, staged where it does not."""
    world = World("a", carries={"a": 2, "late": carried})
    assert world["a"].publish("t", CONTENT, retain=True, areas=AREAS)
    world.settle()
    for _ in range(2):
        world.join("late").subscribe("t")
        world.settle()
        assert world["late"].payloads() == [CONTENT]
        assert world["late"].landed == (carried == 2)
        world.leave("late")


@pytest.mark.parametrize("carried", [0, 2])
def test_a_break_in_the_middle_is_resumed(carried: int) -> None:
    """What was lost is sent again; nothing is doubled."""
    for lost in range(9):
        world = subscribed("a", "b", carries={"a": 2, "b": carried})
        world["a"].link.capacity = 4
        assert world["a"].publish("t", CONTENT, areas=AREAS)
        (conn,) = world.net.between(world["a"].link, world["b"].link)
        for _ in range(min(lost, len(conn.flight))):
            world.net.deliver(conn)
            world["b"].poll()
        world.cut("a", "b", lose_one=lost % 4)
        assert world["a"].publish("t", ONE, areas=AREAS[:1])
        world.advance(1.0)
        assert world["b"].payloads() == [CONTENT, ONE]
        assert world["b"].mesh.stats.malformed == 0


def test_keep_last_replaces_what_has_not_begun() -> None:
    """At most one message of it is on the wire."""
    world = subscribed("a", "b", carries={"a": 2, "b": 2}, keep=1)
    world.stall("b")
    for number in range(5):
        content = bytes([number]) * 64 + bytes(256)
        assert world["a"].publish("t", content, areas=(256,))
        world.advance(0.01)
    world.unstall("b")
    world.advance(0.1)
    assert world["b"].payloads()[-1] == bytes([4]) * 64 + bytes(256)


def test_credit_counts_the_bytes_on_devices() -> None:
    """The same number at both ends, by whichever way a message came."""
    for carried in (0, 2):
        world = subscribed(
            "a", "b", carries={"a": 2, "b": carried}, window_bytes=3 * len(CONTENT)
        )
        count = 0
        while world["a"].publish("t", CONTENT, areas=AREAS):
            count += 1
            world.settle()
        assert count == 3
        (feed,) = world["a"].mesh.publisher.topic("t").feeds
        (source,) = world["b"].mesh.subscriber.topics["t"].sources.values()
        assert feed.topic.total() == source.arrivals[0].nbytes == 3 * len(CONTENT)
        assert world["b"].payloads() == [CONTENT] * 3
        world.settle()
        assert world["a"].publish("t", CONTENT, areas=AREAS)


def test_a_message_over_the_limit_is_refused_before_anything_is_sent() -> None:
    """Bytes on devices count."""
    world = World("a", carries={"a": 2, "b": 2})
    world.join("b", max_message_bytes=len(CONTENT) - 1).subscribe("t")
    world.settle()
    with pytest.raises(MessageTooLarge, match="'b'"):
        world["a"].publish("t", CONTENT, areas=AREAS)
    world.settle()
    assert world["b"].payloads() == []


def test_other_topics_pass_between_the_pieces() -> None:
    """A piece each, in turn."""
    world = subscribed("a", "b", carries={"a": 2, "b": 1})
    world["b"].subscribe("u")
    world.settle()
    world["a"].link.capacity = 1
    large = HOST + bytes(256 * 20)
    assert world["a"].publish("t", large, areas=(256 * 20,))
    assert world["a"].publish("u", b"small")
    world.advance(0.1)
    topics = [item.topic for item in world["b"].recv_all() if isinstance(item, Got)]
    assert topics == ["u", "t"]


def test_memory_of_a_device_is_let_go_piece_by_piece() -> None:
    """As soon as every subscriber has them; the host's likewise."""
    world = subscribed("a", "b", carries={"a": 2, "b": 2})
    publisher: Publisher = world["a"].mesh.publisher
    topic = publisher.topic("t")
    tensors = tensors_of(CONTENT[len(HOST) :], AREAS)
    areas = tuple(map(area_of, DEVICES, tensors))
    frames = Frames(
        HOST[:64], (memoryview(HOST[64:]),), len(CONTENT), frozenset(), areas
    )
    message = publisher.publish(topic, frames, world.now, False, world.now)
    sessions = [world["a"].session(world["b"])]
    world.settle()
    publisher.free_received(topic, message, sessions)
    assert not isinstance(message.data, bytes)
    assert message.data.chunks == [None] * len(message.data.chunks)


def _loss_before_the_next(world: World) -> MessagesLost:
    """What `b` is told once `a` publishes again, which arrives."""
    assert world["a"].publish("t", ONE, areas=AREAS[:1])
    world.advance(1.0)
    notice, got = world["b"].recv_all()
    assert isinstance(notice, MessagesLost)
    assert isinstance(got, Got)
    assert got.payload == ONE
    return notice


def test_a_session_does_not_go_on_where_other_devices_are_carried() -> None:
    """What is under way could not be sent: the session is given up, and said so."""
    world = World("a", "b", carries={"a": 2, "b": 2}, peer_timeout=4.0)
    world["b"].subscribe("t")
    world.settle()
    world["a"].link.capacity = 0
    assert world["a"].publish("t", CONTENT, areas=AREAS)
    world["b"].link.devices = frozenset()
    world.cut("a", "b")
    world["a"].link.capacity = 1000
    world.advance(30.0)
    _loss_before_the_next(world)


def test_a_device_without_room_is_the_reason_of_what_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The session ends after a few tries; the next one tells, and goes on."""
    world = subscribed("a", "b", carries={"a": 2, "b": 2})

    def full(landing: Landing, start: int, piece: Piece) -> None:
        raise ValueError("no room for 768 bytes on cuda:7")

    with monkeypatch.context() as patched:
        patched.setattr(Landing, "add", full)
        assert world["a"].publish("t", CONTENT, areas=AREAS)
        world.advance(10.0)
    notice = _loss_before_the_next(world)
    for told in (notice, pickle.loads(pickle.dumps(notice))):
        assert told.reason == "malformed frames: no room for 768 bytes on cuda:7"
        assert str(told).endswith(f"this member gave 'a' up: {told.reason}")


@pytest.mark.parametrize("error", [ValueError, MemoryError])
def test_a_retained_message_that_does_not_land_is_given_up_once(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """It would end each further session, too; others come in the next."""
    world = World("a", "b", carries={"a": 2, "b": 2}, peer_timeout=4.0)
    assert world["a"].publish("t", CONTENT, retain=True, areas=AREAS)

    def failed(landing: Landing, start: int, piece: Piece) -> None:
        raise error("an assert on cuda:7")

    with monkeypatch.context() as patched:
        patched.setattr(Landing, "add", failed)
        world["b"].subscribe("t")
        world.advance(60.0)
    assert world["b"].mesh.stats.forgotten == 1
    notice = _loss_before_the_next(world)
    assert notice.reason.endswith("an assert on cuda:7")
    assert notice.count == 1


def _broken(piece: Piece, view: memoryview) -> None:
    raise RuntimeError("CUDA error: an assert\nCompile with TORCH_USE_CUDA_DSA")


def test_a_device_that_fails_as_a_message_is_staged_is_a_codec_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody got the message, and the queue goes on."""
    world = subscribed("a", "b", "c", carries={"a": 2, "b": 2, "c": 0})
    with monkeypatch.context() as patched:
        patched.setattr(Piece, "copy_to", _broken)
        with pytest.raises(CodecError, match=r"on cpu.* CUDA error: an assert$"):
            world["a"].publish("t", CONTENT, areas=AREAS)
        world.advance(1.0)
    assert world["a"].publish("t", ONE, areas=AREAS[:1])
    world.advance(1.0)
    assert world["b"].payloads() == world["c"].payloads() == [ONE]


def test_a_retained_message_on_a_device_that_has_failed_is_dropped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For want of it alone no subscriber is refused; the log says so."""
    world = World("a", carries={"a": 2, "late": 0})
    assert world["a"].publish("t", CONTENT, retain=True, areas=AREAS)
    monkeypatch.setattr(Piece, "copy_to", _broken)
    world.join("late").subscribe("t")
    world.settle()
    assert "the retained message on 't' is dropped" in caplog.text
    assert "CUDA error: an assert" in caplog.text
    assert world["a"].publish("t", b"after it")
    world.settle()
    assert world["late"].payloads() == [b"after it"]


# -- what anybody may send ----------

Change = Callable[[wire.Piece, Piece], tuple[wire.Piece, bytes | Piece]]


def _with(piece: wire.Piece, **changes: object) -> wire.Piece:
    names = piece.chunk._fields
    chunk = {key: value for key, value in changes.items() if key in names}
    rest = {key: value for key, value in changes.items() if key not in names}
    return piece._replace(chunk=piece.chunk._replace(**chunk), **rest)  # type: ignore[arg-type]


def _zeros(nbytes: int, device: str = "cpu") -> Piece:
    return Piece(torch.zeros(nbytes, dtype=torch.uint8, device=device))


HUGE = 1 << 50
CHANGES: dict[str, Change] = {
    "more than max_message_bytes": lambda head, body: (
        _with(head, sizes=(HUGE, 512), total=192 + HUGE + 512),
        body,
    ),
    "sizes beyond the total": lambda head, body: (
        _with(head, sizes=(HUGE, 512)),
        body,
    ),
    "no areas": lambda head, body: (_with(head, sizes=()), body),
    "too many areas": lambda head, body: (
        _with(head, sizes=(256,) * 65, total=192 + 256 * 65),
        body,
    ),
    "another area": lambda head, body: (_with(head, area=1), body),
    "an area that is not there": lambda head, body: (_with(head, area=2), body),
    "a size that is none": lambda head, body: (
        _with(head, sizes=(769, 512), total=192 + 769 + 512),
        body,
    ),
    "an empty area": lambda head, body: (
        _with(head, sizes=(768, 0), total=192 + 768),
        body,
    ),
    "later in its area": lambda head, body: (_with(head, start=256), body),
    "a larger piece": lambda head, body: (head, _zeros(769)),
    "bytes in place of a tensor": lambda head, body: (head, bytes(300)),
    "no body": lambda head, body: (head, b""),
    "a sequence that is none": lambda head, body: (
        _with(head, sequence=wire.MAX_SEQUENCE + 1),
        body,
    ),
    "a subscription that is none": lambda head, body: (
        _with(head, subscription=99),
        body,
    ),
    "a part beyond the host memory": lambda head, body: (
        _with(head, part=memoryview(bytes(300))),
        body,
    ),
    "host memory of another size": lambda head, body: (
        _with(head, total=head.chunk.total + 64),
        body,
    ),
}


def packed(parcel: Parcel, head: wire.Piece, body: bytes | Piece) -> Parcel:
    """A PIECE frame with the header of another."""
    chunk = head.chunk
    content = wire.CHUNK_HEAD.pack(
        chunk.subscription,
        len(chunk.part),
        chunk.sequence,
        chunk.published_at,
        chunk.total,
        chunk.offset,
    )
    place = wire.pack_piece(head.area, head.start, head.sizes)
    return parcel[0][: wire.HEADER_BYTES] + content + place + chunk.part, body


@pytest.mark.parametrize(
    ("name", "which"),
    [
        (name, which)
        for name in CHANGES
        for which in (0, 2)
        # What the first piece says of the message is believed, and then contradicted.
        if (name, which) != ("host memory of another size", 0)
    ],
)
def test_a_piece_that_does_not_fit_breaks_the_connection(name: str, which: int) -> None:
    """Before memory is taken for it; what is resumed then arrives."""
    world = subscribed("a", "b", carries={"a": 2, "b": 2})
    taken = len(world["b"].taken)
    seen = 0

    def tamper(conn: ScriptedConn, parcel: Parcel) -> Parcel:
        nonlocal seen
        if parcel[0][0] != wire.PIECE or not parcel[0][1] & wire.FLAG_TENSOR:
            return parcel
        seen += 1
        if seen != which + 1:
            return parcel
        assert isinstance(parcel[1], Piece)
        head = wire.parse_piece(memoryview(parcel[0]))
        return packed(parcel, *CHANGES[name](head, parcel[1]))

    world.net.tamper = tamper
    assert world["a"].publish("t", CONTENT, areas=AREAS)
    world.advance(1.0)
    assert world["b"].mesh.stats.malformed == 1
    assert max(world["b"].taken[taken:], default=0) <= len(CONTENT)
    assert world["b"].payloads() == [CONTENT]


def test_a_tensor_where_host_memory_belongs_breaks_the_connection() -> None:
    """In a chunk, a batch, a control frame, and a message before any session."""
    for kind in (wire.CHUNK, wire.DATA, wire.CREDIT, wire.PIECE):
        world = subscribed("a", "b", carries={"a": 2, "b": 2})
        changed = []

        def tamper(
            conn: ScriptedConn,
            parcel: Parcel,
            kind: int = kind,
            changed: list[int] = changed,
        ) -> Parcel:
            head, body = parcel
            if head[0] == wire.PIECE and not changed:
                changed.append(1)
                return bytes([kind, 0]) + head[2:], _zeros(100)
            return head, body

        world.net.tamper = tamper
        assert world["a"].publish("t", CONTENT, areas=AREAS)
        world.advance(1.0)
        assert world["b"].mesh.stats.malformed == 1
        assert world["b"].payloads() == [CONTENT]


def test_pieces_of_one_area_on_two_devices_break_the_connection() -> None:
    """They cannot be put together."""
    world = subscribed("a", "b", carries={"a": 2, "b": 2})
    changed = 0

    def tamper(conn: ScriptedConn, parcel: Parcel) -> Parcel:
        nonlocal changed
        head, body = parcel
        if head[0] == wire.PIECE and isinstance(body, Piece) and changed < 2:
            changed += 1
            return head, _zeros(len(body), "cpu" if changed == 1 else "meta")
        return head, body

    world.net.tamper = tamper
    assert world["a"].publish("t", CONTENT, areas=AREAS)
    world.advance(1.0)
    assert world["b"].mesh.stats.malformed == 1


def test_a_message_that_ends_before_its_areas_is_malformed() -> None:
    """The last piece says so, whatever is missing."""
    world = subscribed("a", "b", carries={"a": 2, "b": 2})

    def tamper(conn: ScriptedConn, parcel: Parcel) -> Parcel:
        head, body = parcel
        if head[0] == wire.PIECE:
            head = bytes([head[0], head[1] | wire.FLAG_LAST]) + head[2:]
        return head, body

    world.net.tamper = tamper
    assert world["a"].publish("t", CONTENT, areas=AREAS)
    world.advance(1.0)
    assert world["b"].mesh.stats.malformed >= 1
    assert not [item for item in world["b"].recv_all() if isinstance(item, Got)]
