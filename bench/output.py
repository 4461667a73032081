"""Where a run leaves its rows, as they come, and its report."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path

from bench import interrupts, report
from bench.rows import Writer

RESULTS = "results.jsonl"
_EARLY = "the report covers what was measured"


def new_output(asked: Path | None, name: str) -> Path:
    """A directory for a run, made as needed: the one that was asked for, or bench/out.

    Args:
        name: By `time.strftime`, in bench/out; a number follows where that is taken.

    Returns:
        Where an empty file of results is this run's alone.

    Raises:
        OSError: It cannot be made, or has the results of another run.
    """
    output = first = asked or Path("bench", "out", time.strftime(name))
    for place in itertools.count(2):
        output.mkdir(parents=True, exist_ok=True)
        try:
            # In one step: another run may be looking at the same moment.
            (output / RESULTS).touch(exist_ok=False)
        except FileExistsError:
            if asked:
                raise FileExistsError(
                    f"{output} has the {RESULTS} of another run: name a new directory"
                ) from None
            output = first.with_name(f"{first.name}-{place}")
        else:
            break
    return output


def on_the_way(
    output: Path, facts: dict[str, str], measure: Callable[[Writer], int]
) -> int:
    """Measure into `results.jsonl`; write and print the report, also when cut short.

    Args:
        output: Where the file and the report go.
        facts: The conditions of the run.
        measure: Writes down each row as soon as it is known.

    Returns:
        What `measure` returned; 130 if it was interrupted; 2 if rows or, but for that,
        the report could not be written.
    """
    path = output / RESULTS
    writer = Writer(path, facts)
    why = ""
    with interrupts.raised():
        try:
            status = measure(writer)
        except KeyboardInterrupt:
            status, why = 130, "interrupted"
        except OSError as error:  # as on a full disk
            status, why = 2, str(error)
        finally:
            writer.close()
        try:
            with interrupts.held("the report is being written; once more ends that"):
                if why:
                    print(f"{why}: {_EARLY}", file=sys.stderr, flush=True)
                found = report.fitted([path], [(facts, writer.results)])
                told = report.write(found, output)
        except KeyboardInterrupt:
            print(f"without a report: mq bench report {path}", file=sys.stderr)
            return 130
        except OSError as error:  # the same; the rows are known
            print(report.terminal(found))
            print(f"without a report: {error}", file=sys.stderr)
            print(f"elsewhere: mq bench report {path} --output DIR", file=sys.stderr)
            return status or 2
    print("\n".join([report.terminal(found), *told]))
    return status
