"""The bench measures what it says, and nothing in a cell can hold it up."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import signal
import socket
import threading
import time

import pytest
import torch

import mq
from bench import baselines, command, payloads, raw, raw_nng
from bench.command import measure, unusable
from bench.gpu import Gpu, move
from bench.peer import Metrics, Peer, Unusable
from bench.rows import Cell, Result, Usage, percentiles
from bench.runner import Conversation, run_cell
from bench.workloads import lossy_silence, open_wire
from mq import paths, registry
from mq.stream import sockets

RAW_ZMQ = ["raw:zmq:ipc", "raw:zmq:tcp"]
OVER_TCP = ["raw:nng:tcp", "raw:torchrpc:tcp", "raw:zmq:tcp", "raw:zmq:tcp:curve"]
OVER_TCP += ["raw:nng:tcp:pubsub", "raw:zmq:tcp:pubsub", "limit:tcp"]
RAW = ["raw:nng:ipc", "raw:nng:tcp", *RAW_ZMQ, "raw:torchrpc", "raw:torchrpc:tcp"]
RAW += ["raw:torch.multiprocessing"]
FURTHER = ["raw:iceoryx2", "raw:ray", "raw:redis", "raw:zenoh"]
BASELINES = [*RAW, "raw:nng-bus", "limit:unix", "limit:tcp", "limit:memcpy"]
OURS = ["inproc", "nng:ipc", "nng:tcp", "shm", "tcp", "torchrpc:cpu"]
OURS += ["zmq:ipc", "zmq:tcp"]
MODES = ["shm+view", "shm+loan", "auto+loan"]
ENCRYPTED = ["tls", "nng:tls", "raw:zmq:tcp:curve"]


def measured(transport: str, workload: str, nbytes: int) -> dict[str, float]:
    result = measure(Cell(transport, workload, nbytes, 0, budget=0.05, limit=60.0), {})
    assert result.status == "ok", f"{result.reason}\n{result.detail}"
    assert result.metrics["value"] > 0
    assert all(used.peak_rss_bytes > 0 for used in result.processes)
    return result.metrics


@pytest.mark.parametrize("done", [None, 0, 1])
def test_what_a_process_said_last_is_heard_before_its_end(done: int | None) -> None:
    """On the pipes of all its ranks, when all of it is there at once."""
    exited = Usage([0, 1], 1.0, 0, 0)
    ends = [multiprocessing.Pipe() for _ in range(2)]
    if done is not None:
        ends[done][1].send(("done", {"p50_s": 2.0}))
    ends[0][1].send(("exit", exited))
    for _, theirs in ends:
        theirs.close()
    cell = Cell("inproc", "latency", 1, 0, budget=1.0, limit=5.0)
    process = multiprocessing.get_context("forkserver").Process()
    pipes = [ours for ours, _ in ends]
    metrics, usage = Conversation(cell, [[0, 1]], [process], pipes).hold()
    for ours, _ in ends:
        ours.close()
    assert metrics == ({} if done is None else {"p50_s": 2.0})
    assert usage == [exited]


@pytest.mark.parametrize("transport", [*BASELINES, *OURS, *MODES])
def test_latency_is_measured_on(transport: str) -> None:
    """Every transport and baseline reports its percentiles from enough samples."""
    metrics = measured(transport, "latency", 1250)
    assert metrics["samples"] >= 5
    assert metrics["p50"] <= metrics["p90"] <= metrics["p99"]


ON_GPUS = ["torchrpc:cuda", "raw:torchrpc:cuda", "raw:torchrpc:staged"]


@pytest.mark.gpu
@pytest.mark.parametrize("workload", ["latency", "stream"])
def test_a_copy_within_a_gpu_is_a_limit(workload: str) -> None:
    """It is waited for: no GPU copies in the time of a call."""
    if not torch.cuda.is_available():
        pytest.skip(f"torch {torch.__version__} sees no CUDA device")
    assert measured("limit:cuda", workload, 40_000_000)["value"] > 0.005


@pytest.mark.gpu
@pytest.mark.parametrize("transport", ON_GPUS)
@pytest.mark.parametrize(
    ("workload", "nbytes"),
    [("latency", 1250), ("fanin", 2000), ("stream", 20_000), ("mixed", 200_000)],
)
def test_tensors_on_a_gpu_are_measured_in(
    workload: str, nbytes: int, transport: str
) -> None:
    """One GPU is enough for both ends."""
    if not torch.cuda.is_available():
        pytest.skip(f"torch {torch.__version__} sees no CUDA device")
    metrics = measured(transport, workload, nbytes)
    assert metrics.get("lost", 0) == 0


@pytest.mark.parametrize("transport", ON_GPUS)
def test_without_a_gpu_the_row_says_so(transport: str) -> None:
    """Not a missing row, and no failure."""
    if torch.cuda.is_available():
        pytest.skip("this host has a CUDA device")
    unusable = {transport: registry.check(transport)} if "raw" not in transport else {}
    result = measure(Cell(transport, "latency", 1250, 0, 0.05, 60.0), unusable)
    assert result.status == "skipped"
    assert "sees no CUDA device" in result.reason


def test_a_payload_is_placed_on_a_device_once() -> None:
    """With everything in it, and waited for; host memory stands in for a GPU here."""
    gpu = Gpu("cpu")
    batch = payloads.batch(2000)
    placed = gpu.place(batch)
    assert payloads.same(placed, batch)
    assert gpu.place(batch) is placed
    assert gpu.place(None) is None
    text = payloads.message(100)
    assert move(text, "meta") == text
    moved = move(payloads.tensor(100), "meta")
    assert isinstance(moved, torch.Tensor)
    assert moved.is_meta
    gpu.wait()


@pytest.mark.parametrize("transport", [*RAW, *OURS])
@pytest.mark.parametrize(
    ("workload", "nbytes"), [("rate", 64), ("fanin", 2000), ("stream", 20_000)]
)
def test_nothing_is_lost_in(workload: str, nbytes: int, transport: str) -> None:
    """What waits for its receiver delivers every message."""
    assert measured(transport, workload, nbytes)["lost"] == 0


@pytest.mark.parametrize("transport", ENCRYPTED)
@pytest.mark.parametrize(("workload", "nbytes"), [("latency", 20_000), ("rate", 64)])
def test_what_encrypts_gets_its_certificates(
    workload: str, nbytes: int, transport: str
) -> None:
    """They are made for the cell, where openssl is there to make them."""
    if reason := unusable(transport):
        pytest.skip(reason)
    measured(transport, workload, nbytes)


def test_losses_of_di_engines_queue_are_counted() -> None:
    """Bus0 drops what its peers do not take in time; the cell says how much."""
    metrics = measured("raw:nng-bus", "rate", 64)
    assert 0 <= metrics["lost"] < metrics["sent"]


@pytest.mark.parametrize("transport", [*RAW, *OURS])
@pytest.mark.parametrize(
    ("workload", "nbytes"),
    [("fanout", 200_000), ("mixed", 200_000), ("mixed-busy", 5_000_000)],
)
def test_a_tensor_and_its_answers_travel_in(
    workload: str, nbytes: int, transport: str
) -> None:
    """Fan-out and mixed traffic run at small sizes.

    Who computes takes a fiftieth of a second for each tensor: a queue full of small
    ones took it 20 s.
    """
    metrics = measured(transport, workload, nbytes)
    assert metrics["p50"] <= metrics["p99"]
    if workload != "fanout":
        assert metrics["bulk"] >= 1


@pytest.mark.parametrize("transport", [f"{name}:pubsub" for name in RAW_ZMQ])
def test_losses_of_publish_subscribe_are_counted(transport: str) -> None:
    """The default of bare ZeroMQ may lose; what it lost is reported with the rate."""
    metrics = measured(transport, "rate", 64)
    assert 0 <= metrics["lost"] < metrics["sent"]


@pytest.mark.parametrize("transport", [*OURS, "tls"])
def test_actors_and_a_learner_lose_nothing(transport: str) -> None:
    """With gymnasium the cell runs without loss; without it the row says so."""
    result = measure(Cell(transport, "actor-learner", 0, 0, 0.3, 60.0), {})
    if importlib.util.find_spec("gymnasium") is None:
        assert (result.status, "gymnasium" in result.reason) == ("skipped", True)
    else:
        assert result.status == "ok", f"{result.reason}\n{result.detail}"
        assert result.metrics["lost"] == 0
        assert result.metrics["weights_age_ms"] > 0


@pytest.mark.parametrize("transport", [f"{name}:copy" for name in RAW_ZMQ])
@pytest.mark.parametrize("workload", ["latency", "fanout"])
def test_bare_zeromq_copies_where_that_is_compared(
    workload: str, transport: str
) -> None:
    """As by pyzmq's default; everything else is as in the row beside it."""
    metrics = measured(transport, workload, 200_000)
    assert metrics["p50"] <= metrics["p99"]


