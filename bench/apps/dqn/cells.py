"""The distributed DQN as cells of the bench."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mq
from bench.apps import report
from bench.apps.app import App, AppCell, count
from bench.apps.dqn.collector import collect
from bench.apps.dqn.crew import collector_name
from bench.apps.dqn.learner import Learner
from bench.apps.dqn.task import CARTPOLE, PONG, Task, preset
from bench.apps.dqn.training import Summary, Training
from bench.peer import Metrics, Peer, Unusable
from bench.rows import Result, percentiles
from bench.summary import gather, number
from bench.tables import Text

SEEDS = [0, 1, 2]
GOAL = 475.0
_ITERATIONS = 500
_LIMIT = 1200.0  # seconds
_EPISODES = 100


@dataclass(frozen=True)
class Placed:
    """A task, and the file that its returns are written to, or None."""

    task: Task
    returns: Path | None = None


def run(peer: Peer) -> Metrics | None:
    """One process of a cell: the learner, or a collector."""
    placed: Placed = peer.cell.task  # type: ignore[attr-defined]
    task = placed.task
    name = collector_name(peer.rank - 1) if peer.rank else "learner"
    try:
        with mq.connect(peer.cell.transport, group=peer.group, name=name) as queue:
            if peer.rank:
                collect(queue, task, peer.rank - 1)
                return None
            learner = Learner(task)
            summary = Training(queue, task, learner).run()
    except ImportError as error:
        raise Unusable(str(error)) from error
    if placed.returns is not None:
        _write(placed.returns, learner.returns)
    return _metrics(summary)


def _metrics(summary: Summary) -> Metrics:
    seconds = summary.seconds
    ages = percentiles(age * 1000 for age in summary.ages)
    found = {
        "value": 100 * seconds / summary.iterations,
        "seconds": seconds,
        "steps_per_s": summary.steps / seconds,
        "idle_share": summary.idle / seconds,
        "transport_share": summary.transport / seconds,
        "weights_age_ms": ages["p50"],
        "weights_age_p99_ms": ages["p99"],
        "lost": float(summary.lost),
    }
    if summary.best is not None:
        found["best"] = summary.best
    if summary.reached is not None:
        found["reached"] = float(summary.reached)
    return found


def _write(path: Path, returns: Iterable[tuple[int, float]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["steps", "return"])
        writer.writerows(returns)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The task's own options."""
    parser.add_argument(
        "--game",
        type=lambda text: text.split(","),
        default=[CARTPOLE, PONG],
        metavar="A,B",
        help=f"default: {CARTPOLE},{PONG}",
    )
    parser.add_argument(
        "--seeds",
        type=lambda text: [int(one) for one in text.split(",")],
        default=SEEDS,
        metavar="A,B",
        help=f"of {CARTPOLE} (default: {','.join(map(str, SEEDS))}); others take the "
        "first only",
    )
    parser.add_argument(
        "--steps", type=count, default=Task.steps, help=f"of {CARTPOLE} at most"
    )
    parser.add_argument(
        "--iterations",
        type=count,
        default=_ITERATIONS,
        help=f"of the learner, in other games than {CARTPOLE}",
    )
    parser.add_argument("--collectors", type=count, default=Task.collectors)
    parser.add_argument("--prioritized", action="store_true")


def cells(options: argparse.Namespace, backends: Sequence[str]) -> list[AppCell]:
    """CartPole for every seed until its goal, others for some iterations."""
    found = []
    for number_, game in _rounds(options):
        shared: dict[str, Any] = {
            "collectors": options.collectors,
            "prioritized": options.prioritized,
        }
        if game == CARTPOLE:
            steps = 10_000 if options.quick else options.steps
            tasks = [
                preset(game, seed=seed, steps=steps, goal=GOAL, **shared)
                for seed in options.seeds[: 1 if options.quick else None]
            ]
        else:
            iterations = 100 if options.quick else options.iterations
            seed = options.seeds[0]
            tasks = [preset(game, seed=seed, iterations=iterations, **shared)]
        found += [
            AppCell(
                transport,
                f"dqn {game} seed={task.seed}",
                0,
                number_,
                limit=_LIMIT,
                task=Placed(task),
            )
            for task in tasks
            for transport in backends
        ]
    return found


def _rounds(options: argparse.Namespace) -> Iterable[tuple[int, str]]:
    return [(n, game) for n in range(options.rounds) for game in options.game]


def placed(cell: AppCell, output: Path) -> AppCell:
    """The cell, writing its returns below `output`."""
    name = f"returns {cell.workload} {cell.transport} {cell.round}.csv"
    path = output / name.replace("/", "-").replace(":", "-").replace(" ", "_")
    return replace(cell, task=replace(cell.task, returns=path))


def tables(results: Sequence[Result]) -> list[Text]:
    """One line per game, seed and backend, the published ones below."""
    rows = [row for row in gather(results) if row.workload.startswith("dqn")]
    head = ["game", "backend", "s/100 iterations", "steps/s", "learner idle"]
    head += ["transport", "weights' age ms", "age p99 ms", "lost", "best mean return"]
    head += ["475 after steps"]
    names = ("weights_age_ms", "weights_age_p99_ms", "lost", "best", "reached")
    lines = [
        [
            row.workload.partition(" ")[2],
            row.transport,
            number(row.value),
            number(row.metric("steps_per_s")),
            report.percent(row.metric("idle_share")),
            report.percent(row.metric("transport_share")),
            *(number(row.metric(name)) for name in names),
        ]
        for row in rows
        if row.values
    ]
    lines += [
        ["Pong, published", one.system, number(one.seconds), *["-"] * 8]
        for one in report.published("atari-dqn")
    ]
    note = (
        "Seconds of the learner per 100 iterations; learner idle: the share in which "
        "it waited for transitions; transport: the share in which it published "
        "weights or took messages; lost: messages of collectors that did not arrive. "
        "Returns are means over 100 episodes. Published: DI-engine's DQN on an A100, "
        "seconds per 100 of its epochs, whose batches and networks are others."
    )
    return [Text("Distributed DQN", note, head, lines, report.problems(rows))]


def finish(output: Path, _: Sequence[Result]) -> list[Path]:
    """Plot the returns, where matplotlib is installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return []
    written = []
    for game in (CARTPOLE, PONG):
        stem = f"returns_dqn_{game}".replace("/", "-")
        curves = {
            path.stem.removeprefix(stem)[1:]: _means(path)
            for path in sorted(output.glob(f"{stem}_*.csv"))
        }
        curves = {name: means for name, means in curves.items() if means}
        if not curves:
            continue
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.add_subplot(
            xlabel="steps of all collectors",
            ylabel="mean return of 100 episodes",
            title=game,
        )
        for name, means in curves.items():
            axes.plot(*zip(*means, strict=True), label=name.replace("_", " "))
        axes.legend(fontsize="small")
        written.append(output / f"{stem}.png")
        figure.savefig(written[-1], dpi=120)
    return written


def _means(path: Path) -> list[tuple[int, float]]:
    """The mean of the last episodes, up to 100, by steps."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = [
            (int(row["steps"]), float(row["return"])) for row in csv.DictReader(file)
        ]
    found = []
    for place, (steps, _) in enumerate(rows, 1):
        last = rows[max(0, place - _EPISODES) : place]
        found.append((steps, sum(one for _, one in last) / len(last)))
    return found


APP = App(
    "dqn",
    "A learner and collectors in processes of their own; see also dqn.train.",
    f"{__name__}:run",
    lambda cell: 1 + cell.task.task.collectors,
    add_arguments,
    cells,
    tables,
    finish,
    placed,
)
