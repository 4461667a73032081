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
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

import mq
from bench.apps.app import count
from bench.apps.dqn.crew import Crew, play
from bench.apps.dqn.learner import Learner
from bench.apps.dqn.task import CARTPOLE, Task, preset
from bench.apps.dqn.training import Summary, Tick, Training

_SPOKEN = 5.0  # seconds between two lines of progress
_SAVED = 30.0  # seconds between two checkpoints


def main(arguments: Sequence[str]) -> int:
    """Run with these arguments; the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
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
    parser.add_argument("--collectors", type=count)
    parser.add_argument("--steps", type=count, help="of the game, over all collectors")
    parser.add_argument("--goal", type=float, help="mean return at which to stop")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--prioritized", action="store_true", default=None)
    parser.add_argument("--checkpoint", type=Path, metavar="FILE")
    parser.add_argument("--resume", action="store_true", help="go on from --checkpoint")
    parser.add_argument(
        "--role", choices=["all", "learner", "collector"], default="all"
    )
    parser.add_argument("--group", help="what the roles have in common")
    parser.add_argument("--index", type=int, default=0, help="which collector this is")
    return parser


def _changes(options: argparse.Namespace) -> dict[str, Any]:
    names = {field.name for field in fields(Task)} - {"game"}
    return {
        name: value
        for name, value in vars(options).items()
        if name in names and value is not None
    }


def train(
    task: Task,
    backend: str,
    group: str,
    *,
    checkpoint: Path | None = None,
    resume: bool = False,
    alone: bool = False,
    tick: Tick = lambda _: None,
) -> Summary:
    """Train on a backend; save every half minute and at the end.

    Args:
        alone: Whether collectors are started elsewhere.
        tick: Called again and again, at least every second.

    Raises:
        OSError, ValueError: The checkpoint is missing or is of another game.
        mq.MQError: The group cannot be joined, or no collector sends anything.
    """
    # Networks this small take 100 times as long where threads wait for a busy core.
    torch.set_num_threads(1)
    learner = Learner(task)
    if resume and checkpoint is not None:
        learner.load(checkpoint)
    with (
        mq.connect(backend, group=group, name="learner") as queue,
        _Watch(task, checkpoint).shown() as watch,
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


class _Watch:
    """Progress on stderr, and checkpoints."""

    def __init__(self, task: Task, checkpoint: Path | None) -> None:
        self._task = task
        self._checkpoint = checkpoint
        self._spoken = self._saved = time.monotonic()
        self._bar: Any = None

    @contextlib.contextmanager
    def shown(self) -> Iterator[_Watch]:
        """A bar where tqdm is installed and a person looks, else lines."""
        if sys.stderr.isatty():
            with contextlib.suppress(ImportError):
                from tqdm import tqdm

                self._bar = tqdm(
                    total=self._task.steps, unit="step", file=sys.stderr, leave=False
                )
        try:
            yield self
        finally:
            if self._bar is not None:
                self._bar.close()

    def look(self, learner: Learner) -> None:
        """Show how far it is and save, where it is time to."""
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(learner.steps - self._bar.n)
        if now - self._spoken > _SPOKEN:
            self._spoken = now
            self._speak(learner)
        if self._checkpoint is not None and now - self._saved > _SAVED:
            self._saved = now
            learner.save(self._checkpoint)

    def _speak(self, learner: Learner) -> None:
        mean = learner.mean_return()
        shown = "-" if mean is None else f"{mean:.1f}"
        if self._bar is not None:
            self._bar.set_postfix_str(f"mean return {shown}")
            return
        print(
            f"{learner.steps}/{self._task.steps} steps, "
            f"{learner.iteration} iterations, mean return {shown}",
            file=sys.stderr,
            flush=True,
        )

    def end(self, learner: Learner) -> None:
        """Save for the last time."""
        if self._checkpoint is not None:
            learner.save(self._checkpoint)


def describe(summary: Summary) -> str:
    """A summary in one sentence for a person."""
    seconds = summary.seconds or 1.0
    best = "-" if summary.best is None else f"{summary.best:.1f}"
    return (
        f"{summary.iterations} iterations and {summary.steps} steps in "
        f"{seconds:.1f} s; learner idle {summary.idle / seconds:.0%}, in the transport "
        f"{summary.transport / seconds:.1%}; best mean return {best}; "
        f"{summary.lost} messages lost"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
