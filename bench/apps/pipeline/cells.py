"""The pipeline as cells of the bench."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

import mq
from bench.apps import placing, report
from bench.apps.app import ALONE, App, AppCell, Arguments, Column, count, counts
from bench.apps.pipeline.resnet import Size
from bench.apps.pipeline.stages import Task, alone, first_stage, last_stage
from bench.apps.timing import Timed
from bench.peer import Metrics, Peer
from bench.summary import Row, number
from bench.tables import Text

_SPLITS = [1, 2, 4, 8]
BY_SPLIT = "Pipeline by number of splits"
_QUICK = Task(Size((1, 1, 1, 1), 16, 10), image=32, batch=16)
_LIMIT = 600.0  # seconds
_EXPECTED = 10.0  # seconds of the timed part, for the progress shown


def run(peer: Peer) -> Metrics | None:
    """One process of a cell: both stages, or everything."""
    task: Task = peer.cell.task  # type: ignore[attr-defined]
    if peer.cell.transport == ALONE:
        trained = alone(task)
        return {"value": trained.seconds} | _losses(trained.losses)
    names = ("stage0", "stage1")
    name = names[peer.rank]
    options = placing.options(peer.cell.transport, task.device, peer.rank, names)
    with mq.connect(
        peer.cell.transport, group=peer.group, name=name, **options
    ) as queue:
        line = Timed(queue, peer.remaining())
        trained = (first_stage, last_stage)[peer.rank](line, task)
        told = (trained, line.transport, line.waiting, line.nbytes)
        (first, *of_first), (last, *of_last) = peer.meet(told)
    seconds = max(first.seconds, last.seconds)
    both = [a + b for a, b in zip(of_first, of_last, strict=True)]
    return {
        "value": seconds,
        "transport_share": both[0] / (2 * seconds),
        "waiting_share": both[1] / (2 * seconds),
        "carried_bytes": float(both[2]),
        **_losses(last.losses),
    }


def _losses(losses: Sequence[float]) -> Metrics:
    return {f"loss{place}": loss for place, loss in enumerate(losses)}


def add_arguments(parser: Arguments) -> None:
    """The task's own options."""
    parser.add_argument(
        "--num-split",
        type=counts,
        default=_SPLITS,
        metavar="A,B",
        help="micro-batches per batch (default: 1,2,4,8)",
    )
    parser.add_argument("--image", type=count, default=Task.image, help="pixels a side")
    parser.add_argument("--batch", type=count, default=Task.batch, help="images")
    parser.add_argument("--batches", type=count, default=Task.batches)
    parser.add_argument(
        "--stage-device",
        choices=placing.DEVICES,
        default=placing.default(),
        help="where the stages are (default here: %(default)s)",
    )


def cells(options: argparse.Namespace, backends: Sequence[str]) -> list[AppCell]:
    """Every backend beside one process, split by split.

    Raises:
        ValueError: A GPU is asked for and there is none, or a batch cannot be split.
    """
    placing.check(options.stage_device, "--stage-device")
    if options.quick:
        task = replace(_QUICK, device=options.stage_device)
    else:
        task = Task(
            image=options.image,
            batch=options.batch,
            batches=options.batches,
            split=options.num_split[0],
            device=options.stage_device,
        )
    return [
        AppCell(
            transport,
            f"pipeline num_split={split}",
            0,
            number,
            budget=1.0 if options.quick else _EXPECTED,
            limit=_LIMIT,
            task=replace(task, split=split),
        )
        for number in range(options.rounds)
        for split in options.num_split
        for transport in [ALONE, *backends]
    ]


def tables(rows: Sequence[Row]) -> list[Text]:
    """Speed-ups in short, one line per backend; then one per backend and split."""
    rows = sorted(rows, key=split_of)
    single = [row for row in rows if row.transport == ALONE and row.values]
    fastest = min(single, key=lambda row: row.value or 0.0, default=None)
    return [_by_split(rows, fastest), _in_full(rows, single, fastest)]


def split_of(row: Row) -> int:
    """The number of micro-batches per batch."""
    return int(row.workload.partition("=")[2])