@pytest.mark.parametrize("transport", ["mq", "raw"])
@pytest.mark.parametrize("nbytes", [64, 20_000, 200_000])
def test_the_codec_is_timed_apart(nbytes: int, transport: str) -> None:
    """Encoding and decoding have a figure each, for every kind of payload."""
    metrics = measured(transport, "codec", nbytes)
    assert metrics["encode_us"] > 0
    assert metrics["decode_us"] > 0


def test_importing_is_timed() -> None:
    """The import is measured in new interpreters, more than once."""
    assert measured("mq", "import", 0)["samples"] >= 3


@pytest.mark.parametrize("workload", ["latency", "fanout"])
def test_a_loan_of_iceoryx2_carries_what_was_filled_first(workload: str) -> None:
    """The one message that is checked; it is a row like any other."""
    if reason := baselines.check("raw:iceoryx2:loan"):
        pytest.skip(reason)
    assert measured("raw:iceoryx2:loan", workload, 1_250_000)["samples"] >= 5


@pytest.mark.parametrize("transport", FURTHER)
@pytest.mark.parametrize(
    ("workload", "nbytes"), [("latency", 1_250_000), ("rate", 64), ("fanin", 2000)]
)
def test_other_systems_run_where_they_are_installed(
    workload: str, nbytes: int, transport: str
) -> None:
    """Each carries tensors, messages and batches unaltered, from and to several."""
    if reason := baselines.check(transport):
        pytest.skip(reason)
    metrics = measured(transport, workload, nbytes)
    assert metrics["carried_bytes"] >= nbytes


