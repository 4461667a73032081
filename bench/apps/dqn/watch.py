"""What a person sees of a training, and what it leaves on the disk."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.apps.dqn import curves
from bench.apps.dqn.learner import Learner
from bench.apps.dqn.task import Task

_SPOKEN = 5.0  # seconds between two lines of progress
_SAVED = 30.0  # seconds between two checkpoints


class Watch:
    """Progress on stderr, checkpoints, and the returns at the end.

    Args:
        checkpoint: The file that is saved to, or None.
        output: The folder for ``returns.csv`` and ``returns.png``; None: that of
            `checkpoint`, if there is one.

    Raises:
        OSError: One of them cannot be written to.
    """

    def __init__(
        self, task: Task, checkpoint: Path | None = None, output: Path | None = None
    ) -> None:
        self._task = task
        self._checkpoint = checkpoint
        self._output = output
        if output is not None:
            output.mkdir(parents=True, exist_ok=True)
        if checkpoint is not None:
            _check(checkpoint)
            self._output = output or checkpoint.parent
        self._spoken = self._saved = time.monotonic()
        self._bar: Any = None

    @contextlib.contextmanager
    def shown(self) -> Iterator[Watch]:
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
        """Save for the last time, and write and draw the returns."""
        if self._checkpoint is not None:
            learner.save(self._checkpoint)
        if self._output is not None:
            curves.write(self._output / "returns.csv", learner.returns)
            curves.draw(self._output / "returns.png", self._task.game, learner.returns)


def _check(checkpoint: Path) -> None:
    """Raise unless the file can be written: an hour later it would be too late."""
    folder = checkpoint.parent
    if checkpoint.is_dir():
        raise IsADirectoryError(f"{checkpoint} is a folder: name a file in it")
    if not folder.is_dir():
        raise FileNotFoundError(f"{checkpoint}: there is no folder {folder}: create it")
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"{checkpoint}: {folder} cannot be written to")
