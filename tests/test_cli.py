"""The command line says what it has to say, quickly and in sentences."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

import bench.command
from mq import registry, settings
from mq.cli import main
from mq.rendezvous import open_rendezvous
from mq.testing import __main__ as suite
from mq.testing import soak

HEAVY = ["torch", "numpy", "zmq", "pynng", "bench"]


def mq(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mq", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
    )


@contextlib.contextmanager
def serving(
    ending: signal.Signals = signal.SIGTERM, **environment: str
) -> Iterator[str]:
    """The address of a service that is then told to stop, and must do so."""
    with subprocess.Popen(
        [sys.executable, "-m", "mq", "rendezvous", "127.0.0.1:0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    ) as process:
        try:
            assert process.stdout is not None
            assert select.select([process.stdout], [], [], 30)[0]
            yield process.stdout.readline().split()[-1]
            start = time.monotonic()
            process.send_signal(ending)
            assert process.wait(timeout=20) == 0
            assert time.monotonic() - start < 10
        finally:
            process.kill()


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_help_and_version_load_nothing_heavy(argument: str) -> None:
    """Asking for help must not wait for torch."""
    code = (
        "import sys\n"
        "from mq.cli import main\n"
        f"try: main([{argument!r}])\n"
        f"finally: print([m for m in {HEAVY!r} if m in sys.modules])\n"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.splitlines()[-1] == "[]"


@pytest.fixture
def twice_the_time(tmp_path: Path) -> list[str]:
    """Arguments to compare two runs, of which the second is slower."""
    paths = []
    for name, value in (("a", 1.0), ("b", 2.0)):
        row = {"record": "result", "transport": "shm", "workload": "rate"}
        row |= {"nbytes": 64, "round": 0, "status": "ok", "processes": []}
        row |= {"metrics": {"value": 1 / value}}
        paths.append(tmp_path / f"{name}.jsonl")
        facts = {"record": "environment", "python": name}
        paths[-1].write_text(f"{json.dumps(facts)}\n{json.dumps(row)}\n")
    return ["bench", "compare", *map(str, paths), "--fail-above"]


def unheard(*arguments: str, errors: bool = False) -> tuple[int, str]:
    """Status and complaints of a command whose reader has gone before it begins."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "mq", *arguments],
            stdout=writer,
            stderr=writer if errors else subprocess.PIPE,
            text=True,
            timeout=120,
        )
    finally:
        os.close(writer)
    return done.returncode, done.stderr or ""


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["transports"]])
def test_a_reader_that_has_seen_enough_is_no_error(arguments: list[str]) -> None:
    """As with `mq transports | head -1`."""
    assert unheard(*arguments) == (0, "")


def test_a_comparison_finds_the_same_though_nobody_reads_it(
    twice_the_time: list[str],
) -> None:
    """The status tells what is slower, never that a pipe was closed."""
    status, said = unheard(*twice_the_time, "1.2")
    told = "2.00 times the time (too few rounds to tell from luck)"
    assert (status, said) == (1, f"worse: rate 64 B shm: {told}\n")
    assert unheard(*twice_the_time, "3") == (0, "")


def test_a_run_that_nobody_reads_is_measured_and_reported(tmp_path: Path) -> None:
    """Neither the closed pipe of the progress nor that of the table ends it."""
    chosen = ["--transports", "limit:unix", "--workloads", "latency", "--rounds", "1"]
    chosen += ["--sizes", "1250", "--budget", "0.05", "--output", str(tmp_path)]
    assert unheard("bench", *chosen, errors=True) == (0, "")
    assert "limit:unix" in (tmp_path / "report.md").read_text()
    assert '"ok"' in (tmp_path / "results.jsonl").read_text()


