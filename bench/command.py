"""The command `mq bench`: plan, run, write down, report."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench import baselines, certificates, compare, interrupts, plan, report
from bench.output import new_output, on_the_way
from bench.progress import Progress, title
from bench.rows import PLANNED, Cell, Result, Writer, environment, whole
from bench.runner import fork_server, run_cell
from mq.options import listed

DESCRIPTION = """\
Measure transports beside the bare library and the limits of this machine.

Everything is measured in fresh processes, the transports of one round one after the
other, and compared by the ratios within a round. Results are written as JSON lines
(results.jsonl) and as a report (report.html with its plots, and report.md).

  mq bench compare A.jsonl B.jsonl    what got slower or faster between two runs
  mq bench report RESULTS.jsonl ...   write the report again, or one on several runs
  mq bench apps                       applications end to end: mq bench apps --help"""

_QUICK_ROUNDS, _QUICK_BUDGET = 3, 0.15
_QUICK_SECONDS = 255.0  # the report takes 15 more, and all of it less than 300
_TOUCH = 5 << 30  # enough for the largest cells; see peer.touch_memory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `mq bench`."""
    names = ", ".join(plan.WORKLOADS)
    parser.add_argument(
        "--transports",
        type=_names,
        metavar="A,B",
        help="backend strings, each measured beside its raw library and limit; also "
        f"{', '.join(baselines.BASELINES)} (default: every registered one)",
    )
    parser.add_argument(
        "--workloads",
        type=_workloads,
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
        "--rounds",
        type=_count,
        metavar="N",
        help=f"repetitions (default: 5, quick: {_QUICK_ROUNDS})",
    )
    parser.add_argument(
        "--budget",
        type=_seconds,
        metavar="SECONDS",
        help=f"timed seconds per cell and round (default: 1, quick: {_QUICK_BUDGET})",
    )
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="default: bench/out/DATE-TIME"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"{', '.join(plan.QUICK_TRANSPORTS)}, few sizes up to 640 MB, the largest "
        "only once, and less than five minutes in all",
    )


