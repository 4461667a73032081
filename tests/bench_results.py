"""Files of results made up for tests of reports and comparisons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from bench import plan
from bench.rows import Cell, Result, Usage, Writer

SIZES = (1250, 1_250_000, 40_000_000)
TRANSPORTS = {  # milliseconds that a message takes, and per megabyte
    "inproc": (0.1, 0.2),
    "shm": (0.05, 0.1),
    "zmq:ipc": (0.2, 0.3),
    "zmq:tcp": (0.2, 0.4),
    "raw:zmq:ipc": (0.1, 0.6),
    "raw:zmq:tcp": (0.1, 0.8),
    "raw:torch.multiprocessing": (0.3, 0.5),
    "limit:memcpy": (0.001, 0.05),
    "limit:unix": (0.02, 0.1),
    "limit:tcp": (0.04, 0.2),
}
LOSSY = "raw:zmq:ipc:pubsub"


def row(
    transport: str,
    value: float,
    number: int = 0,
    workload: str = "latency",
    nbytes: int = 40_000_000,
    **metrics: float,
) -> Result:
    """A measured cell of two processes."""
    used = [Usage([0], 0.5, 10, 20, 0.2), Usage([1], 0.5, 10, 3_000_010, 0.2)]
    cell = Cell(transport, workload, nbytes, number)
    found = {"value": value, "p50": value, "p99": 2 * value, **metrics}
    return Result.of(cell, "ok", metrics=found, processes=used)


def write(path: Path, rows: list[Result], facts: Mapping[str, str] = {}) -> Path:
    """Write a file of JSON lines."""
    writer = Writer(path, {"command": "mq bench --quick", "cpu": "a fast one", **facts})
    for one in rows:
        writer.add(one)
    writer.close()
    return path


def whole_run() -> list[Result]:
    """Two rounds of every workload that is plotted, and two cells without a value."""
    rows = []
    for number in (0, 1):
        for transport, (each, per_megabyte) in TRANSPORTS.items():
            drift = 1 + number / 10
            for nbytes in SIZES:
                ms = (each + per_megabyte * nbytes / 1e6) * drift
                carried = {"carried_bytes": 1e9}
                rows.append(row(transport, ms, number, nbytes=nbytes, **carried))
            if not transport.startswith("limit:"):
                rows += _others(transport, each * drift, number)
        flow = {"sent": 1000.0, "lost": 250.0}
        rows.append(row(LOSSY, 8.0, number, "rate", 64, **flow))
    gone = Cell("nng:tcp", "latency", 40_000_000)
    rows.append(Result.of(gone, "skipped", "pynng is not installed"))
    broken = Cell("torchrpc:cpu", "rate", 64)
    return [*rows, Result.of(broken, "failed", "rank 1 died of signal 9")]


def _others(transport: str, ms: float, number: int) -> list[Result]:
    rows = []
    for workload in ("rate", "fanout", "fanin", "stream", "mixed"):
        known = plan.WORKLOADS[workload]
        value = ms if known.lower_is_better else 1 / ms
        flow = {} if known.lower_is_better else {"sent": 1000.0, "lost": 0.0}
        rows.append(row(transport, value, number, workload, known.sizes[0], **flow))
    return rows


def app_row(
    transport: str, workload: str, value: float, number: int = 0, **metrics: float
) -> Result:
    """A measured run of an application."""
    cell = Cell(transport, workload, 0, number)
    return Result.of(cell, "ok", metrics={"value": value, **metrics})


def pipeline_rows(backends: Sequence[str]) -> list[Result]:
    """One process and these backends, for splits 1, 2, 4 and 8."""
    rows = []
    for place, split in enumerate((1, 2, 4, 8)):
        workload = f"pipeline num_split={split}"
        rows.append(app_row("alone", workload, 20.0 + place, loss0=2.5))
        shares = {"transport_share": 0.01, "waiting_share": 0.1, "loss0": 2.5}
        shares["carried_bytes"] = 1e6
        rows += [app_row(name, workload, 16.0 - place, **shares) for name in backends]
    return rows


def shards_rows(how: str, backends: Sequence[str], raw: str) -> list[Result]:
    """These backends beside bare RPC."""
    rows = [
        app_row(name, f"shards {how}", 1.5, transport_share=0.1) for name in backends
    ]
    return [*rows, app_row(raw, f"shards {how}", 3.0)]


def dqn_row(transport: str, game: str, seed: int, **metrics: float) -> Result:
    """A training of a game."""
    figures = {"steps_per_s": 2000.0, "idle_share": 0.25, "transport_share": 0.125}
    figures |= {"weights_age_ms": 9.0, "weights_age_p99_ms": 30.0, "lost": 0.0}
    return app_row(transport, f"dqn {game} seed={seed}", 0.5, **figures | metrics)
