"""A report says how many rounds and samples a figure is of, and what has failed."""

from __future__ import annotations

import pytest
from bench_results import row

from bench import tables
from bench.rows import Cell, Result
from bench.summary import Run, gather
from bench.tables import Text


def table(*rows: Result) -> Text:
    """The table of the one workload that there is."""
    (found,) = tables.workloads(Run(gather(rows)))
    return found


def column(found: Text, name: str) -> list[str]:
    place = found.head.index(name)
    return [line[place] for line in found.lines]


def broken(transport: str, number: int, reason: str = "rank 1 died") -> Result:
    return Result.of(Cell(transport, "latency", 40_000_000, number), "failed", reason)


def test_each_figure_says_of_how_many_rounds_it_is() -> None:
    """Of one that failed it cannot be; a run that was cut short has fewer of all."""
    whole = [row("tcp", 1.0, number) for number in range(3)]
    torn = [row("shm", 1.0, 0), broken("shm", 1), row("shm", 1.0, 2)]
    found = table(*whole, *torn, row("limit:tcp", 1.0))
    assert column(found, "rounds") == ["3", "2 of 3", "1"]


def test_a_failure_says_in_which_rounds() -> None:
    """Each reason once; a row without any value needs no rounds for its one reason."""
    rows = [
        row("shm", 1.0, 0),
        broken("shm", 1),
        broken("shm", 3),
        broken("shm", 2, "x"),
    ]
    gone = [broken("tcp", number) for number in range(3)]
    assert table(*rows, *gone).problems == [
        "shm 40 MB: rounds 2, 4 failed: rank 1 died; round 3 failed: x",
        "tcp 40 MB: failed: rank 1 died",
    ]


@pytest.mark.parametrize(
    ("samples", "p90", "p99"),
    [(9, "-", "-"), (10, "1.50", "-"), (99, "1.50", "-"), (100, "1.50", "2.00")],
)
def test_a_percentile_of_too_few_samples_is_not_told(
    samples: int, p90: str, p99: str
) -> None:
    """It would be the longest of them; the round with the fewest decides."""
    counts = [samples, 5000, 5000]
    rows = [row("tcp", 1.0, n, p90=1.5, samples=k) for n, k in enumerate(counts)]
    found = table(*rows)
    assert column(found, "samples") == [f"{samples}"]
    assert (column(found, "p90"), column(found, "p99")) == ([p90], [p99])
    assert "not told: p90 of fewer than 10, p99 of fewer than 100." in found.note


def test_rows_of_before_that_tell_no_samples_keep_their_percentiles() -> None:
    """Nobody knows of how many they are."""
    found = table(row("tcp", 1.0))
    assert "samples" not in found.head
    assert column(found, "p99") == ["2.00"]
    found = table(row("tcp", 1.0), row("shm", 1.0, samples=3))
    assert column(found, "samples") == ["-", "3"]
    assert column(found, "p99") == ["2.00", "-"]
