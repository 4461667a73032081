"""The plots of the applications, drawn by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from bench import plots
from bench.apps import report
from bench.apps.app import ALONE, name_of
from bench.apps.dqn import curves
from bench.apps.dqn import tables as dqn
from bench.apps.dqn.cells import returns_name
from bench.apps.dqn.task import CARTPOLE, PONG
from bench.apps.pipeline import cells as pipeline
from bench.apps.report import Taken
from bench.apps.shards import cells as shards
from bench.plots import Plot
from bench.summary import Row, gather

_FEW = 30  # points of a curve that are marked: a line of one point cannot be seen
_GREY = "#999"


def draw(taken: Sequence[Taken]) -> list[Plot]:
    """Every plot that the results are enough for."""
    rows = [row for row in gather(one.result for one in taken) if row.values]
    by_app = {
        name: [row for row in rows if name_of(row.workload) == name]
        for name in ("pipeline", "shards", "dqn")
    }
    games = dict.fromkeys(dqn.game_of(row.workload) for row in by_app["dqn"])
    with matplotlib.rc_context(plots.STYLE):
        found = [_pipeline(by_app["pipeline"]), _shards(by_app["shards"])]
        for game in games:
            own = [row for row in by_app["dqn"] if dqn.game_of(row.workload) == game]
            found += [_goals(own)] if game == CARTPOLE else [_speed(game, own)]
            found.append(_returns(game, taken))
        return plots.laid_out([plot for plot in found if plot is not None])


def _colors(rows: Sequence[Row]) -> dict[str, str]:
    """One for each backend, the same in all plots of a report if all have the same."""
    names = dict.fromkeys(row.transport for row in rows)
    ours = [name for name in names if name != ALONE and not name.startswith("raw:")]
    return plots.palette(ours)


def _pipeline(rows: Sequence[Row]) -> Plot | None:
    if not rows:
        return None
    figure = Figure(figsize=(10.5, 4.2), layout="constrained")
    times, shares = figure.subplots(1, 2)
    colors = _colors(rows)
    for name in dict.fromkeys(row.transport for row in rows):
        own = sorted(
            (row for row in rows if row.transport == name), key=pipeline.split_of
        )
        splits = [pipeline.split_of(row) for row in own]
        color = colors.get(name, "#000")
        label = "one process" if name == ALONE else name
        seconds = [row.value or 0.0 for row in own]
        gid = f"pipeline/{name}"
        times.plot(splits, seconds, "o-", ms=4, color=color, label=label, gid=gid)
        if name != ALONE:
            share = [100 * (row.metric("transport_share") or 0.0) for row in own]
            shares.plot(splits, share, "o-", ms=4, color=color, gid=f"{gid}/transport")
    figures = pipeline.published()
    times.plot(
        *zip(*sorted(figures.items()), strict=True),
        "s--",
        color=_GREY,
        label="published: torchrpc",
        gid="pipeline/published",
    )
    times.set_ylabel("seconds, lower is better")
    shares.set_ylabel("% of the time in the transport")
    for axes in (times, shares):
        axes.set_ylim(bottom=0)
        _over_splits(axes, sorted({*figures, *map(pipeline.split_of, rows)}))
    figure.legend(loc="outside right upper")
    caption = (
        "Time of all batches and the transport's share of it, by the number of "
        "micro-batches. The published times are of other hardware and larger batches."
    )
    return Plot("pipeline", pipeline.BY_SPLIT, caption, figure)


def _over_splits(axes: Axes, splits: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(splits, [str(split) for split in splits])
    axes.set_xlabel("micro-batches per batch")


def _bars(
    name: str, section: str, rows: Sequence[Row], colors: dict[str, str], caption: str
) -> Plot:
    """A line of dots over a logarithmic axis of seconds, shortest first.

    Args:
        rows: Their values in seconds; published ones may be among them.
    """
    figure, (axes,) = plots.bar_figure([rows])
    in_ms = [
        Row(row.transport, row.workload, 0, {0: 1000 * (row.value or 0.0)})
        for row in sorted(rows, key=lambda row: row.value or 0.0)
    ]
    plots.dots(axes, in_ms, colors, name)
    axes.set_xlabel("time, lower is better")
    return Plot(name, section, caption, figure)


def _shards(rows: Sequence[Row]) -> Plot | None:
    if not rows:
        return None
    base = _colors(rows)
    colors = {}
    shown = []
    for row in rows:
        label = f"{row.transport}, {shards.how_of(row)}"
        shown.append(Row(label, row.workload, 0, row.values))
        if row.transport in base:
            colors[label] = base[row.transport]
    for one in report.published("cuda-rpc"):
        label = f"published: bare RPC, {shards.HOW[one.system]}"
        shown.append(Row(label, "", 0, {0: one.seconds}))
    caption = (
        "Ten forward and backward passes, medians; ours in colour, bare RPC and the "
        "published figures, which are of two GPUs, in grey."
    )
    return _bars("shards", "Two shards", shown, colors, caption)


def _speed(game: str, rows: Sequence[Row]) -> Plot:
    seeds = {dqn.seed_of(row.workload) for row in rows}
    base = _colors(rows)
    colors = {}
    shown = []
    for row in rows:
        seed = f", seed {dqn.seed_of(row.workload)}" if len(seeds) > 1 else ""
        label = f"{row.transport}{seed}"
        shown.append(Row(label, row.workload, 0, row.values))
        colors[label] = base[row.transport]
    shown += [
        Row(f"published: {one.system}", "", 0, {0: one.seconds})
        for one in (report.published("atari-dqn") if game == PONG else [])
    ]
    caption = (
        "100 iterations of the learner, medians. The published ones, where there are "
        "any, are of larger batches on other hardware."
    )
    return _bars(_stem(game), dqn.title(game), shown, colors, caption)


def _stem(game: str) -> str:
    """The name of a game's plots."""
    return f"dqn-{game.replace('/', '-')}"