def _names(text: str) -> list[str]:
    names = list(dict.fromkeys(listed(text)))
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
        return list(dict.fromkeys(plan.parse_size(size) for size in _names(text)))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1000:
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
    if arguments[:1] == ["compare"]:
        return compare.main(arguments[1:])
    if arguments[:1] == ["report"]:
        return report.main(arguments[1:])
    if arguments[:1] == ["apps"]:
        from bench.apps import command as apps

        return apps.main(arguments[1:])
    parser = argparse.ArgumentParser(
        prog="mq bench",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    options = parser.parse_args(arguments)
    asked = (options.transports or [], options.workloads or [])
    try:
        # Torch may be imported here, where it does not bear an interrupt.
        with interrupts.deferred():
            _check(options)
            planned = _planned(options)
            without = plan.left_out(planned, *asked)
        if not planned:
            raise LookupError("; ".join(["nothing to measure", *without]))
        fork_server()
        output = new_output(options.output, "%Y%m%d-%H%M%S")
    except (LookupError, OSError) as error:
        message = error.args[0] if isinstance(error, LookupError) else error
        parser.error(str(message))
    for line in without:
        print(line, file=sys.stderr)
    return run(planned, options.quick, arguments, output)


def _check(options: argparse.Namespace) -> None:
    """Fill in the transports and workloads.

    Raises:
        LookupError: One of them does not exist.
    """
    if not options.transports:
        options.transports = list(plan.QUICK_TRANSPORTS)
        if not options.quick:
            options.transports = [*_registered(), *_installed()]
    options.workloads = options.workloads or list(plan.WORKLOADS)
    for name in options.transports:
        if baselines.is_baseline(name) and name not in baselines.BASELINES:
            known = ", ".join(baselines.BASELINES)
            raise LookupError(f"no baseline {name!r}; there are {known}")
    reasons = {name: unusable(name) for name in options.transports}
    if all(reasons.values()):
        shown = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise LookupError(f"there is nothing to measure here. {shown}")


def _registered() -> list[str]:
    """Every transport, with its modes."""
    from mq import registry

    known = registry.names()  # a bare name stands for one of its wires
    found = []
    for name in known:
        if f"{name}:ipc" not in known:
            found.append(name)
            if registry.check(name) is None and registry.capabilities(name).zero_copy:
                found += [f"{name}+{mode}" for mode in baselines.MODES]
    return found


def _installed() -> list[str]:
    """Other systems that can be measured here; of the rest it is said why not."""
    found = []
    for name in baselines.OPTIONAL:
        if reason := baselines.check(name):
            print(f"without {name}: {reason}", file=sys.stderr)
        else:
            found.append(name)
    return found


def unusable(name: str) -> str | None:
    """Why a transport or baseline cannot be used here, or None.

    Raises:
        LookupError: There is no transport of that name.
    """
    from mq import registry

    if name in baselines.BASELINES:
        return baselines.check(name)
    backend, mode = baselines.split(name)
    reason = registry.check(backend)
    if reason and registry.canonical(backend) not in registry.names():
        raise LookupError(reason)
    if "+" in name and mode not in baselines.MODES:
        known = ", ".join(f"+{mode}" for mode in baselines.MODES)
        raise LookupError(f"no mode {name!r}; there are {known}")
    if mode and not reason and not registry.capabilities(backend).zero_copy:
        raise LookupError(f"{backend} shares no memory: there is no {name!r}")
    if baselines.encrypts(backend) and not shutil.which(certificates.PROGRAM):
        return reason or f"no program {certificates.PROGRAM!r} to make certificates by"
    return reason


def _threads(name: str) -> bool:
    """Whether members on this transport are threads of one process."""
    from mq import registry

    backend, _ = baselines.split(name)
    return not registry.capabilities(backend).separate_processes


def _planned(options: argparse.Namespace) -> list[Cell]:
    rounds = options.rounds or (_QUICK_ROUNDS if options.quick else 5)
    budget = options.budget or (_QUICK_BUDGET if options.quick else 1.0)
    return list(
        plan.cells(
            options.transports,
            options.workloads,
            options.sizes,
            rounds,
            budget,
            options.quick,
        )
    )


def run(
    planned: Sequence[Cell], quick: bool, arguments: Sequence[str], output: Path
) -> int:
    """Measure every cell; print the table; 1 if a cell failed, 130 if interrupted."""
    start = time.monotonic()
    facts = environment(["mq", "bench", *arguments]) | {PLANNED: str(len(planned))}
    end = start + _QUICK_SECONDS if quick else None
    return on_the_way(output, facts, lambda writer: _measure_all(planned, writer, end))


def _measure_all(planned: Sequence[Cell], writer: Writer, end: float | None) -> int:
    """Measure and write down every cell; 1 if one failed, else 0.

    Args:
        end: When no further cell is begun, by `time.monotonic`; those of the first
            round are then written down as skipped.
    """
    status = 0
    runners = {cell.transport for cell in planned} - {"mq", "raw"}
    reasons = {name: reason for name in runners if (reason := unusable(name))}
    with Progress(planned, end).shown() as progress:
        for cell in planned:
            start = time.monotonic()
            if end is not None and start > end:
                if cell.round == 0:
                    writer.add(Result.of(cell, "skipped", "a quick run's time was up"))
                continue
            progress.begin(cell)
            result = measure(cell, reasons, touch=end is None)
            writer.add(result)
            progress.end(cell, time.monotonic() - start)
            if result.status == "failed":
                status = 1
                print(f"{title(cell)}: {result.reason}", file=sys.stderr)
    return status


def measure(cell: Cell, reasons: dict[str, str], touch: bool = False) -> Result:
    """One cell, or the reason why it is not run.

    Args:
        reasons: Why transports cannot be used here.
        touch: Whether to touch memory beforehand, as much as the cell may need. Cells
            that use what they need before the timed part measure the same without.
    """
    reason = reasons.get(cell.transport) or plan.misfit(cell)
    if reason:
        return Result.of(cell, "skipped", reason)
    workload = plan.WORKLOADS[cell.workload]
    alone = cell.transport in (*baselines.COPIES, "mq", "raw")
    size = 1 if alone else 1 + workload.spokes
    ours = not alone and not baselines.is_baseline(cell.transport)
    threads = ours and _threads(cell.transport)
    needed = workload.memory * cell.nbytes + (1 << 27)
    if not touch or not workload.spokes:
        needed = 0
    needed = min(needed, _TOUCH, plan.free_memory() // 2)
    result = run_cell(cell, workload.body, size, threads=threads, touch=needed)
    if not baselines.may_lose(cell.transport):
        result = whole(result)
    if result.status == "ok" and not result.metrics.get("value", 0.0) > 0:
        return Result.of(cell, "failed", "too little arrived to be measured")
    return result
