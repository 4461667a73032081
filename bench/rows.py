"""What a run leaves behind: rows of JSON lines, and where they were measured."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import msgspec

from mq import speed

PACKAGES = ("torch", "numpy", "pyzmq", "pynng", "msgspec", "gymnasium")
OTHERS = ("iceoryx2", "ray", "redis", "eclipse-zenoh", "ale-py", "torchrl")
"""What baselines and applications need; told of only where it is installed."""

PLANNED = "planned cells"
"""The fact that says how many cells a run was to have."""

UNPACED = "bbr, within this host reno"
"""The fact "tcp" where BBR is the system's way, and the bench has all use Reno here."""

_MISSING = "not installed"


@dataclass(frozen=True)
class Cell:
    """One thing to measure, once.

    Attributes:
        transport: A backend string, or ``raw:...`` or ``limit:...``.
        nbytes: Size of one payload in bytes.
        round: Which repetition; the transports of one round are compared.
        budget: Seconds that the timed part should last.
        limit: Seconds after which the cell is given up and its processes killed.
        preload: Modules that the fork server imports, if it does not run yet.
    """

    preload: ClassVar[Sequence[str]] = ()
    transport: str
    workload: str
    nbytes: int
    round: int = 0
    budget: float = 1.0
    limit: float = 60.0


@dataclass(frozen=True)
class Usage:
    """What one process of a cell used.

    Attributes:
        cpu_seconds: User and system time.
        base_rss_bytes: Resident memory before the cell's work began.
        peak_rss_bytes: The most resident memory at any time.
        timed_cpu_seconds: The part of `cpu_seconds` in which messages were timed.
    """

    ranks: list[int]
    cpu_seconds: float
    base_rss_bytes: int
    peak_rss_bytes: int
    timed_cpu_seconds: float = 0.0


@dataclass(frozen=True)
class Result:
    """One row: what a cell measured, or why it did not.

    Attributes:
        status: "ok"; "failed", with `reason`; or "skipped", with `reason`.
        metrics: Named numbers; "value" is the one that transports are compared by, in
            the workload's unit. Of a failure only "lost" and "sent" count.
        seconds: Wall time of the whole cell.
    """

    transport: str
    workload: str
    nbytes: int
    round: int
    status: Literal["ok", "failed", "skipped"]
    reason: str = ""
    detail: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    processes: list[Usage] = field(default_factory=list)
    seconds: float = 0.0

    @classmethod
    def of(
        cls,
        cell: Cell,
        status: Literal["ok", "failed", "skipped"],
        reason: str = "",
        **rest: Any,
    ) -> Result:
        """A row about `cell`."""
        name = (cell.transport, cell.workload, cell.nbytes, cell.round)
        return cls(*name, status, reason, **rest)


def whole(result: Result) -> Result:
    """The result, a failure if messages were lost that must all arrive."""
    lost = result.metrics.get("lost", 0.0)
    if result.status != "ok" or not lost:
        return result
    reason = f"{lost:g} message(s) were lost that should have arrived"
    return replace(result, status="failed", reason=reason)


def environment(command: Sequence[str]) -> dict[str, str]:
    """Where and with what a run is made, for people who read the figures later.

    Args:
        command: By which it was begun; what of it is no text gets escapes.
    """
    facts = {
        "command": shlex.join(command).encode("utf-8", "backslashreplace").decode(),
        "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "cpu": _cpu_model(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE'):,} bytes",
        "kernel": f"{platform.system()} {platform.release()}",
        "tcp": _congestion_control(),
        "python": platform.python_version(),
        "commit": _commit(),
        "compiled": "yes" if speed.COMPILED else "no",
    }
    for package in PACKAGES:
        facts[package] = _version(package)
    for package in OTHERS:
        if (version := _version(package)) != _MISSING:
            facts[package] = version
    facts["libzmq"] = _libzmq()
    return facts | _gpus()


