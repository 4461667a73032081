"""Which cells a run has, and in which order."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import baselines
from bench.rows import Cell
from bench.sizes import following, kind_of

UNPUBLISHED_SIZE = 100_000
"""Between two sizes with published figures that are far apart: no step is to hide."""
SIZES = (
    *(1250, 20_000, UNPUBLISHED_SIZE, 1_250_000),
    *(10_000_000, 40_000_000, 640_000_000),
)
LARGE_SIZES = (1_250_000_000, 2_500_000_000)
QUICK_SIZES = (1250, 1_250_000, 10_000_000, 40_000_000, 640_000_000)
QUICK_TRANSPORTS = (
    *("inproc", "shm", "shm+view", "shm+loan"),
    *("nng:ipc", "nng:tcp", "tcp", "tls"),
    *("zmq:ipc", "zmq:tcp", "torchrpc:cpu"),
)
ONCE = 100_000_000
"""Bytes from which a quick run measures once, after its first round: they take long."""

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
        sizes: In bytes; (0,) where there is nothing to choose.
        memory: How many payloads must fit into memory at once.
        quick: The sizes of a quick run; None: `sizes`.
    """

    body: str
    spokes: int
    unit: str
    lower_is_better: bool
    sizes: tuple[int, ...]
    memory: int = 4
    quick: tuple[int, ...] | None = None


_W = "bench.workloads:"
WORKLOADS = {
    "import": Workload("bench.small:import_time", 0, "ms", True, (0,)),
    "codec": Workload(
        "bench.small:codec",
        *(0, "us", True, (64, 1000, 20_000, 1_250_000)),
        quick=(64, 20_000),
    ),
    "latency": Workload(
        f"{_W}latency", 1, "ms", True, SIZES + LARGE_SIZES, quick=QUICK_SIZES
    ),
    "rate": Workload(f"{_W}rate", 1, "msg/s", False, (64, 1000)),
    "fanout": Workload(f"{_W}latency", 3, "ms", True, (10_000_000,), 6),
    "fanin": Workload(f"{_W}fanin", 3, "msg/s", False, (20_000,)),
    "stream": Workload(f"{_W}stream", 1, "GB/s", False, (40_000_000,), 14),
    "mixed": Workload(
        f"{_W}mixed", 1, "ms", True, (640_000_000,), 5, quick=(40_000_000,)
    ),
    "mixed-busy": Workload(f"{_W}mixed", 1, "ms", True, (640_000_000,), 5, quick=()),
    "actor-learner": Workload(
        "bench.actor_learner:actor_learner", 2, "msg/s", False, (0,)
    ),
}
_WITHOUT_WIRE = {"import": ("mq",), "codec": ("mq", "raw")}
_QUICK_LEAVES = "it takes long, and a quick run leaves it out"


def parse_size(text: str) -> int:
    """Bytes of "1250", "20KB" (decimal) or "1MiB" (binary).

    Raises:
        ValueError: It is none of these.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)\s*([a-z]*)", text.strip().lower())
    if not found or found[2] not in _UNITS:
        raise ValueError(f"{text!r} is no size; write 1250, 20KB, 1.25MB or 1MiB")
    nbytes = float(found[1]) * _UNITS[found[2]]
    if not 4 <= nbytes <= 1 << 40:
        raise ValueError(f"size {text!r} is not between 4 bytes and 1 TiB")
    return round(nbytes)


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
        quick: Few sizes; those from `ONCE` bytes once, after the first round.
    """
    for number in range(rounds):
        last = []
        for workload in workloads:
            for cell in _round(transports, workload, sizes, number, budget, quick):
                if quick and cell.nbytes >= ONCE:
                    last.append(cell)
                else:
                    yield cell
        if not number:
            yield from last


def left_out(
    planned: Sequence[Cell], transports: Sequence[str], workloads: Sequence[str]
) -> list[str]:
    """Of which of these no cell is planned, and why, in words."""
    seen = {cell.transport for cell in planned} | {cell.workload for cell in planned}
    found = []
    for name in workloads:
        if name not in seen:
            able = any(_runners([one], name) for one in transports)
            why = _QUICK_LEAVES if able else "none of these transports has it"
            found.append(f"no cell of {name}: {why}")
    for name in transports:
        if name not in seen:
            has = [workload for workload in WORKLOADS if _has(name, workload)]
            why = _QUICK_LEAVES if {*has} & {*workloads} else f"it has {', '.join(has)}"
            found.append(f"no cell of {name}: {why}")
    return found


def _round(
    transports: Sequence[str],
    workload: str,
    sizes: Sequence[int],
    number: int,
    budget: float,
    quick: bool,
) -> Iterator[Cell]:
    known = WORKLOADS[workload]
    own = known.sizes if known.quick is None or not quick else known.quick
    if sizes and known.sizes != (0,):
        own = tuple(sizes)
    runners = _runners(transports, workload)
    for nbytes in own:
        limit = 30.0 + 10 * budget + nbytes / 2e7
        for runner in runners if number % 2 == 0 else runners[::-1]:
            if not (quick and _left_out(runner, nbytes)):
                yield Cell(runner, workload, nbytes, number, budget, limit)


def _left_out(runner: str, nbytes: int) -> bool:
    known = baselines.BASELINES.get(runner)
    return known is not None and 0 < known.quick < nbytes


def _runners(transports: Sequence[str], workload: str) -> list[str]:
    """The transports of a workload, each followed by its baselines, each once."""
    if workload in _WITHOUT_WIRE:
        return list(_WITHOUT_WIRE[workload])
    found: dict[str, None] = {}
    for transport in transports:
        if _has(transport, workload):
            found[transport] = None
        if not baselines.is_baseline(transport):
            found |= dict.fromkeys(baselines.beside(transport, workload))
    return list(found)


def _has(transport: str, workload: str) -> bool:
    return workload not in _WITHOUT_WIRE and baselines.can_run(transport, workload)


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


def misfit(cell: Cell) -> str | None:
    """Why the size of a cell fits not its workload, transport or memory, or None."""
    nbytes = cell.nbytes
    next_one = following(kind_of(cell.workload, nbytes), nbytes)
    if next_one != nbytes:
        return (
            f"{cell.workload} has no payload of {nbytes} bytes, the next has {next_one}"
        )
    known = baselines.BASELINES.get(cell.transport)
    if known is not None and known.most and cell.nbytes > known.most:
        return f"{cell.transport} carries up to {known.most:,} bytes"
    needed = WORKLOADS[cell.workload].memory * cell.nbytes + (1 << 28)
    free = free_memory()
    if needed <= free:
        return None
    return f"needs about {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free"
