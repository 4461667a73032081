"""Which cells a run has, what stands beside what, and how far a run is."""

from __future__ import annotations

import msgspec
import pytest
import torch

from bench import baselines, payloads, plan, sizes
from bench.payloads import Payload
from bench.progress import Progress, title
from bench.rows import Cell
from mq import registry


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("1250", 1250), ("20KB", 20_000), ("1.25MB", 1_250_000), ("1MiB", 1 << 20)],
)
def test_sizes_are_read_in_decimal_and_binary_units(text: str, nbytes: int) -> None:
    """Units are those of the published tables, or binary where written so."""
    assert plan.parse_size(text) == nbytes


def test_transports_of_a_round_are_measured_side_by_side() -> None:
    """Ours, raw and the limit alternate, so that a drift of the machine hits all."""
    found = list(plan.cells(["zmq:ipc"], ["latency"], [64], 2, 1.0, False))
    names = [(cell.transport, cell.round) for cell in found]
    once = ["zmq:ipc", "raw:zmq:ipc", "raw:zmq:ipc:copy", "limit:unix"]
    assert names == [(one, 0) for one in once] + [(one, 1) for one in once[::-1]]


def test_torchrpc_is_measured_beside_bare_rpc_and_forced_tcp() -> None:
    """What TensorPipe chooses by itself, and plain TCP, are rows of their own."""
    found = list(plan.cells(["torchrpc:cpu"], ["latency"], [64], 1, 1.0, False))
    names = [cell.transport for cell in found]
    assert names == ["torchrpc:cpu", "raw:torchrpc", "raw:torchrpc:tcp", "limit:tcp"]
    assert not [n for n in baselines.beside("torchrpc:cpu", "rate") if "pubsub" in n]


def test_shared_memory_is_compared_with_all_that_is_used_in_its_place() -> None:
    """A transport may have several baselines; each is a row, and all are compared."""
    several = ["raw:zmq:ipc", "raw:torch.multiprocessing", "raw:iceoryx2"]
    assert list(baselines.raw_of("shm")) == several
    assert baselines.beside("shm", "latency") == [*several, "limit:memcpy"]
    assert "raw:zmq:ipc:pubsub" in baselines.beside("shm", "rate")
    assert "raw:iceoryx2" not in baselines.beside("shm", "mixed")


def test_a_loan_is_compared_with_what_is_filled_beforehand_too() -> None:
    """Neither with what copies within its time nor with the time of a copy."""
    for name in ("shm+loan", "auto+loan"):
        for workload in ("latency", "fanout"):
            assert baselines.beside(name, workload) == ["raw:iceoryx2:loan"]


@pytest.mark.parametrize("transport", registry.names())
@pytest.mark.parametrize("workload", plan.WORKLOADS)
def test_everything_beside_a_transport_can_run(transport: str, workload: str) -> None:
    """Whatever the plan puts beside a transport is a baseline with that workload."""
    for name in baselines.beside(transport, workload):
        assert baselines.can_run(name, workload)
        if name not in baselines.COPIES:
            assert baselines.BASELINES[name].wire.startswith("bench.")


def test_what_is_not_installed_is_named_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reason is a sentence that says what to do."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert baselines.check("raw:zmq:ipc") is None
    assert baselines.check("raw:ray") == "ray is not installed: pip install ray"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert "no program 'redis-server'" in str(baselines.check("raw:redis"))


def test_a_mode_is_a_row_with_the_baselines_of_its_transport() -> None:
    """Reading the publisher's memory is measured where it makes a difference."""
    assert baselines.raw_of("shm+view") == baselines.raw_of("shm")
    assert baselines.limit_of("shm+view") == "limit:memcpy"
    cells = plan.cells(["shm", "shm+loan"], ["latency", "rate"], [64], 1, 1.0, False)
    names = [(c.workload, c.transport) for c in cells if "raw" not in c.transport]
    assert names == [
        ("latency", "shm"),
        ("latency", "limit:memcpy"),
        ("latency", "shm+loan"),
        ("rate", "shm"),
    ]


def test_encryption_is_compared_with_encryption() -> None:
    """TLS stands beside ZeroMQ's CURVE and the plain socket."""
    assert baselines.beside("tls", "stream") == ["raw:zmq:tcp:curve", "limit:tcp"]


def quick(transports: list[str]) -> list[Cell]:
    return list(plan.cells(transports, list(plan.WORKLOADS), [], 3, 0.2, True))


