"""`mq bench` as a command: what it writes, says and refuses."""

from __future__ import annotations

import argparse
import errno
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from bench_results import row, write

from bench import command
from bench.command import main
from bench.output import new_output
from bench.rows import Cell, Result, read
from mq import registry

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


def test_a_size_given_twice_is_measured_once(tmp_path: Path) -> None:
    """In whatever unit: a second value of a round would be no further round."""
    chosen = ["--transports", "limit:memcpy", "--workloads", "latency", "--rounds", "1"]
    sizes = ["--sizes", "1250,1.25KB", "--budget", "0.01"]
    assert main([*chosen, *sizes, "--output", str(tmp_path)]) == 0
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 2


def test_a_report_that_cannot_be_written_is_left_for_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a full disk: the table is printed, and how to write it elsewhere."""

    def full(self: Path, *_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))

    monkeypatch.setattr(Path, "write_text", full)
    chosen = ["--transports", "limit:memcpy", "--rounds", "1"]
    assert main([*chosen, *SMALL, "--output", str(tmp_path)]) == 2
    shown = capsys.readouterr()
    assert "limit:memcpy" in shown.out
    assert "without a report: [Errno 28] No space left on device" in shown.err
    again = f"mq bench report {tmp_path / 'results.jsonl'} --output DIR"
    assert shown.err.splitlines()[-1] == f"elsewhere: {again}"


def test_rows_that_cannot_be_written_end_the_run_with_its_table(
    tmp_path: Path,
) -> None:
    """The file ends with a whole row, and a report can be made of it elsewhere."""
    output = tmp_path / "full"
    chosen = ["--transports", "limit:memcpy", "--workloads", "latency"]
    chosen += ["--sizes", ",".join(map(str, range(1250, 1260))), "--rounds", "1"]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "mq", "bench", *chosen),
            *("--budget", "0.05", "--output", output),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2500, 2500)),
    )
    path = output / "results.jsonl"
    said = f"[Errno 27] File too large: '{path}': the report covers what was measured"
    assert said in done.stderr.splitlines()
    assert done.returncode == 2
    assert path.read_bytes().endswith(b"\n")
    rows = read(path)[1]
    assert 0 < len(rows) < 9
    shown = [line for line in done.stdout.splitlines() if "limit:memcpy" in line]
    assert len(shown) == len(rows) + 1  # the last one is known, though not written
    assert main(["report", str(path), "--output", str(tmp_path / "elsewhere")]) == 0


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A directory for temporary files, short enough for the paths of sockets."""
    with tempfile.TemporaryDirectory(prefix="mqb-") as directory:
        yield Path(directory)


@contextmanager
def running(
    output: Path, temporary: Path, begun: str = "[3/2000]"
) -> Iterator[subprocess.Popen[str]]:
    """A long run that has said that this cell begins."""
    chosen = ["--transports", "tcp", "--rounds", "1000", "--output", str(output)]
    run = subprocess.Popen(
        [sys.executable, "-m", "mq", "bench", *SMALL, *chosen],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary), "XDG_RUNTIME_DIR": ""},
        start_new_session=True,
        # Ignored where a shell started the tests in the background.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        until(run, begun)
        yield run
    finally:
        run.kill()
        run.communicate()


def until(run: subprocess.Popen[str], words: str) -> None:
    """Read what a run complains of up to these words."""
    assert run.stderr is not None
    assert any(words in line for line in run.stderr)


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_a_report_on_what_was_measured(
    ending: signal.Signals, tmp_path: Path, temporary: Path
) -> None:
    """It ends with status 130, every cell before is reported, and no more is left."""
    with running(tmp_path, temporary) as run:
        run.send_signal(ending)
        shown, errors = run.communicate(timeout=60)
    assert run.returncode == 130, errors
    assert errors.splitlines()[-1].startswith("interrupted")
    assert "Traceback" not in errors
    assert shown.splitlines()[-1].startswith(f"report: {tmp_path}")
    text = (tmp_path / "report.md").read_text()
    assert "of 2000 planned cells were measured" in text
    assert "| 1.25 KB | tcp |" in text
    assert not list(temporary.iterdir())


