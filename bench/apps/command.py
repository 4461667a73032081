"""`mq bench apps`, and each application on its own."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.apps.app import ALONE, NAMES, QUICK, App, AppCell, count, load, words
from bench.output import new_output, on_the_way
from bench.progress import Progress, title
from bench.rows import PLANNED, Result, Writer, environment, whole
from bench.runner import fork_server, run_cell

BACKENDS = ("inproc", "shm", "zmq", "nng", "tcp", "torchrpc:cpu", "auto")
"""Those that need no GPU."""

DEFAULT = (*BACKENDS, "torchrpc:cuda")

DESCRIPTION = """\
Run the applications under bench/apps over the main backends, each in fresh processes,
and write results.jsonl and a report (report.html with its plots, and report.md) with
the published figures beside ours. `mq bench report A.jsonl B.jsonl --output DIR` joins
several runs, as one of each application, in one report."""


def main(arguments: Sequence[str]) -> int:
    """Run `mq bench apps` with these arguments; the exit status."""
    parser = _parser("mq bench apps", DESCRIPTION)
    parser.add_argument(
        "--apps",
        type=_names,
        default=list(NAMES),
        metavar="A,B",
        help=f"of {', '.join(NAMES)} (default: all)",
    )
    apps = {name: load(name) for name in NAMES}
    for name, app in apps.items():
        app.add_arguments(parser.add_argument_group(name, app.summary))
    options = parser.parse_args(arguments)
    command = ["mq", "bench", "apps", *arguments]
    return _run(command, parser, [apps[name] for name in options.apps], options)


def main_of(app: App, arguments: Sequence[str]) -> int:
    """Run one application with these arguments; the exit status."""
    parser = _parser(f"python -m bench.apps.{app.name}", app.summary)
    app.add_arguments(parser)
    options = parser.parse_args(arguments)
    command = ["python", "-m", f"bench.apps.{app.name}", *arguments]
    return _run(command, parser, [app], options)


def _task(app: App, options: argparse.Namespace) -> str:
    """What each cell does, in words: runs that differ in it cannot be joined."""
    own = argparse.ArgumentParser()
    app.add_arguments(own)
    names = [name for name in vars(own.parse_args([])) if name not in app.choices]
    words = [f"{name}={getattr(options, name)}" for name in names]
    return " ".join([*words, *([QUICK] if options.quick else [])])


def _parser(program: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--backend",
        type=words,
        default=list(DEFAULT),
        metavar="A,B",
        help=f"backend strings (default: {','.join(DEFAULT)})",
    )
    parser.add_argument(
        "--rounds",
        type=count,
        default=1,
        metavar="N",
        help="repetitions; figures are medians (default: %(default)s)",
    )
    parser.add_argument(
        QUICK, action="store_true", help="small tasks: a minute or two in all"
    )
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="default: bench/out/apps-DATE-TIME"
    )
    return parser


def _names(text: str) -> list[str]:
    for name in words(text):
        if name not in NAMES:
            raise argparse.ArgumentTypeError(
                f"no application {name!r}; there are {', '.join(NAMES)}"
            )
    return words(text)


def _usable(parser: argparse.ArgumentParser, backends: Sequence[str]) -> list[str]:
    """The backends, all of which exist."""
    from mq import registry

    for name in backends:
        known = registry.canonical(name) in registry.names()
        if not known and (reason := registry.check(name)):
            parser.error(reason)
    return list(backends)


def _run(
    command: Sequence[str],
    parser: argparse.ArgumentParser,
    apps: Sequence[App],
    options: argparse.Namespace,
) -> int:
    """Run all cells, report; 1 if one failed or lost messages, 130 if interrupted."""
    backends = _usable(parser, options.backend)
    try:
        planned = [(app, app.cells(options, backends)) for app in apps]
        fork_server(AppCell.preload)
        output = new_output(options.output, "apps-%Y%m%d-%H%M%S")
    except (ValueError, OSError) as error:
        parser.error(str(error))
    every = [cell for _, cells in planned for cell in cells]
    facts = environment(command) | {PLANNED: str(len(every))}
    facts |= {app.name: _task(app, options) for app in apps}

    def measure_all(writer: Writer) -> int:
        progress = Progress(every)
        found: list[Result] = []
        with progress.shown():
            for app, cells in planned:
                for cell in cells:
                    result = _measure(app, cell, found, output, progress)
                    found.append(result)
                    writer.add(result)
        return int(any(result.status == "failed" for result in found))

    return on_the_way(output, facts, measure_all)


def _measure(
    app: App,
    cell: AppCell,
    before: Sequence[Result],
    output: Path,
    progress: Progress,
) -> Result:
    start = time.monotonic()
    progress.begin(cell)
    if reason := app.needless(cell, before):
        result = Result.of(cell, "skipped", reason)
    else:
        result = whole(measure(app, cell, output))
    progress.end(cell, time.monotonic() - start)
    if result.status == "failed":
        print(f"{title(cell)}: {result.reason}", file=sys.stderr)
    return result


def measure(app: App, cell: AppCell, output: Path) -> Result:
    """One run of an application, or the reason why it is not run.

    Args:
        output: Where the application may leave files.
    """
    from mq import registry

    threads = False
    if registry.canonical(cell.transport) in registry.names():
        if reason := registry.check(cell.transport):
            return Result.of(cell, "skipped", reason)
        threads = not registry.capabilities(cell.transport).separate_processes
    size = 1 if cell.transport == ALONE else app.size(cell)
    return run_cell(app.placed(cell, output), app.body, size, threads=threads)