@pytest.mark.parametrize("transport", ["raw:zmq:ipc", "inproc"])
@pytest.mark.parametrize("workload", ["latency", "stream"])
def test_processor_time_of_the_timed_part_is_kept(
    workload: str, transport: str
) -> None:
    """It is some of the whole cell's, and the bytes that it moved are known."""
    cell = Cell(transport, workload, 1_250_000, 0, budget=0.05, limit=60.0)
    result = measure(cell, {})
    assert result.metrics["carried_bytes"] % 1_250_000 == 0
    for used in result.processes:
        assert 0 < used.timed_cpu_seconds < used.cpu_seconds


def test_huge_messages_are_few() -> None:
    """From 100 MB a cell times three messages at least."""
    assert measured("limit:unix", "latency", 100_000_000)["samples"] == 3


def dies(peer: Peer) -> Metrics | None:
    if peer.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    peer.meet()
    return None


def hangs(peer: Peer) -> Metrics | None:
    if peer.rank == 1:
        threading.Event().wait(120)
    peer.meet()
    return None


def fails(peer: Peer) -> Metrics | None:
    if peer.rank == 1:
        raise RuntimeError("no such luck")
    peer.meet()
    return None


def meets_and_dies(peer: Peer) -> Metrics | None:
    with mq.connect(peer.cell.transport, group=peer.group, name=f"rank{peer.rank}"):
        where = os.path.join(paths.local_base(), paths.safe_name(peer.group))
        if peer.rank == 1:
            raise RuntimeError(where if os.path.exists(where) else "elsewhere")
        os.kill(os.getpid(), signal.SIGSTOP)  # and is killed in the end
    return None


def declines(peer: Peer) -> Metrics | None:
    raise Unusable("not on this machine")


def run_here(body: str, limit: float = 60.0, *, threads: bool = False) -> Result:
    cell = Cell("raw:zmq:ipc", "latency", 0, 0, 0.05, limit)
    return run_cell(cell, f"{__name__}:{body}", 2, threads=threads)


def counts_paced(peer: Peer) -> Metrics | None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with socket.create_connection(listener.getsockname()):
            usual = paced()
    with open_wire(peer):
        news = peer.meet(paced())
    return None if peer.rank else {"usual": usual, "value": sum(news)}


def paced() -> int:
    """How many connections of this process BBR controls."""
    found = 0
    for known in sockets.connected():
        with sockets.copy_of(known.fd) as sock:
            control = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
            found += control.startswith(b"bbr")
    return found


@pytest.mark.parametrize(
    ("transport", "size"),
    [
        *((transport, 2) for transport in OVER_TCP),
        *((transport, 3) for transport in ("raw:nng:tcp", "raw:zmq:tcp")),
    ],
)
def test_the_bare_libraries_connections_are_as_little_paced_as_ours(
    transport: str, size: int
) -> None:
    """Else /raw would tell of the system's congestion control."""
    cell = Cell(transport, "latency", 1250, 0, budget=0.05, limit=60.0)
    result = run_cell(cell, f"{__name__}:counts_paced", size)
    assert result.status == "ok", f"{result.reason}\n{result.detail}"
    if not result.metrics["usual"]:
        pytest.skip("by default connections of this system are not paced")
    assert result.metrics["value"] == 0


def bench_children() -> list[str]:
    names = [child.name for child in multiprocessing.active_children()]
    return [name for name in names if name.startswith("bench-")]


def test_a_killed_participant_fails_its_cell() -> None:
    """The end of a process is noticed at once, and the others are ended."""
    start = time.monotonic()
    result = run_here("dies")
    assert (result.status, result.reason) == ("failed", "rank 1 died of signal 9")
    assert time.monotonic() - start < 50
    assert not bench_children()


