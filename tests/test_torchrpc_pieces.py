"""Tensors that TensorPipe moves as such: device maps, real calls between processes."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from carrying_link import CarryingLink
from hypothesis import given
from hypothesis import strategies as st
from suite_parts import each_part
from torchrpc_links import context

import mq
from mq import registry
from mq.devices import Piece
from mq.testing.link_world import PATIENCE, World
from mq.transport import Conn, What
from transports import _torchrpc_devices as devices
from transports._torchrpc_aliases import Aliases
from transports._torchrpc_outboxes import INLINE_BYTES
from transports._torchrpc_pieces import HOST_SHARE, unwrap, weight, wrapped

HERE = Path(__file__).parent

# -- names and maps ----------

indices = st.lists(st.integers(0, 7), unique=True, max_size=4)
maps = st.dictionaries(
    st.sampled_from("abc"), st.dictionaries(st.integers(0, 3), st.integers(0, 3))
)


@given(maps, indices, st.integers(0, 5))
def test_every_peer_finds_its_map_among_those_declared(
    wanted: devices.DeviceMap, local: list[int], others: int
) -> None:
    """The agent's maps are fixed before any peer is known."""
    aliases = Aliases(devices.all_declared(wanted, local, others))
    given_out = set()
    for peer in [*wanted, *("?" * others)]:
        pairs = devices.declared(wanted, peer, local)
        name = aliases.take(pairs)
        assert bool(name) == bool(pairs)
        if name:
            mapped = aliases.declared()[name]
            assert mapped == {f"cuda:{a}": f"cuda:{b}" for a, b in pairs}
            assert name not in given_out
            given_out.add(name)


def test_names_are_used_again() -> None:
    """As many peers at a time as there are names, and any number one after another."""
    pairs = ((0, 1),)
    aliases = Aliases([(pairs, 2)])
    first, second = aliases.take(pairs), aliases.take(pairs)
    assert aliases.take(pairs) == aliases.take(((0, 0),)) == ""
    aliases.give_back(first)
    assert aliases.take(pairs) == first != second


def test_a_map_to_a_gpu_that_does_not_take_part_is_refused() -> None:
    """TensorPipe would end both processes."""
    with pytest.raises(ValueError, match=r"b_0_1: GPU 1 of member 'b' is not among"):
        devices.resolve({"b": {0: 1}}, "b", (0,), 2, (0,))
    assert devices.resolve({}, "b", (0, 1), 2, (1,)) == {1: 1}


# -- what goes into calls ----------


def _tensor(**options: Any) -> torch.Tensor:
    return torch.zeros(**{"size": (9,), "dtype": torch.uint8, **options})


@pytest.mark.parametrize(
    "body",
    [
        (),
        (1,),
        (_tensor(), _tensor()),
        (_tensor(dtype=torch.int8),),
        (_tensor(size=(3, 3)),),
        (_tensor(size=(18,))[::2],),
        (_tensor(size=(0,)),),
        (_tensor(size=(1001,)),),
        (_tensor(device="meta"),),
        (b"bytes",),
        ("cpu", b""),
        ("cpu", bytes(INLINE_BYTES + 1)),
        ("cpu", bytearray(9)),
        ("cpu", _tensor(dtype=torch.int8)),
        ("cpu", _tensor(size=(0,))),
        ("cuda:0", b"bytes"),
        (b"cpu", b"bytes"),
        (["cpu"], b"bytes"),
    ],
)
def test_a_piece_that_no_member_sends_is_refused(body: tuple[object, ...]) -> None:
    """Other dtype, shape, size, device or number."""
    assert not unwrap([None, body], {"cpu"}, 1000)
    assert not unwrap((_tensor(),), {"cpu"}, 1000)
    assert not unwrap([(_tensor(),)], {"cuda:0"}, 1000)


def test_pieces_are_told_from_host_memory() -> None:
    """Large host memory travels as a tensor, too."""
    piece, large = Piece(_tensor()), _tensor(size=(999,))
    bodies, pieces, parcels = wrapped([None, b"small", large, piece])
    assert (pieces, parcels) == ([piece], [])
    assert unwrap(bodies, {"cpu"}, 9)
    assert bodies[:3] == [None, b"small", large]
    assert isinstance(bodies[3], Piece)
    assert bodies[3].tensor is piece.tensor
    assert weight(Piece(_tensor(size=(800,)))) == 800
    large_piece = Piece(_tensor(size=(4 * INLINE_BYTES,)))
    assert weight(large_piece) == 4 * INLINE_BYTES // HOST_SHARE
    assert (weight(None), weight(large)) == (0, 999)


def test_a_small_piece_comes_with_its_bytes() -> None:
    """To the device that it names."""
    bodies: list[object] = [None, ("cpu", b"bytes")]
    assert unwrap(bodies, {"cpu"}, 9)
    piece = bodies[1]
    assert isinstance(piece, Piece)
    assert bytes(piece.tensor.numpy()) == b"bytes"


def pieces_of(conn: Conn) -> list[tuple[bytes, bytes]]:
    """Heads and contents of the pieces that can be received."""
    found = []
    while (message := conn.receive()) is not None:
        assert conn.holds_piece
        piece = conn.take_piece()
        assert message[1] == len(piece)
        found.append((bytes(message[0]), piece.tensor.numpy().tobytes()))
    return found


