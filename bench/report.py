"""Tables from the files of a run; measures nothing itself."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import NamedTuple

from bench import plan
from bench.rows import Result, read

_PUBLISHED = Path(__file__).with_name("published_p2p.csv")
_NOTES = {
    "latency": "One way: round trip less half an empty round trip.",
    "fanout": "One way to the last of three subscribers, as for latency.",
    "rate": "Delivered per second, one dictionary per message. raw: one message per "
    "frame, its payload by msgpack; the faster of PUSH/PULL and PUB/SUB (`:pubsub`), "
    "which loses what its queue of 1000 cannot hold; for nng Pair0 in place of "
    "PUSH/PULL. `raw:nng-bus` is what DI-engine does (Bus0, pickle), and loses, too. "
    "send and recv us: processor time per message of the calling threads.",
    "fanin": "Delivered per second from three publishers.",
    "stream": "Received GB/s (10^9 bytes), back to back.",
    "mixed": "Half the round trip of 64-byte messages while large ones flow; raw sends "
    "both over one socket.",
    "mixed-busy": "The same, with a subscriber that computes in pure Python.",
    "actor-learner": "Transitions per second at the learner; ages of the weights acted "
    "on.",
    "codec": "Encoding and decoding together, without a wire.",
    "import": "`import mq` in a new interpreter; the target is 100 ms.",
}
_EXTRA = {
    "p90": "p90",
    "p99": "p99",
    "lost": "lost",
    "send_us": "send us",
    "recv_us": "recv us",
    "encode_us": "encode us",
    "decode_us": "decode us",
    "bulk_gb_per_s": "bulk GB/s",
    "weights_age_ms": "weights' age ms",
    "weights_age_p99_ms": "age p99 ms",
}


@dataclass
class Row:
    """One transport, workload and size, over all rounds.

    Attributes:
        values: By round: what transports are compared by.
        peaks: Bytes that the receiver grew by at most, by round.
        cpu: Seconds, by round.
        problem: Why there is no value, or not one from every round.
    """

    transport: str
    workload: str
    nbytes: int
    values: dict[int, float] = field(default_factory=dict)
    metrics: dict[str, list[float]] = field(default_factory=dict)
    peaks: list[int] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    problem: str = ""

    @property
    def value(self) -> float | None:
        """The median over the rounds."""
        return median(self.values.values()) if self.values else None

    def ratio(self, other: Row | None) -> float | None:
        """The median over the rounds that both have of this by the other."""
        if other is None:
            return None
        both = [number for number in self.values if other.values.get(number)]
        if not both:
            return None
        return median(self.values[number] / other.values[number] for number in both)


def _receiver_memory(result: Result) -> int:
    """Bytes that the receiving process grew by at most."""
    rank = 0 if result.workload in ("fanin", "actor-learner") else 1
    grown = {
        rank: used.peak_rss_bytes - used.base_rss_bytes
        for used in result.processes
        for rank in used.ranks
    }
    return grown.get(rank, max(grown.values(), default=0))


class Published(NamedTuple):
    """A published latency in milliseconds."""

    scope: str
    system: str
    milliseconds: float


class Table(NamedTuple):
    """The rows of one workload as text."""

    workload: str
    head: list[str]
    lines: list[list[str]]
    problems: list[str]


def size_text(nbytes: int) -> str:
    """A size in decimal units, as in the published tables."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if nbytes >= factor:
            return f"{nbytes / factor:g} {unit}"
    return f"{nbytes} B"


def gather(results: Iterable[Result]) -> list[Row]:
    """Rows over the rounds, in the order in which they were measured."""
    rows: dict[tuple[str, int, str], Row] = {}
    for result in results:
        key = (result.workload, result.nbytes, result.transport)
        row = rows.setdefault(
            key, Row(result.transport, result.workload, result.nbytes)
        )
        if result.status != "ok":
            row.problem = f"{result.status}: {result.reason}"
            continue
        row.values[result.round] = result.metrics["value"]
        for name, value in result.metrics.items():
            row.metrics.setdefault(name, []).append(value)
        row.peaks.append(_receiver_memory(result))
        row.cpu.append(sum(used.cpu_seconds for used in result.processes))
    return list(rows.values())


def published(path: Path = _PUBLISHED) -> tuple[dict[int, list[Published]], list[str]]:
    """Published latencies by size in bytes, and the conditions they hold under."""
    lines = path.read_text(encoding="utf-8").splitlines()
    conditions = [line.lstrip("# ") for line in lines if line.startswith("#")]
    found: dict[int, list[Published]] = {}
    for row in csv.DictReader(line for line in lines if not line.startswith("#")):
        entry = Published(row["scope"], row["system"], float(row["ms"]))
        found.setdefault(int(row["nbytes"]), []).append(entry)
    return found, conditions


def _system(transport: str) -> tuple[str, str]:
    """The published system that is nearest to a transport."""
    if plan.limit_of(transport) != "limit:tcp":
        return ("intra-node", "shm")
    if transport.startswith("torchrpc"):
        return ("cross-node", "torchrpc-tcp")
    return ("cross-node", "nng-tcp")


def tables(rows: Sequence[Row]) -> list[Table]:
    """One table per workload, in the order of the plan."""
    return [
        _table(workload, [row for row in rows if row.workload == workload])
        for workload in plan.WORKLOADS
        if any(row.workload == workload for row in rows)
    ]


