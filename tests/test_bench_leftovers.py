"""Nothing of a cell stays behind, wherever temporary files are."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from bench import baselines
from bench.peer import Metrics, Peer
from bench.rows import Cell, read
from bench.runner import run_cell
from bench.workloads import open_wire

ICEORYX = "raw:iceoryx2"
needs_iceoryx = pytest.mark.skipif(
    baselines.check(ICEORYX) is not None, reason="iceoryx2 is not installed"
)


def shared_files() -> list[str]:
    """Files in shared memory that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted({line.split()[-1] for line in lines if "/dev/shm/" in line})


def shares_and_dies(peer: Peer) -> Metrics | None:
    """One stands still and is killed in the end; the other one tells of the files."""
    with open_wire(peer):
        if peer.rank == 1:
            raise RuntimeError(" ".join([peer.directory, *shared_files()]))
        os.kill(os.getpid(), signal.SIGSTOP)
    return None


@needs_iceoryx
def test_a_killed_cell_leaves_no_shared_memory() -> None:
    """Nor sockets, of an engine that keeps both outside its processes."""
    cell = Cell(ICEORYX, "latency", 1250, 0, 0.05, 60.0)
    result = run_cell(cell, f"{__name__}:shares_and_dies", 2)
    kind, named = result.reason.split(": ")[1:]
    assert kind == "RuntimeError", result.reason
    left = [name for name in named.split() if os.path.exists(name)]
    assert len(named.split()) > 3
    assert left == []


@pytest.mark.parametrize("length", [60, 75])
def test_a_long_path_of_temporary_files_is_no_obstacle(
    length: int, tmp_path: Path
) -> None:
    """The sockets of a cell are where their paths have room, and nothing is left."""
    names = [name for name in (ICEORYX, "limit:unix") if not baselines.check(name)]
    chosen = ["--transports", ",".join([*names, "zmq:ipc"]), "--rounds", "1"]
    chosen += ["--workloads", "latency", "--sizes", "1250", "--budget", "0.05"]
    with tempfile.TemporaryDirectory(prefix="mqb-") as directory:
        far = Path(directory, "x" * (length - len(directory) - 1))
        far.mkdir()
        done = subprocess.run(
            [sys.executable, "-m", "mq", "bench", *chosen, "--output", tmp_path],
            env={**os.environ, "TMPDIR": str(far), "XDG_RUNTIME_DIR": ""},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        assert list(far.iterdir()) == []
    assert {one.status for one in read(tmp_path / "results.jsonl")[1]} == {"ok"}


@pytest.mark.parametrize("command", [["--workloads", "latency"], ["apps", "--quick"]])
def test_a_path_too_long_for_any_socket_is_refused_with_the_remedy(
    command: list[str], tmp_path: Path
) -> None:
    """Before anything is measured, and without an empty report."""
    with tempfile.TemporaryDirectory(prefix="mqb-") as directory:
        far = Path(directory, "x" * 90)
        far.mkdir()
        output = tmp_path / "out"
        done = subprocess.run(
            [sys.executable, "-m", "mq", "bench", *command, "--output", output],
            env={**os.environ, "TMPDIR": str(far)},
            capture_output=True,
            text=True,
            timeout=120,
        )
    said = f"no sockets in {far}: AF_UNIX path too long; "
    said += "set TMPDIR to a short path, as /tmp"
    assert done.stderr.splitlines()[-1] == f"{command_of(command)}: error: {said}"
    assert done.returncode == 2
    assert not output.exists()


def command_of(arguments: list[str]) -> str:
    return "mq bench apps" if "apps" in arguments else "mq bench"
