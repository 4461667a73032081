"""Cells of one process: the time of `import mq`, and the codec by itself."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable

from bench import payloads
from bench.payloads import Payload
from bench.peer import Metrics, Peer
from bench.rows import percentiles
from bench.sizes import kind_of

_IMPORT = """
import time
start = time.perf_counter_ns()
import mq
print((time.perf_counter_ns() - start) / 1e6)
"""


def import_time(peer: Peer) -> Metrics:
    """`import mq` in new interpreters: milliseconds."""
    samples: list[float] = []
    end = time.monotonic() + peer.cell.budget
    while len(samples) < 3 or time.monotonic() < end:
        answer = subprocess.run(
            [sys.executable, "-c", _IMPORT],
            capture_output=True,
            text=True,
            timeout=max(1.0, peer.remaining()),
        )
        if answer.returncode:
            raise RuntimeError(f"import mq failed: {answer.stderr.strip()[-500:]}")
        samples.append(float(answer.stdout))
    found = percentiles(samples)
    return {"value": found["p50"], **found}


def codec(peer: Peer) -> Metrics:
    """Encoding and decoding apart, without any wire: microseconds together.

    Up to 1 KB a plain dictionary, up to 100 KB a dictionary of tensors, then a tensor.
    """
    nbytes = peer.cell.nbytes
    kind = kind_of("codec", nbytes)
    payload = payloads.make(kind, nbytes)
    raw = peer.cell.transport == "raw"
    encode, decode = (_raw if raw else _ours)(payload)
    payloads.check(decode(), kind, nbytes)
    out, back = _microseconds(encode, peer), _microseconds(decode, peer)
    return {"value": out + back, "encode_us": out, "decode_us": back}


def _ours(payload: Payload) -> tuple[Callable[[], object], Callable[[], Payload]]:
    from mq.buffers import Pool
    from mq.codec import Codec

    ours = Codec()
    frames = ours.encode(payload)
    area = Pool(frames.nbytes).take(frames.nbytes)
    frames.pack_into(area)
    return lambda: ours.encode(payload), lambda: ours.decode(area)


def _raw(payload: Payload) -> tuple[Callable[[], object], Callable[[], Payload]]:
    from bench import raw

    parts = [memoryview(bytearray(part)) for part in raw.encode(payload)]
    return lambda: raw.encode(payload), lambda: raw.decode(parts)


def _microseconds(call: Callable[[], object], peer: Peer) -> float:
    """The median over blocks of calls, each long against the clock's own cost."""
    samples: list[float] = []
    block, end = 100, time.monotonic() + peer.cell.budget / 2
    while len(samples) < 5 or time.monotonic() < end:
        start = time.perf_counter_ns()
        for _ in range(block):
            call()
        samples.append((time.perf_counter_ns() - start) / block / 1000)
    return percentiles(samples)["p50"]