@pytest.mark.parametrize("again", [False, True])
def test_one_interrupt_more_is_no_end_of_the_report(
    again: bool, tmp_path: Path, temporary: Path
) -> None:
    """Writing takes seconds in which people are impatient; two more end that, too."""
    pytest.importorskip("matplotlib", reason="the page needs it")
    text = tmp_path / "report.md"
    os.mkfifo(text)  # so that it takes until somebody reads
    with running(tmp_path, temporary) as run:
        os.killpg(run.pid, signal.SIGINT)
        until(run, "interrupted: the report covers what was measured")
        os.killpg(run.pid, signal.SIGINT)
        until(run, "the report is being written; once more ends that")
        if again:
            os.killpg(run.pid, signal.SIGINT)
        else:
            assert "of 2000 planned cells were measured" in text.read_text()
        _, errors = run.communicate(timeout=60)
    results = tmp_path / "results.jsonl"
    assert run.returncode == 130
    assert errors == (f"without a report: mq bench report {results}\n" if again else "")
    assert (tmp_path / "report.html").exists() is not again


@pytest.mark.parametrize("step", ["_check", "_planned"])
def test_an_interrupt_waits_for_what_is_imported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, step: str
) -> None:
    """Torch swallows it now and then, and is left half imported."""
    real, ended = getattr(command, step), []

    def interrupted(options: argparse.Namespace) -> object:
        signal.raise_signal(signal.SIGINT)
        found = real(options)
        ended.append(step)
        return found

    monkeypatch.setattr(command, step, interrupted)
    chosen = ["--transports", "limit:memcpy", "--output", str(tmp_path / "out")]
    with pytest.raises(KeyboardInterrupt):
        main([*chosen, *SMALL])
    assert ended == [step]
    assert not (tmp_path / "out").exists()


def test_an_interrupt_while_all_is_imported_is_one_sentence(
    tmp_path: Path, temporary: Path
) -> None:
    """It comes at once, or when the first cell has begun."""
    with running(tmp_path, temporary, "[1/2000]") as run:
        os.killpg(run.pid, signal.SIGINT)
        _, errors = run.communicate(timeout=60)
    assert run.returncode == 130
    assert errors == "interrupted: the report covers what was measured\n"


