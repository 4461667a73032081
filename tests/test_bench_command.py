"""`mq bench` as a command: what it writes, says and refuses."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from bench_results import row, write

from bench import command
from bench.command import main

SMALL = ["--workloads", "latency", "--sizes", "1250", "--budget", "0.05"]


def test_the_command_measures_writes_and_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One call leaves rows of every round and a report, and prints the table."""
    chosen = ["--transports", "raw:zmq:ipc,limit:unix", "--rounds", "2"]
    assert main([*chosen, *SMALL, "--output", str(tmp_path)]) == 0
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert records[0]["record"] == "environment"
    assert records[0]["planned cells"] == "4"
    assert [one["status"] for one in records[1:]] == ["ok"] * 4
    assert "raw:zmq:ipc" in (tmp_path / "report.md").read_text()
    shown = capsys.readouterr()
    assert "limit:unix" in shown.out
    assert str(tmp_path / "report.") in shown.out.splitlines()[-1]
    assert "[4/4] about 0:0" in shown.err


def test_an_interrupt_leaves_a_report_on_what_was_measured(tmp_path: Path) -> None:
    """Ctrl-C ends the run with status 130, and every cell before it is reported."""
    code = "import sys; from bench.command import main; sys.exit(main(sys.argv[1:]))"
    chosen = ["--transports", "raw:zmq:ipc", "--rounds", "1000"]
    running = subprocess.Popen(
        [sys.executable, "-c", code, *chosen, *SMALL, "--output", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Ignored where a shell started the tests in the background.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        assert running.stderr is not None
        for line in running.stderr:
            if line.startswith("[3/1000]"):
                break
        running.send_signal(signal.SIGINT)
        shown, errors = running.communicate(timeout=60)
    finally:
        running.kill()
        running.communicate()
    assert running.returncode == 130, errors
    assert "interrupted" in errors
    assert shown.splitlines()[-1].startswith(f"report: {tmp_path}")
    text = (tmp_path / "report.md").read_text()
    assert "of 1000 planned cells were measured" in text
    assert "| 1.25 KB | raw:zmq:ipc |" in text


def test_a_quick_run_begins_no_cell_after_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cells of the first round that it had no time for are rows with that reason."""
    monkeypatch.setattr(command, "_QUICK_SECONDS", 0.0)
    chosen = ["--quick", "--transports", "raw:zmq:ipc", "--rounds", "2"]
    assert main([*chosen, *SMALL, "--output", str(tmp_path)]) == 0
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    (only,) = [json.loads(line) for line in lines[1:]]
    assert (only["status"], only["reason"]) == ("skipped", "a quick run's time was up")


def test_a_report_can_be_written_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`mq bench report` needs nothing but the file of JSON lines."""
    path = write(tmp_path / "kept.jsonl", [row("zmq:tcp", 10.0)])
    assert main(["report", str(path), "--output", str(tmp_path / "new")]) == 0
    assert (tmp_path / "new" / "report.md").exists()
    assert main(["report", str(tmp_path / "none.jsonl")]) == 1
    assert "none.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--transports", "raw:nothing"], "no baseline 'raw:nothing'"),
        (["--transports", "zmpq:ipc"], "zmq:ipc"),
        (["--transports", "shm+glance"], "there are +view, +loan"),
        (["--transports", "zmq:tcp+view"], "zmq:tcp shares no memory"),
        (["--transports", ","], "no name given"),
        (["--workloads", "latent"], "no workload 'latent'"),
        (["--sizes", "12 parsecs"], "is no size"),
        (["--rounds", "0"], "from 1 to 1000"),
        (["--budget", "never"], "from 0.01 to 600"),
        (["compare", "a.jsonl"], "B.jsonl"),
        (["compare", "a", "b", "--fail-above", "0.5"], "no ratio from 1 to 1000"),
    ],
)
def test_bad_arguments_are_refused_in_words(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong argument ends with status 2 and a sentence, not with a traceback."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
