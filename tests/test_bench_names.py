"""Names that no encoding can show cost neither the table nor the report."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from bench_results import pipeline_rows, row, write

from bench.rows import read


def run(*arguments: str | Path, encoding: str) -> subprocess.CompletedProcess[str]:
    """`mq bench`, by a terminal of that encoding."""
    return subprocess.run(
        [sys.executable, "-m", "mq", "bench", *arguments],
        env={**os.environ, "PYTHONIOENCODING": encoding},
        capture_output=True,
        encoding="utf-8",
        timeout=120,
    )


NAMES = [("p-\udce9", "utf-8", "p-\\udce9"), ("p-é日", "ascii", "p-\\xe9\\u65e5")]
names = pytest.mark.parametrize(("name", "encoding", "shown"), NAMES)


@names
def test_a_run_into_such_a_directory_has_its_table_and_report(
    name: str, encoding: str, shown: str, tmp_path: Path
) -> None:
    """It is named with escapes, and the rows can be read again."""
    chosen = ["--transports", "limit:memcpy", "--workloads", "latency", "--rounds", "1"]
    chosen += ["--sizes", "1250", "--budget", "0.05", "--output"]
    done = run(*chosen, tmp_path / name, encoding=encoding)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert any("1.25 KB  limit:memcpy" in line for line in lines)
    assert lines[-1].startswith(f"report: {tmp_path}/{shown}/report.")
    results = tmp_path / name / "results.jsonl"
    command = read(results)[0]["command"]
    assert command.isprintable()
    assert command in (tmp_path / name / "report.md").read_text()
    again = run("report", results, "--output", tmp_path / "again", encoding=encoding)
    assert again.returncode == 0, again.stderr


@names
def test_a_report_on_files_in_such_directories_names_them(
    name: str, encoding: str, shown: str, tmp_path: Path
) -> None:
    """Where their own names are the same."""
    for place, rows in (("a", [row("tcp", 1.0)]), ("b", pipeline_rows(["tcp"]))):
        (tmp_path / f"{place}{name}").mkdir()
        write(tmp_path / f"{place}{name}" / "r.jsonl", rows)
    files = [tmp_path / f"{place}{name}" / "r.jsonl" for place in "ab"]
    done = run("report", *files, "--output", tmp_path / "both", encoding=encoding)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "both" / "report.md").read_text()
    assert f"b{shown if encoding == 'utf-8' else name}/r.jsonl" in text
