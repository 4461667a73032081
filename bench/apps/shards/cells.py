"""The two-shard model as cells of the bench."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

import mq
from bench.apps import placing, report
from bench.apps.app import App, AppCell, Arguments, Column, count
from bench.apps.placing import CUDA
from bench.apps.shards import rpc
from bench.apps.shards.model import Passed, Task, far, near
from bench.apps.timing import Timed
from bench.peer import Metrics, Peer
from bench.summary import Row, number
from bench.tables import Text

RAW, RAW_CUDA = "raw:torchrpc", "raw:torchrpc:cuda"
_QUICK = {"width": 200, "rows": 200, "passes": 2}
_LIMIT = 180.0  # seconds


def run(peer: Peer) -> Metrics | None:
    """One process of a cell: the near shard or the far one."""
    task: Task = peer.cell.task  # type: ignore[attr-defined]
    if peer.cell.transport.startswith("raw:"):
        with rpc.member(task, peer.rank, peer.directory, peer.remaining()):
            return _metrics(rpc.near(task)) if peer.rank == 0 else None
    name, body = (("near", near), ("far", far))[peer.rank]
    options = placing.options(
        peer.cell.transport, task.device, peer.rank, ("near", "far")
    )
    with mq.connect(
        peer.cell.transport, group=peer.group, name=name, **options
    ) as queue:
        line = Timed(queue, peer.remaining())
        passed = body(line, task)
        peer.meet()
    if peer.rank:
        return None
    share = line.transport / passed.seconds
    return {**_metrics(passed), "transport_share": share}


def _metrics(passed: Passed) -> Metrics:
    return {"value": passed.seconds, "gradient": float(passed.gradient.abs().sum())}


def add_arguments(parser: Arguments) -> None:
    """The task's own options."""
    parser.add_argument(
        "--device",
        choices=placing.DEVICES,
        default=placing.default(),
        help="where the shards are (default here: %(default)s)",
    )
    parser.add_argument("--passes", type=count, default=Task.passes)
    parser.add_argument("--width", type=count, default=Task.width, help="of a shard")


def cells(options: argparse.Namespace, backends: Sequence[str]) -> list[AppCell]:
    """Staged over every backend, direct where there is a GPU, and bare RPC.

    Raises:
        ValueError: A GPU is asked for and there is none.
    """
    placing.check(options.device, "--device")
    sizes = {"width": options.width, "rows": options.width, "passes": options.passes}
    task = Task(**(_QUICK if options.quick else sizes), device=options.device)
    direct = replace(task, direct=True)
    if options.device == "cpu":
        tasks = [(name, task) for name in [*backends, RAW]]
    else:
        staged = [name for name in [*backends, RAW] if name != CUDA]
        tasks = [(name, task) for name in staged]
        tasks += [(CUDA, direct), (RAW_CUDA, direct)]
    return [
        AppCell(name, f"shards {_how(one)}", 0, number, limit=_LIMIT, task=one)
        for number in range(options.rounds)
        for name, one in tasks
    ]


def _how(task: Task) -> str:
    if task.device == "cpu":
        return "cpu"
    return "direct" if task.direct else "staged"


def how_of(row: Row) -> str:
    """Where its tensors were: "cpu", "staged" or "direct"."""
    return row.workload.partition(" ")[2]


def raw_of(row: Row, rows: Sequence[Row]) -> Row | None:
    """The same on bare RPC; None where it was not measured, or is the row itself."""
    for one in rows:
        bare = one.transport.startswith("raw:") and one.values
        if bare and one.workload == row.workload:
            return None if one is row else one
    return None


STAGED = {CUDA: "torchrpc:cpu", RAW_CUDA: RAW}
"""What a direct row is compared with: the same RPC between host memories."""


def staged_of(row: Row, rows: Sequence[Row]) -> Row | None:
    """The staged row that a direct one is compared with; None for others."""
    if how_of(row) != "direct":
        return None
    for one in rows:
        if how_of(one) == "staged" and one.transport == STAGED.get(row.transport):
            return one
    return None


def _times_faster(row: Row, rows: Sequence[Row]) -> str:
    ratio = row.ratio(staged_of(row, rows))
    return number(1 / ratio if ratio else None)


def _published() -> dict[str, str]:
    """The ratio of the published times, by what its row is called here."""
    seconds = {HOW[one.system]: one.seconds for one in report.published("cuda-rpc")}
    return {"direct": number(seconds["staged"] / seconds["direct"])}


HOW = {"cpu": "staged", "cuda": "direct"}
"""What the published rows are called here."""


def tables(rows: Sequence[Row]) -> list[Text]:
    """One line per backend, the published two below."""
    head = ["tensors", "backend", "s", "/bare RPC", "staged / direct"]
    head.append("transport share")
    lines = [
        [
            how_of(row),
            row.transport,
            number(row.value),
            number(row.ratio(raw_of(row, rows))),
            _times_faster(row, rows),
            report.percent(row.metric("transport_share")),
        ]
        for row in rows
        if row.values
    ]
    ratio = _published()
    for one in report.published("cuda-rpc"):
        how = HOW[one.system]
        line = [how, "published: bare RPC", number(one.seconds), "-"]
        lines.append([*line, ratio.get(how, "-"), "-"])
    note = (
        "Seconds for all forward and backward passes. /bare RPC: by the same on "
        "bare torch RPC with distributed autograd. "
    )
    if all(how_of(row) == "cpu" for row in rows):
        note += (
            "No row is of a GPU, so nothing is staged and nothing goes from device to "
            "device: this compares mq's backends with bare RPC between the host "
            "memories of two processes, and not with the published rows, which are of "
            "two GPUs."
        )
    else:
        note += (
            "staged / direct: how many times faster from device to device than by host "
            "memory, torchrpc:cuda than torchrpc:cpu and bare RPC than bare RPC."
        )
    return [Text("Two shards", note, head, lines, report.problems(rows))]


def columns(rows: Sequence[Row]) -> list[Column]:
    """Seconds, and by bare RPC, for each place that tensors were in."""
    found = []
    for how in dict.fromkeys(how_of(row) for row in rows if row.values):
        own = [row for row in rows if row.values and how_of(row) == how]
        figures = {
            f"bare RPC, {HOW[one.system]}": number(one.seconds)
            for one in report.published("cuda-rpc")
            if how in ("cpu", HOW[one.system])
        }
        times = {row.transport: number(row.value) for row in own}
        ratios = {row.transport: number(row.ratio(raw_of(row, rows))) for row in own}
        found += [
            Column(f"shards, {how}: s", times, figures),
            Column("/bare RPC", ratios),
        ]
        if how == "direct":
            faster = {row.transport: _times_faster(row, rows) for row in own}
            beside = {
                f"bare RPC, {place}": text for place, text in _published().items()
            }
            found.append(Column("staged / direct", faster, beside))
    return found


APP = App(
    "shards",
    "Two linear shards in two processes, forward and backward.",
    f"{__name__}:run",
    lambda _: 2,
    add_arguments,
    cells,
    tables,
    columns,
    choices=("device",),
)
