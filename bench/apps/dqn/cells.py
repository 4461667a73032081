"""The distributed DQN as cells of the bench."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import mq
from bench.apps.app import App, AppCell, Arguments, count, numbers, words
from bench.apps.dqn import curves, games
from bench.apps.dqn.collector import collect
from bench.apps.dqn.crew import collector_name
from bench.apps.dqn.learner import Learner
from bench.apps.dqn.tables import columns, game_of, tables
from bench.apps.dqn.task import CARTPOLE, PONG, Task, preset
from bench.apps.dqn.training import Training
from bench.apps.dqn.variants import add_variants, variants
from bench.peer import Metrics, Peer, Unusable
from bench.rows import Result

SEEDS = [0, 1, 2]
GOAL = 475.0
_ITERATIONS = 500
_LIMIT = 1200.0  # seconds
_EXPECTED = {CARTPOLE: 40.0, PONG: 10.0}  # seconds timed, for the progress shown


@dataclass(frozen=True)
class Placed:
    """A task in the bench.

    Attributes:
        returns: The file that returns are written to, or None.
        every_seed: Whether it is run though another seed has reached the goal.
    """

    task: Task
    returns: Path | None = None
    every_seed: bool = False


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
        curves.write(placed.returns, learner.returns)
    return summary.figures()


def add_arguments(parser: Arguments) -> None:
    """The task's own options."""
    parser.add_argument(
        "--game",
        type=_games,
        default=[CARTPOLE, PONG],
        metavar="A,B",
        help=f"default: {CARTPOLE},{PONG}",
    )
    parser.add_argument(
        "--seeds",
        type=numbers,
        default=SEEDS,
        metavar="A,B",
        help=f"of {CARTPOLE} (default: {','.join(map(str, SEEDS))}), each until a mean "
        f"return of {GOAL:g}; other games take the first only",
    )
    parser.add_argument(
        "--every-seed",
        action="store_true",
        help="run every seed over every backend; else one that reached the goal is "
        "enough for a backend",
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
    add_variants(parser)


def _games(text: str) -> list[str]:
    """Names of games without a space, which ends them in a row, for argparse.

    Where gymnasium is not installed their cells are skipped, whatever they are called.
    """
    found = words(text)
    for name in found:
        if len(name.split()) > 1:
            raise argparse.ArgumentTypeError(f"{name!r} is no name of a game")
        try:
            with contextlib.suppress(ImportError):
                games.make(name).close()
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
    return found


def cells(options: argparse.Namespace, backends: Sequence[str]) -> list[AppCell]:
    """CartPole for every seed until its goal, others for some iterations."""
    found = []
    for number_, game in _rounds(options):
        shared = variants(options)
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
                budget=1.0 if options.quick else _EXPECTED.get(game, 10.0),
                limit=_LIMIT,
                task=Placed(task, every_seed=options.every_seed),
            )
            for task in tasks
            for transport in backends
        ]
    return found


def _rounds(options: argparse.Namespace) -> Iterable[tuple[int, str]]:
    return [(n, game) for n in range(options.rounds) for game in options.game]


def placed(cell: AppCell, output: Path) -> AppCell:
    """The cell, writing its returns below `output`."""
    path = output / returns_name(cell.workload, cell.transport, cell.round)
    return replace(cell, task=replace(cell.task, returns=path))


def returns_name(workload: str, transport: str, round_: int) -> str:
    """The file that a cell's returns are written to."""
    name = f"returns {workload} {transport} {round_}.csv"
    return name.replace("/", "-").replace(":", "-").replace(" ", "_")


def needless(cell: AppCell, results: Sequence[Result]) -> str:
    """Another seed need not be tried over a backend where one has reached the goal."""
    placed: Placed = cell.task
    if placed.task.goal is None or placed.every_seed:
        return ""
    for row in results:
        same = (row.transport, row.round) == (cell.transport, cell.round)
        if (
            same
            and row.status == "ok"
            and "reached" in row.metrics
            and game_of(row.workload) == CARTPOLE
        ):
            return "another seed reached the goal; --every-seed runs this one, too"
    return ""


APP = App(
    "dqn",
    "A learner and collectors in processes of their own; see also dqn.train.",
    f"{__name__}:run",
    lambda cell: 1 + cell.task.task.collectors,
    add_arguments,
    cells,
    tables,
    columns,
    placed,
    needless,
    ("game", "seeds", "every_seed"),
)
