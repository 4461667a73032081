"""The command `mq bench`: plan, run, write down, report."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench import plan, report
from bench.rows import Cell, Result, Writer, environment
from bench.runner import run_cell

DESCRIPTION = """\
Measure transports beside the bare library and the limits of this machine.

Everything is measured in fresh processes, the transports of one round one after the
other, and compared by the ratios within a round. Results are written as JSON lines
(results.jsonl) and as a report (report.md)."""

_QUICK_SECONDS = 240.0
_TOUCH = 5 << 30  # enough for the largest cells; see peer.touch_memory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `mq bench`."""
    names = ", ".join(plan.WORKLOADS)
    parser.add_argument(
        "--transports",
        type=_names,
        metavar="A,B",
        help="backend strings, each measured beside its raw library and limit; also "
        f"{', '.join(plan.BASELINES)} (default: every registered one)",
    )
    parser.add_argument(
        "--workloads",
        type=_workloads,
        default=list(plan.WORKLOADS),
        metavar="A,B",
        help=f"of {names} (default: all)",
    )
    parser.add_argument(
        "--sizes",
        type=_sizes,
        default=[],
        metavar="A,B",
        help="payload sizes such as 1250,20KB,1MiB in place of each workload's own",
    )
    parser.add_argument(
        "--rounds", type=_count, metavar="N", help="repetitions (default: 5, quick: 3)"
    )
    parser.add_argument(
        "--budget",
        type=_seconds,
        metavar="SECONDS",
        help="timed seconds per cell and round (default: 1, quick: 0.3)",
    )
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="default: bench/out/DATE-TIME"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"{', '.join(plan.QUICK_TRANSPORTS)}, sizes up to 640 MB, and no further "
        "round after four minutes",
    )


def _names(text: str) -> list[str]:
    names = list(
        dict.fromkeys(name.strip() for name in text.split(",") if name.strip())
    )
    if not names:
        raise argparse.ArgumentTypeError("no name given")
    return names


def _workloads(text: str) -> list[str]:
    names = _names(text)
    for name in names:
        if name not in plan.WORKLOADS:
            known = ", ".join(plan.WORKLOADS)
            raise argparse.ArgumentTypeError(f"no workload {name!r}; there are {known}")
    return names


def _sizes(text: str) -> list[int]:
    try:
        return [plan.parse_size(size) for size in _names(text)]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _count(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 1000:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 to 1000")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0.01 <= seconds <= 600:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0.01 to 600")
    return seconds


def main(arguments: Sequence[str]) -> int:
    """Run `mq bench` with these arguments; the exit status."""
    parser = argparse.ArgumentParser(
        prog="mq bench",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    options = parser.parse_args(arguments)
    try:
        unusable = _check(options)
        output = _output(options.output)
    except (LookupError, OSError) as error:
        message = error.args[0] if isinstance(error, LookupError) else error
        parser.error(str(message))
    return run(options, arguments, unusable, output)


def _check(options: argparse.Namespace) -> dict[str, str]:
    """Fill in the transports; why some of them cannot be used here.

    Raises:
        LookupError: One of them does not exist.
    """
    if not options.transports:
        options.transports = list(plan.QUICK_TRANSPORTS)
        if not options.quick:
            options.transports = _registered()
    unusable = {}
    for name in options.transports:
        if not plan.is_baseline(name):
            if reason := _unusable(name):
                unusable[name] = reason
        elif name not in plan.BASELINES:
            known = ", ".join(plan.BASELINES)
            raise LookupError(f"no baseline {name!r}; there are {known}")
    return unusable


def _registered() -> list[str]:
    from mq import registry

    known = registry.names()  # a bare name stands for one of its wires
    return [name for name in known if f"{name}:ipc" not in known]


def _unusable(name: str) -> str | None:
    from mq import registry

    reason = registry.check(name)
    if reason and name not in registry.names():
        raise LookupError(reason)
    return reason


def _threads(name: str) -> bool:
    """Whether members on this transport are threads of one process."""
    from mq import registry

    return not registry.capabilities(name).separate_processes


def _output(asked: Path | None) -> Path:
    output: Path = asked or Path("bench", "out", time.strftime("%Y%m%d-%H%M%S"))
    output.mkdir(parents=True, exist_ok=True)
    return output


def run(
    options: argparse.Namespace,
    arguments: Sequence[str],
    unusable: dict[str, str],
    output: Path,
) -> int:
    """Measure every cell; print the table; 1 if a cell failed, 130 if interrupted."""
    rounds = options.rounds or (3 if options.quick else 5)
    budget = options.budget or (0.3 if options.quick else 1.0)
    planned = list(
        plan.cells(
            options.transports,
            options.workloads,
            options.sizes,
            rounds,
            budget,
            options.quick,
        )
    )
    path = output / "results.jsonl"
    writer = Writer(path, environment(arguments))
    status = 0
    try:
        status = _measure_all(planned, unusable, writer, options.quick)
    except KeyboardInterrupt:
        print("interrupted: the report covers what was measured", file=sys.stderr)
        status = 130
    finally:
        writer.close()
    written = report.write(path, output / "report.md")
    print(report.terminal(path), f"report: {written}", sep="\n")
    return status


def _measure_all(
    planned: Sequence[Cell], unusable: dict[str, str], writer: Writer, quick: bool
) -> int:
    """Measure and write down every cell; 1 if one failed, else 0."""
    status, end = 0, time.monotonic() + _QUICK_SECONDS
    with _progress(len(planned)) as advance:
        for cell in planned:
            if quick and cell.round and time.monotonic() > end:
                break  # the first round is complete, and the time is up
            advance(_title(cell))
            result = measure(cell, unusable)
            writer.add(result)
            if result.status == "failed":
                status = 1
                print(f"{_title(cell)}: {result.reason}", file=sys.stderr)
    return status


def measure(cell: Cell, unusable: dict[str, str]) -> Result:
    """One cell, or the reason why it is not run."""
    reason = unusable.get(cell.transport) or plan.too_large(cell)
    if reason:
        return Result.of(cell, "skipped", reason)
    workload = plan.WORKLOADS[cell.workload]
    alone = cell.transport in ("limit:memcpy", "mq", "raw")
    size = 1 if alone else 1 + workload.spokes
    ours = not alone and not plan.is_baseline(cell.transport)
    threads = ours and _threads(cell.transport)
    touch = workload.memory * cell.nbytes + (1 << 27) if workload.spokes else 0
    touch = min(touch, _TOUCH, plan.free_memory() // 2)
    return run_cell(cell, workload.body, size, threads=threads, touch=touch)


def _title(cell: Cell) -> str:
    size = f" {report.size_text(cell.nbytes)}" if cell.nbytes else ""
    return f"{cell.workload}{size} {cell.transport} (round {cell.round + 1})"


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr where tqdm is installed and a person looks, else lines."""
    bar: Any = None
    if sys.stderr.isatty():
        with contextlib.suppress(ImportError):
            from tqdm import tqdm

            bar = tqdm(total=total, unit="cell", file=sys.stderr, leave=False)
    done = -1

    def advance(title: str) -> None:
        nonlocal done
        done += 1
        if bar is None:
            print(f"[{done + 1}/{total}] {title}", file=sys.stderr, flush=True)
        else:
            bar.update(1 if done else 0)
            bar.set_postfix_str(title)

    try:
        yield advance
    finally:
        if bar is not None:
            bar.close()