def test_an_interrupt_anywhere_is_a_status(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the bench, too, before and after its measuring."""

    def interrupted(arguments: Sequence[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench.command, "main", interrupted)
    assert main(["bench"]) == 130


def test_what_cannot_be_written_is_said_in_a_sentence(
    twice_the_time: list[str],
) -> None:
    """On a full disk; the status is not the one of a comparison."""
    for arguments in (["--version"], [*twice_the_time, "1.2"]):
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                [sys.executable, "-m", "mq", *arguments],
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                timeout=60,
            )
        assert done.returncode == 2
        last = done.stderr.splitlines()[-1]
        assert last == "mq: standard output: [Errno 28] No space left on device"
        assert "Traceback" not in done.stderr


def test_help_names_the_commands() -> None:
    """The help of `mq` lists every command."""
    shown = mq("--help")
    assert shown.returncode == 0
    for command in ("bench", "transports", "rendezvous"):
        assert command in shown.stdout


def test_bench_has_a_help_of_its_own() -> None:
    """`mq bench --help` names options and workloads."""
    shown = mq("bench", "--help")
    assert shown.returncode == 0, shown.stderr
    for word in ("--transports", "--sizes", "--quick", "actor-learner"):
        assert word in shown.stdout


def test_transports_lists_every_backend(capsys: pytest.CaptureFixture[str]) -> None:
    """Each registered backend has a line, and its reason where it is unusable."""
    assert main(["transports"]) == 0
    lines = capsys.readouterr().out.splitlines()
    shown = {line.split()[0]: line for line in lines}
    for name in registry.names():
        reason = registry.check(name)
        assert shown[name].split()[1] == ("no" if reason else "yes")
        assert reason is None or any(reason in line for line in lines)
    assert "process" in shown["inproc"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "COMMAND"),
        (["bnech"], "bnech"),
        (["rendezvous"], "HOST:PORT"),
        (["rendezvous", "nowhere"], "is not HOST:PORT"),
        (["rendezvous", "host:70000"], "is not HOST:PORT"),
        (["bench", "--rounds", "none"], "from 1 to 1000"),
        (["bench", "--sizes", "1e400"], "between 4 bytes and 1 TiB"),
        (["bench", "apps", "--output", "/dev/null/x"], "/dev/null"),
    ],
)
def test_bad_arguments_end_with_status_2(arguments: list[str], said: str) -> None:
    """A wrong argument is answered by a sentence, never by a traceback."""
    shown = mq(*arguments)
    assert shown.returncode == 2
    assert said in shown.stderr
    assert "Traceback" not in shown.stderr


@pytest.mark.parametrize(
    ("command", "arguments", "said"),
    [
        (suite.main, ["zqm"], "did you mean 'zmq'?"),
        (soak.main, ["--minutes", "nan"], "time to run is nan"),
        (soak.main, ["--minutes", "-1"], "time to run is -60"),
        (soak.main, ["--minutes", "0"], "time to run is 0"),
    ],
)
def test_so_do_those_of_the_suite_and_the_soak(
    command: Callable[[], int],
    arguments: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Before anything is run."""
    monkeypatch.setattr(sys, "argv", ["mq", *arguments])
    with pytest.raises(SystemExit) as ended:
        command()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_missing_secret_file_is_named(tmp_path: Path) -> None:
    """A file that cannot be read ends the command with its name."""
    missing = str(tmp_path / "missing")
    shown = mq("rendezvous", "127.0.0.1:0", "--secret-file", missing)
    assert shown.returncode == 1
    assert missing in shown.stderr
    assert "Traceback" not in shown.stderr


def test_a_secret_that_no_member_could_have_is_not_served(tmp_path: Path) -> None:
    """What is too short for `connect` is so for the service."""
    file = tmp_path / "secret"
    file.write_text("short\n")
    for shown in (
        mq("rendezvous", "127.0.0.1:0", "--secret-file", str(file)),
        mq("rendezvous", "127.0.0.1:0", MQ_SECRET="short"),
    ):
        assert shown.returncode == 1
        assert "shorter than 8 bytes" in shown.stderr


def test_the_service_has_the_secret_that_members_have(tmp_path: Path) -> None:
    """From the same variables, of which one goes before the other."""
    file = tmp_path / "secret"
    file.write_text("the secret of a file")
    variables = {"MQ_SECRET": "that of the variable", "MQ_SECRET_FILE": str(file)}
    with serving(**variables) as address:
        secret, _ = settings.secret_from(None, variables)
        found = open_rendezvous(address, group="g", secret=secret, timeout=10)
        found.close()


def test_a_taken_address_is_named() -> None:
    """Where another program listens, the service says so and ends."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        shown = mq("rendezvous", f"127.0.0.1:{port}")
    assert shown.returncode == 1
    assert str(port) in shown.stderr
    assert "Traceback" not in shown.stderr


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_rendezvous_serves_until_it_is_told_to_stop(ending: signal.Signals) -> None:
    """It says where it serves, accepts connections, and ends cleanly on a signal."""
    with serving(ending) as address:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        socket.create_connection((host, int(port)), timeout=10).close()
