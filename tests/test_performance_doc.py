"""The figures of `docs/performance.md` are those of the runs that it names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench import report

ROOT = Path(__file__).parent.parent
DOC = (ROOT / "docs" / "performance.md").read_text()
Rows = dict[tuple[str, str], dict[str, str]]


def table(text: str, header: str) -> list[list[str]]:
    """The cells of the table whose header begins like that, without backquotes."""
    rows = text[text.index(header) :].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip(" `") for cell in row.split("|")[1:-1]] for row in rows]


def section(run: str, title: str) -> str:
    """A section of the report on a committed run."""
    report = (ROOT / "bench" / "results" / f"{run}.md").read_text()
    found = re.search(rf"^## {title}$(.*?)(?=^## |\Z)", report, re.M | re.S)
    assert found is not None, f"{run} has no section {title}"
    return found[1]


def measured(run: str, title: str) -> Rows:
    """The rows of a workload, by size and transport; their cells by column."""
    text = section(run, title)
    (head,) = (line for line in text.splitlines() if line.startswith("| size |"))
    names = [name.strip() for name in head.split("|")[1:-1]]
    rows = table(text, "| size |")
    return {(row[0], row[1]): dict(zip(names, row, strict=True)) for row in rows}


def fitted(run: str) -> dict[str, list[str]]:
    rows = table(section(run, "Two-term model"), "| transport |")
    return {row[0]: row[1:] for row in rows}


@pytest.mark.parametrize(
    "stored",
    sorted((ROOT / "bench" / "results").rglob("*.md")),
    ids=lambda one: one.stem,
)
def test_the_stored_reports_are_those_of_the_stored_rows(stored: Path) -> None:
    """What a report says has not changed since; that of the applications joins four."""
    rows = [stored.with_suffix(".jsonl")]
    if stored.parent.name == "apps":
        names = ("pipeline", "shards", "cartpole", "pong")
        rows = [stored.with_name(f"{name}.jsonl") for name in names]
    assert report.markdown(report.load(rows)) == stored.read_text()


def test_the_two_term_model_is_that_of_the_run() -> None:
    """Each transport and its baseline."""
    terms = fitted("two-cores")
    rows = table(DOC, "| transport | per message us |")
    assert len(rows) > 8
    for ours, *numbers in rows:
        assert numbers[:3] == terms[ours]
        assert numbers[4:] == terms[numbers[3]]


def test_the_budget_of_small_messages_is_that_of_the_run() -> None:
    """Processor time on both sides, rate and losses."""
    rate = measured("two-cores", "rate")
    rows = table(DOC, "| dictionary | transport |")
    assert len(rows) > 20
    for size, transport, send, recv, messages, lost in rows:
        row = rate[size, transport]
        assert [messages, lost] == [row["msg/s"], row["lost"]]
        assert [send, recv] == [row["send us"], row["recv us"]]
    shown = {(row[0], row[1]) for row in rows}
    for size, name in rate:  # who shows the one way of a library shows the faster, too
        if (size, name.removesuffix(":pubsub")) in shown:
            assert (size, name) in shown


@pytest.mark.parametrize("transport", ["shm", "zmq:ipc", "raw:zmq:ipc"])
def test_what_is_said_of_four_cores_is_in_the_run(transport: str) -> None:
    """The rates of 64 B."""
    (said,) = re.findall(r"On four \(`bench/results/four-cores.md`\).*?\n\n", DOC, re.S)
    messages = measured("four-cores", "rate")["64 B", transport]["msg/s"]
    words = re.sub(r"\s+", " ", said)
    assert re.search(rf"`{transport}`( took)? {messages}\b", words)


def test_large_messages_of_nng_are_those_of_the_run() -> None:
    """The medians, the ratio, the processor time; and the line from its two terms."""
    latency, terms = measured("two-cores", "latency"), fitted("two-cores")
    rows = table(DOC, "| size | transport | the line, ms |")
    assert len(rows) == 6
    for size, transport, line, ours, raw, ratio, cost, raw_cost in rows:
        mine, theirs = latency[size, transport], latency[size, f"raw:{transport}"]
        assert [ours, ratio, cost] == [mine["p50 ms"], mine["/raw"], mine["CPU s/GB"]]
        assert [raw, raw_cost] == [theirs["p50 ms"], theirs["CPU s/GB"]]
        per_message, bandwidth = map(float, terms[transport][:2])
        nbytes = float(size.removesuffix(" MB")) * 1e6
        expected = per_message / 1e3 + nbytes / bandwidth / 1e6
        assert line == f"{expected:.3g}"


def test_small_messages_beside_large_ones_are_those_of_the_run() -> None:
    """The median and both percentiles, each under its name."""
    rows = measured("mixed-640mb", "mixed")
    found = table(DOC, "| beside 640 MB | p50, ms | p90, ms | p99, ms |")
    assert len(found) == 4
    for transport, *percentiles in found:
        row = rows["640 MB", transport]
        assert percentiles == [row["p50 ms"], row["p90"], row["p99"]]


def test_the_table_between_gpus_is_that_of_the_run() -> None:
    """Ours, the bare library's, and its detour by host memory."""
    rows = measured("h100-latency", "latency")
    found = table(
        DOC, "| size | transport | p50, ms | raw, ms | /raw | CPU s/GB | staged"
    )
    assert len(found) == 4
    for size, transport, p50, raw, ratio, cpu, staged in found:
        run = rows[size, transport]
        assert (p50, ratio, cpu) == (run["p50 ms"], run["/raw"], run["CPU s/GB"])
        assert raw == rows[size, "raw:torchrpc:cuda"]["p50 ms"]
        assert staged == rows[size, "raw:torchrpc:staged"]["p50 ms"]
