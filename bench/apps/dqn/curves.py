"""Returns by steps: as a file of their own, and as a curve."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeAlias

Returns: TypeAlias = Sequence[tuple[int, float]]
"""Of each finished episode: steps of all collectors by then, and the return."""

_EPISODES = 100  # that a mean is over, as the goal of CartPole has it
_FEW = 10  # in its place where an application finished fewer than that
_POINTS = 300  # of a curve; more cannot be seen


def write(path: Path, returns: Iterable[tuple[int, float]]) -> None:
    """Write a file that `read` reads."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["steps", "return"])
        writer.writerows(returns)


def read(path: Path) -> Returns:
    """What `write` has written."""
    with path.open(newline="", encoding="utf-8") as file:
        return [
            (int(row["steps"]), float(row["return"])) for row in csv.DictReader(file)
        ]


def window(curves: Iterable[Returns]) -> int:
    """How many episodes a mean is over, the same for all curves of a plot."""
    fewest = min(map(len, curves), default=0)
    return _EPISODES if fewest >= _EPISODES else _FEW


def means(returns: Returns, episodes: int) -> Returns:
    """The mean of the last `episodes`, or of as many as there were, by steps."""
    apart = max(1, len(returns) // _POINTS)
    found = []
    for place in range(len(returns), 0, -apart):
        last = returns[max(0, place - episodes) : place]
        mean = sum(one for _, one in last) / len(last)
        found.append((returns[place - 1][0], mean))
    return found[::-1]


def caption(episodes: int) -> str:
    """What a curve shows, in a sentence."""
    return (
        f"What was learnt: the mean return of the last {episodes} episodes, or of as "
        "many as there were by then, by the steps made."
    )


def draw(path: Path, game: str, returns: Returns) -> None:
    """A picture of one training; none without episodes, or without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    if not returns:
        return
    episodes = window([returns])
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(title=game)
    axes.plot(*zip(*returns, strict=True), ".", ms=3, color="#999", label="episodes")
    axes.plot(*zip(*means(returns, episodes), strict=True), color="#36a", label="mean")
    axes.set_xlabel("steps of all collectors")
    axes.set_ylabel("return")
    axes.legend()
    figure.supxlabel(caption(episodes), fontsize="small")
    figure.savefig(path)
