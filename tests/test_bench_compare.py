"""`mq bench compare` tells what got slower or faster, and what may be luck."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from bench_results import row, write

from bench import compare
from bench.rows import Cell, Result


def rounds(
    transport: str, values: Sequence[float], workload: str = "latency"
) -> list[Result]:
    nbytes = 64 if workload == "rate" else 40_000_000
    flow = {"lost": 0.0, "sent": 100.0} if workload == "rate" else {}
    return [
        row(transport, value, number, workload, nbytes, **flow)
        for number, value in enumerate(values)
    ]


def compared(
    tmp_path: Path,
    before: Sequence[Result],
    after: Sequence[Result],
    *options: str,
) -> int:
    a = write(tmp_path / "a.jsonl", list(before), {"python": "3.11"})
    b = write(tmp_path / "b.jsonl", list(after), {"python": "3.12"})
    return compare.main([str(a), str(b), *options])


def test_a_cell_is_slower_if_none_of_its_rounds_is_as_fast(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The ratio is of the medians, its range of the single rounds."""
    before = rounds("zmq:tcp", [10, 11, 11, 11, 12])
    assert compared(tmp_path, before, rounds("zmq:tcp", [20, 22, 22, 22, 24])) == 0
    out = capsys.readouterr().out
    assert "latency  zmq:tcp    40 MB  2.00   1.67  2.40    5, 5  slower" in out
    assert "slower:\n  latency 40 MB zmq:tcp: 2.00" in out
    assert "python: 3.11 -> 3.12" in out


def test_rounds_that_overlap_are_no_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A median that moved within the noise is neither slower nor faster."""
    before = rounds("zmq:tcp", [10, 11, 11, 12, 30])
    after = rounds("zmq:tcp", [20, 22, 22, 23, 24])
    assert compared(tmp_path, before, after, "--fail-above", "1.2") == 0
    assert "slower" not in capsys.readouterr().out


@pytest.mark.parametrize(("limit", "status"), [("1.2", 1), ("2.5", 0)])
def test_one_round_each_is_no_change_but_may_be_too_slow(
    limit: str, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It tells nothing of the noise; who sets a limit has said how much that may be."""
    before, after = rounds("zmq:tcp", [10]), rounds("zmq:tcp", [20])
    assert compared(tmp_path, before, after, "--fail-above", limit) == status
    shown = capsys.readouterr()
    assert "2.00" in shown.out
    assert "slower" not in shown.out
    said = "2.00 times the time (too few rounds to tell from luck)"
    assert (said in shown.err) is (status == 1)


