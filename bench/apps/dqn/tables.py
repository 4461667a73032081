"""The tables of the distributed DQN, the published figures beside them."""

from __future__ import annotations

from collections.abc import Sequence

from bench.apps import report
from bench.apps.app import Column
from bench.apps.dqn.task import CARTPOLE, PONG
from bench.summary import Row, number
from bench.tables import Text

_FIGURES = ("weights_age_ms", "weights_age_p99_ms")


def game_of(workload: str) -> str:
    """The game of a row."""
    return workload.split(" ")[1]


def seed_of(workload: str) -> str:
    """The seed of a row."""
    return workload.rpartition("=")[2]


def reached(row: Row) -> str:
    """Steps to the goal, the median over the rounds that reached it, or that none did.

    Rounds without it are counted beside.
    """
    rounds, found = len(row.values), len(row.metrics.get("reached", ()))
    if not found:
        return "not reached"
    beside = "" if found == rounds else f" ({found} of {rounds} rounds)"
    return f"{number(row.metric('reached'))}{beside}"


def tables(rows: Sequence[Row]) -> list[Text]:
    """A table for each game: one line per seed and backend, published ones below."""
    games = dict.fromkeys(game_of(row.workload) for row in rows)
    return [
        _game(game, [row for row in rows if game_of(row.workload) == game])
        for game in games
    ]


def title(game: str) -> str:
    """What the section of a game is called."""
    return f"DQN on {game}"


def _game(game: str, rows: Sequence[Row]) -> Text:
    goal = game == CARTPOLE
    head = ["seed", "backend"]
    head += ["475 after steps", "best mean return"] if goal else []
    head += ["s/100 iterations", "steps/s", "transport share", "learner idle"]
    head += ["weights' age ms", "age p99 ms", "lost"]
    lines = []
    for row in rows:
        if not row.values:
            continue
        line = [seed_of(row.workload), row.transport]
        line += [reached(row), number(row.metric("best"))] if goal else []
        line += [number(row.value), number(row.metric("steps_per_s"))]
        line.append(report.percent(row.metric("transport_share")))
        line.append(report.percent(row.metric("idle_share")))
        line += [number(row.metric(name)) for name in _FIGURES]
        lines.append([*line, f"{row.lost():,.0f}"])
    note = (
        "s/100 iterations: seconds of the learner; transport share: the part in which "
        "it published weights or took messages; learner idle: the part in which it "
        "waited for transitions; lost: messages of collectors that did not "
        "arrive, in all rounds. "
    )
    if goal:
        note += (
            "475 after steps: steps of all collectors until the mean return of 100 "
            "episodes was 475. There are no published figures of this game."
        )
    if game == PONG:
        blank = ["-"] * (len(head) - 3)
        lines += [
            ["-", f"published: {one.system}", number(one.seconds), *blank]
            for one in report.published("atari-dqn")
        ]
        note += (
            "Published: DI-engine's DQN on an A100, seconds per 100 of its epochs, "
            "whose batches and networks are others."
        )
    return Text(title(game), note, head, lines, report.problems(rows))


def columns(rows: Sequence[Row]) -> list[Column]:
    """Of CartPole whether and when its goal was reached; of others how fast."""
    measured = [row for row in rows if row.values]
    found = []
    for game in dict.fromkeys(game_of(row.workload) for row in measured):
        own = [row for row in measured if game_of(row.workload) == game]
        names = list(dict.fromkeys(row.transport for row in own))
        by_name = {
            name: [row for row in own if row.transport == name] for name in names
        }
        if game == CARTPOLE:
            goals = {name: _best(by_name[name]) for name in names}
            found.append(Column(f"{game}: 475 after steps", goals))
            lost = {name: sum(one.lost() for one in by_name[name]) for name in names}
            shown = {name: f"{count:,.0f}" for name, count in lost.items()}
            found.append(Column("lost", shown))
            continue
        figures = [] if game != PONG else report.published("atari-dqn")
        times = {name: number(by_name[name][0].value) for name in names}
        shares = {
            name: report.percent(by_name[name][0].metric("transport_share"))
            for name in names
        }
        beside = {one.system: number(one.seconds) for one in figures}
        found.append(Column(f"{game}: s/100 iterations", times, beside))
        found.append(Column("transport share", shares))
    return found


def _best(rows: Sequence[Row]) -> str:
    """The first seed that reached the goal, or how many did not."""
    for row in rows:
        if "reached" in row.metrics:
            return f"{reached(row)}, seed {seed_of(row.workload)}"
    return "not reached"
