"""Which cells a run has, and in which order."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from bench.rows import Cell

SIZES = (1250, 20_000, 1_250_000, 10_000_000, 40_000_000, 640_000_000)
LARGE_SIZES = (1_250_000_000, 2_500_000_000)
QUICK_TRANSPORTS = (
    "inproc",
    "nng:ipc",
    "nng:tcp",
    "zmq:ipc",
    "zmq:tcp",
    "torchrpc:cpu",
)

BUS = "raw:nng-bus"
"""What DI-engine's queue does with NNG, over unix sockets as by its default."""

_UNITS = {"": 1}
for _power, _prefix in enumerate("kmgt", 1):
    _UNITS |= {_prefix: 1000**_power, f"{_prefix}b": 1000**_power}
    _UNITS |= {f"{_prefix}i": 1024**_power, f"{_prefix}ib": 1024**_power}
_UNITS["b"] = 1


@dataclass(frozen=True)
class Workload:
    """One thing that is timed.

    Attributes:
        body: ``module:function``, run by every participant.
        spokes: Participants besides the hub.
        unit: Of the value that transports are compared by.
        lower_is_better: Whether a small value is a good one.
        baselines: What else than the library can run it: of "raw", "pubsub", "bus"
            (what DI-engine does with NNG), "memcpy" and "limit" (the socket of the same
            kind).
        sizes: In bytes; (0,) where there is nothing to choose.
        memory: How many payloads must fit into memory at once.
        quick: The sizes of a quick run; empty: `sizes`.
    """

    body: str
    spokes: int
    unit: str
    lower_is_better: bool
    sizes: tuple[int, ...]
    baselines: frozenset[str] = frozenset()
    memory: int = 4
    quick: tuple[int, ...] = ()


_ALL = frozenset({"raw", "bus", "memcpy", "limit"})
_RAW = frozenset({"raw"})
_W = "bench.workloads:"
WORKLOADS = {
    "import": Workload("bench.small:import_time", 0, "ms", True, (0,)),
    "codec": Workload(
        "bench.small:codec", 0, "us", True, (64, 1000, 20_000, 1_250_000)
    ),
    "latency": Workload(
        f"{_W}latency", 1, "ms", True, SIZES + LARGE_SIZES, _ALL, 4, SIZES
    ),
    "rate": Workload(
        f"{_W}rate", 1, "msg/s", False, (64, 1000), _RAW | {"bus", "pubsub"}
    ),
    "fanout": Workload(f"{_W}latency", 3, "ms", True, (10_000_000,), _RAW, 6),
    "fanin": Workload(f"{_W}fanin", 3, "msg/s", False, (20_000,), _RAW),
    "stream": Workload(f"{_W}stream", 1, "GB/s", False, (40_000_000,), _ALL, 14),
    "mixed": Workload(
        f"{_W}mixed", 1, "ms", True, (640_000_000,), _RAW, 5, (40_000_000,)
    ),
    "mixed-busy": Workload(
        f"{_W}mixed", 1, "ms", True, (640_000_000,), _RAW, 5, (40_000_000,)
    ),
    "actor-learner": Workload(
        "bench.actor_learner:actor_learner", 2, "msg/s", False, (0,)
    ),
}
_WITHOUT_WIRE = {"import": ("mq",), "codec": ("mq", "raw")}


