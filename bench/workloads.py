"""The timed loops: one of each kind, whatever carries the payloads."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from bench import payloads
from bench.baselines import COPIES, is_baseline, may_lose, wire_of
from bench.payloads import Payload
from bench.peer import Metrics, Peer
from bench.rows import percentiles
from bench.wire import MqWire, Wire
from mq.stream.sockets import connected, unpace

_LARGE = 1_000_000  # bytes from which few messages are enough to warm up
_HUGE = 100_000_000  # bytes from which one is, after the one that is checked
_MOST = 1_000_000


@contextmanager
def open_wire(peer: Peer, quiet: float | None = None) -> Iterator[Wire]:
    """What the cell's transport is, as a wire; closed by all participants together.

    Args:
        quiet: Seconds without a message after which `recv` gives up; None: a third of
            what the cell has.
    """
    wait = peer.remaining() / 3 if quiet is None else quiet
    transport = peer.cell.transport
    wire: Wire
    if is_baseline(transport):
        wire = wire_of(transport)(peer, wait)
    else:
        wire = MqWire(peer, wait)
    try:
        if is_baseline(transport) and "tcp" in transport.split(":"):
            _unpace_all(peer, wire)
        yield wire
        peer.meet()
    finally:
        wire.close()


def _unpace_all(peer: Peer, wire: Wire) -> None:
    """Spare a bare library what our own connections within a host are spared.

    Else the ratio would tell of the system's congestion control. Its connections are
    there once a message has passed each.
    """
    if not peer.rank:
        wire.send(None)
    for _ in range(1 if peer.rank else peer.spokes):
        wire.recv()
    if peer.rank:
        wire.send(None)
    peer.meet()  # no spoke's next message may pass for another's first
    for known in connected():
        unpace(known.fd)


def latency(peer: Peer) -> Metrics | None:
    """A tensor outwards, an empty answer from each spoke: milliseconds one way.

    One way is the round trip less half the median round trip of an empty message, each
    measured before one of the other: the time from the sender's call until the last
    receiver holds a usable tensor.
    """
    if peer.cell.transport in COPIES:
        from bench.limits import copy_memory

        return copy_memory(peer)
    nbytes = peer.cell.nbytes
    payload = payloads.tensor(nbytes) if peer.rank == 0 else None
    warm = 1 if nbytes >= _HUGE else 3 if nbytes >= _LARGE else 50
    with open_wire(peer) as wire:
        if peer.rank:
            payloads.check(wire.recv(), "tensor", nbytes)
            wire.send(None)
            _answer(wire, 2 * warm)
            count = peer.meet()[0]
            with peer.timed():
                _answer(wire, 2 * count)
            return None
        _round_trips(wire, payload, peer.spokes, 1)
        trips = _alternate(wire, payload, peer.spokes, warm)[1]
        first = percentiles(trips)["p50"]
        least = 3 if nbytes >= _HUGE else 5
        count = min(10_000, max(least, int(peer.cell.budget * 1000 / first)))
        peer.meet(count)
        with peer.timed():
            empties, trips = _alternate(wire, payload, peer.spokes, count)
    empty = percentiles(empties)["p50"]
    # A tensor takes no less than the answer: noise must not make it less than nothing.
    found = percentiles(max(trip - empty / 2, trip / 2) for trip in trips)
    carried = float(count * nbytes * peer.spokes)
    return {
        "value": found["p50"],
        "empty_round_trip": empty,
        "carried_bytes": carried,
        **found,
    }


def _alternate(
    wire: Wire, payload: Payload, spokes: int, count: int
) -> tuple[list[float], list[float]]:
    """Round trips of empty messages and of the payload, by turns."""
    empties: list[float] = []
    trips: list[float] = []
    for _ in range(count):  # by turns: the machine drifts within a cell, too
        empties += _round_trips(wire, None, spokes, 1)
        trips += _round_trips(wire, payload, spokes, 1)
    return empties, trips


def _round_trips(wire: Wire, payload: Payload, spokes: int, count: int) -> list[float]:
    samples = []
    for _ in range(count):
        start = time.perf_counter_ns()
        wire.send(payload)
        for _ in range(spokes):
            wire.recv()
        samples.append((time.perf_counter_ns() - start) / 1e6)
    return samples


def _answer(wire: Wire, count: int) -> None:
    for _ in range(count):
        payload = wire.recv()
        wire.send(None)
        del payload  # dropped at once, as by a receiver that has used it


def rate(peer: Peer) -> Metrics | None:
    """Small dictionaries outwards, as fast as they go: delivered per second.

    With it the budget of a message: processor time of the two calling threads.
    """
    return _flow(peer, "message", sender=peer.rank == 0)


def fanin(peer: Peer) -> Metrics | None:
    """Dictionaries of tensors from every spoke to the hub: delivered per second."""
    return _flow(peer, "batch", sender=peer.rank > 0)


def stream(peer: Peer) -> Metrics | None:
    """Tensors outwards, back to back: GB/s by the receiver's clock."""
    if peer.cell.transport in COPIES:
        from bench.limits import copy_memory

        return copy_memory(peer)
    found = _flow(peer, "tensor", sender=peer.rank == 0)
    if found and "value" in found:
        found["value"] *= peer.cell.nbytes / 1e9
    return found