def test_a_quick_run_keeps_the_published_sizes_and_leaves_out_what_takes_long() -> None:
    """The largest size comes once, after all others, what needs minutes never."""
    found = quick(list(plan.QUICK_TRANSPORTS))
    latency = [c for c in found if (c.workload, c.transport) == ("latency", "zmq:tcp")]
    sizes = [1250, 1_250_000, 10_000_000, 40_000_000, 640_000_000]
    assert [c.nbytes for c in latency if c.round == 0] == sizes
    assert [c.nbytes for c in latency if c.round == 1] == sizes[:-1]
    first = [cell.nbytes for cell in found if cell.round == 0]
    assert first.index(640_000_000) > max(
        place for place, nbytes in enumerate(first) if nbytes < plan.ONCE
    )
    assert not [c for c in found if c.workload == "mixed-busy"]
    slow = [c.nbytes for c in found if c.transport == baselines.BUS]
    assert slow
    assert max(slow) < 40_000_000


def test_a_full_run_has_every_size_and_workload() -> None:
    """Nothing is left out of it."""
    found = list(plan.cells(["nng:ipc"], list(plan.WORKLOADS), [], 1, 1.0, False))
    wanted = {(name, n) for name, w in plan.WORKLOADS.items() for n in w.sizes}
    assert {(cell.workload, cell.nbytes) for cell in found} == wanted
    assert (baselines.BUS, 640_000_000) in {(c.transport, c.nbytes) for c in found}


def test_a_payload_beyond_what_a_baseline_carries_is_not_tried() -> None:
    """Redis holds half a gigabyte in a value; the reason says so."""
    reason = plan.misfit(Cell("raw:redis", "latency", 640_000_000))
    assert reason == "raw:redis carries up to 536,870,912 bytes"


def test_the_time_left_is_learnt_from_the_cells_before() -> None:
    """First a guess, then what others of the size took, then what it took itself."""
    cells = [Cell(name, "rate", 64, n, 0.2) for n in (0, 1) for name in ("a", "b")]
    progress = Progress(cells)
    assert progress.seconds_left() == pytest.approx(4 * 0.7, rel=0.01)
    progress.end(cells[0], 3.0)
    assert progress.seconds_left() == pytest.approx(3 * 3.0)
    progress.end(cells[1], 1.0)
    assert progress.seconds_left() == pytest.approx(3.0 + 1.0)


def test_the_time_left_ends_where_the_run_will() -> None:
    """A run with an end of its own never says that it takes longer."""
    assert Progress([Cell("a", "rate", 64)] * 1000, end=0.0).seconds_left() == 0


def test_a_cell_is_named_in_words() -> None:
    """The size is left out where there is none."""
    assert title(Cell("zmq:ipc", "latency", 1250, 1)) == (
        "latency 1.25 KB zmq:ipc (round 2)"
    )
    assert title(Cell("mq", "import", 0)) == "import mq (round 1)"


def bytes_of(payload: Payload) -> int:
    """What of a payload its size is about: tensors, or the message as msgpack."""
    if isinstance(payload, torch.Tensor):
        return payload.nbytes
    assert isinstance(payload, dict)
    if "note" in payload:
        return len(msgspec.msgpack.encode(payload))
    return sum(map(bytes_of, payload.values()))


@pytest.mark.parametrize("kind", ["tensor", "message", "batch"])
def test_the_bytes_of_a_payload_are_known_beforehand(kind: str) -> None:
    """Also at the lengths at which a string has a longer header."""
    for nbytes in [*range(16, 400), 1250, 20_000, *range(65_500, 65_700)]:
        assert sizes.carried(kind, nbytes) == bytes_of(payloads.make(kind, nbytes))


@pytest.mark.parametrize("transport", ["shm", "raw:zmq:ipc"])
@pytest.mark.parametrize(
    ("workload", "nbytes", "following"),
    [
        *(("latency", 5, 8), ("fanout", 7, 8), ("stream", 9, 12)),
        *(("rate", 4, 35), ("rate", 34, 35), ("rate", 67, 68)),
        *(("fanin", 4, 32), ("fanin", 31, 32), ("fanin", 40, 64)),
        *(("codec", 4, 35), ("mixed", 6, 8)),
    ],
)
def test_a_size_that_no_payload_has_is_refused(
    workload: str, nbytes: int, following: int, transport: str
) -> None:
    """It would be the label of another one; the next that there is has none."""
    said = f"{workload} has no payload of {nbytes} bytes, the next has {following}"
    assert plan.misfit(Cell(transport, workload, nbytes)) == said
    assert plan.misfit(Cell(transport, workload, following)) is None


def test_a_size_that_is_met_but_for_a_hundredth_is_measured() -> None:
    """As that of the published figures, of which a tensor of floats has 1248 bytes."""
    for workload, known in plan.WORKLOADS.items():
        for nbytes in known.sizes:
            cell = Cell("shm", workload, nbytes)
            assert "no payload" not in (plan.misfit(cell) or "")
    assert plan.misfit(Cell("shm", "fanin", 2000)) is None