@pytest.mark.parametrize("counts", [(1, 2), (2, 2), (3, 3), (4, 4), (5, 5)])
def test_verdicts_by_chance_are_rare(
    counts: tuple[int, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 300 cells that did not change less than 1 in 100 may be called so."""
    chance = random.Random(1)
    names = [f"zmq:tcp{number}" for number in range(300)]
    a, b = (
        [
            one
            for name in names
            for one in rounds(name, [chance.lognormvariate(0, 0.15) for _ in range(n)])
        ]
        for n in counts
    )
    compared(tmp_path, a, b)
    out = capsys.readouterr().out
    assert out.count(" slower\n") + out.count(" faster\n") <= 6
    enough = counts == (5, 5)
    assert ("300 of 300 cells have too few rounds for a verdict" in out) is not enough
    assert ("chance alone about 2.38 of 300 cells would get" in out) is enough
    assert (out.count(", 5\n") > 290) is enough
    assert (out.count("too few rounds\n") == 300) is not enough


def test_a_rate_is_compared_as_the_time_per_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Twice as many per second take half the time."""
    before = rounds("zmq:tcp", [100, 110, 110, 110, 120], "rate")
    compared(tmp_path, before, rounds("zmq:tcp", [200, 220, 220, 220, 240], "rate"))
    out = capsys.readouterr().out
    assert "faster:\n  rate 64 B zmq:tcp: 0.500" in out


@pytest.mark.parametrize(("limit", "status"), [("1.2", 1), ("2.5", 0)])
def test_the_exit_status_tells_of_what_is_slower_than_allowed(
    limit: str, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only beyond the limit, and it is named."""
    before = rounds("zmq:tcp", [10, 11])
    after = rounds("zmq:tcp", [20, 22])
    assert compared(tmp_path, before, after, "--fail-above", limit) == status
    said = "worse: latency 40 MB zmq:tcp: 2.00 times the time"
    assert (said in capsys.readouterr().err) is (status == 1)


def test_what_is_not_ours_never_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A slower bare library tells that the machine was slower."""
    before = [*rounds("raw:zmq:tcp", [10, 11]), *rounds("zmq:tcp", [10, 11])]
    after = [*rounds("raw:zmq:tcp", [20, 22]), *rounds("zmq:tcp", [10, 11])]
    assert compared(tmp_path, before, after, "--fail-above", "1.2") == 0
    out = capsys.readouterr().out
    assert "ours: 1.00; raw and limits, the machine itself: 2.00" in out


def test_messages_that_get_lost_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Being fast is no excuse."""
    lost = row("zmq:tcp", 500.0, 0, "rate", 64, lost=3.0, sent=100.0)
    before = rounds("zmq:tcp", [100], "rate")
    assert compared(tmp_path, before, [lost], "--fail-above", "1.2") == 1
    shown = capsys.readouterr()
    assert "lost 0, 3" in shown.out
    assert "rate 64 B zmq:tcp: lost 3 messages" in shown.err


def test_a_cell_of_one_side_is_named_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """New cells are told of; what failed now and did not before fails."""
    broken = Result.of(Cell("nng:tcp", "latency", 40_000_000), "failed", "no luck")
    before = [*rounds("nng:tcp", [1]), *rounds("zmq:tcp", [1, 1])]
    again = Result.of(Cell("zmq:tcp", "latency", 40_000_000, 1), "failed", "died")
    after = [broken, *rounds("zmq:tcp", [1]), again, *rounds("zmq:ipc", [1])]
    assert compared(tmp_path, before, after) == 0
    out = capsys.readouterr().out
    assert "latency 40 MB nng:tcp: not in B (failed: no luck)" in out
    assert "latency 40 MB zmq:ipc: not in A" in out
    assert compared(tmp_path, before, after, "--fail-above", "2") == 1
    assert capsys.readouterr().err.splitlines() == [
        "worse: latency 40 MB zmq:tcp: round 2 failed: died",
        "worse: latency 40 MB nng:tcp: not in B (failed: no luck)",
    ]


def broken(transport: str, *numbers: int, status: str = "failed") -> list[Result]:
    cells = [Cell(transport, "latency", 40_000_000, number) for number in numbers]
    if status == "failed":
        return [Result.of(cell, "failed", "died") for cell in cells]
    return [Result.of(cell, "skipped", "no room") for cell in cells]


def test_rounds_without_a_value_are_named_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside their count; so are those of cells that have no value in either run."""
    before = [*rounds("tcp", [1, 1, 1, 1, 1]), *broken("shm", 0, 1)]
    before += [*rounds("zmq:tcp", [1]), *broken("zmq:tcp", 1, status="skipped")]
    before += broken("nng:ipc", 0, status="skipped")
    after = [*rounds("tcp", [1]), *broken("tcp", 1, 2, 3, 4), *broken("shm", 0)]
    after += [*rounds("zmq:tcp", [1, 1]), *broken("nng:tcp", 0)]
    after += broken("nng:ipc", 0, status="skipped")
    assert compared(tmp_path, before, after) == 0
    out = capsys.readouterr().out
    told = out.partition("without a value:\n")[2].partition("\n\n")[0].splitlines()
    assert told == [
        "  latency 40 MB tcp: B: rounds 2, 3, 4, 5 failed: died",
        "  latency 40 MB shm: A: failed: died; B: failed: died",
        "  latency 40 MB zmq:tcp: A: round 2 skipped: no room",
        "  latency 40 MB nng:tcp: A: not tried; B: failed: died",
    ]


def test_runs_in_which_all_failed_say_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Though there is nothing to compare."""
    compared(tmp_path, broken("tcp", 0, 1), broken("tcp", 0, 1))
    out = capsys.readouterr().out
    assert "the two runs have no cell in common" in out
    assert "latency 40 MB tcp: A: failed: died; B: failed: died" in out


@pytest.mark.parametrize(
    ("before", "status"),
    [
        ([*rounds("tcp", [1]), *broken("tcp", 1, status="skipped")], 1),
        ([*rounds("tcp", [1]), *broken("tcp", 1)], 0),
        (rounds("tcp", [1, 1]), 1),
        ([], 1),
    ],
)
@pytest.mark.parametrize("again", [rounds("tcp", [1]), []])
def test_what_failed_fails_unless_it_had_failed_before(
    again: list[Result],
    before: list[Result],
    status: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """To be skipped is another thing; what has no value left is missing in any case."""
    common = rounds("shm", [1])
    before, after = [*common, *before], [*common, *again, *broken("tcp", 1)]
    missing = not again and len(before) > 1
    assert compared(tmp_path, before, after, "--fail-above", "2") == (missing or status)
    said = capsys.readouterr().err
    assert said.count("latency 40 MB tcp: ") == (missing or status)
    assert "died" in said or not said


def test_a_cell_of_ours_that_is_missing_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever leaves it out has not shown that it is no slower."""
    bare = rounds("raw:nng:tcp", [1])
    before = [*rounds("nng:tcp", [1]), *rounds("zmq:tcp", [1]), *bare]
    after = rounds("zmq:tcp", [1])
    assert compared(tmp_path, before, after, "--fail-above", "2") == 1
    assert capsys.readouterr().err == "worse: latency 40 MB nng:tcp: not in B\n"
    assert compared(tmp_path, after, before, "--fail-above", "2") == 0


@pytest.mark.parametrize("other", [[], rounds("raw:zmq:ipc", [1])])
def test_where_nothing_was_compared_nothing_has_passed(
    other: list[Result], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither with a run that measured nothing nor with one of other cells."""
    ours = rounds("zmq:ipc", [1])
    said = "worse: the two runs have no cell of ours in common"
    for before, after in ((ours, other), (other, ours), (other, other)):
        assert compared(tmp_path, before, after, "--fail-above", "2") == 1
        assert said in capsys.readouterr().err.splitlines()


def test_runs_without_a_common_cell_say_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """There is nothing to compare."""
    compared(tmp_path, rounds("zmq:ipc", [1]), rounds("zmq:tcp", [1]))
    assert "no cell in common" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (None, "No such file"),
        (b"", "is empty"),
        (b"not json\n", "line 1: not a row"),
        (b"\xff\xfe", "line 1: not a row"),
        (
            b'{"record":"result","transport":"x","workload":"dance","nbytes":1,'
            b'"round":0,"status":"ok","metrics":{"value":1},"processes":[]}\n',
            "there is no workload 'dance'",
        ),
    ],
)
def test_a_file_that_is_no_run_is_refused_by_name(
    data: bytes | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message names the file and what is wrong with it; the status is 2."""
    good = write(tmp_path / "good.jsonl", rounds("zmq:tcp", [1]))
    bad = tmp_path / "bad.jsonl"
    if data is not None:
        bad.write_bytes(data)
    assert compare.main([str(good), str(bad)]) == 2
    error = capsys.readouterr().err
    assert "bad.jsonl" in error
    assert said in error