def _goals(rows: Sequence[Row]) -> Plot | None:
    found = [row for row in rows if "reached" in row.metrics]
    if not found:
        return None
    found.sort(key=_steps)
    base = _colors(rows)
    shown = [
        Row(
            f"{row.transport}, seed {dqn.seed_of(row.workload)}",
            row.workload,
            0,
            {0: _steps(row)},
        )
        for row in found
    ]
    colors = {
        one.transport: base[row.transport]
        for one, row in zip(shown, found, strict=True)
    }
    name = f"{_stem(CARTPOLE)}-goal"
    figure, (axes,) = plots.bar_figure([shown])
    plots.horizontal(axes, shown, colors, name, lambda row: row.value or 0.0, _integer)
    axes.set_xlabel("steps of all collectors, fewer is better")
    caption = (
        "Steps until the mean return of 100 episodes was 475, of the seeds that "
        "reached it."
    )
    return Plot(name, dqn.title(CARTPOLE), caption, figure)


def _steps(row: Row) -> float:
    return row.metric("reached") or 0.0


def _integer(value: float, _: object = None) -> str:
    return f"{value:,.0f}"


def _returns(game: str, taken: Sequence[Taken]) -> Plot | None:
    found: dict[tuple[str, str], curves.Returns] = {}
    for result, folder, number in taken:
        if name_of(result.workload) != "dqn" or dqn.game_of(result.workload) != game:
            continue
        path = folder / returns_name(result.workload, result.transport, number)
        returns = curves.read(path) if result.status == "ok" and path.exists() else []
        if returns:
            seed = dqn.seed_of(result.workload)
            again = f", round {result.round + 1}" if result.round else ""
            found[result.transport, f"seed {seed}{again}"] = returns
    if not found:
        return None
    name = f"{_stem(game)}-returns"
    episodes = curves.window(found.values())
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    colors = plots.palette(list(dict.fromkeys(backend for backend, _ in found)))
    for (backend, which), returns in found.items():
        means = curves.means(returns, episodes)
        axes.plot(
            *zip(*means, strict=True),
            "o-" if len(means) < _FEW else "-",
            ms=3,
            color=colors[backend],
            lw=1.2,
            label=f"{backend}, {which}",
            gid=f"{name}/{backend}/{which.replace(' ', '_')}",
        )
    axes.set_xlabel("steps of all collectors")
    axes.set_ylabel(f"mean return of {episodes} episodes")
    axes.xaxis.set_major_formatter(FuncFormatter(_integer))
    figure.legend(loc="outside right upper")
    return Plot(name, dqn.title(game), curves.caption(episodes), figure)
