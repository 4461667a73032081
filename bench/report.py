"""Reports from the file of a run; measures nothing itself."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench import advice, plan, tables
from bench.apps.app import QUICK, name_of
from bench.apps.report import METHOD as APPS_METHOD
from bench.apps.report import Source, Taken, joined, texts
from bench.apps.report import conditions as published_apps
from bench.rows import PLANNED, UNPACED, Result, read
from bench.summary import Run, gather, number, published

if TYPE_CHECKING:
    from bench.plots import Plot

DESCRIPTION = """\
Write the report on a run again, or one report on several: any number of runs of
`mq bench apps`, and beside them at most one of `mq bench`. What several runs of
applications have measured counts as further rounds."""

METHOD = (
    "Every cell runs in fresh processes on one machine. The transports of a round are "
    "measured one after the other, in turning order, so that a drift of the machine "
    "hits all of them.",
    "Figures are medians over the rounds. /raw and /limit are medians of the ratios "
    "within one round, ours by theirs in the unit of the table: below 1 ours is faster "
    "where that is a time, above 1 where it is a rate. raw is the bare library on the "
    "same wire, used as its documentation says, limit what this machine can do: a copy "
    "into memory in use (memcpy), or a plain socket into a buffer made beforehand.",
    "While answers come soon, ours look again and again before they sleep, for up to "
    "400 us; the bare libraries wait as they do by themselves: they sleep at once, but "
    "for raw:torchrpc, whose own shared memory transport never does. So /raw of one "
    "message at a time compares the waiting, too; what that costs is in CPU s/GB.",
    "Every payload is checked once, outside the timing. Cells warm up first.",
    "CPU s/GB: processor seconds of all processes of a cell per 10^9 bytes delivered, "
    "answers included; the servers of redis and Ray are not among them. sender and "
    "receiver MB: the most resident memory above what the process started with, mapped "
    "shared memory included.",
    "lost: messages that did not arrive, in all rounds together, those of cells that "
    "failed for it included: ours may lose none.",
)

_PACED = (
    "TCP is controlled by BBR here, which spaces out what is sent. Connections of ours "
    "within a host, but for torchrpc's, use Reno; those to other hosts keep BBR. "
)
_ALIKE = "The bench sees to it that the bare libraries within this host use Reno, too."
_BARE = "The bare libraries were left to BBR: /raw over TCP tells of that, too."


@dataclass(frozen=True)
class Found:
    """What files of JSON lines hold.

    Attributes:
        names: Of the files, short and each another.
        facts: The conditions of each file.
        counts: Of each file, how many of the planned cells need no further word: those
            of transports that were measured, and all rows of applications.
        run: The cells of transports.
        apps: What there is of applications, file by file.
    """

    names: list[str]
    facts: list[dict[str, str]]
    counts: list[int]
    run: Run
    apps: list[Taken]


def load(paths: Sequence[Path]) -> Found:
    """The conditions and the rows of files of JSON lines.

    Raises:
        ValueError: A line is not one that `Writer` makes, or they do not fit together.
    """
    return fitted(paths, [read(path) for path in paths])


def fitted(
    paths: Sequence[Path], files: Sequence[tuple[dict[str, str], list[Result]]]
) -> Found:
    """What files hold, their conditions and rows being known.

    Raises:
        ValueError: A file or a copy of it is given twice, two are of transports, whose
            ratios hold within one run only, or two have done different things under
            one name.
    """
    names = _short_names(paths)
    facts, counts, sources = [], [], []
    transports: list[Result] = []
    for path, (own, results) in zip(paths, files, strict=True):
        of_apps = [row for row in results if name_of(row.workload)]
        others = [row for row in results if not name_of(row.workload)]
        facts.append(own)
        counts.append(len(of_apps) + sum(row.status == "ok" for row in others))
        sources.append(Source(path.parent, of_apps))
        for result in others:
            if result.workload not in plan.WORKLOADS:
                raise ValueError(f"{path}: there is no workload {result.workload!r}")
        if others and transports:
            raise ValueError(
                f"{path}: a second run of transports, whose ratios hold within one run "
                "only: mq bench compare shows two side by side"
            )
        transports = transports or others
        if (first := paths[files.index((own, results))]) is not path:
            raise ValueError(f"{path} and {first} hold the same run")
    _check_tasks(names, facts, sources)
    run = Run(gather(transports))
    return Found(names, facts, counts, run, joined(sources))


def _check_tasks(
    names: Sequence[str], facts: Sequence[dict[str, str]], sources: Sequence[Source]
) -> None:
    """That a workload was the same in all files.

    Raises:
        ValueError: It was not in two of them.
    """
    seen: dict[str, tuple[str, str]] = {}
    for name, own, source in zip(names, facts, sources, strict=True):
        for row in source.results:
            task = own.get(name_of(row.workload) or "", "unknown")
            other, first = seen.setdefault(row.workload, (name, task))
            if first != task:
                raise ValueError(
                    f"{other} and {name} have not measured the same "
                    f"{row.workload!r}: {first}; {task}: make a report of each"
                )


def _short_names(paths: Sequence[Path]) -> list[str]:
    """Their own names, with as many folders as tell them apart.

    Raises:
        ValueError: Two are the same file.
    """
    parts = [path.resolve().parts for path in paths]
    for path, one in zip(paths, parts, strict=True):
        if parts.count(one) > 1:
            raise ValueError(f"{path} is given twice")
    names = [one[-1] for one in parts]
    depth = 1
    while len(set(names)) < len(names):
        depth += 1
        names = ["/".join(one[-depth:]) for one in parts]
    return names


def write(found: Found, directory: Path) -> list[str]:
    """Write every report that can be made of what was found.

    Returns:
        What to tell, the last line being the best report's path.
    """
    text = directory / "report.md"
    coded = {"encoding": "utf-8", "errors": "backslashreplace"}  # names of files
    text.write_text(markdown(found), **coded)
    try:
        from bench import page

        drawn = _drawn(found)
    except ImportError as error:
        reason = f"without plots and HTML page: {error.name} is not installed: "
        return [f"{reason}pip install 'tensormq[bench]'", f"report: {text}"]
    for plot in drawn:
        plot.png(directory)
    whole = directory / "report.html"
    about = page.About(
        title(found), found.facts, conditions(found), method(found), remarks(found)
    )
    shown = page.render(found.run, applications(found), drawn, about)
    whole.write_text(shown, **coded)
    return [f"report: {whole}"]


def _drawn(found: Found) -> list[Plot]:
    from bench import plots

    drawn = plots.draw(found.run)
    if found.apps:
        from bench.apps import plots as apps_plots  # which loads torch

        drawn += apps_plots.draw(found.apps)
    return drawn


def applications(found: Found) -> list[tables.Text]:
    """The tables of the applications, that of all of them first; none without rows."""
    return texts([one.result for one in found.apps])


def title(found: Found) -> str:
    """What the report is called."""
    if not found.apps:
        return "Transports compared"
    if found.run.rows:
        return "Transports and applications compared"
    return "Applications over every backend"


def conditions(found: Found) -> tables.Text:
    """Where and with what it was measured, one column per file."""
    keys = dict.fromkeys(key for facts in found.facts for key in facts)
    lines = [[key, *(facts.get(key, "-") for facts in found.facts)] for key in keys]
    names = found.names if len(found.names) > 1 else [""]
    return tables.Text("Conditions", "", ["", *names], lines, [])


def method(found: Found) -> list[str]:
    """How it was measured, in sentences."""
    said = [*METHOD] if found.run.rows or not found.apps else []
    if found.run.rows:
        controls = {facts.get("tcp", "") for facts in found.facts}
        said += [_PACED + _BARE] if "bbr" in controls else []
        said += [_PACED + _ALIKE] if UNPACED in controls else []
    return [*said, *APPS_METHOD] if found.apps else said


def remarks(found: Found) -> list[str]:
    """What of the plans is missing, and what does not fit together, in sentences."""
    said = []
    for name, facts, count in zip(found.names, found.facts, found.counts, strict=True):
        planned = int(facts.get(PLANNED, "0"))
        where = f"{name}: " if len(found.names) > 1 else ""
        if count < planned:
            said.append(
                f"{where}{count} of {planned} planned cells were measured: the others "
                "were left out for want of time, cannot run here, or failed. The "
                "figures below hold for what was measured."
            )
        if found.apps and QUICK in facts.get("command", "").split():
            said.append(
                f"{where}the tasks of {QUICK} are small: their figures do not compare "
                "with the published ones."
            )
    for key in ("cpu", "cores", "gpu", "torch", "commit"):
        values = dict.fromkeys(facts[key] for facts in found.facts if key in facts)
        if len(values) > 1:
            said.append(f"Not all was measured alike: {key}: {'; '.join(values)}.")
    return said


def terminal(found: Found) -> str:
    """The tables of what was found, aligned."""
    parts = []
    for table in [*tables.workloads(found.run), *applications(found)]:
        parts.append(f"\n{table.title}  ({table.note})")
        if table.lines:
            parts += tables.aligned(table.head, table.lines)
        parts += [f"  ! {problem}" for problem in table.problems]
    return "\n".join(parts)


def markdown(found: Found) -> str:
    """The report in Markdown."""
    parts = [f"# {title(found)}", ""]
    for facts in found.facts:
        parts += [f"`{facts.get('command', 'mq bench')}`", ""]
    for remark in remarks(found):
        parts += [tables.plain(remark), ""]
    apps = applications(found)
    for table in apps[:1]:
        parts += [*_markdown_section(table)[1:], ""]
    parts += _short(found.run)
    parts += ["## Conditions", ""]
    about = conditions(found)
    parts += tables.markdown(about.head, about.lines)
    parts += ["", *(f"- {sentence}" for sentence in method(found))]
    for table in tables.workloads(found.run):
        parts += _markdown_section(table)
        if table.title == "latency":
            further = [tables.two_terms(found.run), tables.against_each(found.run)]
            for one in further:
                parts += _markdown_section(one) if one else []
    for table in apps[1:]:
        parts += _markdown_section(table)
    return "\n".join([*parts, *_published(found)]).rstrip() + "\n"


def _published(found: Found) -> list[str]:
    """Published figures, and what they hold for."""
    parts = []
    if shown := tables.measured_published(found.run):
        parts += ["", "## Published", "", *published()[1], ""]
        parts += tables.markdown(shown.head, shown.lines)
    if found.apps:
        parts += ["", "## Published figures of applications", ""]
        parts += [f"- {line}" for line in published_apps()]
    return parts


def _short(run: Run) -> list[str]:
    scores = advice.scores(run)
    if not scores:
        return []
    head = ["transport", "reaches", advice.small_size(run), "/raw"]
    head += [advice.large_size(run), "/raw", "rate", "/raw", "lost"]
    lines = [
        [
            *(one.transport, one.reach),
            *(one.small, number(one.small_raw)),
            *(one.large, number(one.large_raw)),
            *(one.rate, number(one.rate_raw)),
            str(one.lost),
        ]
        for one in scores
    ]
    fastest = [
        f"- {one.purpose}"
        + (", to other hosts" if one.reach == "network" else "")
        + f": {tables.plain(one.transport)}, {one.value}"
        + (f" ({one.caveat})" if one.caveat else "")
        for one in advice.choices(run)
    ]
    if local := advice.local_only(run):
        names = tables.plain(", ".join(local))
        fastest.append(
            f"- not ranked for other hosts, as on one host they go another way: {names}"
        )
    return ["## In short", "", *tables.markdown(head, lines), "", *fastest, ""]


def _markdown_section(table: tables.Text) -> list[str]:
    parts = ["", f"## {table.title}", "", table.note, ""]
    if table.lines:
        parts += tables.markdown(table.head, table.lines)
    if table.problems:
        parts += ["", *(f"- {tables.plain(problem)}" for problem in table.problems)]
    return parts


def main(arguments: Sequence[str]) -> int:
    """Run `mq bench report`; the exit status."""
    parser = argparse.ArgumentParser(prog="mq bench report", description=DESCRIPTION)
    parser.add_argument(
        "results", type=Path, nargs="+", help="a run's file of JSON lines"
    )
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="default: where the first file is"
    )
    options = parser.parse_args(arguments)
    output = options.output or options.results[0].parent
    try:
        output.mkdir(parents=True, exist_ok=True)
        told = write(load(options.results), output)
    except (OSError, ValueError) as error:
        print(f"mq bench report: {error}", file=sys.stderr)
        return 2
    print("\n".join(told))
    return 0
