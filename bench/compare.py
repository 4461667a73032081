"""Two runs side by side: what got slower or faster between them."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench import plan, report, tables
from bench.baselines import is_baseline
from bench.rows import size_text
from bench.summary import Row, Run, number

DESCRIPTION = """\
Compare two runs, cell by cell: how many times as long B takes as A (for rates: how many
times as few per second), by the medians over the rounds, with the range that the single
rounds span. A cell counts as slower or faster if the rounds of the two runs do not
overlap, and there are so many that of cells that are alike less than 1 in 100 would do
so by chance: five and five do, in 1 of 126; of three and three it would be 1 in 10, of
one and one all. Cells with fewer have "too few rounds" in place of a verdict. Bare
libraries and limits tell how far the machine itself has changed."""

_CHANCE = 0.01
_TOO_FEW = "too few rounds"


@dataclass(frozen=True)
class Change:
    """One cell in two runs.

    Attributes:
        ratio: Time of B by time of A; above 1 is slower.
        low, high: The least and the greatest ratio of single rounds.
        rounds: Of A and of B.
        lost: Messages lost in A and in B.
    """

    workload: str
    nbytes: int
    transport: str
    ratio: float
    low: float
    high: float
    rounds: tuple[int, int]
    lost: tuple[float, float]

    @property
    def chance(self) -> float:
        """How likely it is that rounds of two cells that are alike do not overlap."""
        return 2 / math.comb(sum(self.rounds), self.rounds[0])

    @property
    def verdict(self) -> str:
        """ "slower" or "faster" if the rounds do not overlap, and are enough."""
        if self.chance > _CHANCE:
            return _TOO_FEW
        if self.low > 1:
            return "slower"
        return "faster" if self.high < 1 else ""

    def title(self) -> str:
        """The cell in words."""
        return _title(self)


def _title(one: Change | Row) -> str:
    size = f" {size_text(one.nbytes)}" if one.nbytes else ""
    return f"{one.workload}{size} {one.transport}"


def changes(before: Run, after: Run) -> list[Change]:
    """The cells that both runs have measured, in the order of A."""
    found = []
    for old in before.rows:
        new = after.row(*_key(old))
        if new is not None and old.values:
            found.append(_change(old, new))
    return found


def _change(old: Row, new: Row) -> Change:
    a, b = list(old.values.values()), list(new.values.values())
    if not plan.WORKLOADS[old.workload].lower_is_better:
        a, b = [1 / value for value in a], [1 / value for value in b]
    return Change(
        old.workload,
        old.nbytes,
        old.transport,
        median(b) / median(a),
        min(b) / max(a),
        max(b) / min(a),
        (len(a), len(b)),
        (old.lost(), new.lost()),
    )


def missing(before: Run, after: Run) -> list[str]:
    """Cells that only one of the runs has measured, in words."""
    return [*_missing(before.rows, after, "B"), *_missing(after.rows, before, "A")]


def _missing(rows: Sequence[Row], other: Run, side: str) -> list[str]:
    return [
        f"{_title(row)}: not in {side}{_problem(other, row)}"
        for row in rows
        if row.values and other.row(*_key(row)) is None
    ]


def _problem(run: Run, row: Row) -> str:
    found = run.tried(*_key(row))
    return f" ({found.problem})" if found is not None and found.problem else ""


def _key(row: Row) -> tuple[str, int, str]:
    return (row.workload, row.nbytes, row.transport)


def _without(before: Run, after: Run) -> list[str]:
    """Rounds without a value, and cells that have none in either run, in words.

    Left out are cells that both runs have skipped.
    """
    found = []
    rows = {_key(row): row for row in [*after.rows, *before.rows]}
    for key in dict.fromkeys([*map(_key, before.rows), *rows]):
        sides = {"A": before.tried(*key), "B": after.tried(*key)}
        both = [row for row in sides.values() if row is not None]
        valued = sum(bool(row.values) for row in both)
        if valued == 1 or not (valued or any(row.failed() for row in both)):
            continue  # the one is named by `missing`
        said = {
            side: row.problem if row else "not tried" for side, row in sides.items()
        }
        reasons = "; ".join(f"{side}: {words}" for side, words in said.items() if words)
        if reasons:
            found.append(f"{_title(rows[key])}: {reasons}")
    return found


def text(before: Run, after: Run) -> str:
    """The comparison in words and columns."""
    found = changes(before, after)
    parts = _table(found) if found else ["the two runs have no cell in common"]
    for what, worst in (("slower", True), ("faster", False)):
        group = [one for one in found if one.verdict == what]
        group.sort(key=lambda one: one.ratio, reverse=worst)
        if group:
            parts += ["", f"{what}:"]
            parts += [f"  {one.title()}: {number(one.ratio)}" for one in group]
    if absent := missing(before, after):
        parts += ["", "in one run only:", *(f"  {line}" for line in absent)]
    if without := _without(before, after):
        parts += ["", "without a value:", *(f"  {line}" for line in without)]
    return "\n".join([*parts, *(["", _luck(found), _medians(found)] if found else [])])


def _table(found: Sequence[Change]) -> list[str]:
    head = ["workload", "transport", "size", "B/A", "least", "most", "rounds", ""]
    lines = []
    for one in found:
        size = size_text(one.nbytes) if one.nbytes else "-"
        line = [one.workload, one.transport, size, number(one.ratio)]
        line += [number(one.low), number(one.high), f"{one.rounds[0]}, {one.rounds[1]}"]
        lines.append([*line, _remark(one)])
    return tables.aligned(head, lines)


def _remark(change: Change) -> str:
    remarks = [change.verdict] if change.verdict else []
    if any(change.lost):
        remarks.append(f"lost {change.lost[0]:,.0f}, {change.lost[1]:,.0f}")
    return ", ".join(remarks)


def _luck(found: Sequence[Change]) -> str:
    """How many of the verdicts are to be expected of cells that are alike."""
    judged = [one.chance for one in found if one.verdict != _TOO_FEW]
    few = len(found) - len(judged)
    parts = []
    if few:
        parts.append(f"{few} of {len(found)} cells have {_TOO_FEW} for a verdict")
    if judged:
        parts.append(
            f"by chance alone about {number(sum(judged))} of {len(judged)} cells would "
            "get a verdict"
        )
    return "; ".join(parts)


def _medians(found: Sequence[Change]) -> str:
    parts = []
    for what, kind in (("ours", False), ("raw and limits, the machine itself", True)):
        ratios = [c.ratio for c in found if is_baseline(c.transport) is kind]
        if ratios:
            parts.append(f"{what}: {number(median(ratios))}")
    return f"median of B/A over the cells: {'; '.join(parts)}"


def failures(before: Run, after: Run, most: float) -> list[str]:
    """What is worse in B than it may be, in words.

    Ours only: cells whose medians differ by more than `most` and whose rounds do not
    overlap, though there be one each; that lose messages and did not, or that failed or
    are missing and were not; and that there is no cell to compare.
    """
    found = []
    common = [one for one in changes(before, after) if not is_baseline(one.transport)]
    if not common:
        found.append("the two runs have no cell of ours in common")
    for one in common:
        if one.low > 1 and one.ratio > most:
            few = f" ({_TOO_FEW} to tell from luck)" if one.verdict == _TOO_FEW else ""
            found.append(f"{one.title()}: {number(one.ratio)} times the time{few}")
        if one.lost[1] > one.lost[0] == 0:
            found.append(f"{one.title()}: lost {one.lost[1]:,.0f} messages")
    for row in after.rows:
        was = before.tried(*_key(row))
        if is_baseline(row.transport) or not row.failed() or (was and was.failed()):
            continue
        if row.values or was is None or not was.values:  # else it is missing
            found.append(f"{_title(row)}: {row.problem}")
    ours = [row for row in before.rows if not is_baseline(row.transport)]
    return [*found, *_missing(ours, after, "B")]


def main(arguments: Sequence[str]) -> int:
    """Run `mq bench compare`; the exit status."""
    parser = argparse.ArgumentParser(
        prog="mq bench compare",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("before", type=Path, metavar="A.jsonl")
    parser.add_argument("after", type=Path, metavar="B.jsonl")
    parser.add_argument(
        "--fail-above",
        type=_ratio,
        metavar="RATIO",
        help="exit with 1 if one of ours is slower than this by the medians, as 1.2, "
        "and its rounds do not overlap, though they be few, or if it loses messages, "
        "fails or is missing and did not in A",
    )
    options = parser.parse_args(arguments)
    try:
        old_facts, before = _load(options.before)
        new_facts, after = _load(options.after)
    except (OSError, ValueError) as error:
        print(f"mq bench compare: {error}", file=sys.stderr)
        return 2
    for key in sorted({*old_facts, *new_facts}):
        old, new = old_facts.get(key, "-"), new_facts.get(key, "-")
        if old != new:
            print(f"{key}: {old} -> {new}")
    print()
    print(text(before, after))
    if options.fail_above is None:
        return 0
    failed = failures(before, after, options.fail_above)
    for line in failed:
        print(f"worse: {line}", file=sys.stderr)
    return 1 if failed else 0


def _load(path: Path) -> tuple[dict[str, str], Run]:
    """The conditions and the rows of a run of transports.

    Raises:
        ValueError: It is of applications, or no file of `mq bench`.
    """
    found = report.load([path])
    if found.apps:
        raise ValueError(
            f"{path} is of applications: mq bench report joins such runs in one report"
        )
    return found.facts[0], found.run


def _ratio(given: str) -> float:
    try:
        ratio = float(given)
    except ValueError:
        ratio = 0.0
    if not 1 <= ratio <= 1000:
        raise argparse.ArgumentTypeError(f"{given!r} is no ratio from 1 to 1000")
    return ratio
