"""The plots of a report, drawn by matplotlib."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from bench import plan
from bench.baselines import is_baseline, limit_of, measured_reach, raw_of
from bench.rows import size_text
from bench.summary import Row, Run, nearest, number, published

_PALETTE = "#36a #d54 #284 #a70 #84a #09a #b27 #670 #55d #853 #444".split()
_LIMITS = ("limit:memcpy", "limit:cuda", "limit:unix", "limit:tcp")
_MARKS = "ov^sDPX"
_WITHOUT_BARS = ("latency", "import", "codec")
_GREYS = ("#333333", "#777777", "#a07840", "#5f8f8f")
STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "legend.frameon": False,
    "legend.fontsize": 8,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "mq",
}


class Plot(NamedTuple):
    """One picture.

    Attributes:
        name: Of its file; also the prefix of the ids of its series.
        section: The workload that it belongs to.
        caption: What it shows, in a sentence.
    """

    name: str
    section: str
    caption: str
    figure: Figure

    def png(self, directory: Path) -> Path:
        """Write it as ``name.png``; where it is."""
        path = directory / f"{self.name}.png"
        with matplotlib.rc_context(STYLE):
            self.figure.savefig(path, dpi=120)
        return path

    def svg(self) -> str:
        """Its SVG element; each series is a group whose id is ``name/series``."""
        out = io.StringIO()
        with matplotlib.rc_context(STYLE):
            self.figure.savefig(out, format="svg", metadata={"Date": None})
        text = out.getvalue()
        # Ids other than the series' are alike in every plot of one page.
        prefix = f"{self.name}."
        text = re.sub(r'(\bid="|href="#|url\(#)(?![^")]*/)', rf"\g<1>{prefix}", text)
        return text[text.index("<svg") :]


def draw(run: Run) -> list[Plot]:
    """Every plot that the results are enough for."""
    with matplotlib.rc_context(STYLE):
        found = [_latency(run), _panels(run), _ratios(run), _with_published(run)]
        others = [name for name in plan.WORKLOADS if name not in _WITHOUT_BARS]
        found += [*(_bars(run, workload) for workload in others), _losses(run)]
        return laid_out([plot for plot in found if plot is not None])


def laid_out(plots: list[Plot]) -> list[Plot]:
    """The plots with their layout, which takes most of the time and is made once."""
    for plot in plots:
        plot.figure.draw_without_rendering()
        plot.figure.set_layout_engine("none")
    return plots


def _colors(run: Run) -> dict[str, str]:
    return palette(run.transports())


def palette(names: Sequence[str]) -> dict[str, str]:
    """A color for each."""
    return {name: _PALETTE[i % len(_PALETTE)] for i, name in enumerate(names)}


def _time_text(ms: float, _: object = None) -> str:
    for unit, factor in (("s", 1e3), ("ms", 1.0), ("us", 1e-3)):
        if ms >= factor * 0.999:
            return f"{ms / factor:g} {unit}"
    return f"{ms * 1e6:g} ns"


def _over_sizes(axes: Axes) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(numticks=12))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: size_text(round(x))))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _time_axis(axes: Axes) -> None:
    _over_sizes(axes)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(numticks=9))
    axes.yaxis.set_major_formatter(FuncFormatter(_time_text))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _curve(run: Run, transport: str) -> tuple[list[int], list[float]]:
    rows = [row for row in run.of("latency") if row.transport == transport]
    points = sorted((r.nbytes, r.value) for r in rows if r.value is not None)
    return [size for size, _ in points], [value for _, value in points]


def _published_curve(scope: str, system: str) -> tuple[list[int], list[float]]:
    points = [
        (size, entry.milliseconds)
        for size, entries in sorted(published()[0].items())
        for entry in entries
        if (entry.scope, entry.system) == (scope, system)
    ]
    return [size for size, _ in points], [value for _, value in points]


def _latency(run: Run) -> Plot | None:
    names = [name for name in run.transports() if _curve(run, name)[0]]
    limits = [name for name in _LIMITS if _curve(run, name)[0]]
    if not names and not limits:
        return None
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    _time_axis(axes)
    colors = _colors(run)
    for name in names:
        color = colors[name]
        axes.plot(
            *_curve(run, name), "o-", color=color, label=name, gid=f"latency/{name}"
        )
    for name, style in zip(limits, (":", "-.", "--"), strict=False):
        axes.plot(
            *_curve(run, name), style, color="#999", label=name, gid=f"latency/{name}"
        )
    axes.set_ylabel("one way, median")
    axes.set_xlabel("size of the tensor")
    figure.legend(loc="outside right upper")
    caption = "Time of one message by its size, both axes logarithmic; lower is better."
    return Plot("latency", "latency", caption, figure)


def _panels(run: Run) -> Plot | None:
    names = [name for name in run.transports() if _curve(run, name)[0]]
    if not names:
        return None
    columns = min(3, len(names))
    lines = -(-len(names) // columns)
    figure = Figure(figsize=(3.6 * columns + 0.4, 3.2 * lines), layout="constrained")
    grid = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
    spots = [axes for line in grid for axes in line]
    colors = _colors(run)
    for name, axes in zip(names, spots, strict=False):
        _panel(run, name, axes, colors[name])
    for axes in spots[len(names) :]:
        axes.set_visible(False)
    for axes in grid[:, 0]:
        axes.set_ylabel("one way, median")
    caption = (
        "Each transport beside the bare library (raw), what bounds it on this machine "
        "(limit), and the nearest published system (on other hardware)."
    )
    return Plot("latency-panels", "latency", caption, figure)


def _panel(run: Run, name: str, axes: Axes, color: str) -> None:
    _time_axis(axes)
    axes.set_title(name, color=color, loc="left")
    gid = f"latency-panels/{name}"
    scope, system = nearest(name)
    curve = _published_curve(scope, system)
    label = f"published: {system}"
    axes.plot(*curve, "-", lw=3, color="#e8ddc8", label=label, gid=f"{gid}/published")
    limit = limit_of(name)
    axes.plot(*_curve(run, limit), ":", color="#888", label=limit, gid=f"{gid}/{limit}")
    for raw, grey in zip(_raw_names(run, name), _GREYS, strict=False):
        curve = _curve(run, raw)
        axes.plot(*curve, "x--", color=grey, ms=4, label=raw, gid=f"{gid}/{raw}")
    axes.plot(*_curve(run, name), "o-", color=color, ms=4, label=name, gid=gid)
    axes.legend(loc="upper left", fontsize=7)


def _raw_names(run: Run, transport: str) -> list[str]:
    names = [*raw_of(transport), *(f"{raw}:tcp" for raw in raw_of(transport))]
    return [name for name in names if _curve(run, name)[0]]


def _ratios(run: Run) -> Plot | None:
    curves: dict[str, list[tuple[int, float]]] = {}
    for row in run.of("latency"):
        ratio = None if is_baseline(row.transport) else row.ratio(run.raw(row))
        if ratio is not None:
            curves.setdefault(row.transport, []).append((row.nbytes, ratio))
    if not curves:
        return None
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.add_subplot()
    _over_sizes(axes)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}x"))
    axes.axhline(1, color="#555", lw=1)
    colors = _colors(run)
    for name, points in curves.items():
        axes.plot(
            *zip(*sorted(points), strict=True),
            "o-",
            color=colors[name],
            label=name,
            gid=f"latency-raw/{name}",
        )
    axes.set_ylabel("time of ours / raw")
    axes.set_xlabel("size of the tensor")
    figure.legend(loc="outside right upper")
    caption = (
        "Our time divided by that of the bare library in the same round (the fastest "
        "where there are several): below the line ours is faster."
    )
    return Plot("latency-raw", "latency", caption, figure)


def _with_published(run: Run) -> Plot | None:
    names = [name for name in run.transports() if _curve(run, name)[0]]
    if not names:
        return None
    figure = Figure(figsize=(10.5, 5.2), layout="constrained")
    spots = figure.subplots(1, 2, sharey=True)
    titles = {"intra-node": "on one host", "cross-node": "across hosts"}
    colors = _colors(run)
    for (scope, title), axes in zip(titles.items(), spots, strict=True):
        _time_axis(axes)
        axes.set_title(title, loc="left")
        axes.set_xlabel("size of the tensor")
        for system, style in zip(_systems(scope), _MARKS, strict=False):
            gid = f"published/{scope}/{system}"
            curve = _published_curve(scope, system)
            label = f"{system} (published)"
            axes.plot(*curve, f"{style}--", color="#999", lw=1, label=label, gid=gid)
        far = scope == "cross-node"
        for name in names:
            if far is (measured_reach(name) == "network"):
                curve = _curve(run, name)
                gid = f"published/{name}"
                axes.plot(*curve, lw=2, color=colors[name], label=name, gid=gid)
        axes.legend(loc="upper left", fontsize=8)
    spots[0].set_ylabel("one way, median")
    caption = (
        "Ours on this machine (solid; what reaches other hosts over loopback) among "
        "the published figures (dashed), which come from other hardware: some of them "
        "from GPUs, NVLink and InfiniBand."
    )
    return Plot("published", "latency", caption, figure)


def _systems(scope: str) -> list[str]:
    """The published systems of a scope."""
    every = (entry for entries in published()[0].values() for entry in entries)
    return list(dict.fromkeys(one.system for one in every if one.scope == scope))


def _bars(run: Run, workload: str) -> Plot | None:
    sizes = run.sizes(workload)
    if not sizes:
        return None
    known = plan.WORKLOADS[workload]
    rows = [[row for row in run.of(workload) if row.nbytes == n] for n in sizes]
    figure, spots = bar_figure(rows)
    draw = dots if known.lower_is_better else _beams
    for nbytes, measured, axes in zip(sizes, rows, spots, strict=True):
        if nbytes:
            axes.set_title(size_text(nbytes), loc="left")
        sign = 1 if known.lower_is_better else -1
        measured.sort(key=lambda row: sign * (row.value or 0.0))
        draw(axes, measured, _colors(run), f"{workload}/{nbytes}")
        better = "lower" if known.lower_is_better else "higher"
        what = "time" if known.unit == "ms" else known.unit
        axes.set_xlabel(f"{what}, {better} is better")
    caption = "Medians, best first; ours in colour, bare libraries and limits in grey."
    caption += " Filled: p50, hollow: p99, if told." if known.lower_is_better else ""
    return Plot(workload, workload, caption, figure)


def bar_figure(rows: Sequence[Sequence[Row]]) -> tuple[Figure, list[Axes]]:
    columns = len(rows)
    height = 1.1 + 0.21 * max(len(measured) for measured in rows)
    width = 8.0 if columns == 1 else 5.2 * columns
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def _names(axes: Axes, rows: Sequence[Row], colors: dict[str, str]) -> None:
    axes.set_yticks(range(len(rows)), [row.transport for row in rows])
    for label, row in zip(axes.get_yticklabels(), rows, strict=True):
        label.set_color(colors.get(row.transport, "#666"))
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")


def _beams(
    axes: Axes, rows: Sequence[Row], colors: dict[str, str], prefix: str
) -> None:
    horizontal(axes, rows, colors, prefix, lambda row: row.value or 0.0, number)


def horizontal(
    axes: Axes,
    rows: Sequence[Row],
    colors: dict[str, str],
    prefix: str,
    length: Callable[[Row], float],
    text: Callable[[float], str],
) -> None:
    lengths = [length(row) for row in rows]
    most = max(lengths) or 1.0
    for place, (row, value) in enumerate(zip(rows, lengths, strict=True)):
        color = colors.get(row.transport, "#c4c4c4")
        (bar,) = axes.barh(place, value, color=color, height=0.7)
        bar.set_gid(_gid(prefix, row))
        axes.text(value + most * 0.01, place, text(value), va="center", fontsize=8)
    axes.set_xlim(0, most * 1.18)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,g}"))
    axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(4))
    _names(axes, rows, colors)


def _gid(prefix: str, row: Row) -> str:
    return f"{prefix}/{row.transport}".replace(" ", "_")  # an id has no spaces


def dots(axes: Axes, rows: Sequence[Row], colors: dict[str, str], prefix: str) -> None:
    axes.set_xscale("log")
    for place, row in enumerate(rows):
        color = colors.get(row.transport, "#999")
        value = row.value or 0.0
        high = row.metric("p99") or value
        gid = _gid(prefix, row)
        axes.plot([value, high], [place, place], color=color, lw=1.5)
        axes.plot([high], [place], "o", mfc="white", mec=color, ms=5)
        axes.plot([value], [place], "o", color=color, ms=6, gid=gid)
        axes.annotate(
            _time_text(float(f"{value:.3g}")),
            (high, place),
            (6, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axes.margins(x=0.15)
    axes.xaxis.set_major_formatter(FuncFormatter(_time_text))
    axes.xaxis.set_minor_formatter(NullFormatter())
    _names(axes, rows, colors)


def _losses(run: Run) -> Plot | None:
    sizes = [n for n in run.sizes("rate") if n]
    rows = [[row for row in run.of("rate") if row.nbytes == n] for n in sizes]
    if not sizes:
        return None
    figure, spots = bar_figure(rows)
    for nbytes, measured, axes in zip(sizes, rows, spots, strict=True):
        axes.set_title(size_text(nbytes), loc="left")
        measured.sort(key=_lost_share)
        horizontal(
            axes,
            measured,
            _colors(run),
            f"loss/{nbytes}",
            _lost_share,
            lambda share: f"{share:.2g} %" if share else "0",
        )
        axes.set_xlabel("% of the messages lost")
    caption = "Messages that were sent and never arrived."
    return Plot("loss", "rate", caption, figure)


def _lost_share(row: Row) -> float:
    """Per cent of what was sent."""
    sent = sum(row.metrics.get("sent", ()))
    return 100 * row.lost() / sent if sent else 0.0
