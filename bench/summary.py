"""The results of a run over its rounds, and what they are compared with."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import NamedTuple

from bench import plan
from bench.baselines import is_baseline, limit_of, raw_of
from bench.rows import Result

_PUBLISHED = Path(__file__).with_name("published_p2p.csv")

LEAST = {"p90": 10, "p99": 100}
"""Samples that a round needs for a percentile; of fewer it is the longest of them."""


@dataclass
class Row:
    """One transport, workload and size, over all rounds.

    Attributes:
        values: By round: what transports are compared by.
        metrics: Everything that was measured, by name, then in order of the rounds.
        receiver_bytes: What the receiver grew by at most, by round.
        sender_bytes: The same of the sender.
        cpu_per_gb: Processor seconds of all processes per 10^9 bytes, by round.
        problems: By round: why it has no value.
    """

    transport: str
    workload: str
    nbytes: int
    values: dict[int, float] = field(default_factory=dict)
    metrics: dict[str, list[float]] = field(default_factory=dict)
    receiver_bytes: list[int] = field(default_factory=list)
    sender_bytes: list[int] = field(default_factory=list)
    cpu_per_gb: list[float] = field(default_factory=list)
    problems: dict[int, str] = field(default_factory=dict)

    @property
    def problem(self) -> str:
        """Why there is no value, or not one from every round; else empty."""
        rounds: dict[str, list[str]] = {}
        for number, reason in sorted(self.problems.items()):
            rounds.setdefault(reason, []).append(str(number + 1))
        if not self.values and len(rounds) == 1:  # there is nothing to tell apart
            return next(iter(rounds))
        return "; ".join(
            f"round{'s' if len(numbers) > 1 else ''} {', '.join(numbers)} {reason}"
            for reason, numbers in rounds.items()
        )

    def failed(self) -> bool:
        """Whether a round has failed."""
        return any(reason.startswith("failed") for reason in self.problems.values())

    @property
    def value(self) -> float | None:
        """The median over the rounds."""
        return median(self.values.values()) if self.values else None

    def metric(self, name: str) -> float | None:
        """The median over the rounds of one of the metrics.

        None also of a percentile for which a round had too few samples.
        """
        found = self.metrics.get(name)
        few = self.samples() < LEAST.get(name, 0)
        return median(found) if found and not few else None

    def samples(self) -> float:
        """The fewest of a round; infinite where they are not known."""
        return min(self.metrics.get("samples", ()), default=math.inf)

    def lost(self) -> float:
        """Messages lost in all rounds, also in those that failed for it."""
        return sum(self.metrics.get("lost", ()))

    def ratio(self, other: Row | None) -> float | None:
        """The median over the rounds that both have of this by the other."""
        if other is None:
            return None
        both = [number for number in self.values if other.values.get(number)]
        if not both:
            return None
        return median(self.values[number] / other.values[number] for number in both)

    def add(self, result: Result) -> None:
        """Take in one round."""
        if result.status != "ok":
            self.problems[result.round] = f"{result.status}: {result.reason}"
            self._note(result, ("lost", "sent"))
            return
        if result.round in self.values:  # twice in one file: the first one counts
            return
        self.values[result.round] = result.metrics["value"]
        self._note(result, result.metrics)
        receiver, sender = _grown(result)
        self.receiver_bytes.append(receiver)
        self.sender_bytes.append(sender)
        carried = result.metrics.get("carried_bytes")
        if carried:
            used = sum(one.timed_cpu_seconds for one in result.processes)
            self.cpu_per_gb.append(used / carried * 1e9)

    def _note(self, result: Result, names: Iterable[str]) -> None:
        for name in names:
            if name in result.metrics:
                self.metrics.setdefault(name, []).append(result.metrics[name])


def _grown(result: Result) -> tuple[int, int]:
    """Bytes that the receiving and the sending process grew by at most."""
    to_hub = result.workload in ("fanin", "actor-learner")
    by_rank = {
        rank: used.peak_rss_bytes - used.base_rss_bytes
        for used in result.processes
        for rank in used.ranks
    }
    most = max(by_rank.values(), default=0)
    hub, spoke = by_rank.get(0, most), by_rank.get(1, most)
    return (hub, spoke) if to_hub else (spoke, hub)


def gather(results: Iterable[Result]) -> list[Row]:
    """Rows over the rounds, in the order in which they were measured."""
    rows: dict[tuple[str, int, str], Row] = {}
    for result in results:
        key = (result.workload, result.nbytes, result.transport)
        rows.setdefault(key, Row(result.transport, result.workload, result.nbytes)).add(
            result
        )
    return list(rows.values())


class Run:
    """The rows of one run, found by what they are about."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows
        self._by_name = {(row.workload, row.nbytes, row.transport): row for row in rows}

    def tried(self, workload: str, nbytes: int, transport: str) -> Row | None:
        """The row of a cell, be there a value or not, or None."""
        return self._by_name.get((workload, nbytes, transport))

    def row(self, workload: str, nbytes: int, transport: str) -> Row | None:
        """The row of a cell that was measured, or None."""
        found = self.tried(workload, nbytes, transport)
        return found if found is not None and found.values else None

    def of(self, workload: str) -> list[Row]:
        """The rows of a workload that were measured."""
        return [row for row in self.rows if row.workload == workload and row.values]

    def sizes(self, workload: str) -> list[int]:
        """The sizes of a workload that were measured, ascending."""
        return sorted({row.nbytes for row in self.of(workload)})

    def transports(self) -> list[str]:
        """Ours of all workloads, in the order in which they were measured."""
        alone = ("mq", "raw")
        names = dict.fromkeys(row.transport for row in self.rows)
        return [name for name in names if not is_baseline(name) and name not in alone]

    def raws(self, row: Row) -> list[Row]:
        """The measured rows of the bare libraries that a row is compared with."""
        names: Iterable[str] = raw_of(row.transport)
        if row.workload == "codec":
            names = ("raw",) if row.transport == "mq" else ()
        variants = [f"{name}{end}" for name in names for end in ("", ":pubsub")]
        found = [self.row(row.workload, row.nbytes, name) for name in variants]
        return [one for one in found if one is not None]

    def raw(self, row: Row) -> Row | None:
        """The fastest of `raws`."""
        sign = 1 if plan.WORKLOADS[row.workload].lower_is_better else -1
        raws = self.raws(row)
        return min(raws, key=lambda one: sign * (one.value or 0.0), default=None)

    def limit(self, row: Row) -> Row | None:
        """The measured row of what bounds a row."""
        return self.row(row.workload, row.nbytes, limit_of(row.transport))


class Published(NamedTuple):
    """A published latency in milliseconds."""

    scope: str
    system: str
    milliseconds: float


def published() -> tuple[dict[int, list[Published]], list[str]]:
    """Published latencies by size in bytes, and the conditions they hold under."""
    lines = _PUBLISHED.read_text(encoding="utf-8").splitlines()
    conditions = [line.lstrip("# ") for line in lines if line.startswith("#")]
    found: dict[int, list[Published]] = {}
    for row in csv.DictReader(line for line in lines if not line.startswith("#")):
        entry = Published(row["scope"], row["system"], float(row["ms"]))
        found.setdefault(int(row["nbytes"]), []).append(entry)
    return found, conditions


def nearest(transport: str) -> tuple[str, str]:
    """Scope and name of the published system that is nearest to a transport."""
    if limit_of(transport) == "limit:cuda":
        return ("intra-node", "cuda-shared-tensor")
    if limit_of(transport) != "limit:tcp":
        return ("intra-node", "shm")
    if transport.startswith("torchrpc"):
        return ("cross-node", "torchrpc-tcp")
    return ("cross-node", "nng-tcp")


def number(value: float | None) -> str:
    """Three significant digits, and thousands apart."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}"