def test_what_starts_the_cells_sees_no_interrupt() -> None:
    """It imports for seconds, in which Ctrl-C had it print a traceback."""
    code = (
        "import os, signal\n"
        "from multiprocessing import forkserver\n"
        "from bench.runner import fork_server\n"
        "if __name__ == '__main__':\n"
        "    signal.signal(signal.SIGINT, lambda *_: None)\n"
        "    context = fork_server()\n"
        "    forkserver.ensure_running()\n"
        "    os.killpg(0, signal.SIGINT)\n"
        "    process = context.Process(target=os.killpg, args=(0, signal.SIGINT))\n"
        "    process.start()\n"
        "    process.join()\n"
        "    raise SystemExit(process.exitcode)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        start_new_session=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_only_the_progress_is_written_to_stderr(tmp_path: Path) -> None:
    """Not what TensorPipe warns of as the other end leaves."""
    chosen = ["--transports", "raw:torchrpc", "--rounds", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "mq", "bench", *SMALL, *chosen, "--output", tmp_path],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    lines = done.stderr.splitlines()
    assert [line for line in lines if line and not line[1:2].isdigit()] == []


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


def test_what_was_asked_for_and_has_no_cell_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rest is measured; what nobody asked for needs no word."""
    chosen = ["--transports", "limit:memcpy,raw:zmq:ipc:pubsub", "--rounds", "1"]
    assert main([*chosen, *SMALL, "--output", str(tmp_path)]) == 0
    first, second = capsys.readouterr().err.splitlines()[:2]
    assert first == "no cell of raw:zmq:ipc:pubsub: it has rate"
    assert second.startswith("[1/1]")


@pytest.mark.parametrize("name", ["torchrpc:cuda", "cuda"])
def test_an_alias_is_as_unusable_as_what_it_stands_for(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row with the reason, not a name that there is not."""
    monkeypatch.setattr(registry, "check", lambda name: f"{name}: no luck")
    assert command.unusable(name) == f"{name}: no luck"


@pytest.mark.parametrize("arguments", [SMALL, ["apps", "--quick"]])
def test_the_results_of_another_run_are_not_overwritten(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hours of measuring may be in there; it is said before anything is measured."""
    path = write(tmp_path / "results.jsonl", [row("zmq:tcp", 10.0)])
    kept = path.read_bytes()
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--output", str(tmp_path)])
    assert ended.value.code == 2
    said = f"{tmp_path} has the results.jsonl of another run: name a new directory"
    assert said in capsys.readouterr().err
    assert path.read_bytes() == kept


@pytest.mark.parametrize(
    ("name", "fails"),
    [("tcp", True), ("raw:zmq:ipc", True), ("raw:zmq:ipc:pubsub", False)],
)
def test_a_cell_that_lost_what_must_arrive_has_failed(
    name: str,
    fails: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its losses are kept; publish/subscribe may lose, and is only said to."""

    def lossy(cell: Cell, *_: object, **__: object) -> Result:
        flow = {"lost": 2.0 if cell.round else 0.0, "sent": 9.0}
        return row(cell.transport, 1.0, cell.round, "rate", cell.nbytes, **flow)

    monkeypatch.setattr(command, "run_cell", lossy)
    chosen = ["--transports", name, "--workloads", "rate", "--sizes", "64"]
    status = main([*chosen, "--rounds", "2", "--output", str(tmp_path)])
    found = read(tmp_path / "results.jsonl")[1]
    second = next(one for one in found if one.transport == name and one.round)
    reason = "2 message(s) were lost that should have arrived" if fails else ""
    assert status == int(fails)
    assert (second.reason, second.metrics["lost"]) == (reason, 2)
    problem = f"{name} 64 B: round 2 failed: {reason}"
    assert (problem in capsys.readouterr().out) is fails


def test_two_runs_begun_together_have_a_directory_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before either has written a row; who named one that is taken is refused."""
    monkeypatch.chdir(tmp_path)
    names = [new_output(None, "today").name for _ in range(3)]
    assert names == ["today", "today-2", "today-3"]
    asked = new_output(tmp_path / "asked", "today")
    with pytest.raises(FileExistsError, match="of another run: name"):
        new_output(asked, "today")


def test_a_report_can_be_written_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`mq bench report` needs nothing but the file of JSON lines."""
    path = write(tmp_path / "kept.jsonl", [row("zmq:tcp", 10.0)])
    assert main(["report", str(path), "--output", str(tmp_path / "new")]) == 0
    assert (tmp_path / "new" / "report.md").exists()
    assert main(["report", str(tmp_path / "none.jsonl")]) == 2
    assert "none.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--transports", "raw:nothing"], "no baseline 'raw:nothing'"),
        (["--transports", "zmpq:ipc"], "zmq:ipc"),
        (["--transports", "shm+glance"], "there are +view, +loan"),
        (["--transports", "zmq:tcp+view"], "zmq:tcp shares no memory"),
        (["--transports", ","], "no name given"),
        (
            ["--quick", "--workloads", "mixed-busy", "--transports", "tcp"],
            "no cell of mixed-busy: it takes long, and a quick run leaves it out",
        ),
        (
            ["--transports", "limit:memcpy", "--workloads", "rate"],
            "no cell of rate: none of these transports has it; "
            "no cell of limit:memcpy: it has latency, stream",
        ),
        (["--workloads", "latent"], "no workload 'latent'"),
        (["--sizes", "12 parsecs"], "is no size"),
        (["--rounds", "0"], "from 1 to 1000"),
        (["--rounds", "²"], "from 1 to 1000"),
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


def test_transports_of_which_none_is_usable_are_no_success(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `--transports cuda` where there is none; each says why."""
    monkeypatch.setattr("bench.command.unusable", lambda name: f"no {name} here")
    with pytest.raises(SystemExit) as ended:
        main(["--quick", "--transports", "tcp,shm"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "nothing to measure here. tcp: no tcp here; shm: no shm here" in said