def _flow(peer: Peer, kind: str, sender: bool) -> Metrics | None:
    nbytes, budget = peer.cell.nbytes, peer.cell.budget
    payload = payloads.make(kind, nbytes) if sender else None
    senders = peer.spokes if kind == "batch" else 1
    lossy = may_lose(peer.cell.transport)
    # Each trial of what loses ends with silence: they begin with more.
    count = 4 if nbytes >= _LARGE else 5000 if lossy else 50
    seconds, delivered, trial = 0.0, 0, 0
    lasting = False
    with open_wire(peer, quiet=lossy_silence(nbytes) if lossy else None) as wire:
        while True:
            sent = count * senders - (not trial)  # one that is checked comes first
            # Lengthened until it lasts, then repeated: a single pause of the machine
            # would otherwise make a short trial pass for a long one.
            if sender:
                with peer.timed():  # until all of it is out of the engine's threads
                    news = peer.meet(_pour(wire, payload, count))
            else:
                if not trial:
                    payloads.check(wire.recv(), kind, nbytes)
                cpu = time.thread_time()
                with peer.timed():
                    seconds, delivered = _drain(wire, sent)
                cpu = time.thread_time() - cpu
                news = peer.meet((seconds, delivered, cpu))
            seconds, delivered, recv_cpu = next(n for n in news if isinstance(n, tuple))
            send_cpu = sum(n for n in news if isinstance(n, float))
            # What may not lose has failed by the first loss, in whichever trial.
            if lasting or (delivered < sent and not lossy):
                break
            lasting = trial > 0 and (seconds >= budget / 2 or count >= _MOST)
            trial += 1
            if not lasting:
                growth = 1.2 * budget / max(seconds, 1e-6)
                least = 2.0 if seconds < budget else 1.0
                count = min(_MOST, int(count * min(20.0, max(least, growth))))
    if sender:
        return None
    return {
        "value": (delivered - 1) / seconds,
        "lost": float(sent - delivered),
        "sent": float(sent),
        "carried_bytes": float(delivered * nbytes),
        "send_us": 1e6 * send_cpu / sent,
        "recv_us": 1e6 * recv_cpu / delivered,
    }


def lossy_silence(nbytes: int) -> float:
    """Seconds without a message after which the rest counts as lost.

    A second, and what a message takes at 80 MB/s: the slowest of what loses, the Bus of
    NNG with pickled tensors, carried 150.
    """
    return 1.0 + nbytes / 8e7


def _pour(wire: Wire, payload: Payload, count: int) -> float:
    """Seconds of processor time that the sending thread took."""
    start = time.thread_time()
    for _ in range(count):
        wire.send(payload)
    return time.thread_time() - start


def _drain(wire: Wire, expected: int) -> tuple[float, int]:
    """Seconds from the first message to the last, and how many there were."""
    wire.recv()
    start = last = time.perf_counter_ns()
    count = 1
    try:
        while count < expected:
            wire.recv()
            count += 1
            last = time.perf_counter_ns()
    except TimeoutError:  # the rest is lost, and will be reported so
        pass
    return max(last - start, 1) / 1e9, count


def mixed(peer: Peer) -> Metrics | None:
    """Small messages out and back while large ones flow: milliseconds one way.

    One way is half the round trip. In ``mixed-busy`` the spoke computes in pure Python
    in another thread.
    """
    bulk = payloads.tensor(peer.cell.nbytes) if peer.rank == 0 else None
    with open_wire(peer) as wire:
        if peer.rank == 0:
            _round_trips(wire, bulk, 1, 1)
            trips = _small_trips(peer, wire, bulk)
            wire.send(None)
            count, seconds = peer.meet()[1]
        else:
            payloads.check(wire.recv(), "tensor", peer.cell.nbytes)
            wire.send(None)
            busy = peer.cell.workload == "mixed-busy"
            with _computing() if busy else _idle():
                met = _serve(wire)
            peer.meet(met)
            return None
    found = percentiles(trip / 2 for trip in trips)
    flow = count * peer.cell.nbytes / seconds / 1e9
    return {"value": found["p50"], **found, "bulk": count, "bulk_gb_per_s": flow}


def _small_trips(peer: Peer, wire: Wire, bulk: Payload) -> list[float]:
    small = payloads.message(64)
    _round_trips(wire, small, 1, 50)
    trips: list[float] = []
    end = time.monotonic() + peer.cell.budget
    with wire.bulk(bulk) as turn:
        while turn() < 1 or len(trips) < 3 or time.monotonic() < end:
            trips += _round_trips(wire, small, 1, 1)
    return trips


def _serve(wire: Wire) -> tuple[int, float]:
    """Answer small messages, count large ones, until the empty one."""
    count, start = 0, time.perf_counter_ns()
    while (payload := wire.recv()) is not None:
        if isinstance(payload, dict):
            wire.send(None)
        else:
            count += 1
        del payload
    return count, (time.perf_counter_ns() - start) / 1e9


@contextmanager
def _idle() -> Iterator[None]:
    yield


@contextmanager
def _computing() -> Iterator[None]:
    stop = threading.Event()

    def compute() -> None:
        total = 0
        while not stop.is_set():
            total = sum(range(1000)) - total

    thread = threading.Thread(target=compute, name="bench-busy", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
