"""`python -m bench.apps.dqn.train`: train, watch, save, go on.

The learner runs here and starts its collectors; or, for other terminals and hosts, one
role each: `--role learner` and `--role collector --index 0`, with one `--group`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import mq
from bench.apps.app import count
from bench.apps.dqn.crew import Crew, play
from bench.apps.dqn.learner import Learner
from bench.apps.dqn.task import CARTPOLE, Task, preset
from bench.apps.dqn.training import Summary, Tick, Training
from bench.apps.dqn.variants import add_variants, variants
from bench.apps.dqn.watch import Watch
from mq import registry


def main(arguments: Sequence[str]) -> int:
    """Run with these arguments; the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        _check_backend(options.backend)
        task = preset(options.game, **_changes(options))
    except ValueError as error:
        parser.error(str(error))
    if options.resume and not options.checkpoint:
        parser.error("--resume needs --checkpoint FILE: where to go on from")
    if options.role != "all" and not options.group:
        parser.error(f"--role {options.role} needs --group NAME: whose {options.role}")
    group = options.group or f"dqn-{os.getpid()}-{time.time_ns()}"
    try:
        if options.role == "collector":
            play(options.backend, group, task, options.index)
            return 0
        summary = train(
            task,
            options.backend,
            group,
            checkpoint=options.checkpoint,
            output=options.output,
            resume=options.resume,
            alone=options.role == "learner",
        )
    except (mq.MQError, ImportError, OSError, ValueError) as error:
        print(f"dqn: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(describe(summary))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.apps.dqn.train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--backend", default="zmq", help="default: %(default)s")
    parser.add_argument("--game", default=CARTPOLE, help="default: %(default)s")
    add_variants(parser)
    parser.add_argument("--steps", type=count, help="of the game, over all collectors")
    parser.add_argument("--goal", type=float, help="mean return at which to stop")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--checkpoint", type=Path, metavar="FILE")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="for returns.csv and returns.png (default: where --checkpoint is)",
    )
    parser.add_argument("--resume", action="store_true", help="go on from --checkpoint")
    parser.add_argument(
        "--role", choices=["all", "learner", "collector"], default="all"
    )
    parser.add_argument("--group", help="what the roles have in common")
    parser.add_argument("--index", type=int, default=0, help="which collector this is")
    return parser


def _check_backend(backend: str) -> None:
    """Raise ValueError unless it joins processes, and here."""
    if reason := registry.check(backend):
        raise ValueError(reason)
    if not registry.capabilities(backend).separate_processes:
        raise ValueError(
            f"{backend} joins threads of one process, and each collector is a process: "
            "choose another --backend, as shm"
        )


def _changes(options: argparse.Namespace) -> dict[str, Any]:
    found = {name: getattr(options, name) for name in ("steps", "goal", "seed")}
    given = {name: value for name, value in found.items() if value is not None}
    return given | variants(options)


def train(
    task: Task,
    backend: str,
    group: str,
    *,
    checkpoint: Path | None = None,
    output: Path | None = None,
    resume: bool = False,
    alone: bool = False,
    tick: Tick = lambda _: None,
) -> Summary:
    """Train on a backend; save every half minute and at the end.

    Args:
        output: The folder for the returns; None: where the checkpoint is.
        alone: Whether collectors are started elsewhere.
        tick: Called again and again, at least every second.

    Raises:
        OSError, ValueError: The checkpoint is missing or is of another game, or there
            is no place for it or the returns.
        mq.MQError: The group cannot be joined, or no collector sends anything.
    """
    # Networks this small take 100 times as long where threads wait for a busy core.
    torch.set_num_threads(1)
    watched = Watch(task, checkpoint, output)
    learner = Learner(task)
    if resume and checkpoint is not None:
        learner.load(checkpoint)
    with (
        mq.connect(backend, group=group, name="learner") as queue,
        watched.shown() as watch,
        contextlib.ExitStack() as stack,
    ):
        crew = None if alone else stack.enter_context(Crew(backend, group, task))

        def look(training: Training) -> None:
            if crew is not None:
                crew.mend()
            watch.look(learner)
            tick(training)

        summary = Training(queue, task, learner, look, resumed=resume).run()
        watch.end(learner)
    return summary


def describe(summary: Summary) -> str:
    """A summary in one sentence for a person: the figures of the bench's rows."""
    try:
        figures = summary.figures()
    except ValueError as error:
        return str(error)
    best = "-" if summary.best is None else f"{summary.best:.1f}"
    reached = "" if summary.reached is None else f", goal after {summary.reached} steps"
    return (
        f"{summary.iterations} iterations and {summary.steps} steps in "
        f"{summary.seconds:.1f} s: {figures['value']:.3g} s/100 iterations, "
        f"{figures['steps_per_s']:.0f} steps/s; learner idle "
        f"{figures['idle_share']:.0%}, in the transport "
        f"{figures['transport_share']:.1%}; weights' age "
        f"{figures['weights_age_ms']:.1f} ms, p99 "
        f"{figures['weights_age_p99_ms']:.1f} ms; best mean return {best}{reached}; "
        f"{summary.lost} messages lost"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
