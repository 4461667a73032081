"""Reports from the file of a run; measures nothing itself."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bench import advice, plan, tables
from bench.rows import read
from bench.summary import Run, gather, number, published

METHOD = (
    "Every cell runs in fresh processes on one machine. The transports of a round are "
    "measured one after the other, in turning order, so that a drift of the machine "
    "hits all of them.",
    "Figures are medians over the rounds. /raw and /limit are medians of the ratios "
    "within one round, ours by theirs; raw is the bare library on the same wire, used "
    "as its documentation says, limit what this machine can do: a copy into memory in "
    "use (memcpy), or a plain socket into a buffer made beforehand.",
    "Every payload is checked once, outside the timing. Cells warm up first.",
    "CPU s/GB: processor seconds of all processes of a cell per 10^9 bytes delivered, "
    "answers included. sender and receiver MB: the most resident memory above what "
    "the process started with, mapped shared memory included.",
)


def load(path: Path) -> tuple[dict[str, str], Run]:
    """The conditions and the rows of a file of JSON lines.

    Raises:
        ValueError: A line is not one that `Writer` makes.
    """
    facts, results = read(path)
    for result in results:
        if result.workload not in plan.WORKLOADS:
            raise ValueError(f"{path}: there is no workload {result.workload!r}")
    return facts, Run(gather(results))


def write(path: Path, directory: Path) -> list[str]:
    """Write every report that can be made of a file of JSON lines.

    Returns:
        What to tell, the last line being the best report's path.
    """
    facts, run = load(path)
    text = directory / "report.md"
    text.write_text(markdown(facts, run), encoding="utf-8")
    try:
        from bench import page, plots
    except ImportError as error:
        reason = f"without plots and HTML page: {error.name} is not installed: "
        return [f"{reason}pip install 'tensormq[bench]'", f"report: {text}"]
    drawn = plots.draw(run)
    for plot in drawn:
        plot.png(directory)
    whole = directory / "report.html"
    shown = page.render(run, drawn, facts, METHOD, unfinished(facts, run))
    whole.write_text(shown, encoding="utf-8")
    return [f"report: {whole}"]


def unfinished(facts: dict[str, str], run: Run) -> str:
    """What of the plan is missing, in a sentence; empty if nothing is."""
    planned = int(facts.get("planned cells", 0))
    done = sum(len(row.values) for row in run.rows)
    if done >= planned:
        return ""
    return (
        f"{done} of {planned} planned cells were measured: the others were left out "
        "for want of time, cannot run here, or failed. The figures below hold for "
        "what was measured."
    )


def terminal(path: Path) -> str:
    """The tables of a file of JSON lines, aligned."""
    _, run = load(path)
    parts = []
    for table in tables.workloads(run):
        parts.append(f"\n{table.title}  ({table.note})")
        if table.lines:
            parts += tables.aligned(table.head, table.lines)
        parts += [f"  ! {problem}" for problem in table.problems]
    return "\n".join(parts)


def markdown(facts: dict[str, str], run: Run) -> str:
    """The report in Markdown."""
    parts = ["# Transports compared", "", f"`{facts.get('command', 'mq bench')}`", ""]
    if missing := unfinished(facts, run):
        parts += [missing, ""]
    parts += _short(run)
    parts += ["## Conditions", ""]
    parts += tables.markdown(["", ""], [[key, text] for key, text in facts.items()])
    parts += ["", *(f"- {sentence}" for sentence in METHOD)]
    for table in tables.workloads(run):
        parts += _markdown_section(table)
        if table.title == "latency":
            further = [tables.two_terms(run), tables.against_each(run)]
            for one in further:
                parts += _markdown_section(one) if one else []
    if shown := tables.measured_published(run):
        _, conditions = published()
        parts += ["", "## Published", "", *conditions, ""]
        parts += tables.markdown(shown.head, shown.lines)
    return "\n".join(parts).rstrip() + "\n"


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
        + f": {one.transport}, {one.value}"
        for one in advice.choices(run)
    ]
    return ["## In short", "", *tables.markdown(head, lines), "", *fastest, ""]


def _markdown_section(table: tables.Text) -> list[str]:
    parts = ["", f"## {table.title}", "", table.note, ""]
    if table.lines:
        parts += tables.markdown(table.head, table.lines)
    if table.problems:
        parts += ["", *(f"- {problem}" for problem in table.problems)]
    return parts


def main(arguments: Sequence[str]) -> int:
    """Run `mq bench report`; the exit status."""
    parser = argparse.ArgumentParser(
        prog="mq bench report", description="Write the report on a run again."
    )
    parser.add_argument("results", type=Path, help="its file of JSON lines")
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="default: where the file is"
    )
    options = parser.parse_args(arguments)
    output = options.output or options.results.parent
    try:
        output.mkdir(parents=True, exist_ok=True)
        told = write(options.results, output)
    except (OSError, ValueError) as error:
        print(f"mq bench report: {error}", file=sys.stderr)
        return 1
    print("\n".join(told))
    return 0