def _gpus() -> dict[str, str]:
    """The GPUs, their driver, and torch's CUDA; empty where there are none."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version"]
    said = _output([*command, "--format=csv,noheader"]).splitlines()
    pairs = [line.rpartition(", ") for line in said if ", " in line]
    if not pairs:
        return {}
    names = Counter(name for name, _, _ in pairs)
    facts = {
        "gpu": ", ".join(f"{count} x {name}" for name, count in names.items()),
        "gpu driver": pairs[0][2],
    }
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        facts["CUDA_VISIBLE_DEVICES"] = visible
    torch = sys.modules.get("torch")  # not imported for this: it takes seconds
    if torch is not None and torch.version.cuda:
        facts["cuda"] = torch.version.cuda
    return facts


def _congestion_control() -> str:
    """How the congestion of TCP is controlled, on which ``...:tcp`` depends."""
    try:
        name = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    except OSError:
        return "unknown"
    return UNPACED if name == "bbr" else name


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2] for line in lines if line.startswith("model name")]
    return names[0].strip() if names else platform.machine()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return _MISSING


def _libzmq() -> str:
    try:
        import zmq
    except ImportError:
        return _MISSING
    return str(zmq.zmq_version())


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    return _output(command) or "unknown"


def _output(command: Sequence[str]) -> str:
    """What a command says, run beside this file; empty if it fails or is not there."""
    here = Path(__file__).parent
    try:
        answer = subprocess.run(
            command, cwd=here, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return answer.stdout.strip()


class Writer:
    """Appends rows to a file of JSON lines, each as soon as it is known.

    Attributes:
        facts: The environment.
        results: All rows, also one that could not be written.
    """

    def __init__(self, path: Path, facts: dict[str, str]) -> None:
        self.results: list[Result] = []
        self._path = path
        # Without a buffer, which would hold what does not fit and try it again.
        self._file = path.open("wb", buffering=0)
        self._write({"record": "environment", **facts})

    def add(self, result: Result) -> None:
        """Write one row.

        Raises:
            OSError: It cannot be written, as on a full disk; the file ends with the
                row before.
        """
        self.results.append(result)
        self._write({"record": "result", **asdict(result)})

    def _write(self, row: dict[str, Any]) -> None:
        line = json.dumps(row).encode() + b"\n"
        start = self._file.tell()
        try:
            while line:  # what fits of it is written before the rest is refused
                line = line[self._file.write(line) :]
        except OSError as error:
            self._file.seek(start)
            self._file.truncate()
            error.filename = str(self._path)
            raise

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read(path: Path) -> tuple[dict[str, str], list[Result]]:
    """The environment and the rows of a file of JSON lines.

    A last line that was cut off while it was written is left out, which is said.

    Raises:
        ValueError: A line is not one that `Writer` makes, or there is none.
    """
    facts: dict[str, str] = {}
    results = []
    number = 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = _parse(line)
            except (
                *(ValueError, TypeError, KeyError, AttributeError),
                msgspec.MsgspecError,  # a ValueError only since msgspec 0.21
            ) as error:
                if number > 1 and not line.endswith(b"\n"):
                    said = f"{path}, line {number}: left out, as it was cut off"
                    print(said, file=sys.stderr)
                    break
                raise ValueError(
                    f"{path}, line {number}: not a row of `mq bench`: {error}"
                ) from error
            if isinstance(row, Result):
                results.append(row)
            else:
                facts = row
    if not number:
        raise ValueError(f"{path} is empty: not a file of `mq bench`")
    return facts, results


def _parse(line: bytes) -> dict[str, str] | Result:
    row = msgspec.json.decode(line)  # unlike json it takes no NaN and no Infinity
    kind = row.pop("record")
    if kind == "environment":
        facts = {str(key): str(text) for key, text in row.items()}
        if not facts.get(PLANNED, "0").isdecimal():
            raise ValueError(f"{PLANNED}: {facts[PLANNED]!r} is no number")
        return facts
    if kind != "result":
        raise ValueError(f"unknown record {kind!r}")
    result = msgspec.convert(row, Result)
    if result.nbytes < 0:
        raise ValueError(f"{result.nbytes} is no number of bytes")
    if result.status == "ok" and not result.metrics["value"] > 0:
        raise ValueError(f"the value {result.metrics['value']:g} is no measurement")
    return result


def size_text(nbytes: int) -> str:
    """A size in decimal units, as in the published tables."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if nbytes >= factor:
            return f"{nbytes / factor:g} {unit}"
    return f"{nbytes} B"


def percentiles(samples: Iterable[float]) -> dict[str, float]:
    """p50, p90, p99 by the nearest rank, and how many samples there are."""
    ordered = sorted(samples)
    if not ordered:
        raise ValueError("no samples: nothing was measured")
    ranks = {p: math.ceil(len(ordered) * p / 100) for p in (50, 90, 99)}
    found = {f"p{p}": ordered[rank - 1] for p, rank in ranks.items()}
    return {**found, "samples": float(len(ordered))}