def published() -> dict[int, float]:
    """The published seconds by the number of micro-batches."""
    found = report.published("pipeline")
    return {int(one.parameter.partition("=")[2]): one.seconds for one in found}


def _speed_up(row: Row, fastest: Row | None) -> str:
    ratio = None if row is fastest else row.ratio(fastest)
    return number(1 / ratio) if ratio else "-"


def _by_split(rows: Sequence[Row], fastest: Row | None) -> Text:
    splits = sorted({split_of(row) for row in rows})
    head = ["backend", *(f"{split}: s" for split in splits)]
    head += [f"{split}: speed-up" for split in splits]
    measured = {(row.transport, split_of(row)): row for row in rows if row.values}
    lines = []
    for name in dict.fromkeys(name for name, _ in measured):
        own = [measured.get((name, split)) for split in splits]
        seconds = [number(row.value if row else None) for row in own]
        lines.append(
            [name, *seconds, *(_speed_up(row, fastest) if row else "-" for row in own)]
        )
    figures = published()
    times = [number(figures.get(split)) for split in splits]
    faster = [number(figures[1] / figures[n]) if n in figures else "-" for n in splits]
    lines.append(["published: torchrpc, over num_split=1", *times, *faster])
    note = (
        "By the number of micro-batches per batch. Speed-up of ours: over the fastest "
        "split of one process with one thread; of the published: over their own first "
        "line, for one process was not published."
    )
    return Text(BY_SPLIT, note, head, lines, [])


def _in_full(rows: Sequence[Row], single: Sequence[Row], fastest: Row | None) -> Text:
    figures = published()
    head = ["num_split", "backend", "s", "speed-up", "transport share", "waiting", "MB"]
    head += ["loss differs by", "published s"]
    lines = []
    for row in rows:
        if not row.values:
            continue
        beside = next((one for one in single if one.workload == row.workload), None)
        carried = row.metric("carried_bytes")
        figure = figures.get(split_of(row))
        lines.append(
            [
                str(split_of(row)),
                row.transport,
                number(row.value),
                _speed_up(row, fastest),
                report.percent(row.metric("transport_share")),
                report.percent(row.metric("waiting_share")),
                number(carried / 1e6 if carried else None),
                "-" if row is beside else number(_difference(row, beside)),
                "-" if row is beside else number(figure),
            ]
        )
    note = (
        "Seconds for all batches, forward, backward and optimiser. speed-up: over the "
        "fastest split of one process with one thread. transport share: part of the "
        "stages' time in publish and in waiting for a message already published. "
        "waiting: share in which the other stage was not done yet. loss differs by: "
        "the most by which a batch's loss differs from one process's with the same "
        "micro-batches. published: 120 images of 128x128 on one machine."
    )
    return Text("Pipeline", note, head, lines, report.problems(rows))


def _difference(row: Row, beside: Row | None) -> float | None:
    if beside is None:
        return None
    names = [name for name in row.metrics if name.startswith("loss")]
    return max(abs((row.metric(n) or 0) - (beside.metric(n) or 0)) for n in names)


def columns(rows: Sequence[Row]) -> list[Column]:
    """The largest split that was measured."""
    most = max((split_of(row) for row in rows if row.values), default=0)
    own = [row for row in rows if row.values and split_of(row) == most]
    single = [row for row in rows if row.transport == ALONE and row.values]
    fastest = min(single, key=lambda row: row.value or 0.0, default=None)
    times = {row.transport: number(row.value) for row in own}
    figures = {"torchrpc": number(published()[most])} if most in published() else {}
    shares = {
        row.transport: report.percent(row.metric("transport_share")) for row in own
    }
    return (
        [
            Column(f"pipeline, {most} splits: s", times, figures),
            Column("speed-up", {row.transport: _speed_up(row, fastest) for row in own}),
            Column("transport share", shares),
        ]
        if own
        else []
    )


APP = App(
    "pipeline",
    "ResNet-50 in two processes, micro-batch by micro-batch.",
    f"{__name__}:run",
    lambda _: 2,
    add_arguments,
    cells,
    tables,
    columns,
    choices=("num_split",),
)
