"""The short answer of a report: which transport for what, and how it stands to raw."""

from __future__ import annotations

from dataclasses import dataclass

from bench import plan
from bench.baselines import is_baseline, lends, measured_reach, reach_of
from bench.rows import size_text
from bench.summary import Row, Run, number

_QUESTIONS = {
    "rate": "many small messages",
    "fanout": "one publisher, three subscribers",
    "fanin": "three publishers, one subscriber",
    "stream": "large tensors back to back",
    "mixed": "small messages beside large ones",
    "mixed-busy": "the same with a busy subscriber",
    "actor-learner": "two actors and a learner",
}


@dataclass(frozen=True)
class Choice:
    """The fastest transport for one purpose.

    Attributes:
        purpose: In words, with the size.
        reach: "host" or "network": how far it must reach.
        value: What was measured, with its unit.
        caveat: What is not in the value, and what is fastest otherwise; mostly empty.
    """

    purpose: str
    reach: str
    transport: str
    value: str
    caveat: str


@dataclass(frozen=True)
class Score:
    """One transport in a line.

    Attributes:
        small, large: One way times, with their sizes and units.
        rate: Messages per second.
        small_raw, large_raw, rate_raw: The ratio to the bare library, as in the table
            of the workload: times below 1 are faster, rates above; None: there is none.
        lost: Messages lost in all cells.
    """

    transport: str
    reach: str
    small: str
    small_raw: float | None
    large: str
    large_raw: float | None
    rate: str
    rate_raw: float | None
    lost: int


def choices(run: Run) -> list[Choice]:
    """The fastest between processes of one host, and across hosts, per purpose.

    Across hosts of those only whose way there is the one that was measured.
    """
    found = []
    for workload, nbytes, purpose in _purposes(run):
        rows = [row for row in run.of(workload) if row.nbytes == nbytes]
        ours = [row for row in rows if row.transport in run.transports()]
        for reaches in (("host", "network"), ("network",)):
            able = [row for row in ours if measured_reach(row.transport) in reaches]
            if able:
                best = _best(able)
                name, measured = best.transport, value(best)
                caveat = _caveat(best, able)
                found.append(Choice(purpose, reaches[0], name, measured, caveat))
    return found


def _caveat(best: Row, able: list[Row]) -> str:
    if not lends(best.transport):
        return ""
    others = [row for row in able if not lends(row.transport)]
    said = "the time to fill the memory is not in it"
    if others:
        other = _best(others)
        said += f"; without a loan {other.transport}, {value(other)}"
    return said


def local_only(run: Run) -> list[str]:
    """Transports that reach other hosts, but by another way than was measured."""
    return [
        name
        for name in run.transports()
        if reach_of(name) == "network" != measured_reach(name)
    ]


def _purposes(run: Run) -> list[tuple[str, int, str]]:
    sizes = run.sizes("latency")
    found = [
        ("latency", nbytes, f"one message at a time ({size_text(nbytes)})")
        for nbytes in sorted({*sizes[:1], *sizes[-1:]})
    ]
    for workload, text in _QUESTIONS.items():
        for nbytes in run.sizes(workload):
            size = f" ({size_text(nbytes)})" if nbytes else ""
            found.append((workload, nbytes, f"{text}{size}"))
    return found


def _best(rows: list[Row]) -> Row:
    sign = 1 if plan.WORKLOADS[rows[0].workload].lower_is_better else -1
    return min(rows, key=lambda row: sign * (row.value or 0.0))


def value(row: Row | None) -> str:
    """What was measured, in a unit that suits it."""
    if row is None or row.value is None:
        return "-"
    unit = plan.WORKLOADS[row.workload].unit
    if unit == "ms" and row.value < 1:
        return f"{number(row.value * 1000)} us"
    return f"{number(row.value)} {unit}"


def scores(run: Run) -> list[Score]:
    """One line for each of our transports."""
    return [_score(run, transport) for transport in run.transports()]


def _score(run: Run, transport: str) -> Score:
    sizes, rates = run.sizes("latency"), run.sizes("rate")
    small = run.row("latency", sizes[0], transport) if sizes else None
    large = run.row("latency", sizes[-1], transport) if len(sizes) > 1 else None
    rate = run.row("rate", rates[0], transport) if rates else None
    return Score(
        transport,
        reach_of(transport),
        value(small),
        _by_raw(run, small),
        value(large),
        _by_raw(run, large),
        value(rate),
        _by_raw(run, rate),
        lost=round(sum(r.lost() for r in run.rows if r.transport == transport)),
    )


def _by_raw(run: Run, row: Row | None) -> float | None:
    return None if row is None else row.ratio(run.raw(row))


def losses(run: Run) -> list[tuple[str, int, int]]:
    """Baselines that lost messages: name, lost and sent, over all their cells."""
    found: dict[str, tuple[float, float]] = {}
    for row in run.rows:
        if row.lost() and is_baseline(row.transport):
            lost, sent = found.get(row.transport, (0.0, 0.0))
            sent += sum(row.metrics.get("sent", ()))
            found[row.transport] = (lost + row.lost(), sent)
    return [(name, round(lost), round(sent)) for name, (lost, sent) in found.items()]


def small_size(run: Run) -> str:
    """The size that `Score.small` is about."""
    sizes = run.sizes("latency")
    return size_text(sizes[0]) if sizes else "-"


def large_size(run: Run) -> str:
    """The size that `Score.large` is about."""
    sizes = run.sizes("latency")
    return size_text(sizes[-1]) if len(sizes) > 1 else "-"