@pytest.mark.parametrize("way", ["shared", "host", "engine"])
def test_pieces_arrive_whole_and_in_order_with_backpressure(way: str) -> None:
    """As host memory does; a receiver that does not read stops the sender."""
    with World(functools.partial(CarryingLink, way=way)) as world:
        conn, accepted = world.connect()
        assert conn.devices == accepted.devices == {"cpu": "cpu"}
        world.members[1].reading = False
        sent = []
        for number in range(1000):
            tensor = torch.full((CarryingLink.piece_bytes,), number % 251)
            piece = Piece(tensor.to(torch.uint8))
            if not conn.try_send_piece(b"%d" % number, piece):
                break
            sent.append(number)
            world.members[0].pump()
        # Before a receiver has begun to copy a connection gets 3 places of an outbox.
        assert 3 <= len(sent) < 1000, "nothing stops the sender"
        got: list[tuple[bytes, bytes]] = []

        def all_there() -> bool:
            got.extend(pieces_of(accepted))
            return len(got) == len(sent)

        world.until(all_there, "all that was sent")
        for number, (head, content) in zip(sent, got, strict=True):
            assert int(head) == number
            assert content == bytes([number % 251]) * CarryingLink.piece_bytes
        world.until(
            lambda: conn in world.members[0].conns(What.WRITABLE), "room for more"
        )


def test_a_piece_where_none_is_carried_breaks_the_connection() -> None:
    """It is counted; no memory of it is kept."""
    with World(functools.partial(CarryingLink, way="engine")) as world:
        conn, accepted = world.connect()
        world.members[1].link.devices = frozenset()
        assert conn.try_send_piece(b"head", Piece(_tensor()))
        world.lost(1, accepted)
        assert world.members[1].link.malformed == 1


# -- whole queues, in processes ----------


def _subscriber(
    pipe: Connection, backend: str, options: dict[str, Any], device: str | None
) -> None:
    registry.register("carrying", CarryingLink)
    with mq.connect(backend, group="pieces", name="b", **options) as queue:
        # A second device that each machine has; users are refused it.
        with mock.patch("mq.devices.check_device"):
            queue.subscribe("t", device=device)
        pipe.send("subscribed")
        for _ in range(pipe.recv()):
            message = queue.recv(timeout=PATIENCE)
            payload = message.payload
            where = str(payload["x"].device)
            total = None if where == "meta" else int(payload["x"].double().sum())
            pipe.send((message.sequence, message.nbytes, where, total, payload["y"]))


@pytest.mark.parametrize(
    "options", [{}, {"takes": False}, {"way": "host"}, {"way": "engine"}], ids=repr
)
@pytest.mark.parametrize("device", [None, "meta"])
def test_tensors_travel_by_real_calls(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], device: str | None
) -> None:
    """To a process that takes them as they are, and to one that does not."""
    monkeypatch.setitem(registry._TABLE, "carrying", registry.Entry(CarryingLink))
    _send_to_a_process("carrying", "cpu", options, device)


def _send_to_a_process(
    backend: str, source: str, options: dict[str, Any], device: str | None
) -> None:
    """Tensors of all sizes to another process, each overwritten at once.

    Args:
        source: The device where they are.
        options: Of the other process's queue.
        device: Where its subscription asks for them.
    """
    ours, theirs = context.Pipe()
    arguments = (theirs, backend, options, device)
    process = context.Process(target=_subscriber, args=arguments)
    with mq.connect(backend, group="pieces", name="a") as queue:
        process.start()
        try:
            assert ours.poll(PATIENCE)
            assert ours.recv() == "subscribed"
            peers = queue.describe()["peers"]
            assert peers["b"]["connection"]["agent"].startswith("uv://")
            sizes = (0, 1, 1000, 300_000, 2_000_000)
            ours.send(len(sizes))
            for number, size in enumerate(sizes):
                x = torch.arange(size, dtype=torch.float32, device=source)
                y = {"n": number, "b": b"y" * (number * 50_000)}
                queue.publish("t", {"x": x, "y": y}, timeout=PATIENCE)
                x.fill_(-1)
                assert ours.poll(PATIENCE)
                sequence, nbytes, where, total, got = ours.recv()
                assert (sequence, where, got) == (number, device or source, y)
                assert where == "meta" or total == size * (size - 1) // 2
                assert nbytes > 4 * size
        finally:
            process.join(PATIENCE)
            process.kill()
            process.join(PATIENCE)
            process.close()
            ours.close()
            theirs.close()


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """Variables of a process in which `carrying` is a backend."""
    distribution = tmp_path / "carrying-1.dist-info"
    distribution.mkdir()
    (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: carrying\n")
    (distribution / "entry_points.txt").write_text(
        "[mq.transports]\ncarrying = carrying_link:CarryingLink\n"
    )
    path = os.pathsep.join(map(str, (tmp_path, HERE, HERE.parent)))
    return {**os.environ, "PYTHONPATH": path}


@pytest.mark.slow
@each_part
def test_the_whole_suite_passes_where_tensors_are_carried(
    installed: dict[str, str], part: list[str]
) -> None:
    """Every clause, with messages of which a part is on a device."""
    done = subprocess.run(
        [sys.executable, "-m", "mq.testing", "carrying", *part],
        env=installed,
        capture_output=True,
        text=True,
        timeout=290,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    assert "FAIL" not in done.stdout


# -- on a GPU ----------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("device", [None, "cpu", "cuda:0"])
def test_tensors_travel_from_gpu_to_gpu(device: str | None) -> None:
    """Between two processes on one GPU; who asks for it gets them on the CPU."""
    _send_to_a_process("torchrpc:cuda", "cuda:0", {}, device)