@pytest.mark.parametrize("threads", [False, True])
def test_a_hanging_participant_is_killed(threads: bool) -> None:
    """A cell beyond its limit is given up and leaves no process."""
    result = run_here("hangs", 2.0, threads=threads)
    assert result.status == "failed"
    assert "hung" in result.reason or "in vain" in result.reason
    assert not bench_children()


@pytest.mark.parametrize("threads", [False, True])
def test_an_exception_fails_its_cell(threads: bool) -> None:
    """The row names the rank and the error, and keeps the traceback."""
    result = run_here("fails", threads=threads)
    assert result.reason == "rank 1: RuntimeError: no such luck"
    assert "in fails" in result.detail


def test_a_killed_cell_leaves_no_place_where_its_members_met() -> None:
    """No other group would ever look there."""
    cell = Cell("tcp", "latency", 0, 0, 0.05, 60.0)
    result = run_cell(cell, f"{__name__}:meets_and_dies", 2)
    kind, where = result.reason.split(": ")[1:]
    assert kind == "RuntimeError", result.reason
    assert "bench_" in where
    assert not os.path.exists(where)


def test_a_cell_that_cannot_run_here_is_skipped_with_its_reason() -> None:
    """What is missing is no failure."""
    result = run_here("declines")
    assert (result.status, result.reason) == ("skipped", "not on this machine")


def test_an_unusable_transport_is_a_row() -> None:
    """A transport that cannot work appears with its reason."""
    result = measure(Cell("zmq:ipc", "latency", 1250), {"zmq:ipc": "no luck"})
    assert (result.status, result.reason) == ("skipped", "no luck")


def test_what_measured_nothing_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rate of nothing per second is a row with that reason, never a figure."""
    cell = Cell("raw:zmq:ipc:pubsub", "rate", 64)
    empty = Result.of(cell, "ok", metrics={"value": 0.0})
    monkeypatch.setattr(command, "run_cell", lambda *args, **rest: empty)
    result = measure(cell, {})
    assert (result.status, result.metrics) == ("failed", {})
    assert "too little arrived" in result.reason


def test_what_does_not_fit_into_memory_is_not_tried() -> None:
    """A size that needs more memory than is free is skipped, in words."""
    result = measure(Cell("raw:zmq:ipc", "latency", 1 << 40), {})
    assert result.status == "skipped"
    assert "needs about" in result.reason


@pytest.mark.parametrize("kind", ["tensor", "message", "batch"])
@pytest.mark.parametrize("nbytes", [64, 20_000, 600_000])
def test_the_raw_codec_gives_back_what_it_was_given(kind: str, nbytes: int) -> None:
    """Baselines carry the same payloads as the library."""
    sent = payloads.make(kind, nbytes)
    parts = [memoryview(bytearray(part)) for part in raw.encode(sent)]
    payloads.check(raw.decode(parts), kind, nbytes)
    whole = bytearray(raw_nng.join(raw.encode(sent)))
    payloads.check(raw.decode(raw_nng.split(whole)), kind, nbytes)


@pytest.mark.parametrize("nbytes", [64, 65, 100, 300, 1000, 70_000])
def test_a_message_has_the_size_it_is_named_by(nbytes: int) -> None:
    """A dictionary of n bytes is n bytes of msgpack."""
    assert len(raw.encode(payloads.message(nbytes))[0]) == nbytes


def test_an_altered_payload_is_noticed() -> None:
    """The check outside the timing sees a changed value and swapped blocks."""
    changed = payloads.tensor(1_000_000)
    changed[123_456] = -1
    swapped = payloads.tensor(1_000_000)
    swapped[: 1 << 16], swapped[1 << 16 : 1 << 17] = (
        swapped[1 << 16 : 1 << 17].clone(),
        swapped[: 1 << 16].clone(),
    )
    for altered in (changed, swapped, torch.zeros(5), None):
        with pytest.raises(ValueError, match=r"altered|in place of"):
            payloads.check(altered, "tensor", 1_000_000)


def test_what_loses_messages_has_time_for_a_large_one() -> None:
    """400 MB on their way for 2.7 s, as over `raw:nng-bus`, are not lost."""
    assert lossy_silence(400_000_000) > 2 * 2.7
    assert lossy_silence(64) == pytest.approx(1)  # else each trial would end later


@pytest.mark.parametrize("transport", ["shm", "raw:zmq:ipc"])
def test_the_least_batch_is_measured(transport: str) -> None:
    """None of its four tensors is empty."""
    assert measured(transport, "fanin", 32)


def test_percentiles_are_by_nearest_rank() -> None:
    """A percentile is one of the samples."""
    found = percentiles(range(1, 101))
    assert (found["p50"], found["p90"], found["p99"]) == (50, 90, 99)
    found = percentiles(range(1, 11))
    assert (found["p50"], found["p90"], found["p99"]) == (5, 9, 10)
    assert percentiles([7.0])["p99"] == 7
