"""How far a run is, and how long the rest of it may take."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from bench.rows import Cell, size_text


class Progress:
    """A bar on stderr where tqdm is installed and a person looks, else lines.

    Args:
        cells: All that will be measured, in order.
        end: When no further cell is begun, by `time.monotonic`; None: never.
    """

    def __init__(self, cells: Sequence[Cell], end: float | None = None) -> None:
        self._cells = cells
        self._end = end
        self._done = 0
        self._seen: dict[tuple[str, str, int], float] = {}
        self._alike: dict[tuple[str, int], list[float]] = {}
        self._bar: Any = None

    @contextlib.contextmanager
    def shown(self) -> Iterator[Progress]:
        """Show it within this block."""
        if sys.stderr.isatty():
            with contextlib.suppress(ImportError):
                from tqdm import tqdm

                total = len(self._cells)
                shape = "{n_fmt}/{total_fmt} |{bar:20}| {elapsed} {postfix}"
                self._bar = tqdm(
                    total=total, file=sys.stderr, leave=False, bar_format=shape
                )
        try:
            yield self
        finally:
            if self._bar is not None:
                self._bar.close()

    def begin(self, cell: Cell) -> None:
        """Say which cell comes now."""
        left = f"about {_clock(self.seconds_left())} left"
        if self._bar is None:
            place = f"[{self._done + 1}/{len(self._cells)}]"
            print(f"{place} {left}: {title(cell)}", file=sys.stderr, flush=True)
        else:
            self._bar.set_postfix_str(f"{left}, {title(cell)}")

    def end(self, cell: Cell, seconds: float) -> None:
        """Take down what a cell took."""
        self._done += 1
        self._seen[cell.transport, cell.workload, cell.nbytes] = seconds
        self._alike.setdefault((cell.workload, cell.nbytes), []).append(seconds)
        if self._bar is not None:
            self._bar.update()

    def seconds_left(self) -> float:
        """What the rest may take: as in an earlier round, or as others like it."""
        left = sum(self._expected(cell) for cell in self._cells[self._done :])
        if self._end is not None:
            left = min(left, max(0.0, self._end - time.monotonic()))
        return left

    def _expected(self, cell: Cell) -> float:
        known = self._seen.get((cell.transport, cell.workload, cell.nbytes))
        if known is not None:
            return known
        alike = self._alike.get((cell.workload, cell.nbytes))
        if alike:
            return sum(alike) / len(alike)
        return 0.3 + 2 * cell.budget + 8e-9 * cell.nbytes  # measured; 640 MB take 5 s


def title(cell: Cell) -> str:
    """A cell in words."""
    size = f" {size_text(cell.nbytes)}" if cell.nbytes else ""
    return f"{cell.workload}{size} {cell.transport} (round {cell.round + 1})"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
