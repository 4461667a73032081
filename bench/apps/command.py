"""`mq bench apps`, and each application on its own."""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.apps import report
from bench.apps.app import ALONE, App, AppCell, count
from bench.progress import Progress, title
from bench.rows import Result, Writer, environment
from bench.runner import run_cell

NAMES = ("pipeline", "shards", "dqn")
BACKENDS = ("inproc", "shm", "zmq", "nng", "tcp", "torchrpc:cpu", "auto")

DESCRIPTION = """\
Run the applications under bench/apps over every backend, each in fresh processes, and
write results.jsonl and report.md with the published figures beside ours."""


def main(arguments: Sequence[str]) -> int:
    """Run `mq bench apps` with these arguments; the exit status."""
    parser = _parser("mq bench apps", DESCRIPTION)
    parser.add_argument(
        "--apps",
        type=_names,
        default=list(NAMES),
        metavar="A,B",
        help=f"of {', '.join(NAMES)} (default: all); each has more options on its own: "
        "python -m bench.apps.NAME --help",
    )
    options = parser.parse_args(arguments)
    planned = []
    for name in options.apps:
        app: App = importlib.import_module(f"bench.apps.{name}.cells").APP
        own = argparse.ArgumentParser()
        app.add_arguments(own)
        merged = argparse.Namespace(**vars(options), **vars(own.parse_args([])))
        planned.append((app, app.cells(merged, _usable(parser, options.backend))))
    return _run(shlex.join(["mq", "bench", "apps", *arguments]), planned, options)


def main_of(app: App, arguments: Sequence[str]) -> int:
    """Run one application with these arguments; the exit status."""
    parser = _parser(f"python -m bench.apps.{app.name}", app.summary)
    app.add_arguments(parser)
    options = parser.parse_args(arguments)
    try:
        cells = app.cells(options, _usable(parser, options.backend))
    except ValueError as error:
        parser.error(str(error))
    command = ["python", "-m", f"bench.apps.{app.name}", *arguments]
    return _run(shlex.join(command), [(app, cells)], options)


def _parser(program: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--backend",
        type=_words,
        default=list(BACKENDS),
        metavar="A,B",
        help=f"backend strings (default: {','.join(BACKENDS)})",
    )
    parser.add_argument(
        "--rounds",
        type=count,
        default=1,
        metavar="N",
        help="repetitions; figures are medians (default: %(default)s)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="small tasks: a minute or two in all"
    )
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="default: bench/out/apps-DATE-TIME"
    )
    return parser


def _words(text: str) -> list[str]:
    words = list(dict.fromkeys(word.strip() for word in text.split(",")))
    if not all(words):
        raise argparse.ArgumentTypeError(f"{text!r} names nothing between two commas")
    return words


def _names(text: str) -> list[str]:
    for name in _words(text):
        if name not in NAMES:
            raise argparse.ArgumentTypeError(
                f"no application {name!r}; there are {', '.join(NAMES)}"
            )
    return _words(text)


def _usable(parser: argparse.ArgumentParser, backends: Sequence[str]) -> list[str]:
    """The backends, all of which exist."""
    from mq import registry

    for name in backends:
        if name not in registry.names() and (reason := registry.check(name)):
            parser.error(reason)
    return list(backends)


def _run(
    command: str,
    planned: Sequence[tuple[App, list[AppCell]]],
    options: argparse.Namespace,
) -> int:
    """Run all cells, report; 1 if one failed, 130 if interrupted."""
    output: Path = options.output or Path(
        "bench", "out", time.strftime("apps-%Y%m%d-%H%M%S")
    )
    output.mkdir(parents=True, exist_ok=True)
    facts = environment([]) | {"command": command}
    writer = Writer(output / "results.jsonl", facts)
    status = 0
    every = [cell for _, cells in planned for cell in cells]
    progress = Progress(every)
    found: list[tuple[App, list[Result]]] = []
    try:
        with progress.shown():
            for app, cells in planned:
                found.append((app, []))
                for cell in cells:
                    result = _measure(app, cell, output, progress)
                    found[-1][1].append(result)
                    writer.add(result)
                    status |= result.status == "failed"
    except KeyboardInterrupt:
        print("interrupted: the report covers what was measured", file=sys.stderr)
        status = 130
    finally:
        writer.close()
    print(report.terminal(found))
    for path in report.write(found, facts, output):
        print(f"report: {path}")
    return int(status)


def _measure(app: App, cell: AppCell, output: Path, progress: Progress) -> Result:
    start = time.monotonic()
    progress.begin(cell)
    result = measure(app, cell, output)
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
    if cell.transport in registry.names():
        if reason := registry.check(cell.transport):
            return Result.of(cell, "skipped", reason)
        threads = not registry.capabilities(cell.transport).separate_processes
    size = 1 if cell.transport == ALONE else app.size(cell)
    return run_cell(app.placed(cell, output), app.body, size, threads=threads)