def _table(workload: str, rows: Sequence[Row]) -> Table:
    known = plan.WORKLOADS[workload]
    by_name = {(row.nbytes, row.transport): row for row in rows}
    figures = published()[0] if workload == "latency" else {}
    extra = [name for name in _EXTRA if any(name in row.metrics for row in rows)]
    head = ["size", "transport", known.unit, *(_EXTRA[name] for name in extra)]
    head += ["raw", "/raw", "limit", "/limit", "receiver MB", "CPU s"]
    head += ["published ms"] if figures else []
    lines = []
    for row in rows:
        line = [size_text(row.nbytes) if row.nbytes else "-", row.transport]
        line.append(_number(row.value))
        for name in extra:
            found = row.metrics.get(name)
            line.append(_number(median(found) if found else None))
        line += _compared(row, by_name)
        line.append(_number(max(row.peaks) / 1e6 if row.peaks else None))
        line.append(_number(median(row.cpu) if row.cpu else None))
        if figures:
            line.append(_nearest(row, figures))
        lines.append(line)
    problems = [
        f"{row.transport} {size_text(row.nbytes)}: {row.problem}"
        for row in rows
        if row.problem
    ]
    return Table(workload, head, lines, problems)


def _compared(row: Row, rows: dict[tuple[int, str], Row]) -> list[str]:
    """The raw value and ratio, the limit's value and ratio."""
    if plan.is_baseline(row.transport):
        return ["-"] * 4
    name = plan.raw_of(row.transport)
    if row.workload == "codec":
        name = "raw" if row.transport == "mq" else None
    candidates = [rows.get((row.nbytes, f"{name}{end}")) for end in ("", ":pubsub")]
    measured = [one for one in candidates if one and one.value is not None]
    sign = 1 if plan.WORKLOADS[row.workload].lower_is_better else -1
    raw = min(measured, key=lambda one: sign * (one.value or 0.0), default=None)
    limit = rows.get((row.nbytes, plan.limit_of(row.transport)))
    cells = []
    for other in (raw, limit):
        cells += [_number(other.value if other else None), _number(row.ratio(other))]
    return cells


def _nearest(row: Row, figures: dict[int, list[Published]]) -> str:
    if plan.is_baseline(row.transport):
        return "-"
    wanted = _system(row.transport)
    for entry in figures.get(row.nbytes, []):
        if (entry.scope, entry.system) == wanted:
            return f"{_number(entry.milliseconds)} {entry.system}"
    return "-"


def _number(value: float | None) -> str:
    """Three significant digits, and thousands apart."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}"


def terminal(path: Path) -> str:
    """The tables of a file of JSON lines, aligned."""
    parts = []
    for table in tables(gather(read(path)[1])):
        parts.append(f"\n{table.workload}  ({_NOTES[table.workload]})")
        widths = [
            max(len(line[i]) for line in [table.head, *table.lines])
            for i in range(len(table.head))
        ]
        for line in [table.head, *table.lines]:
            pairs = zip(line, widths, strict=True)
            aligned = [
                text.ljust(width) if i == 1 else text.rjust(width)
                for i, (text, width) in enumerate(pairs)
            ]
            parts.append("  ".join(aligned).rstrip())
        parts += [f"  ! {problem}" for problem in table.problems]
    return "\n".join(parts)


def write(path: Path, target: Path) -> Path:
    """Write the Markdown report on a file of JSON lines; where it is."""
    target.write_text(markdown(path), encoding="utf-8")
    return target


def markdown(path: Path) -> str:
    """The Markdown report on a file of JSON lines."""
    facts, results = read(path)
    parts = [
        "# Transports compared",
        "",
        f"`{facts.get('command', 'mq bench')}`",
        "",
        "Medians over the rounds. `/raw` and `/limit` are medians of the ratios "
        "within one round, ours by theirs; `raw` is the bare library on the same wire, "
        "`limit` what this machine can do. `receiver MB` is the most resident memory "
        "of the receiving process above what it started with (of both ends where they "
        "share a process); `CPU s` is of all processes of a cell together.",
        "",
        *_markdown_table(["", ""], [[key, text] for key, text in facts.items()]),
    ]
    measured = tables(gather(results))
    for table in measured:
        parts += ["", f"## {table.workload}", "", _NOTES[table.workload], ""]
        parts += _markdown_table(table.head, table.lines)
        parts += ["", *(f"- {problem}" for problem in table.problems)]
    if any(table.workload == "latency" for table in measured):
        parts += _published_section({result.nbytes for result in results})
    return "\n".join(parts).rstrip() + "\n"


def _published_section(sizes: set[int]) -> list[str]:
    figures, conditions = published()
    lines = [
        [size_text(nbytes), entry.scope, entry.system, _number(entry.milliseconds)]
        for nbytes, entries in sorted(figures.items())
        if nbytes in sizes
        for entry in entries
    ]
    if not lines:
        return []
    head = ["size", "scope", "system", "ms"]
    return ["", "## Published", "", *conditions, "", *_markdown_table(head, lines)]


def _markdown_table(head: list[str], lines: Iterable[list[str]]) -> list[str]:
    rows = [head, ["---"] * len(head), *lines]
    return [
        "| " + " | ".join(cell.replace("|", "\\|") for cell in r) + " |" for r in rows
    ]