def parse_size(text: str) -> int:
    """Bytes of "1250", "20KB" (decimal) or "1MiB" (binary).

    Raises:
        ValueError: It is none of these.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)\s*([a-z]*)", text.strip().lower())
    if not found or found[2] not in _UNITS:
        raise ValueError(f"{text!r} is no size; write 1250, 20KB, 1.25MB or 1MiB")
    nbytes = round(float(found[1]) * _UNITS[found[2]])
    if not 4 <= nbytes <= 1 << 40:
        raise ValueError(f"size {text!r} is not between 4 bytes and 1 TiB")
    return nbytes


@lru_cache
def raw_of(transport: str) -> str | None:
    """The bare library under a transport, on the same wire."""
    if transport in ("nng", "zmq"):  # they choose ipc between members on one host
        return f"raw:{transport}:ipc"
    if transport in ("torchrpc", "torchrpc:cpu"):
        return "raw:torchrpc"
    if transport in ("cuda", "torchrpc:cuda"):
        return "raw:torchrpc:cuda"
    engine, _, wire = transport.partition(":")
    known = engine in ("nng", "zmq") and wire in ("ipc", "tcp")
    return f"raw:{transport}" if known else None


@lru_cache
def limit_of(transport: str) -> str:
    """What bounds a transport on one host."""
    if transport in ("inproc", "shm"):
        return "limit:memcpy"
    unix = transport in ("nng", "zmq") or transport.endswith(":ipc")
    return "limit:unix" if unix else "limit:tcp"


def baselines(transport: str, workload: str) -> list[str]:
    """What is measured beside a transport, in the same rounds."""
    allowed = WORKLOADS[workload].baselines
    found = []
    raw, limit = raw_of(transport), limit_of(transport)
    if raw and "raw" in allowed:
        found.append(raw)
    if raw == "raw:torchrpc" and "raw" in allowed:
        found.append(f"{raw}:tcp")  # left to itself TensorPipe reads other memory
    elif raw == "raw:torchrpc:cuda" and "raw" in allowed:
        found.append("raw:torchrpc:staged")
    elif raw and "pubsub" in allowed:
        found.append(f"{raw}:pubsub")
    if transport in ("nng", "nng:ipc") and "bus" in allowed:
        found.append(BUS)
    if ("memcpy" if limit == "limit:memcpy" else "limit") in allowed:
        found.append(limit)
    return found


def is_baseline(transport: str) -> bool:
    """Whether this is not the library but what it is compared with."""
    return transport.partition(":")[0] in ("raw", "limit")


def can_run(transport: str, workload: str) -> bool:
    """Whether a baseline that was asked for by name has this workload."""
    if not is_baseline(transport):
        return True
    allowed = WORKLOADS[workload].baselines
    if transport == BUS:
        return "bus" in allowed
    if transport.startswith("raw:"):
        return ("pubsub" if transport.endswith(":pubsub") else "raw") in allowed
    return ("memcpy" if transport == "limit:memcpy" else "limit") in allowed


BASELINES = [
    *(
        f"raw:{engine}:{wire}{kind}"
        for engine in ("nng", "zmq")
        for wire in ("ipc", "tcp")
        for kind in ("", ":pubsub")
    ),
    BUS,
    *(f"raw:torchrpc{wire}" for wire in ("", ":tcp", ":cuda", ":staged")),
    *(f"limit:{kind}" for kind in ("memcpy", "unix", "tcp")),
]


def cells(
    transports: Sequence[str],
    workloads: Sequence[str],
    sizes: Sequence[int],
    rounds: int,
    budget: float,
    quick: bool,
) -> Iterator[Cell]:
    """Every cell, round by round: a drift of the machine hits all of them alike.

    Within a round, workload and size one transport follows the other.

    Args:
        sizes: In place of each workload's own; empty: those.
    """
    for number, workload in itertools.product(range(rounds), workloads):
        own = WORKLOADS[workload].sizes
        if quick and WORKLOADS[workload].quick:
            own = WORKLOADS[workload].quick
        runners = _runners(transports, workload)
        for nbytes in sizes if sizes and own != (0,) else own:
            limit = 30.0 + 10 * budget + nbytes / 2e7
            for runner in runners if number % 2 == 0 else runners[::-1]:
                yield Cell(runner, workload, nbytes, number, budget, limit)


def _runners(transports: Sequence[str], workload: str) -> list[str]:
    """The transports of a workload, each followed by its baselines, each once."""
    if workload in _WITHOUT_WIRE:
        return list(_WITHOUT_WIRE[workload])
    found: dict[str, None] = {}
    for transport in transports:
        if can_run(transport, workload):
            found[transport] = None
        if not is_baseline(transport):
            found |= dict.fromkeys(baselines(transport, workload))
    return list(found)


def free_memory() -> int:
    """Bytes that new processes may use here, by the host and by the control group."""
    fields = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, amount = line.partition(":")
        fields[name] = int(amount.split()[0]) * 1024
    return min(fields["MemAvailable"], _cgroup_room())


def _cgroup_room() -> int:
    root = Path("/sys/fs/cgroup")
    files = [
        (root / "memory.max", root / "memory.current"),
        (root / "memory/memory.limit_in_bytes", root / "memory/memory.usage_in_bytes"),
    ]
    rooms = [_difference(limit, used) for limit, used in files]
    return min(room for room in [*rooms, 1 << 62] if room is not None)


def _difference(limit: Path, used: Path) -> int | None:
    try:
        return int(limit.read_text()) - int(used.read_text())
    except (OSError, ValueError):  # not there, or "max"
        return None


def too_large(cell: Cell) -> str | None:
    """Why a cell does not fit into memory here, or None."""
    needed = WORKLOADS[cell.workload].memory * cell.nbytes + (1 << 28)
    free = free_memory()
    if needed <= free:
        return None
    return f"needs about {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free"
